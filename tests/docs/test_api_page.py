"""docs/api.md calls what it does not list private: it lists every public name."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/api.md"
PACKAGES = ("integrations", "nn", "ops", "optim", "patching")


@pytest.mark.parametrize("package", ["onetrip", *(f"onetrip.{name}" for name in PACKAGES)])
def test_every_public_name_is_listed(package: str) -> None:
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE)}
    public = set(import_module(package).__all__)
    assert public - {"__version__", *PACKAGES} <= listed
