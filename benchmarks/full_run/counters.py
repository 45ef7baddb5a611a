"""Nsight Compute over the kernels of one backend: what each one moves, executes and waits for.

    python -m onetrip.benchmarks.full_run.counters BACKEND DIR

ncu starts this module again (`drive`) and counts the launches of one forward and backward of each case that is larger
than a GPU's cache, and of a step of AdamW8bit. The name of the case is the NVTX range of its launches. Clocks are left
alone. DIR/counters/BACKEND.csv has a row for each kernel.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from onetrip import use_backend

from ..measure.cases import LARGE_ELEMENTS
from ..measure.checks import make_inputs
from ..suites import row_norm, softmax
from ..suites.optimizers import ONETRIP, make
from . import EXIT_SKIPPED
from .sanitizer import kernels

_REJECTIONS = ("LibraryNotLoaded", "ERR_NVGPUCTRPERM", "Failed to initialize", "Profiling is not supported")


def _count(name: str, call: Callable[[], object]) -> None:
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # ncu saves all memory that is allocated before it runs a kernel again
    torch.cuda.profiler.start()
    handle = torch.cuda.nvtx.range_start(name)  # not pushed: backward runs in a thread of autograd's
    call()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_end(handle)
    torch.cuda.profiler.stop()


def drive(backend: str, device: str = "cuda") -> None:
    """Makes every launch: what ncu watches."""
    for case in (*row_norm.cases(False), *softmax.cases(False)):
        if case.n_rows * case.n_cols == LARGE_ELEMENTS and case.dtype != torch.float16:
            inputs = make_inputs(case.operator, case.n_rows, case.n_cols, case.dtype, torch.device(device), seed=0)
            with use_backend(backend):
                _count(case.id, partial(inputs.forward_backward, case.operator.fused))
    for dtype in (torch.bfloat16, torch.float32):
        parameter = torch.nn.Parameter(torch.randn(LARGE_ELEMENTS, device=device, dtype=dtype))
        parameter.grad = torch.randn_like(parameter)
        with use_backend(backend):
            _count(f"AdamW8bit {dtype}", make(ONETRIP, [parameter]).step)


def run(backend: str, folder: str) -> int:
    """Counts all launches; the part's exit code."""
    table = Path(folder) / "counters" / f"{backend}.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    command = ["ncu", "--set=detailed", "--nvtx", "--csv", "--page=raw", f"--log-file={table}", "--clock-control=none"]
    command += [f"--kernel-name=regex:{'|'.join(kernels(backend))}", "--kernel-name-base=demangled"]
    command += ["--profile-from-start=off", sys.executable, "-m", __spec__.name, "drive", backend]
    code = subprocess.run(command).returncode
    found = table.read_text(errors="replace") if table.exists() else ""
    if '"Kernel Name"' in found:
        print(f"wrote {table}")
        return code
    print(found)
    return EXIT_SKIPPED if any(words in found for words in _REJECTIONS) else 1


if __name__ == "__main__":
    sys.exit(drive(sys.argv[2]) if sys.argv[1] == "drive" else run(*sys.argv[1:]))
