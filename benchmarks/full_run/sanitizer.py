"""compute-sanitizer over the kernels of one backend and family.

    python -m onetrip.benchmarks.full_run.sanitizer TOOL BACKEND FAMILY DIR

The driver launches what `onetrip doctor` checks, in all dtypes, and rows that take the kernels for wide rows, at
addresses that are not aligned; every allocation is the driver's own (no caching), so that what lies beside a tensor is
out of bounds. A report counts where it happened in one of our kernels: PyTorch's are not ours to check.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from onetrip import ops, selfcheck
from torch import Tensor

from . import EXIT_SKIPPED, driver
from .driver import Launch

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

        def check(kernel: object = kernel, dtype_name: str = dtype_name) -> list[str]:
            checks = selfcheck.run_check(device, backend, kernel, dtype_name)
            return [f"{c.direction}: {c.failure or f'error {c.error:.2e}'}" for c in checks if not c.passed]

        if kernel.family == family:
            yield f"{kernel.name} {dtype_name}", check


def drive(backend: str, family: str) -> int:
    """What compute-sanitizer watches."""
    return driver.drive(launches(backend, family), backend)


def reports(text: str) -> list[list[str]]:
    """The sanitizer's findings, the lines of each: an unindented one and the indented ones below it."""
    found: list[list[str]] = []
    for line in text.splitlines():
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


def run(tool: str, backend: str, family: str, output: Path) -> int:
    names = driver.kernels(backend)
    # initcheck must see every kernel that writes what ours read; the other tools look at ours alone. A kernel is
    # checked if any of the filters matches.
    filters = [] if tool == "initcheck" else [f"--kernel-name=kernel_substring={name}" for name in names]
    command = ["compute-sanitizer", f"--tool={tool}", "--report-api-errors=no", "--print-limit=1000", *filters]
    command += ["--target-processes=application-only", sys.executable, "-m", __spec__.name, "drive", backend, family]
    log = output / "sanitizers" / f"{tool}-{backend}-{family}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    return verdict(log.read_text(errors="replace"), names, code)


def verdict(text: str, names: list[str], code: int) -> int:
    """Prints what was found; the part's exit code. text, code: of compute-sanitizer; names: of our kernels."""
    print("\n".join(line for line in text.splitlines() if not line.startswith(_PREFIX)))
    found = reports(text)
    ours = [" | ".join(report) for report in found if is_ours(report, names)]
    if not driver.has_ended(text) and not ours:
        own = (line for line in text.splitlines() if line.startswith(_PREFIX))
        if rejected := next((line for line in own if any(words in line for words in _NO_DEVICE)), ""):
            print(rejected)
            return EXIT_SKIPPED
    for line in dict.fromkeys(re.sub(r"\(\d+,\d+,\d+\)", "(...)", line) for line in ours):
        print(f"FAILED {line[:400]}")
    print(f"{len(ours)} reports on our kernels, {len(found) - len(ours)} others")
    if not driver.has_ended(text):
        print(f"the driver did not end: exit code {code}")
        return 1
    return 1 if ours or driver.failures(text) else code


if __name__ == "__main__":
    driver.main(drive, run)
