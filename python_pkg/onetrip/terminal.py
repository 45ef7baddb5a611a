"""The tables and paragraphs of a page (html.py) on a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from io import StringIO
from itertools import compress, repeat
from typing import Any

from rich.bar import Bar
from rich.box import SIMPLE_HEAD, Box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.containers import Lines
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from .html import ABSENT, Cell, Table, cell, numeric_columns

_RULE_BELOW_HEAD = Box(str(SIMPLE_HEAD).replace("─", "-"), ascii=True)
"""Of characters that every encoding has: a text may be written where the encoding is not that of standard output."""
_LEAST_WIDTH = 80
_SHORTEST_BAR, _LONGEST_BAR = 4, 32
_BESIDE_BARS = 73
"""Characters of the longest labels and figures beside a bar."""
_MANY_COLUMNS = 7
_LINE_COLOURS = ("default", "green", "cyan", "magenta")
_GOOD_STYLES = {True: "green", False: "red", None: ""}


class _Bar(Bar):
    """A bar as wide as its column, of "#" where the encoding lacks blocks."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = max(_SHORTEST_BAR, min(options.size.width - _BESIDE_BARS, _LONGEST_BAR))
        return Measurement(_SHORTEST_BAR, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.ascii_only:
            yield Segment("#" * int(options.max_width * self.end / self.size) if self.size else "", self.style)
        else:
            yield from super().__rich_console__(console, options)


class _Entry(Text):
    """A name that fits no line is folded after its dots and underscores."""

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        lines = [""]
        for part in [self.plain] if " " in self.plain else re.findall(r"[^._]*[._]|[^._]+", self.plain):
            if lines[-1] and len(lines[-1] + part) > width:
                lines.append("")
            lines[-1] += part
        return Text("\n".join(lines), self.style).wrap(console, width, **options)


def _first_number(row: Iterable[Cell]) -> float:
    return next((each.value for each in row if isinstance(each.value, float | int)), 0.0)


def render_table(table: Table) -> RichTable:
    """The table for rich, without columns of None alone. A bar of the first number ends each row of a grouped table."""
    entries = [[cell(entry) for entry in row] for row in table.rows]
    kept = [any(each.text != ABSENT for each in column) for column in zip(*entries, strict=True)]
    kept[: 1 + table.grouped] = [True] * (1 + table.grouped)  # labels
    columns = list(compress(table.columns, kept if entries else repeat(True)))
    rows = [list(compress(row, kept)) for row in entries]
    rich = RichTable(
        title=Text(table.caption),
        caption=Text(table.note) if table.note else None,
        title_justify="left",
        caption_justify="left",
        box=_RULE_BELOW_HEAD,
        pad_edge=False,
        show_header=any(columns),
        padding=0 if len(columns) > _MANY_COLUMNS else (0, 1, 0, 0),
    )
    numbers = numeric_columns(rows) or [False] * len(columns)
    for column, numeric in zip(columns, numbers, strict=True):
        rich.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    if table.grouped:
        rich.add_column("")
    largest = max(map(_first_number, rows), default=0.0)
    n_line = 0
    for i, row in enumerate(rows):
        shown: list[RenderableType] = [_Entry(each.text.replace(ABSENT, "-"), _GOOD_STYLES[each.good]) for each in row]
        if table.grouped:
            n_line = n_line + 1 if i and row[0].text == rows[i - 1][0].text else 0
            colour = _LINE_COLOURS[n_line % len(_LINE_COLOURS)]
            shown[:2] = [Text("" if n_line else row[0].text), Text(row[1].text, colour)]
            shown.append(_Bar(largest, 0, _first_number(row), color=colour))
        is_last = i + 1 == len(rows) or row[0].text != rows[i + 1][0].text
        rich.add_row(*shown, end_section=table.grouped and is_last)
    return rich


def render(parts: Iterable[str | Table], title: str = "") -> Group:
    """Paragraphs and tables below a title."""
    shown = [render_table(part) if isinstance(part, Table) else Text(part) for part in parts]
    return Group(*([Text(title, "bold")] if title else []), *shown)


def _width(console: Console, otherwise: int) -> int:
    """Of standard output. otherwise: of a file or a pipe, unless COLUMNS says it."""
    return max(console.width, _LEAST_WIDTH) if console.is_terminal or "COLUMNS" in os.environ else otherwise


def show(parts: Iterable[str | Table], width: int = 160) -> None:
    """Prints them on standard output. width: of a file or a pipe, unless COLUMNS says otherwise."""
    console = Console()
    console.width = _width(console, width)
    console.print(render(parts))


def text(parts: Iterable[str | Table], width: int = 120) -> str:
    """The same as a string, without colours. Nothing is written to standard output, which may be closed."""
    into = StringIO()
    console = Console(file=into, width=_width(Console(), width), color_system=None, force_jupyter=False)
    console.print(render(parts))
    return "\n".join(map(str.rstrip, into.getvalue().strip("\n").splitlines()))
