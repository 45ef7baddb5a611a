"""Runs the selected cases under pytest-benchmark, and keeps each record as soon as it is made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import pytest
import torch
from onetrip.environment import header, load_average
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..measure import libraries
from ..measure.cases import Named, Session
from ..measure.results import PACKAGE, Results
from .selection import Options, runnable
from .store import Store, fingerprint

_FULL_CASE, _WIDTH_CASE = 6.0, 1.0
"""How long a case with all its passes and providers takes against one of a series of widths."""
_SPEED_OF_LAST_S = 3600.0
"""The rest is estimated from what the last cases took."""


class Reporter:
    """Shows how far a run is: a bar on a terminal, elsewhere a line for each case. silent: shows nothing.

    weights: of every case, in any unit of time; only their ratios matter.
    """

    def __init__(
        self, weights: Mapping[str, float], stream: TextIO, silent: bool = False, now: Callable[[], float] | None = None
    ) -> None:
        self._weights, self._silent, self._n_ended = weights, silent, 0
        self.console = Console(file=stream)
        self._bar = Progress(
            *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"), TimeRemainingColumn()),
            console=self.console,
            disable=silent or not self.console.is_terminal,
            speed_estimate_period=_SPEED_OF_LAST_S,
            get_time=now,
        )
        self._task = self._bar.add_task("", total=sum(weights.values()), words="")

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def start(self, case: str) -> None:
        words = f"{self._n_ended}/{len(self._weights)}"
        self._bar.update(self._task, description=case, words=words)
        if not self.console.is_terminal:
            left = self._bar.tasks[0].time_remaining
            self.say(f"{case} ({words}{'' if left is None else f', about {timedelta(seconds=left)} left'})")

    def end(self, case: str) -> None:
        self._n_ended += 1
        self._bar.advance(self._task, self._weights[case])

    def say(self, line: str) -> None:
        if not self._silent:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Found:
    results: Results
    failures: list[str] = field(default_factory=list)
    """One line for each case that did not pass."""
    interrupted: bool = False
    paths: list[Path] = field(default_factory=list)


def _weight(case: Named) -> float:
    return _FULL_CASE if getattr(case, "full", True) else _WIDTH_CASE


class CasesPlugin:
    """A pytest plugin: gives test_case of bench_cases.py the selected cases."""

    def __init__(self, selected: Mapping[str, list[Named]], session: Session) -> None:
        self._cases = [(suite, case) for suite, cases in selected.items() for case in cases]
        self._session = session

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize(("suite", "case"), self._cases, ids=[case.id for _, case in self._cases])

    @pytest.fixture
    def session(self) -> Session:
        return self._session


class _Watcher:
    """A pytest plugin: keeps records and failures, shows how far the run is."""

    def __init__(self, reporter: Reporter, store: Store) -> None:
        self._reporter, self._store = reporter, store
        self.failures: list[str] = []
        self.interrupted = False

    def pytest_keyboard_interrupt(self) -> None:
        self.interrupted = True

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._reporter.start(item.callspec.id)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield
        if (record := item.funcargs["benchmark"].extra_info.get("record")) is not None:
            self._store.add(item.callspec.params["suite"], record)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._reporter.end(item.callspec.id)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.when == "setup" and report.skipped):
            self._add(report)
        elif report.skipped:
            self._reporter.say(f"skipped {report.nodeid}: {report.longrepr[-1]}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        lines = [line.removeprefix("E ").strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
        self.failures.append(f"{report.nodeid.rpartition('::')[2]}: {lines[0] if lines else report.longreprtext}")


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
    silent: no progress on standard error. Ctrl-C ends the run after the current case; found.interrupted says so.
    """
    described = header(device)
    described["versions"] |= libraries.versions()
    described |= {
        "quick": options.quick,
        "load_average_before": load_average(),
        "code": fingerprint(),
        "measured": options.measured(),
        "asked_for": list(options.words),
    }
    store = Store(output, described, {suite: [case.id for case in cases] for suite, cases in selected.items()})
    done = store.resume() if resume else {}
    waiting, skipped = runnable(selected, device, options)
    for suite, cases in waiting.items():
        cases[:] = [case for case in cases if case.id not in done.get(suite, ())]
    arguments = [
        str(PACKAGE / "run/bench_cases.py"),
        "--import-mode=importlib",
        f"--rootdir={PACKAGE}",
        f"--config-file={os.devnull}",
        "--noconftest",
        "-pno:cacheprovider",
        "-pno:terminal",
        "-pno:xdist",
        "--benchmark-disable-gc",
        "--benchmark-quiet",
    ]
    status = pytest.ExitCode.OK
    # pytest captures the file descriptors; progress goes to a copy of what standard error was.
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(2), "w") as terminal:
        arguments.append(f"--benchmark-storage=file://{folder}")  # else a folder appears where the user stands
        weights = {case.id: _weight(case) for cases in waiting.values() for case in cases}
        with Reporter(weights, terminal, silent) as reporter:
            watcher = _Watcher(reporter, store)
            for note in (*store.notes, *skipped):
                reporter.say(note)
            if weights:
                session = Session(device, options.quick, options.get("against"))
                status = pytest.main(arguments, plugins=[CasesPlugin(waiting, session), watcher])
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        store.finish()
    elif not watcher.interrupted:
        watcher.failures.append(f"the run did not end: {pytest.ExitCode(status).name.lower()}")
    return Found(store.results, watcher.failures, watcher.interrupted, store.paths())
