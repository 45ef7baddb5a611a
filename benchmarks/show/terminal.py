"""Tables on the terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence

from onetrip import html
from onetrip.html import Table
from rich.console import Console
from rich.table import Table as RichTable


def console(width: int = 160) -> Console:
    """For standard output. width: of a file or a pipe, unless COLUMNS says otherwise."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=width)


def print_tables(tables: Sequence[Table], notes: Sequence[str] = (), width: int = 160) -> None:
    """Rows with an entry that is not good are red. notes: lines below the tables."""
    out = console(width)
    for table in tables:
        rich = RichTable(title=table.caption, caption=table.note or None, title_justify="left", caption_justify="left")
        for column, numeric in zip(table.columns, html.numeric_columns(table.rows), strict=True):
            rich.add_column(column, justify="right" if numeric else "left")
        for row in table.rows:
            shown = [html.cell(entry) for entry in row]
            bad = any(entry.good is False for entry in shown)
            rich.add_row(*(entry.text for entry in shown), style="red" if bad else None)
        out.print(rich)
    for line in notes:
        out.print(line, style="dim")
