"""Recorded results on the terminal, and as docs/benchmarks.md, which is never written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from onetrip import html, methods
from onetrip.environment import describe
from onetrip.html import Table

from ..measure.results import RECORDED, Results
from . import figures
from . import operator_tables as operators
from . import training_tables as training
from .operator_tables import cases, of_every_width
from .terminal import print_tables

BUSY = 0.3
"""CPUs that other processes keep busy: above it a result is doubtful."""
TEMPLATE = Path(__file__).with_name("benchmarks.md.j2")


def tables(results: Results) -> list[Table]:
    """Everything that one machine's results hold."""
    return [
        *operators.verdicts(results),
        *operators.operators(operators.full(results) + operators.alone(results)),
        *operators.widths(of_every_width(results)),
        *operators.graphs(cases(results, "row_norm", "softmax")),
        *operators.attention_winners(cases(results, "attention")),
        *operators.attention(cases(results, "attention")),
        *training.training(cases(results, "training")),
        *training.adam(cases(results, "adam")),
        *training.streams(cases(results, "adam_streams")),
        *training.language_model(cases(results, "adam_training")),
        *operators.overhead(cases(results, "overhead")),
        *operators.saved(cases(results, "bert_blocks")),
        *training.install(cases(results, "install")),
        *operators.counters(results),
        *operators.verified(cases(results, "everything")),
        *operators.without_number(cases(results, *results)),
    ]


def origins(results: Results) -> dict[tuple[str, ...], list[str]]:
    """(date, machine, versions, commit) -> the suites that were measured so."""
    found: dict[tuple[str, ...], list[str]] = {}
    for suite, content in results.items():
        found.setdefault(tuple(describe(content).values()), []).append(suite)
    return found


def provenance(results: Results) -> list[str]:
    """One line for each distinct origin."""
    return [
        f"{', '.join(suites)}: {date}, {machine}; {versions}; commit {commit}."
        for (date, machine, versions, commit), suites in origins(results).items()
    ]


def load_in_words(results: Results) -> str:
    """What other processes took of the CPUs while the cases were timed; empty where it was little."""
    loads = [case["other_busy_cpus"] for case in cases(results, *results) if case.get("other_busy_cpus") is not None]
    disturbed = [load for load in loads if load > BUSY]
    if not disturbed:
        return ""
    n = f"{len(disturbed)} of {len(loads)}"
    return f"Other processes kept up to {max(disturbed):.1f} CPUs busy in {n} cases: distrust times, less so ratios."


def print_results(results: Results, width: int = 160) -> None:
    """width: of what is no terminal."""
    print_tables(tables(results), provenance(results), width)


def markdown(table: Table) -> list[str]:
    """The lines of a table, from its head to its last row."""

    def line(entries: list[str]) -> str:
        return f"| {' | '.join(entry.replace('|', chr(92) + '|') for entry in entries)} |"

    rule = "".join("---:|" if numeric else "---|" for numeric in html.numeric_columns(table.rows))
    rows = [[html.cell(entry).text for entry in row] for row in table.rows]
    return [line(list(table.columns)), f"|{rule}", *map(line, rows)]


def _of_methods(folder: Path) -> Results:
    """What `onetrip methods --output` left beside the suites' files, by file name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("methods*.json"))}


def render(recorded: dict[str, Results], folder: Path = RECORDED) -> str:
    """docs/benchmarks.md from every machine's results and what `onetrip methods` left in folder/machine."""
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    machines = []
    for name, results in recorded.items():
        trained = _of_methods(folder / name)
        shown = [*tables(results), *(table for result in trained.values() for table in methods.tables(result))]
        machines.append(
            {
                "id": name,
                "provenance": provenance({**results, **trained}),
                "tables": [(table, markdown(table)) for table in shown],
                "figures": figures.of_docs(name, results),
            }
        )
    return environment.from_string(TEMPLATE.read_text()).render(machines=machines)


def write_docs(recorded: dict[str, Results], path: Path, folder: Path = RECORDED) -> None:
    html.write(path, render(recorded, folder))
    for machine, results in recorded.items():
        figures.draw(machine, results, path.parent)
