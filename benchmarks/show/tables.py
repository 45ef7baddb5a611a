"""Every table of one machine's results, and the results on the terminal."""

from __future__ import annotations

from onetrip.environment import describe
from onetrip.html import Table

from ..measure.results import Results
from . import operator_tables as operators
from . import training_tables as training
from .operator_tables import cases, of_every_width
from .terminal import print_tables

BUSY = 0.3
"""CPUs that other processes keep busy: above it a result is doubtful."""


def every(results: Results) -> list[Table]:
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
    print_tables(every(results), provenance(results), width)
