"""Runs triton_adam_cases.py where Triton interprets, and where it compiles for a GPU; there beside the CUDA kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onetrip import use_backend
from onetrip.optim.table import StepTable
from onetrip.reference.adam import BLOCK, Group, Slot
from targets import Target, needs
from triton_runner import COMPILE, INTERPRET, run_cases, run_emulated

pytestmark = pytest.mark.promise("adam bits")

CASES = Path(__file__).with_name("triton_adam_cases.py")


def test_interpreted_quickly() -> None:
    """Every pair of dtypes; tensors of several groups and kinds in one step after another."""
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET, "test_dtypes or test_tensors_groups or (test_sizes and 129)")


@pytest.mark.slow
def test_interpreted() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET)


@pytest.mark.promise("T6")
@pytest.mark.slow
def test_compiled() -> None:
    run_emulated(CASES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, COMPILE)


def new_slots(dtype: torch.dtype) -> list[Slot]:
    """The same on every call. A large 8-bit parameter, a part of a block, and a small one with float32 states."""
    generator = torch.Generator("cuda").manual_seed(1)
    slots = []
    for n, is_8bit in ((1 << 20, True), (5000, True), (300, False)):
        state = {"device": "cuda", "dtype": torch.uint8 if is_8bit else torch.float32}
        scales = [torch.zeros(-(-n // BLOCK), device="cuda") if is_8bit else None for _ in range(2)]
        param = torch.randn(n, device="cuda", generator=generator).to(dtype)
        zeros = [torch.full((n,), 127 if is_8bit else 0, **state), torch.zeros(n, **state)]
        slots.append(Slot(param, *zeros, *scales, torch.zeros((), device="cuda"), 0))
    return slots


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_card_s_two_backends_agree(dtype: torch.dtype) -> None:
    """After a step from zero the codes are at most one apart; after ten more, almost all are."""
    for backend in ("cuda", "triton"):
        needs(Target("cuda", backend))
    group = Group(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
    ours = {backend: new_slots(dtype) for backend in ("cuda", "triton")}
    tables = {backend: StepTable.of_slots(slots) for backend, slots in ours.items()}
    generator = torch.Generator("cuda").manual_seed(2)
    for step in range(11):
        grads = [torch.randn(slot.param.numel(), device="cuda", generator=generator) for slot in ours["cuda"]]
        for backend, table in tables.items():
            with use_backend(backend):
                table.step([grad.to(dtype) for grad in grads], [group])
        for one, other in zip(ours["cuda"], ours["triton"], strict=True):
            assert one.step.item() == other.step.item() == step + 1
            torch.testing.assert_close(one.param, other.param, rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-4)
            if one.exp_avg_scale is None:
                torch.testing.assert_close(one.exp_avg_sq, other.exp_avg_sq, rtol=1e-5, atol=0.0)
                continue
            for name in ("exp_avg", "exp_avg_sq"):
                apart = (getattr(one, name).int() - getattr(other, name).int()).abs()
                assert apart.max() <= 1 if step == 0 else (apart > 1).double().mean() <= 1e-3, (name, step)
