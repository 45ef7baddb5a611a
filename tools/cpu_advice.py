"""What docs/cpu.md claims of allocators, threads and bfloat16, measured: python -m tools.cpu_advice [--output DIR]

Processes that differ in the environment take turns, one training step of MiniLM at a time. Allocators and bfloat16 have
one thread each, and a step's time is the CPU time of its process, which other processes do not count into: a machine
that is shared will do. Numbers of threads are compared by wall time: nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from onetrip import anatomy, patch_model
from onetrip.benchmarks.measure import results
from onetrip.cpu_advice import KEEPING_JEMALLOC
from onetrip.environment import header, load_average
from onetrip.measure import spread

BATCH_SIZE, SEQUENCE_LENGTH = 8, 128
WARM_UP = 1
GLIBC = "glibc"
LIBRARIES = {"tcmalloc": "libtcmalloc_minimal.so.4", "jemalloc": "libjemalloc.so.2"}
TUNABLES = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
SET_HERE = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_CONF")
WAYS = ("eager-fp32", "patched-fp32", "eager-bf16", "patched-bf16")


def environments() -> Iterator[tuple[str, dict[str, str]]]:
    """(allocator, what its process has in the environment) of each that is installed."""
    yield GLIBC, {}
    yield "glibc, tuned", {"GLIBC_TUNABLES": TUNABLES}
    for name, library in LIBRARIES.items():
        found = [path for folder in ("/usr/lib", "/usr/local/lib") for path in Path(folder).rglob(library)]
        if found:
            yield name, {"LD_PRELOAD": str(found[0])}
            if name == "jemalloc":
                yield "jemalloc, tuned", {"LD_PRELOAD": str(found[0]), "MALLOC_CONF": KEEPING_JEMALLOC}
        else:
            print(f"{name} is left out: no {library} (Debian: apt install libtcmalloc-minimal4 libjemalloc2)")


def threads() -> Iterator[tuple[str, dict[str, str]]]:
    """(threads, what its process has in the environment): 1, half as many as there are CPUs, as many, twice as many."""
    n_cpus = len(os.sched_getaffinity(0))
    for n in dict.fromkeys((1, max(n_cpus // 2, 1), n_cpus, 2 * n_cpus)):
        yield f"{n} thread{'s' * (n > 1)}", {"OMP_NUM_THREADS": str(n)}
    yield f"{n_cpus} threads, bound", {"OMP_NUM_THREADS": str(n_cpus), "OMP_PROC_BIND": "true"}


def trained(model_name: str, way: str) -> Callable[[], None]:
    """One training step of a model of its own."""
    torch.manual_seed(0)
    model = anatomy.load_model(model_name).train()
    if way.startswith("patched"):
        patch_model(model)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = anatomy.make_batch(model, BATCH_SIZE, SEQUENCE_LENGTH)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=way.endswith("bf16")):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def serve(model_name: str) -> None:
    """Reads names of WAYS, one a line; takes a step, prints its seconds: CPU time, the system's, wall time."""
    steps: dict[str, Callable[[], None]] = {}
    for line in sys.stdin:
        way = line.strip()
        step = steps[way] if way in steps else steps.setdefault(way, trained(model_name, way))
        system, total, wall = os.times().system, time.process_time(), time.perf_counter()
        step()
        taken = time.process_time() - total, os.times().system - system, time.perf_counter() - wall
        print(json.dumps(taken), flush=True)


class Process:
    """Takes steps in an environment of its own."""

    def __init__(self, stack: ExitStack, model_name: str, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tools.cpu_advice", "--serve", "--model", model_name]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        inherited = {name: value for name, value in os.environ.items() if name not in SET_HERE}
        self._process = stack.enter_context(
            subprocess.Popen(command, env=inherited | {"OMP_NUM_THREADS": "1"} | environment, **pipes)
        )
        stack.callback(self._process.kill)

    def step(self, way: str) -> tuple[float, float, float]:
        """(CPU seconds, system seconds, seconds) of one step."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(way, file=self._process.stdin, flush=True)
        total, system, wall = json.loads(self._process.stdout.readline())
        return total, system, wall


def measure(model_name: str, rounds: int) -> list[dict[str, Any]]:
    """Cases: every allocator with the patched model; with glibc's default, what patching, bfloat16, threads bring."""
    taken: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    with ExitStack() as stack:
        counts = dict(threads())
        settings = dict(environments()) | counts
        processes = {name: Process(stack, model_name, environment) for name, environment in settings.items()}
        turns = [(name, WAYS[1]) for name in processes] + [(GLIBC, way) for way in WAYS if way != WAYS[1]]
        for number in range(WARM_UP + rounds):
            for name, way in turns:
                seconds = processes[name].step(way)
                if number >= WARM_UP:
                    taken.setdefault((name, way), []).append(seconds)
            print(f"round {number + 1} of {WARM_UP + rounds}", file=sys.stderr, flush=True)

    def case(subject: str, own: tuple[str, str], against: tuple[str, str]) -> dict[str, Any]:
        clock = 2 if subject == "threads" else 0
        ratios = [base[clock] / seconds[clock] for base, seconds in zip(taken[against], taken[own], strict=True)]
        return {
            "case": f"{subject}: {', '.join(own)}",
            "against": ", ".join(against),
            "environment": settings[own[0]],
            "cpu_ms": spread([1e3 * total for total, _, _ in taken[own]]).to_dict(),
            "system_ms": statistics.median(1e3 * system for _, system, _ in taken[own]),
            "wall_ms": spread([1e3 * wall for _, _, wall in taken[own]]).to_dict(),
            "faster": spread(ratios).to_dict(),
        }

    default = {way: (GLIBC, way) for way in WAYS}
    return [
        *(case("allocator", (name, WAYS[1]), default[WAYS[1]]) for name in processes if name not in counts),
        *(case("threads", (name, WAYS[1]), (next(iter(counts)), WAYS[1])) for name in counts),
        *(case("patching", default[f"patched-{dtype}"], default[f"eager-{dtype}"]) for dtype in ("fp32", "bf16")),
        *(case("bfloat16", default[f"{way}-bf16"], default[f"{way}-fp32"]) for way in ("eager", "patched")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure allocators and bfloat16 on this CPU.")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="minilm", help="as onetrip anatomy takes it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=results.RECORDED, metavar="DIR")
    options = parser.parse_args()
    if options.serve:
        return serve(options.model)
    torch.set_num_threads(1)
    described = header(torch.device("cpu")) | {"quick": False, "load_average_before": load_average()}
    cases = measure(options.model, options.rounds)
    for case in cases:
        ratio = case["faster"]
        print(
            f"{case['case']:36} {case['cpu_ms']['median']:6.0f} ms of CPU time, of it the system's "
            f"{case['system_ms']:4.0f}; {case['wall_ms']['median']:6.0f} ms; "
            f"{ratio['median']:.2f}x ({ratio['p20']:.2f}-{ratio['p80']:.2f}) of {case['against']}"
        )
    shape = {
        "model": options.model,
        "batch_size": BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        "rounds": options.rounds,
    }
    found = {"schema": results.SCHEMA, "suite": "cpu_advice", **described, **shape, "cases": cases}
    for path in results.write({"cpu_advice": found}, options.output):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
