"""Nsight Compute over the kernels of one backend.

    python -m onetrip.benchmarks.full_run.counters BACKEND DIR

Every launch happens once unwatched, then once between cudaProfilerStart and cudaProfilerStop, behind a launch of
PyTorch's spin_kernel, which tells the launches apart in what ncu prints. Clocks are left alone; caches are emptied
before each of ncu's passes. What comes out is a suite's file, counters-BACKEND.json, in the folder of the part.
"""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..measure.cases import DTYPE_NAMES, LARGE_ELEMENTS, Operator
from ..measure.checks import make_inputs
from ..measure.results import Store
from ..runner import describe
from ..show import tables
from ..suites import row_norm, softmax
from ..suites.optimizers import ONETRIP, make
from . import EXIT_SKIPPED, driver

METRICS = {
    "duration_ns": ("gpu__time_duration.sum",),
    "read_bytes": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "written_bytes": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "warp_instructions": ("smsp__inst_executed.sum",),
    "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active",),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "l2_percent": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed",),
    "local_load_sectors": ("l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",),
    "local_store_sectors": ("l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",),
    "registers": ("launch__registers_per_thread",),
    "static_shared_bytes": ("launch__shared_mem_per_block_static",),
    "dynamic_shared_bytes": ("launch__shared_mem_per_block_dynamic",),
}
"""What is recorded -> ncu's names for it: a GPU or a version of ncu that does not know the first may know the next."""
_SECTOR_BYTES, _WARP = 32, 32
_MARKER = "spin_kernel"
_REJECTIONS = (
    "LibraryNotLoaded",
    "ERR_NVGPUCTRPERM",
    "Failed to initialize the profiler",
    "Profiling is not supported",
    "driver resource was unavailable",
)
_UNKNOWN = "Failed to find metric"

Widths = tuple[tuple[Operator, tuple[int, ...]], ...]
_ROW_NORM = (1024, 4096, 8192, 16384, 65536, 768)
_SOFTMAX = (512, 2048, 16384, 65536)
WIDTHS: Widths = (
    (row_norm.LAYER_NORM, _ROW_NORM),
    (row_norm.BIAS_DROPOUT_RESIDUAL_LAYER_NORM[0.1], _ROW_NORM),
    (row_norm.RMS_NORM, (4096, 768)),
    (softmax.SOFTMAX, _SOFTMAX),
    (softmax.CAUSAL_SOFTMAX, _SOFTMAX),
)
ELEMENTS = LARGE_ELEMENTS
_BERT_LAYER = [(1024, 1024), (1024,)] * 4 + [(4096, 1024), (4096,), (1024, 4096), (1024,)] + [(1024,)] * 4
_LLAMA_LAYER = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2
MODELS: dict[str, Sequence[tuple[int, ...]]] = {
    "bert_large": [(30522, 1024), (512, 1024), (2, 1024), (1024,), (1024,), *(_BERT_LAYER * 24)],
    "two layers of llama_7b": _LLAMA_LAYER * 2,
}
"""The shapes of the parameters that a step of AdamW8bit updates."""


@dataclass(frozen=True)
class Counted:
    """One launch, of one kernel or of several."""

    operator: str
    direction: str
    shape: str
    dtype: str
    n_elements: int
    floor_bytes: float
    """What it must move, by the formula that the suites judge it by."""
    prepare: Callable[[torch.device], Callable[[], object]]
    """Makes the inputs, and gives the call."""

    @property
    def id(self) -> str:
        return f"{self.operator}-{self.direction}-{self.shape}-{self.dtype}"


def _prepare(
    operator: Operator, n_rows: int, n_cols: int, dtype: torch.dtype, direction: str, device: torch.device
) -> Callable[[], object]:
    inputs = make_inputs(operator, n_rows, n_cols, dtype, device, seed=0)
    if direction == "forward":
        return lambda: operator.fused(**inputs.tensors)
    outputs = inputs.forward(operator.fused)
    return lambda: torch.autograd.grad(outputs, inputs.leaves, inputs.grad_outputs, retain_graph=True)


def _prepare_step(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    params = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return make(ONETRIP, params).step


def cases() -> Iterator[Counted]:
    """In order of worth: 16-bit rows, which are furthest from the speed of a copy, first."""
    dtypes = (torch.bfloat16, torch.float32)
    for dtype in dtypes:
        for operator, widths in WIDTHS:
            for n_cols in widths:
                n_rows = max(ELEMENTS // n_cols, 1)
                least = operator.least_bytes(n_rows, n_cols, dtype.itemsize)
                for direction, floor in (("forward", least.forward), ("backward", least.backward)):
                    prepare = partial(_prepare, operator, n_rows, n_cols, dtype, direction)
                    shape, numel = f"{n_rows} x {n_cols}", n_rows * n_cols
                    yield Counted(operator.name, direction, shape, DTYPE_NAMES[dtype], numel, floor, prepare)
    for dtype in dtypes:
        for model, shapes in MODELS.items():
            numel = sum(torch.Size(shape).numel() for shape in shapes)
            floor_bytes = ONETRIP.least_bytes(numel, dtype.itemsize, dtype.itemsize)
            step = partial(_prepare_step, shapes, dtype)
            yield Counted("AdamW8bit", "step", model, DTYPE_NAMES[dtype], numel, floor_bytes, step)


def _count(case: Counted, device: torch.device) -> list[str]:
    call = case.prepare(device)
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # ncu saves all memory that is allocated, before it replays a kernel
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return []


def drive(backend: str, device: str = "cuda") -> int:
    """What ncu watches."""
    return driver.drive(((case.id, partial(_count, case, torch.device(device))) for case in cases()), backend)


def parse(text: str) -> list[dict[str, str]]:
    """The kernels, in order, as `ncu --csv --page raw` prints them below its messages: column -> entry."""
    _, head, table = text.partition('"ID",')
    lines = [line for line in (head + table).splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(lines) if row["ID"]]  # the row of units has no ID


def by_launch(kernels: Sequence[dict[str, str]]) -> list[list[dict[str, str]]]:
    """The kernels behind each of the markers."""
    found: list[list[dict[str, str]]] = []
    for kernel in kernels:
        if _MARKER in kernel["Kernel Name"]:
            found.append([])
        elif found:
            found[-1].append(kernel)
    return found


def _number(entry: str | None) -> float:
    """NaN where ncu has none."""
    try:
        return float((entry or "").replace(",", ""))
    except ValueError:  # "n/a"
        return math.nan


def _without_nan(figures: dict[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def measured(case: Counted, rows: Sequence[dict[str, str]], copy_gb_per_s: float = math.nan) -> dict[str, Any]:
    """The record of a launch. share_of_copy: of the copy's bandwidth, by the bytes that the launch must move, in the
    time of all its kernels; a byte a nanosecond is a GB/s."""
    kernels, duration_ns = [], 0.0
    for row in rows:
        numbers = {key: [_number(row.get(name)) for name in names] for key, names in METRICS.items()}
        found = {key: next((n for n in each if not math.isnan(n)), math.nan) for key, each in numbers.items()}
        moved = found["read_bytes"] + found["written_bytes"]
        sectors = found.pop("local_load_sectors") + found.pop("local_store_sectors")
        shared = found.pop("static_shared_bytes") + found.pop("dynamic_shared_bytes")
        instructions = found.pop("warp_instructions")
        figures = {
            **found,
            "shared_bytes": shared,
            "local_bytes": _SECTOR_BYTES * sectors,
            # Instructions of warps times 32, over the elements: instructions of threads, idle lanes counted in.
            "instructions_per_element": _WARP * instructions / case.n_elements,
            "moved_share_of_copy": moved / found["duration_ns"] / copy_gb_per_s,
        }
        where = {"kernel": row["Kernel Name"], "grid": row.get("Grid Size"), "block": row.get("Block Size")}
        kernels.append(where | _without_nan(figures))
        duration_ns += found["duration_ns"]
    share = case.floor_bytes / duration_ns / copy_gb_per_s
    return {
        "case": case.id,
        **{name: getattr(case, name) for name in ("operator", "direction", "shape", "dtype", "n_elements")},
        **_without_nan({"floor_bytes": case.floor_bytes, "duration_ns": duration_ns, "share_of_copy": share}),
        "kernels": kernels,
    }


def _copy_gb_per_s(output: Path) -> float:
    """The copy bandwidth of this GPU, as the part "environment" measured it; NaN where it has not."""
    path = output / "environment.json"
    ceilings = json.loads(path.read_text()).get("ceilings") if path.exists() else None
    measured = (ceilings or {}).get("copy_gb_per_s")
    return math.nan if measured is None else measured


def _profile(backend: str, folder: Path) -> tuple[int, str, list[dict[str, str]]]:
    """(exit code, all that was printed, the kernels).

    A metric that ncu does not know ends it before a kernel is counted: then what is left of METRICS is tried.
    """
    log, table = folder / f"{backend}.txt", folder / f"{backend}.csv"
    names = "|".join([_MARKER, *driver.kernels(backend)])
    wanted = {key: list(candidates) for key, candidates in METRICS.items()}
    while True:
        table.unlink(missing_ok=True)
        command = ["ncu", "--profile-from-start", "off", "--target-processes", "application-only"]
        command += ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{names}"]
        command += ["--replay-mode", "kernel", "--cache-control", "all", "--clock-control", "none"]
        command += ["--metrics", ",".join(candidates[0] for candidates in wanted.values() if candidates)]
        command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)]
        command += [sys.executable, "-m", __spec__.name, "drive", backend]
        with log.open("wb") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
        printed, counted = (path.read_text(errors="replace") if path.exists() else "" for path in (log, table))
        kernels, printed = parse(counted), printed + counted.partition('"ID",')[0]
        messages = [line.replace("\\", "") for line in printed.splitlines() if _UNKNOWN in line]
        unknown = [c for c in wanted.values() if c and any(c[0].partition(".")[0] in line for line in messages)]
        if kernels or not unknown:
            return code, printed, kernels
        for candidates in unknown:
            candidates.pop(0)


def run(backend: str, output: Path, device: str = "cuda") -> int:
    """Counts every launch and prints the table; the exit code says what became of it."""
    suite, planned = f"counters-{backend}", list(cases())
    described = describe(torch.device(device), quick=False, measured={"metrics": sorted(METRICS)})
    store = Store(output / "parts" / suite, described, {suite: [case.id for case in planned]})
    folder = output / "counters"
    folder.mkdir(parents=True, exist_ok=True)
    code, printed, kernels = _profile(backend, folder)
    print("\n".join(line for line in printed.splitlines() if not line.startswith("==PROF==")))
    rejected = [line for line in printed.splitlines() if any(words in line for words in _REJECTIONS)]
    if not kernels and rejected:
        print(f"ncu cannot count here: {rejected[0]}")
        return EXIT_SKIPPED
    launches, has_ended = by_launch(kernels), driver.has_ended(printed)
    if not has_ended:
        launches = launches[:-1]  # the last one may have been cut
    copy_gb_per_s, failures = _copy_gb_per_s(output), driver.failures(printed)
    for case, rows in zip(planned, launches, strict=False):
        if rows:
            store.add(suite, measured(case, rows, copy_gb_per_s))
        else:
            failures.append(case.id)
            print(f"FAILED {case.id}: ncu saw no kernel of ours")
    passed = has_ended and len(launches) == len(planned) and not failures
    if passed:
        store.finish()
    tables.print_results(store.results, width=250)
    print(f"{len(launches)} of {len(planned)} launches are counted")
    if not has_ended:
        print(f"the driver did not end: exit code {code}")
    return 0 if passed else 1


if __name__ == "__main__":
    driver.main(drive, run)
