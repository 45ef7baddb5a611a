"""Where a library that onetrip integrates with is missing, the error says so; see test_public_api.py for imports."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("module", "package"),
    [("trainer", "transformers"), ("axolotl", "axolotl"), ("llamafactory", "llamafactory")],
)
def test_a_missing_library_is_named(module, package, monkeypatch):
    if module == "axolotl":
        pytest.importorskip("pydantic")
    name = f"onetrip.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package} must be installed: pip install --upgrade {package}"):
        import_module(name)


@pytest.mark.parametrize(
    ("function", "module"), [("kernel_mapping", "kernels.layer"), ("kernel_config", "transformers")]
)
def test_a_missing_library_is_named_at_the_call(function, module, monkeypatch):
    from onetrip import integrations

    call, package = getattr(integrations, function), module.partition(".")[0]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{package} must be installed: pip install --upgrade {package}"):
        call()


def test_another_missing_module_is_not_taken_for_the_library(monkeypatch):
    from onetrip.integrations import needs

    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"), needs("transformers"):
        import_module("nothing_of_this_name")


def test_a_library_without_the_name_is_too_old(monkeypatch):
    from types import ModuleType

    from onetrip.integrations import kernel_mapping

    monkeypatch.setitem(sys.modules, "kernels.layer", ModuleType("kernels.layer"))
    with pytest.raises(ImportError, match=r"kernels must be installed: pip install --upgrade kernels .*LocalLayer"):
        kernel_mapping()
