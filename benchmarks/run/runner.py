"""Runs the selected cases under pytest-benchmark, and keeps each record as soon as it is made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ..measure import libraries
from ..measure.cases import Named
from ..measure.machine import PACKAGE, header, load_average
from ..measure.results import Results, bench_file
from .options import Options
from .progress import Reporter, Watch
from .store import Store, fingerprint

_FULL_CASE, _WIDTH_CASE = 6.0, 1.0
"""How long a case with all its passes and providers takes against one of a series of widths."""


@dataclass(frozen=True)
class Found:
    results: Results
    failures: list[str] = field(default_factory=list)
    """One line for each case that did not pass."""
    interrupted: bool = False
    paths: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _weight(case: Named) -> float:
    return _FULL_CASE if getattr(case, "full", True) else _WIDTH_CASE


class _Watcher:
    """A pytest plugin: leaves out what is done, keeps records and failures, shows how far the run is."""

    def __init__(self, reporter: Reporter, store: Store, done: Mapping[str, set[str]]) -> None:
        self._reporter, self._store, self._done = reporter, store, done
        self.failures: list[str] = []
        self.interrupted = False

    def pytest_keyboard_interrupt(self) -> None:
        self.interrupted = True

    @staticmethod
    def _names(item: pytest.Item) -> tuple[str, str]:
        """(suite, id of the case)."""
        return item.path.stem.removeprefix("bench_"), item.nodeid.rpartition("[")[2].rstrip("]")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def is_done(item: pytest.Item) -> bool:
            suite, case = self._names(item)
            return case in self._done.get(suite, ())

        items[:] = [item for item in items if not is_done(item)]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._reporter.start(self._names(item)[1])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield
        fixture = getattr(item, "funcargs", {}).get("benchmark")
        if fixture is not None and "record" in fixture.extra_info:
            record = {**fixture.extra_info["record"], "other_busy_cpus": fixture.extra_info.get("other_busy_cpus")}
            self._store.add(self._names(item)[0], record)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._reporter.end(self._names(item)[1])

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
    silent: no progress on standard error. Ctrl-C ends the run after the case that it meets; found.interrupted says so.
    """
    described = header(device)
    described["versions"] |= libraries.versions()
    described |= {
        "quick": options.quick,
        "load_average_before": load_average(),
        "code": fingerprint(),
        "measured": options.measured(),
        "asked_for": options.words(),
    }
    store = Store(output, described, {suite: [case.id for case in cases] for suite, cases in selected.items()})
    done = store.resume() if resume else {}
    waiting = {
        suite: {case.id: _weight(case) for case in cases if case.id not in done.get(suite, ())}
        for suite, cases in selected.items()
    }
    arguments = [
        *(str(bench_file(suite)) for suite in selected if waiting[suite]),
        "--import-mode=importlib",
        f"--rootdir={PACKAGE}",
        f"--config-file={os.devnull}",
        f"--confcutdir={PACKAGE}",
        "-pno:cacheprovider",
        "-pno:terminal",
        "-pno:xdist",
        "--benchmark-disable-gc",
        "--benchmark-quiet",
        f"--bench-device={device.type}",
        *options.words(),
    ]
    status = pytest.ExitCode.OK
    # pytest captures the file descriptors; progress goes to a copy of what standard error was.
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(2), "w") as terminal:
        arguments.append(f"--benchmark-storage=file://{folder}")  # else a folder appears where the user stands
        watch = Watch({case: weight for cases in waiting.values() for case, weight in cases.items()})
        with Reporter(watch, terminal, silent) as reporter:
            watcher = _Watcher(reporter, store, done)
            for note in store.notes:
                reporter.say(note)
            if len(watch):
                status = pytest.main(arguments, plugins=[watcher])
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        store.finish()
    elif not watcher.interrupted:
        watcher.failures.append(f"the run did not end: {pytest.ExitCode(status).name.lower()}")
    return Found(store.results, watcher.failures, watcher.interrupted, store.paths(), store.notes)
