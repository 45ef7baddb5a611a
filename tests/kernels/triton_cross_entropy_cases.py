"""What the Triton kernel of cross-entropy must do, on whatever device it runs: see triton_softmax_cases.py."""

from __future__ import annotations

import pytest
import torch
from onetrip.kernels import cross_entropy as kernels
from onetrip.reference import cross_entropy as reference
from onetrip.reference.cross_entropy import CrossEntropyPlan
from pairwise import pairwise
from triton_runner import DEVICE, memory_past_2_to_the_31

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PLANS = {
    "plain": CrossEntropyPlan(-100),
    "smoothing": CrossEntropyPlan(-100, label_smoothing=0.1, lse_square_scale=0.01),
    "softcap": CrossEntropyPlan(-100, softcap=2.5, scale=1.7),
    "all": CrossEntropyPlan(-100, 0.2, 4.0, 0.02, 0.6),
}
BLOCKS = ("one-block", "many-blocks")
ALL_PLANS = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


@pytest.fixture(params=BLOCKS)
def blocks(request, monkeypatch):
    if request.param == "many-blocks":
        monkeypatch.setattr(kernels, "_BLOCK_COLS", 16)


def close(found, exact):
    assert exact.dtype == torch.float64
    error = (found.double() - exact).abs().max().item()
    assert error <= TOLERANCE[found.dtype] * max(1.0, exact.abs().max().item()), error


def labels_of(n_rows, n_cols):
    labels = torch.arange(n_rows, device=DEVICE) * 7919 % n_cols
    labels[1] = -100
    return labels


def check(logits, plan):
    n_rows, n_cols = logits.shape
    labels = labels_of(n_rows, n_cols)
    weights, entropy_weights = torch.randn(2, n_rows, device=DEVICE)
    exact = reference.forward(logits.double(), labels, plan, True)
    found = kernels.forward(logits, labels, plan, True)
    for mine, truth in zip(found, exact, strict=True):
        close(mine, truth)
    for given in (weights, weights[:1].clone()):
        truth = reference.backward(logits.double(), labels, exact.stats, given.double(), plan)
        dlogits = kernels.backward(logits, labels, found.stats, given, plan)
        close(dlogits, truth)
        packed = logits.clone(memory_format=torch.contiguous_format)
        kernels.backward_(packed, labels, found.stats, given, plan)
        assert torch.equal(packed, dlogits)
        packed.copy_(logits)
        close(kernels.forward_backward_(packed, labels, given, None, plan), exact.loss)
        close(packed, truth)
    packed, truth = logits.clone(memory_format=torch.contiguous_format), logits.double()
    kernels.forward_backward_(packed, labels, weights, entropy_weights, plan)
    reference.forward_backward_(truth, labels, weights.double(), entropy_weights.double(), plan)
    close(packed, truth)


@pairwise(["blocks"], blocks=BLOCKS, n_cols=[1, 3, 64, 100], dtype=DTYPES, plan=PLANS)
def test_losses_and_gradients(blocks, n_cols, dtype, plan):
    torch.manual_seed(0)
    check((3.0 * torch.randn(5, n_cols, device=DEVICE)).to(dtype), plan)


def test_rows_apart():
    check(torch.randn(5, 90, device=DEVICE)[:, 3:60], PLANS["all"])


@ALL_PLANS
def test_a_maximum_that_moves(blocks, plan):
    rising = torch.linspace(-300.0, 300.0, 50, device=DEVICE)
    check(torch.stack([rising, rising.flip(0), torch.zeros_like(rising), 0.01 * rising]), plan)


@ALL_DTYPES
def test_special_rows(blocks, dtype):
    """Wrong labels make NaN of their row, ignored rows are zero whatever they hold, -inf has probability 0."""
    logits = torch.randn(6, 40, device=DEVICE).to(dtype)
    logits[0, 35], logits[1], logits[2, 5] = torch.nan, torch.nan, -torch.inf
    labels = torch.tensor([3, -100, 7, 40, -1, 9], device=DEVICE)
    plan, weights = PLANS["plain"], torch.ones(1, device=DEVICE)
    found = kernels.forward(logits, labels, plan, True)
    wrong = torch.tensor([True, False, False, True, True, False], device=DEVICE)
    assert torch.equal(found.loss.isnan(), wrong) and found.loss[1] == 0.0 and found.entropy[2].isfinite()
    packed = logits.clone()
    kernels.forward_backward_(packed, labels, weights, weights.expand(6).contiguous(), plan)
    for gradient in (kernels.backward(logits, labels, found.stats, weights, plan), packed):
        assert gradient[wrong].isnan().all() and gradient[~wrong].isfinite().all()
        assert (gradient[1] == 0.0).all() and gradient[2, 5] == 0.0


def test_rows_past_2_to_the_31_elements():
    storage, stride = memory_past_2_to_the_31()
    logits = storage.as_strided((2, 16), (stride, 1)).copy_(torch.randn(2, 16, device=DEVICE))
    labels, plan = torch.tensor([3, 5], device=DEVICE), PLANS["plain"]
    close(kernels.forward(logits, labels, plan).loss, reference.forward(logits.double(), labels, plan).loss)


@ALL_DTYPES
@pytest.mark.parametrize("n_elements", [1, 1000, 8192, 20001])
def test_multiply(n_elements, dtype):
    values = torch.randn(n_elements, device=DEVICE).to(dtype)
    found = values.clone()
    kernels.multiply_(found, torch.tensor([0.37], device=DEVICE))
    close(found, values.double() * torch.tensor(0.37).double())


def test_nothing_is_multiplied_by_1():
    signalling = torch.tensor([0x7F800001], dtype=torch.int32, device=DEVICE)  # a product would be another NaN
    kernels.multiply_(signalling.view(torch.float32), torch.ones(1, device=DEVICE))
    assert signalling.item() == 0x7F800001
