"""Launches of our kernels under a tool that watches them: compute-sanitizer (sanitizer.py), ncu (counters.py).

The tool starts a driver, a process that makes the launches and writes each one down, before and after it: what was cut
is gone on with by the next call.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from onetrip import use_backend
from onetrip.processes import process_group

from . import EXIT_UNFINISHED

Launch = tuple[str, Callable[[], list[str]]]
"""What it launches, and the call: it returns what was wrong with the results."""


def kernels(backend: str) -> list[str]:
    """Parts of the names that tell our kernels from all others: the namespace of the CUDA ones, Triton's by name."""
    if backend == "cuda":
        return ["onetrip"]
    import onetrip.kernels

    folder = Path(onetrip.kernels.__file__).parent
    return sorted(
        {name for path in folder.glob("*.py") for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.M)}
    )


def launched(record: Path) -> tuple[set[str], set[str]]:
    """The launches that ended, and those that were begun and did not end."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    ended = {line["name"] for line in lines if line["ended"]}
    return ended, {line["name"] for line in lines} - ended


class _Launches:
    """Counts what Triton launches under the names that the tool's filters have."""

    def __init__(self, names: list[str]) -> None:
        self._names, self.count = names, 0

    def __call__(self, metadata: Any) -> None:
        self.count += any(name in metadata.get()["name"] for name in self._names)

    def install(self) -> bool:
        """False where this Triton has no chain of hooks to join."""
        import triton

        chain = getattr(getattr(getattr(triton, "knobs", None), "runtime", None), "launch_enter_hook", None)
        if not hasattr(chain, "add"):
            return False
        chain.add(self)
        return True


def drive(planned: Sequence[Launch], backend: str, record: Path, deadline: float) -> int:
    """Launches everything that has not ended yet, as far as the time goes: the process that the tool watches."""
    failed = 0
    ended, broken = launched(record)
    # What was cut, or broke the process, may do so again: first what has not run.
    todo = sorted((launch for launch in planned if launch[0] not in ended), key=lambda launch: launch[0] in broken)
    seen = _Launches(kernels(backend))
    counts = backend == "triton" and seen.install()
    with use_backend(backend), record.open("a") as file:
        for name, launch in todo:
            if time.time() > deadline:
                break
            print(json.dumps({"name": name, "ended": False}), file=file, flush=True)
            for line in launch():
                print(f"FAILED {name}: {line}", flush=True)
                failed += 1
            torch.cuda.synchronize()
            print(json.dumps({"name": name, "ended": True}), file=file, flush=True)
            ended.add(name)
    if counts and todo and seen.count == 0:
        print("FAILED no kernel was launched that the filter names", flush=True)
        failed += 1
    print(f"{len(ended)} of {len(planned)} launches", flush=True)
    return 1 if failed else 0 if len(ended) == len(planned) else EXIT_UNFINISHED


def watch(command: list[str], environment: Mapping[str, str], log: Path, deadline: float) -> int | None:
    """The exit code, or None where the time was up. What is printed is in the log at once: a cut loses nothing."""
    with log.open("ab") as file:
        streams = {"stdout": file, "stderr": subprocess.STDOUT}
        # The tool's own process and the one that it watches.
        with process_group(command, signal.SIGKILL, 0.0, env=environment, **streams) as process:
            try:
                return process.wait(max(deadline - time.time(), 1.0))
            except subprocess.TimeoutExpired:
                return None


def main(drive: Callable[[str, Path, float], int], run: Callable[..., int]) -> NoReturn:
    """Entry point of counters.py and sanitizer.py: `drive ...` is what the tool watches, all else the part."""
    *words, path, deadline = sys.argv[1:]
    if words[0] == "drive":
        sys.exit(drive(words[1], Path(path), float(deadline)))
    sys.exit(run(*words, Path(path), float(deadline)))
