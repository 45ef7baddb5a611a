"""Every table of one machine's results, and the results on the terminal."""

from __future__ import annotations

from onetrip import terminal
from onetrip.environment import describe
from onetrip.html import Table

from ..measure.results import OPERATOR_SUITES, Results
from . import operator_tables as operators
from .operator_tables import cases, of_every_width

_TRAINING = {"training", "adam", "adam_streams", "adam_training", "install"}
SLOWED = 1.1
"""Slowdown by other processes: above it a time is doubtful."""


def every(results: Results) -> list[Table]:
    """Everything that one machine's results hold."""
    training = _of_training(results) if results.keys() & _TRAINING else []
    return [
        *operators.verdicts(results),
        *operators.operators(operators.full(results) + operators.alone(results)),
        *operators.widths(of_every_width(results)),
        *operators.graphs(cases(results, *OPERATOR_SUITES)),
        *operators.attention_winners(cases(results, "attention")),
        *operators.attention(cases(results, "attention")),
        *training,
        *operators.overhead(cases(results, "overhead")),
        *operators.saved(cases(results, "bert_blocks")),
        *operators.counters(results),
        *operators.verified(cases(results, "everything")),
        *operators.without_number(cases(results, *results)),
    ]


def _of_training(results: Results) -> list[Table]:
    from . import training_tables as training

    return [
        *training.training(cases(results, "training")),
        *training.adam(cases(results, "adam")),
        *training.streams(cases(results, "adam_streams")),
        *training.language_model(cases(results, "adam_training")),
        *training.install(cases(results, "install")),
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
    """What waiting for CPUs that other processes held did to the cases; empty where it was little."""
    found = [case["cpu_slowdown"] for case in cases(results, *results) if case.get("cpu_slowdown") is not None]
    slowed = [slowdown for slowdown in found if slowdown > SLOWED]
    if not slowed:
        return ""
    n = f"{len(slowed)} of {len(found)}"
    return f"Other processes slowed {n} cases by up to {max(slowed):.1f}x: distrust times, less so ratios."


def print_results(results: Results, width: int = 160) -> None:
    """width: of what is no terminal."""
    terminal.show([*every(results), *provenance(results)], width)
