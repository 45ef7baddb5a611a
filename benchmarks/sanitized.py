"""compute-sanitizer over every kernel family of one backend: python -m onetrip.benchmarks.sanitized TOOL BACKEND DIR S

The driver launches what `onetrip doctor` checks, in all dtypes, and rows that take the kernels for wide rows, at
addresses that are not aligned; every allocation is the driver's own (no caching), so that what lies beside a tensor is
out of bounds. A report counts where it names one of our kernels: PyTorch's are not ours to check.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from onetrip import ops, selfcheck, use_backend
from torch import Tensor

from .everything import EXIT_SKIPPED, EXIT_UNFINISHED

_PREFIX = "========="
_NO_DEVICE = ("Device not supported", "Unable to", "not supported on this", "requires a newer driver")
_WIDE, _NARROW = 40_003, 33
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


def _rows(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random values one element off an aligned address, filled from the host so that initcheck knows them."""
    flat = torch.randn(shape).to(dtype).flatten()
    return torch.cat([flat[:1], flat]).cuda()[1:].view(shape).detach().requires_grad_()


def _finite(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[str]:
    grads = torch.autograd.grad(outputs, leaves, [torch.ones(y.shape, dtype=y.dtype).cuda() for y in outputs])
    tensors = [*outputs, *grads]
    return [f"result {i} is not finite" for i, t in enumerate(tensors) if not t.detach().cpu().isfinite().all()]


def _edge(family: str, width: int, dtype: torch.dtype) -> Callable[[], list[str]]:
    def row_norm(norm: str) -> list[str]:
        x, residual = (_rows(3, width, dtype=dtype) for _ in range(2))
        weight, bias = (_rows(width, dtype=dtype) for _ in range(2))
        y, z = ops.bias_dropout_residual_norm(
            x, residual, weight, bias=bias, dropout_p=0.1, norm=norm, return_residual=True, rng=(1, 4)
        )
        return _finite((y, z), [x, residual, weight, bias])

    def softmax() -> list[str]:
        scores, mask = _rows(2, 3, width, dtype=dtype), _rows(3, width, dtype=dtype)
        return _finite((ops.softmax(scores, mask, scale=0.5, causal=True, dropout_p=0.1, rng=(1, 4)),), [scores, mask])

    return softmax if family == "softmax" else lambda: row_norm(family)


def launches(backend: str) -> Iterator[Launch]:
    """Edge cases first: they are what a sanitizer is for."""
    device = torch.device("cuda")
    for family in ("layer", "rms", "softmax"):
        for width in (_WIDE, _NARROW):
            for dtype in (torch.float32, torch.bfloat16):
                yield f"{family} {width} {dtype}", _edge(family, width, dtype)
    for kernel, dtype_name in selfcheck.cases(backend):

        def check(kernel: object = kernel, dtype_name: str = dtype_name) -> list[str]:
            checks = selfcheck.run_check(device, backend, kernel, dtype_name)
            return [f"{c.direction}: {c.failure or f'error {c.error:.2e}'}" for c in checks if not c.passed]

        yield f"{kernel.name} {dtype_name}", check


def drive(backend: str, seconds: float) -> int:
    """Launches everything, as far as the time goes; what compute-sanitizer watches."""
    deadline, failed, done = time.monotonic() + seconds, 0, 0
    planned = list(launches(backend))
    with use_backend(backend):
        for name, launch in planned:
            if time.monotonic() > deadline:
                break
            for line in launch():
                print(f"FAILED {name}: {line}", flush=True)
                failed += 1
            done += 1
    torch.cuda.synchronize()
    print(f"{done} of {len(planned)} launches", flush=True)
    return 1 if failed else 0 if done == len(planned) else EXIT_UNFINISHED


def reports(text: str) -> list[str]:
    """The sanitizer's findings, one string each: an unindented line and the indented ones below it."""
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
    return [" | ".join(lines) for lines in found if "SUMMARY" not in lines[0]]


def run(tool: str, backend: str, output: Path, seconds: float) -> int:
    names = kernels(backend)
    # initcheck must see every kernel that writes what ours read; the other tools look at ours alone.
    filters = [] if tool == "initcheck" else [f"--kernel-name=kernel_substring={name}" for name in names]
    command = ["compute-sanitizer", f"--tool={tool}", "--report-api-errors=no", "--print-limit=1000", *filters]
    command += ["--target-processes=application-only", sys.executable, "-m", __spec__.name, "drive", backend]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, f"{seconds - 30.0:.0f}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (output / "sanitizers").mkdir(parents=True, exist_ok=True)
    (output / "sanitizers" / f"{tool}-{backend}.txt").write_text(done.stdout)
    print("\n".join(line for line in done.stdout.splitlines() if not line.startswith(_PREFIX)))
    if "launches" not in done.stdout and any(text in done.stdout for text in _NO_DEVICE):
        print(next(line for line in done.stdout.splitlines() if any(text in line for text in _NO_DEVICE)))
        return EXIT_SKIPPED
    all_of_them = reports(done.stdout)
    ours = [text for text in all_of_them if any(name in text for name in names)]
    for text in dict.fromkeys(re.sub(r"\(\d+,\d+,\d+\)", "(...)", text) for text in ours):
        print(f"FAILED {text[:400]}")
    print(f"{tool}, {backend}: {len(ours)} reports on our kernels, {len(all_of_them) - len(ours)} others")
    if "launches" not in done.stdout:
        print(f"the driver did not end: exit code {done.returncode}")
        return 1
    return 1 if ours else done.returncode


def main(arguments: list[str]) -> int:
    if arguments[0] == "drive":
        return drive(arguments[1], float(arguments[2]))
    tool, backend, output, seconds = arguments
    return run(tool, backend, Path(output), float(seconds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
