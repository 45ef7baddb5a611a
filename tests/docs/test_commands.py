"""The `onetrip` commands that pages and README show have options, models and methods that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from onetrip.anatomy import PRESETS
from onetrip.cli import app
from onetrip.methods import NAMES

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\w+=\S+ )*onetrip (?P<arguments>.+?)(?: {2,}#.*)?$", re.MULTILINE)


def commands() -> list[str]:
    """What follows `onetrip` in blocks without a language, once each."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [block for page in pages for block in FENCE.findall(page.read_text())]
    return sorted({each["arguments"] for block in blocks for each in COMMAND.finditer(block)})


def parsed(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """(command, its parameters); raises where an option is unknown or its value has another type."""
    root = typer.main.get_command(app)
    group = root.make_context("onetrip", arguments)
    name, command, rest = root.resolve_command(group, [*group._protected_args, *group.args])
    return name, command.make_context(name, rest, parent=group).params


@pytest.mark.parametrize("line", commands())
def test_a_command_is_accepted(line: str) -> None:
    name, parameters = parsed(shlex.split(line))
    if name in ("anatomy", "methods"):
        assert parameters["model"] in PRESETS
    for given in (*(parameters.get("only") or ()), *(parameters.get("combine") or ())):
        assert set(given.split("+")) <= set(NAMES)


def test_commands_are_found_and_wrong_ones_rejected() -> None:
    assert len(commands()) > 15
    with pytest.raises(Exception, match="No such option"):
        parsed(["anatomy", "minilm", "--colums", "eager"])
