"""Runs triton_rotary_cases.py where Triton interprets, and where it compiles for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onetrip.reference.rotary import Operands, RotaryPlan
from pairwise import pairwise
from triton_runner import COMPILE, INTERPRET, run_cases, run_emulated

CASES = Path(__file__).with_name("triton_rotary_cases.py")
# Both forms of a pair, columns that are copied, sizes that are no multiples of a tile's. Of float32 only: the emulator
# lacks the products of half precision.
COMPILED = "test_every_width_and_dtype and f32 and (D6-4 or D80-20) or special_values or beside_the_result"


def test_interpreted_quickly() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET, "D6-4 or test_one_of_the_two")


@pytest.mark.slow
def test_interpreted() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET)


@pytest.mark.slow
def test_compiled() -> None:
    run_emulated(CASES, COMPILED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, COMPILE)


@pytest.mark.slow
@pairwise(
    capability=(80, 90, 120),
    dtype=(torch.float32, torch.bfloat16),
    width={"D64": (64, 64), "D80-32": (80, 32), "D128": (128, 128)},
    interleaved={"halves": False, "interleaved": True},
)
def test_budget(capability, dtype, width, interleaved, monkeypatch) -> None:
    """Compiled for GPUs that are not here: nothing spills, half of a multiprocessor's threads are resident, and every
    access of heads as transformers makes them moves 8 bytes or more a lane."""
    pytest.importorskip("triton")
    from onetrip.kernels import rotary
    from triton_budgets import measure, recorded

    launches = recorded(monkeypatch, rotary)
    head_dim, n = width
    q, k = (torch.empty(4, 1024, n_heads, head_dim, dtype=dtype, device="meta").transpose(1, 2) for n_heads in (16, 4))
    cos = torch.empty(1024, n, dtype=dtype, device="meta")
    rotary.rotate(Operands(q, k, cos, cos), RotaryPlan(interleaved, False))
    (launch,) = launches
    share, spilled, loads, stores, line = measure(f"D{head_dim}-{n}", launch, capability)
    assert spilled == 0 and share >= 0.5, line
    assert min(loads) >= 8 and min(stores) >= 8, line
