"""The tables and paragraphs of a page (html.py) on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from .html import Cell, Table, cell, numeric_columns

_SHORTEST_BAR, _LONGEST_BAR = 4, 32
_BESIDE_BARS = 73
"""Characters of the longest labels and figures beside a bar."""
_MANY_COLUMNS = 7
_LINE_COLOURS = ("default", "green", "cyan", "magenta")
_GOOD_STYLES = {True: "green", False: "red", None: ""}


class _Bar(Bar):
    """A bar as wide as its column."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = max(_SHORTEST_BAR, min(options.size.width - _BESIDE_BARS, _LONGEST_BAR))
        return Measurement(_SHORTEST_BAR, width)


def _first_number(row: Iterable[Cell]) -> float:
    return next((each.value for each in row if isinstance(each.value, float | int)), 0.0)


def render_table(table: Table) -> RichTable:
    """The table for rich. A bar of the first number ends each row of a grouped table."""
    rich = RichTable(
        title=Text(table.caption),
        caption=Text(table.note) if table.note else None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(table.columns),
        padding=0 if len(table.columns) > _MANY_COLUMNS else (0, 1, 0, 0),
    )
    numbers = numeric_columns(table.rows) or [False] * len(table.columns)
    for column, numeric in zip(table.columns, numbers, strict=True):
        rich.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    rows = [[cell(entry) for entry in row] for row in table.rows]
    if table.grouped:
        rich.add_column("")
    largest = max(map(_first_number, rows), default=0.0)
    n_line = 0
    for i, row in enumerate(rows):
        shown: list[RenderableType] = [Text(each.text, _GOOD_STYLES[each.good]) for each in row]
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


def show(parts: Iterable[str | Table], width: int = 160) -> None:
    """Prints them on standard output. width: of a file or a pipe, unless COLUMNS says otherwise."""
    console = Console()
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console = Console(width=width)
    console.print(render(parts))
