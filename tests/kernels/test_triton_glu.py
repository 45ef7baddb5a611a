"""Runs triton_glu_cases.py where Triton interprets, and where it compiles for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onetrip.reference.glu import ACTIVATIONS, GluPlan, Operands
from pairwise import pairwise
from triton_runner import COMPILE, INTERPRET, run_cases, run_emulated

CASES = Path(__file__).with_name("triton_glu_cases.py")


def test_interpreted_quickly() -> None:
    pytest.importorskip("triton")
    run_cases(
        CASES, INTERPRET, "test_widths and 64-f32 and gelu_tanh or test_one_gradient and True-False or test_partition"
    )


@pytest.mark.slow
def test_interpreted() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET)


@pytest.mark.slow
def test_compiled() -> None:
    run_emulated(CASES, "not 2_to_the_31")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, COMPILE)


@pytest.mark.slow
@pairwise(
    capability=(80, 90, 120),
    dtype=(torch.float32, torch.bfloat16),
    activation=ACTIVATIONS,
    kind=("glu", "packed", "bias"),
    n_cols=(128, 2816),
)
def test_budget(capability, dtype, activation, kind, n_cols, monkeypatch) -> None:
    """Compiled for GPUs that are not here: nothing spills, half of a multiprocessor's threads are resident, and every
    access to a matrix moves 8 bytes or more a lane."""
    pytest.importorskip("triton")
    from onetrip.kernels import glu, glu_kernels, sum_partials
    from triton_budgets import measure, recorded

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    launches = recorded(monkeypatch, glu_kernels, sum_partials)
    x, dy = empty(512, n_cols), empty(512, n_cols)
    operands = {
        "glu": Operands(x, empty(512, n_cols)),
        "packed": Operands(empty(512, 2 * n_cols)),
        "bias": Operands(x, None, empty(n_cols)),
    }[kind]
    plan = GluPlan(activation, True if kind == "packed" else None)
    glu.forward(operands, plan)
    glu.backward(dy, operands, plan, (True, kind == "glu", kind == "bias"))
    for launch in launches[:2]:
        share, spilled, loads, stores, line = measure(f"{kind}-N{n_cols}-{activation}", launch, capability)
        assert spilled == 0 and share >= 0.5, line
        if kind != "bias":  # whose row, and partial sums of it, are small and stay in caches
            assert min(loads) >= 8 and min(stores) >= 8, line
        assert max(loads) >= 8 and max(stores) >= 8, line
