"""Runs the selected cases one after the other, and keeps each record as soon as it is made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from onetrip.environment import header, load_average
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .measure.cases import Named, Session, Skip, one_line
from .measure.providers import versions
from .measure.results import Results, Store, fingerprint, own_failures
from .measure.timing import Rounds
from .selection import Options, module, runnable

_FULL_CASE, _WIDTH_CASE = 6.0, 1.0
"""How long a case with all its passes and providers takes against one of a series of widths."""
_SPEED_OF_LAST_S = 3600.0
"""The rest is estimated from what the last cases took."""


@dataclass
class Found:
    results: Results
    failures: list[str] = field(default_factory=list)
    """One line for each case that did not pass."""
    interrupted: bool = False
    paths: list[Path] = field(default_factory=list)


def _weight(case: Named) -> float:
    return _FULL_CASE if getattr(case, "full", True) else _WIDTH_CASE


def _measure(suite: str, case: Named, session: Session, store: Store, say: Callable[[str], None]) -> str:
    """Measures a case and keeps its record; returns why the case did not pass, "" where it did."""
    rounds = Rounds()
    try:
        record = module(suite).measure(case, session._replace(rounds=rounds))
    except Skip as reason:
        say(f"skipped {case.id}: {reason}")
        return ""
    except Exception as error:  # the other cases are measured
        return one_line(error)
    store.add(suite, record | {"cpu_slowdown": rounds.cpu_slowdown})
    failures = own_failures(record)
    return f"no number for what fails its check: {failures}" if failures else ""


def describe(
    device: torch.device, quick: bool, measured: dict[str, object], words: Sequence[str] = ("--everything",)
) -> dict[str, Any]:
    """What the file of a suite says of its run. words: of the command line."""
    found = header(device)
    found["versions"] |= versions()
    return found | {
        "quick": quick,
        "load_average_before": load_average(),
        "code": fingerprint(),
        "measured": measured,
        "asked_for": list(words),
    }


def run(
    selected: Mapping[str, list[Named]],
    device: torch.device,
    options: Options,
    output: Path | None = None,
    resume: bool = False,
    silent: bool = False,
) -> Found:
    """Measure every selected case; selected: as selection.select gave it for the same options.

    output: a folder that holds what is done whenever the run ends, and however. resume: leave out what is there.
    silent: no progress on standard error. Ctrl-C ends the run at once; found.interrupted says so.
    """
    described = describe(device, options.quick, options.measured(), options.words)
    store = Store(output, described, {suite: [case.id for case in cases] for suite, cases in selected.items()})
    done = store.resume() if resume else {}
    waiting, skipped = runnable(selected, device, options)
    cases = [(suite, case) for suite, of_suite in waiting.items() for case in of_suite]
    cases = [(suite, case) for suite, case in cases if case.id not in done.get(suite, ())]
    found = Found(store.results)
    session = Session(device, options.quick, options.get("against"))
    console = Console(file=sys.stderr)
    has_bar = console.is_terminal and not silent
    columns = (*map(TextColumn, ("{task.description}", "{task.fields[words]}")), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not has_bar, speed_estimate_period=_SPEED_OF_LAST_S)
    task = bar.add_task("", total=sum(_weight(case) for _, case in cases), words="")

    def say(line: str) -> None:
        if not silent:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    # Standard output is for the results: what a library prints while it is measured goes the way of the progress.
    with bar, redirect_stdout(sys.stderr):
        for note in skipped:
            say(note)
        try:
            for i, (suite, case) in enumerate(cases):
                words = f"{i}/{len(cases)}"
                bar.update(task, description=case.id, words=words)
                if not has_bar:
                    say(f"{case.id} ({words})")
                if failure := _measure(suite, case, session, store, say):
                    found.failures.append(f"{case.id}: {failure}")
                bar.advance(task, _weight(case))
        except KeyboardInterrupt:
            found.interrupted = True
    if not found.interrupted:
        store.finish()
    found.paths = store.paths()
    return found
