"""Runs the selected cases under pytest-benchmark, with a progress bar in place of pytest's output."""

from __future__ import annotations

import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pytest_benchmark.logger import PytestBenchmarkWarning
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .machine import PACKAGE, header, load_average
from .results import Results, bench_file, from_pytest_benchmark
from .suite import Named


@dataclass(frozen=True)
class Found:
    results: Results
    failures: list[str]
    """One line for each case that did not pass."""


class _Watcher:
    """A pytest plugin: moves the bar, keeps what failed."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._task = progress, progress.add_task("", total=total)
        self.failures: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._progress.update(self._task, description=nodeid.rpartition("[")[2].rstrip("]"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._progress.advance(self._task)
        if report.failed or (report.when == "setup" and report.skipped):
            self._add(report)
        elif report.skipped:
            self._progress.console.print(f"skipped {report.nodeid}: {report.longrepr[-1]}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        lines = [line.removeprefix("E ").strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
        self.failures.append(f"{report.nodeid.rpartition('::')[2]}: {lines[0] if lines else report.longreprtext}")


def run(selected: dict[str, list[Named]], device: torch.device, quick: bool, only: str | None) -> Found:
    """Measure every selected case. selected: as results.select gave it for the same quick and only."""
    described = header(device) | {"quick": quick, "load_average_before": load_average()}
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(2), "w") as terminal:
        raw = Path(folder) / "raw.json"
        arguments = [
            *(str(bench_file(suite)) for suite in selected),
            "--import-mode=importlib",
            f"--rootdir={PACKAGE}",
            f"--config-file={os.devnull}",
            f"--confcutdir={PACKAGE}",
            "-pno:cacheprovider",
            "-pno:terminal",
            "-pno:xdist",
            "--benchmark-disable-gc",
            "--benchmark-quiet",
            f"--benchmark-json={raw}",
            f"--bench-device={device.type}",
            *(["--quick"] if quick else []),
            *([f"--only={only}"] if only is not None else []),
        ]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(file=terminal)
        # pytest captures the file descriptors; the bar goes to a copy of what standard error was.
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            watcher = _Watcher(progress, sum(len(cases) for cases in selected.values()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PytestBenchmarkWarning)  # "not saving": said by the failures below
                status = pytest.main(arguments, plugins=[watcher])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            # Interrupted, or never started: half a run must not replace a record.
            return Found({}, [*watcher.failures, f"the run did not end: {pytest.ExitCode(status).name.lower()}"])
        results = from_pytest_benchmark(raw, described) if raw.exists() and raw.stat().st_size else {}
    return Found(results, watcher.failures)
