"""The tests marked gpu, in shards that go on where they were stopped, and outlive a broken CUDA context.

    python -m onetrip.benchmarks.full_run.gpu_tests SHARD ROOT DIR

Workers run pytest over their shares of a shard with this module as a plugin, which writes each outcome down at once in
DIR/gpu-tests/<shard>-<worker>.jsonl. A kernel that faults breaks the CUDA context of its process for good: the process
ends there, and another one goes on with the tests that are left. A test that kills its process is a failure too. The
next call runs what failed and what is left.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from onetrip import html
from onetrip.command_line import INTERRUPTED
from onetrip.environment import checkout

_VARIABLE = "ONETRIP_GPU_TESTS"
_BROKEN_CONTEXT = 9  # exit code of a process that the plugin ends
_MOST_WORKERS = 6
_LINES = 3  # of a failure's message


@dataclass(frozen=True)
class Shard:
    name: str
    what: str
    paths: tuple[str, ...]
    """Below tests/."""
    keywords: str = ""
    """pytest's -k."""
    alone: bool = False
    """One worker: its tests fill the GPU's memory."""


_SPECIAL = ("ops/test_row_norm_gpu.py", "ops/test_softmax_gpu.py", "ops/test_adam_gpu.py")
_ROW_NORM = (
    *(f"ops/test_row_norm_{name}.py" for name in ("forward", "backward", "input", "dropout", "determinism")),
    "nn/test_row_norm.py",
)
_COMPILE = (
    "ops/test_row_norm_compile.py",
    "ops/test_jit_trace.py",
    "kernels/test_triton_cases.py",
)
_LARGE = "more_than_two_to_the or many_rows"
SHARDS = (
    Shard("special", "graphs, streams, autocast, wide rows, Adam's bits", _SPECIAL, f"not ({_LARGE})"),
    Shard("row_norm-cuda", "the contract of row_norm, CUDA C++", _ROW_NORM, "not triton"),
    Shard("row_norm-triton", "the contract of row_norm, Triton", _ROW_NORM, "triton"),
    Shard("softmax-cuda", "the contract of softmax, CUDA C++", ("ops/test_softmax.py",), "not triton"),
    Shard("softmax-triton", "the contract of softmax, Triton", ("ops/test_softmax.py",), "triton"),
    Shard("rotary", "the contract of rotary, Triton", ("ops/test_rotary.py",)),
    Shard("glu", "the contract of glu, Triton", ("ops/glu/test_glu.py", "ops/glu/test_glu_dropout.py")),
    Shard("cross_entropy", "the contract of cross_entropy, Triton", ("ops/test_cross_entropy.py",)),
    Shard("models", "patched models: gradients, checkpointing, a training loop", ("patching/test_models_gpu.py",)),
    Shard("large", "2^31 elements and more, a million rows", _SPECIAL, _LARGE, alone=True),
    Shard("compile", "torch.compile, and cases of Triton's kernels", _COMPILE),
)


def root() -> Path | None:
    """Root of a source tree with tests: the one that the package runs from, else the current folder."""
    for folder in (checkout(), Path.cwd()):
        if folder is not None and (folder / "tests/conftest.py").is_file() and (folder / "csrc").is_dir():
            return folder
    return None


def missing() -> str:
    """What pytest needs and is not installed."""
    needed = {"pytest_benchmark": "pytest-benchmark", "hypothesis": "hypothesis", "transformers": "transformers"}
    absent = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    return f"not installed: {', '.join(absent)} (pip install 'onetrip[test]')" if absent else ""


def read(record: Path) -> dict[str, Any]:
    """What one worker wrote: {"total": ..., "tests": {id: its last line}}."""
    total, tests = None, {}
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # the process died while it wrote
            continue
        if "total" in entry:
            total = entry["total"]
        else:
            tests[entry["test"]] = entry
    return {"total": total, "tests": tests}


class _Recorder:
    """The plugin: takes the worker's share of the tests, less those that have run; writes outcomes."""

    def __init__(self, record: Path, worker: int, workers: int) -> None:
        self._file = record.open("a")
        # The records of all workers count: on another machine there may have been more of them.
        shard = record.name.rpartition("-")[0]
        self._finished = {test for path in record.parent.glob(f"{shard}-*.jsonl") for test in read(path)["tests"]}
        self._worker, self._workers = worker, workers
        self._outcome, self._reason, self._start = "passed", "", 0.0

    def _write(self, **entry: object) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % self._workers == self._worker]
        self._write(total=len(mine))
        items[:] = [item for item in mine if item.nodeid not in self._finished]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, outcome="failed", reason=_message(report), seconds=0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome, self._reason, self._start = "passed", "", time.time()
        self._write(test=nodeid, outcome="started", at=self._start)

    def _seconds(self) -> float:
        return round(time.time() - self._start, 3)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome, self._reason = "failed", _message(report)
            if _context_is_broken():
                reason = f"{self._reason} [and the CUDA context is broken]"
                self._write(test=report.nodeid, outcome="failed", reason=reason, seconds=self._seconds())
                self._file.close()
                os._exit(_BROKEN_CONTEXT)
        elif report.skipped and self._outcome == "passed":
            longrepr = report.longrepr
            self._outcome = "skipped"
            self._reason = str(longrepr[-1] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
        if report.when == "teardown":
            self._write(test=report.nodeid, outcome=self._outcome, reason=self._reason, seconds=self._seconds())


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    lines = [line.removeprefix("E").strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return " | ".join(lines[:_LINES] or report.longreprtext.splitlines()[-1:])


def _context_is_broken() -> bool:
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    if _VARIABLE in os.environ:
        given = json.loads(os.environ[_VARIABLE])
        given["record"] = Path(given["record"])
        config.pluginmanager.register(_Recorder(**given), "onetrip gpu tests")


def _settle(record: Path) -> None:
    """Tests that were running when their process died have failed."""
    running = [entry for entry in read(record)["tests"].values() if entry["outcome"] == "started"]
    with record.open("a") as file:
        for entry in running:
            outcome = {
                "outcome": "failed",
                "reason": "its process died",
                "seconds": round(time.time() - entry["at"], 3),
            }
            file.write("\n" + json.dumps({"test": entry["test"], **outcome}) + "\n")  # it may have died within a line


def _keep_what_passed(record: Path) -> None:
    kept = [entry for entry in read(record)["tests"].values() if entry["outcome"] in ("passed", "skipped")]
    if record.exists():
        html.write(record, "".join(json.dumps(entry) + "\n" for entry in kept))


def _work(shard: Shard, tree: Path, record: Path, worker: int, workers: int) -> str:
    """Runs one worker's share; says why it did not come to its end, "" where it did."""
    given = {"record": str(record), "worker": worker, "workers": workers}
    environment = {**os.environ, _VARIABLE: json.dumps(given), "OMP_NUM_THREADS": "1"}
    environment.pop("OMP_PROC_BIND", None)  # all workers' threads would share one core
    command = [sys.executable, "-m", "pytest", "-p", "onetrip.benchmarks.full_run.gpu_tests", "-p", "no:cacheprovider"]
    command += ["-q", "--tb=short", "--continue-on-collection-errors", f"--rootdir={tree}"]
    command += [*(str(tree / "tests" / path) for path in shard.paths), "-m", "gpu"]
    command += ["-k", shard.keywords] if shard.keywords else []
    while True:
        before = len(read(record)["tests"])
        with record.with_suffix(".log").open("ab") as log:
            status = subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
        if status == pytest.ExitCode.INTERRUPTED:
            return "interrupted"
        if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ""
        _settle(record)
        found = read(record)
        if found["total"] is not None and len(found["tests"]) >= found["total"]:
            return ""
        if len(found["tests"]) == before:
            return f"pytest ended with {status} before a test ran: {record.with_suffix('.log')}"


def run(shard: Shard, tree: Path, output: Path, workers: int) -> int:
    """One shard, what ran before kept. Prints the outcome; the exit code says whether it is whole and green."""
    folder = output / "gpu-tests"
    folder.mkdir(parents=True, exist_ok=True)
    records = [folder / f"{shard.name}-{worker}.jsonl" for worker in range(workers)]
    for record in records:
        _keep_what_passed(record)
    with ThreadPoolExecutor(workers) as pool:
        ends = [pool.submit(_work, shard, tree, record, i, workers) for i, record in enumerate(records)]
        try:
            reasons = {end.result() for end in ends} - {""}
        except KeyboardInterrupt:
            summarise(shard, records)  # now: the pool waits for the tests that are running
            return INTERRUPTED
    has_failed = summarise(shard, records)
    for line in sorted(reasons):
        print(line)
    return 1 if reasons or has_failed else 0


def summarise(shard: Shard, records: list[Path]) -> bool:
    """Prints what became of the tests and writes it into <shard>.json; whether one failed."""
    found = [read(record) for record in records]
    tests = {name: entry for one in found for name, entry in one["tests"].items()}
    total = sum(one["total"] or 0 for one in found)
    counts = Counter(entry["outcome"] for entry in tests.values())
    skipped = Counter(entry["reason"] for entry in tests.values() if entry["outcome"] == "skipped")
    failures = [entry for entry in tests.values() if entry["outcome"] == "failed"]
    summary = {"shard": shard.name, "total": total, **counts, "reasons": dict(skipped), "failures": failures}
    slowest = sorted(tests.values(), key=lambda entry: -entry.get("seconds", 0.0))[:10]
    summary["slowest"] = [{"test": entry["test"], "seconds": entry.get("seconds")} for entry in slowest]
    (records[0].parent / f"{shard.name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    for entry in failures:
        print(f"FAILED {re.sub(r'^tests/', '', entry['test'])}: {entry['reason']}")
    for reason, count in skipped.items():
        print(f"{count} skipped: {reason}")
    print(f"{len(tests)} of {total} tests ran: " + ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    for entry in tests.values():
        if entry["outcome"] == "started":
            print(f"stopped in {entry['test']}, after {time.time() - entry['at']:.0f} s")
    return bool(failures)


def main(arguments: list[str]) -> int:
    name, tree, output = arguments
    shard = next(shard for shard in SHARDS if shard.name == name)
    workers = 1 if shard.alone else max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 2))
    return run(shard, Path(tree), Path(output), workers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
