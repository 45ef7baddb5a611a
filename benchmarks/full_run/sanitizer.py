"""compute-sanitizer over the kernels of one backend and family.

    python -m onetrip.benchmarks.full_run.sanitizer TOOL BACKEND FAMILY DIR

compute-sanitizer starts this module again (`drive`) and watches it. That process launches what `onetrip doctor` checks,
in all dtypes, and rows that take the kernels for wide rows, at addresses that are not aligned; every allocation is its
own (no caching), so that what lies beside a tensor is out of bounds. A report counts where it happened in one of our
kernels: PyTorch's are not ours to check.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onetrip.kernels
import torch
from onetrip import ops, selfcheck, use_backend
from torch import Tensor

from . import EXIT_SKIPPED

Launch = tuple[str, Callable[[], list[str]]]
"""What it launches, and the call: it returns what was wrong with the results."""
_PREFIX = "========="
_NO_DEVICE = ("Device not supported", "Unable to", "not supported on this", "requires a newer driver")
_NOT_TRACKED = "Internal Sanitizer Error"
"""How a report begins where a launch was not watched: errors in it go unseen."""
_PLACES = re.compile(r"(at |Device Frame:|.*\b(?:Read|Write|Atomic) access at )")
"""How the lines of a report begin that say where it happened; the host's frames say who launched it."""
_WIDE, _NARROW = 40_003, 33
_ALIGNED = (1024, 8192, 40_000)
"""Rows of a block, of a block that copies ahead, and of a cluster of blocks."""


def _rows(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random values, filled from the host so that initcheck knows them; rows that cannot be read 16 bytes at a time lie
    one element off an aligned address too."""
    flat = torch.randn(shape).to(dtype).flatten()
    shift = 1 if shape[-1] % 8 else 0
    return torch.cat([flat[:shift], flat]).cuda()[shift:].view(shape).detach().requires_grad_()


def _finite(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[str]:
    grads = torch.autograd.grad(outputs, leaves, [torch.ones(y.shape, dtype=y.dtype).cuda() for y in outputs])
    tensors = [*outputs, *grads]
    return [f"result {i} is not finite" for i, t in enumerate(tensors) if not t.detach().cpu().isfinite().all()]


def _edge(operator: str, width: int, dtype: torch.dtype) -> Callable[[], list[str]]:
    def row_norm(norm: str) -> list[str]:
        x, residual = (_rows(3, width, dtype=dtype) for _ in range(2))
        weight, bias = (_rows(width, dtype=dtype) for _ in range(2))
        y, z = ops.bias_dropout_residual_norm(
            x, residual, weight, bias=bias, dropout_p=0.1, norm=norm, return_residual=True, rng=(1, 4)
        )
        return _finite((y, z), [x, residual, weight, bias])

    def softmax() -> list[str]:
        # Rows that share a row of the mask, then rows that share none.
        scores, mask = _rows(2, 3, width, dtype=dtype), _rows(3, width, dtype=dtype)
        y = ops.softmax(scores, mask, scale=0.5, causal=True, dropout_p=0.1, rng=(1, 4))
        return _finite((y,), [scores, mask]) + _finite((ops.softmax(scores, scale=0.5),), [scores])

    return softmax if operator == "softmax" else lambda: row_norm(operator)


def launches(backend: str, family: str) -> Iterator[Launch]:
    """Edge cases first: they are what a sanitizer is for."""
    device = torch.device("cuda")
    for operator in {"row_norm": ("layer", "rms"), "softmax": ("softmax",)}.get(family, ()):
        for width in (_WIDE, _NARROW, *_ALIGNED):
            for dtype in (torch.float32, torch.bfloat16):
                yield f"{operator} {width} {dtype}", _edge(operator, width, dtype)
    for kernel, dtype_name in selfcheck.cases(backend):
        if kernel.family == family:
            yield f"{kernel.name} {dtype_name}", partial(_checked, device, backend, kernel, dtype_name)


def _checked(*check: Any) -> list[str]:
    found = selfcheck.run_check(*check)
    return [f"{c.direction}: {c.failure or f'error {c.error:.2e}'}" for c in found if not c.passed]


def drive(backend: str, family: str) -> int:
    """Makes every launch: what compute-sanitizer watches."""
    n_launches = n_failures = 0
    with use_backend(backend):
        for name, launch in launches(backend, family):
            for line in launch():
                print(f"FAILED {name}: {line}", flush=True)
                n_failures += 1
            torch.cuda.synchronize()
            n_launches += 1
    print(f"all {n_launches} launches have ended", flush=True)
    return 1 if n_failures or not n_launches else 0


def kernels(backend: str) -> list[str]:
    """Parts of the names that tell our kernels from all others: the namespace of the CUDA ones, Triton's by name."""
    if backend == "cuda":
        return ["onetrip"]
    sources = [path.read_text() for path in Path(onetrip.kernels.__file__).parent.glob("*.py")]
    return sorted({name for source in sources for name in re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)})


def reports(lines: Iterable[str]) -> list[list[str]]:
    """The sanitizer's findings, the lines of each: an unindented one and the indented ones below it."""
    found: list[list[str]] = []
    for line in lines:
        if not line.startswith(_PREFIX):
            continue
        rest = line.removeprefix(_PREFIX)
        if not rest.strip() or rest.strip() == "COMPUTE-SANITIZER":
            continue
        if rest.startswith("    ") and found:
            found[-1].append(rest.strip())
        else:
            found.append([rest.strip()])
    return [lines for lines in found if "SUMMARY" not in lines[0]]


def is_ours(report: list[str], names: list[str]) -> bool:
    """Whether it happened in one of our kernels, or keeps us from knowing."""
    places = [line for line in report if _PLACES.match(line)]
    return report[0].startswith(_NOT_TRACKED) or any(name in line for line in places for name in names)


def run(tool: str, backend: str, family: str, folder: str) -> int:
    """Prints what was found; the part's exit code."""
    names = kernels(backend)
    # initcheck must see every kernel that writes what ours read; the other tools look at ours alone. A kernel is
    # checked if any of the filters matches.
    filters = [] if tool == "initcheck" else [f"--kernel-name=kernel_substring={name}" for name in names]
    command = ["compute-sanitizer", f"--tool={tool}", "--report-api-errors=no", "--print-limit=1000", *filters]
    command += ["--target-processes=application-only", sys.executable, "-m", __spec__.name, "drive", backend, family]
    log = Path(folder) / "sanitizers" / f"{tool}-{backend}-{family}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    lines = log.read_text(errors="replace").splitlines()
    printed = [line for line in lines if not line.startswith(_PREFIX)]
    print("\n".join(printed))
    has_ended = any(re.fullmatch(r"all \d+ launches have ended", line) for line in printed)
    found = reports(lines)
    ours = [" | ".join(report) for report in found if is_ours(report, names)]
    if not has_ended and not ours:
        own = (line for line in lines if line.startswith(_PREFIX))
        if rejected := next((line for line in own if any(words in line for words in _NO_DEVICE)), ""):
            print(rejected)
            return EXIT_SKIPPED
    for line in dict.fromkeys(re.sub(r"\(\d+,\d+,\d+\)", "(...)", line) for line in ours):
        print(f"FAILED {line[:400]}")
    print(f"{len(ours)} reports on our kernels, {len(found) - len(ours)} others")
    if not has_ended:
        print(f"the driver did not end: exit code {code}")
    return 1 if ours or not has_ended else code


if __name__ == "__main__":
    sys.exit(drive(*sys.argv[2:]) if sys.argv[1] == "drive" else run(*sys.argv[1:]))
