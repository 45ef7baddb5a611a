"""Runs triton_cross_entropy_cases.py where Triton interprets, and where it compiles for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onetrip.reference.cross_entropy import CrossEntropyPlan
from pairwise import pairwise
from triton_runner import COMPILE, INTERPRET, run_cases, run_emulated

CASES = Path(__file__).with_name("triton_cross_entropy_cases.py")
QUICK = "(100 and many and all or special_rows and one) and f32"


def test_interpreted_quickly() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET, QUICK)


@pytest.mark.slow
def test_interpreted() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET)


@pytest.mark.slow
def test_compiled() -> None:
    run_emulated(CASES, "64 and (plain or all) or special_rows and f32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, COMPILE)


@pytest.mark.slow
@pairwise(
    capability=(80, 90, 120),
    dtype=(torch.float32, torch.bfloat16),
    n_cols=(512, 32000),
    plan={"plain": CrossEntropyPlan(-100), "all": CrossEntropyPlan(-100, 0.1, 30.0, 1e-4)},
    kind=("forward", "backward", "in-place", "entropy"),
)
def test_budget(capability, dtype, n_cols, plan, kind, monkeypatch) -> None:
    """Compiled for GPUs that are not here: nothing spills, half of a multiprocessor's threads are resident, and the
    logits are read and written 8 bytes or more at a time."""
    pytest.importorskip("triton")
    from onetrip.kernels import cross_entropy
    from triton_budgets import measure, recorded

    launches = recorded(monkeypatch, cross_entropy)
    logits = torch.empty(64, n_cols, dtype=dtype, device="meta")
    labels = torch.empty(64, dtype=torch.int64, device="meta")
    numbers = torch.empty(64, device="meta")
    if kind == "forward":
        cross_entropy.forward(logits, labels, plan, True)
    elif kind == "backward":
        cross_entropy.backward(logits, labels, torch.empty(64, 2, device="meta"), numbers, plan)
    else:
        cross_entropy.forward_backward_(logits, labels, numbers, numbers if kind == "entropy" else None, plan)
    (launch,) = launches
    share, spilled, loads, stores, line = measure(f"{kind}-N{n_cols}", launch, capability)
    assert spilled == 0 and share >= 0.5, line
    assert max(loads) >= 8 and max(stores) >= (4 if kind == "forward" else 8), line
