"""docs/benchmarks.md, which is never written by hand: from the recorded JSON of every machine."""

from __future__ import annotations

import json
from pathlib import Path

from onetrip import html
from onetrip.html import Table

from ..measure.results import RECORDED, Results
from . import plots
from .tables import every, provenance

TEMPLATE = Path(__file__).with_name("benchmarks.md.j2")


def markdown(table: Table) -> list[str]:
    """The lines of a table, from its head to its last row."""

    def line(entries: list[str]) -> str:
        return f"| {' | '.join(entry.replace('|', chr(92) + '|') for entry in entries)} |"

    rule = "".join("---:|" if numeric else "---|" for numeric in html.numeric_columns(table.rows))
    rows = [[html.cell(entry).text for entry in row] for row in table.rows]
    return [line(list(table.columns)), f"|{rule}", *map(line, rows)]


def render(recorded: dict[str, Results], folder: Path = RECORDED) -> str:
    """docs/benchmarks.md from every machine's results and what `onetrip methods` left in folder/machine."""
    import jinja2
    from onetrip import methods

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    machines = []
    for name, results in recorded.items():
        trained = {path.stem: json.loads(path.read_text()) for path in sorted((folder / name).glob("methods*.json"))}
        shown = [*every(results), *(table for result in trained.values() for table in methods.tables(result))]
        machine = {"id": name, "provenance": provenance({**results, **trained}), "figures": [*plots.drawings(results)]}
        machines.append({**machine, "tables": [(table, markdown(table)) for table in shown]})
    return environment.from_string(TEMPLATE.read_text()).render(machines=machines)


def write(recorded: dict[str, Results], path: Path, folder: Path = RECORDED) -> None:
    html.write(path, render(recorded, folder))
    for machine, results in recorded.items():
        plots.draw(machine, results, path.parent)
