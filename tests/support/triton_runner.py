"""Runs a file of cases for Triton's kernels in a process of its own: Triton decides at its import whether it
interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from onetrip.kernels import interpreter_fault

ROOT = Path(__file__).parents[2]
CASES = {"ONETRIP_TRITON_CASES": "1"}
INTERPRET = CASES | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
COMPILE = CASES | {"TRITON_INTERPRET": "0"}
EMULATE = CASES | {
    "TRITON_INTERPRET": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "ONETRIP_TRITON_MACHINE": "1",
    "TRITON_CACHE_DIR": str(ROOT / "build" / "triton_machine" / "cache"),
    # No stack trace for each of the compiler's allocations, and few of them kept back: a third of the time.
    "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=0:quarantine_size_mb=16",
}
"""Compiled for sm_90, and its machine code run on the CPU: see triton_machine.py."""

# How this process runs cases: with Triton, or with the CPU kernels those that are not Triton's alone.
RUNS_TRITON = CASES.items() <= os.environ.items()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED = os.environ.get("ONETRIP_TRITON_MACHINE") == "1"
DEVICE = torch.device("cuda" if RUNS_TRITON and not (INTERPRETED or EMULATED) else "cpu")


def memory_past_2_to_the_31() -> tuple[torch.Tensor, int]:
    """(uninitialised float16 memory, a stride past 2^31 of which two rows fit). Skips the test where there is none."""
    stride = 2**31 + 64
    torch.use_deterministic_algorithms(False)  # its NaN would fill the memory
    try:
        return torch.empty(stride + 64, dtype=torch.float16, device=DEVICE), stride
    except RuntimeError as error:
        pytest.skip(f"needs 4 GB: {error}")


def run_cases(files: Sequence[Path], environment: dict[str, str], selection: str = "") -> None:
    """selection: as pytest's -k. Fails where a case fails, and shows its output."""
    if environment is INTERPRET and interpreter_fault():
        pytest.skip(interpreter_fault())
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", selection, *map(str, files)]
    outcome = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True)
    print(outcome.stdout)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]


def run_emulated(file: Path, selection: str = "") -> None:
    """run_cases() with EMULATE; under AddressSanitizer, which finds an access beside a tensor."""
    pytest.importorskip("triton")
    from simulators import triton_emulator_missing

    reason = triton_emulator_missing()
    if reason:
        pytest.skip(reason)
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")  # the one intercepts the other's exceptions
    ]
    assert all(Path(library).is_absolute() for library in libraries), libraries
    run_cases([file], EMULATE | {"LD_PRELOAD": " ".join(libraries)}, selection)


def comparable(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float64, without NaN, which must stand at the same places."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape and actual.is_contiguous()
    wrong_nans = actual.isnan() != expected.isnan()
    assert not wrong_nans.any(), f"NaN at {wrong_nans.nonzero()[:4].tolist()} of one only"
    return actual.double().nan_to_num(), expected.double().nan_to_num()


def assert_close(
    actual: torch.Tensor | None,
    expected: torch.Tensor | None,
    *,
    terms: int = 1,
    roundings: int = 1,
    may_flush: bool = False,
) -> None:
    """Equal but for float32 arithmetic in another order, and a unit in the last place for each rounding.

    terms: how many values were added up. may_flush: subnormal numbers may be 0.
    """
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    a, e = comparable(actual, expected)
    if a.numel() == 0:
        return
    # Relative to the largest terms; then the rounding of the result.
    bound = 16 * terms * torch.finfo(torch.float32).eps * e.abs().max().clamp_min(1e-30)
    if actual.dtype != torch.float32:
        info = torch.finfo(actual.dtype)
        bound = bound + roundings * info.eps * e.abs() + (info.smallest_normal if may_flush else 0.0)
    excess = ((a - e).abs() - bound).max().item()
    assert excess <= 0, f"off by {excess:.3g} more than the bound"
