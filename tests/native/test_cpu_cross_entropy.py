"""The native CPU kernel of cross-entropy against reference, at every level this machine has."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import (
    BF16,
    DTYPE_IDS,
    F16,
    F32,
    at_levels_with_fused_multiply_add,
    normal,
)
from onetrip.ops import cross_entropy_native as native
from onetrip.ops.common.backends import native as native_library
from onetrip.reference import cross_entropy as reference
from onetrip.reference.cross_entropy import CrossEntropyPlan
from tolerances import assert_bitwise, assert_like_torch, assert_ulps

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="the native library was not built")

WIDTHS = (1, 3, 4, 15, 16, 17, 63, 64, 65, 1000, 1023, 1024, 1025, 2049, 5000)
PLANS = {
    "plain": CrossEntropyPlan(-100),
    "smoothing": CrossEntropyPlan(-100, label_smoothing=0.1, lse_square_scale=0.01),
    "softcap": CrossEntropyPlan(-100, softcap=2.5),
    "temperature": CrossEntropyPlan(-100, scale=1.7),
    "all": CrossEntropyPlan(-100, 0.2, 4.0, 0.02, 0.6),
}
ALL_PLANS = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def labels_of(n_rows, n_cols):
    labels = torch.arange(n_rows) * 7919 % n_cols
    labels[1] = -100
    return labels


def check(logits, plan):
    n_rows, n_cols = logits.shape
    labels, weights = labels_of(n_rows, n_cols), normal(n_rows, seed=2)
    entropy_weights = normal(n_rows, seed=3)
    exact = reference.forward(logits.double(), labels, plan, True)
    torchs = reference.forward(logits.float(), labels, plan, True)
    ours = native.forward(logits, labels, plan, True)
    for mine, truth in zip(ours, exact, strict=True):
        assert_ulps(mine, truth)
    assert_bitwise(native.forward(logits, labels, plan).loss, ours.loss)
    dlogits = native.backward(logits, labels, ours.stats, weights, plan)
    truth = reference.backward(logits.double(), labels, exact.stats, weights.double(), plan)
    other = reference.backward(logits, labels, torchs.stats, weights, plan)
    assert_like_torch(dlogits, other, truth, terms=16)
    packed = logits.contiguous().clone()
    loss = native.forward_backward_(packed, labels, weights, None, plan)
    assert_bitwise(loss, ours.loss)
    assert_bitwise(packed, dlogits)
    packed.copy_(logits)
    native.backward_(packed, labels, ours.stats, weights, plan)
    assert_bitwise(packed, dlogits)
    for tensors in (packed, other, truth):
        tensors.copy_(logits)
    native.forward_backward_(packed, labels, weights, entropy_weights, plan)
    reference.forward_backward_(other, labels, weights, entropy_weights, plan)
    reference.forward_backward_(truth, labels, weights.double(), entropy_weights.double(), plan)
    assert_like_torch(packed, other, truth, terms=16)


@ALL_PLANS
@pytest.mark.parametrize("n_cols", WIDTHS, ids=lambda n: f"N{n}")
def test_every_width(level, n_cols, plan):
    check(3.0 * normal(200 if n_cols < 100 else 5, n_cols), plan)


@ALL_PLANS
@pytest.mark.parametrize("dtype", [F16, BF16], ids=DTYPE_IDS.get)
def test_half_precision(level, dtype, plan):
    check((3.0 * normal(9, 1300)).to(dtype), plan)
    check((3.0 * normal(9, 1400)).to(dtype)[:, 3:99], plan)


@pytest.mark.parametrize("plan", [PLANS["plain"], PLANS["all"]], ids=["plain", "all"])
def test_a_maximum_that_moves(level, plan):
    """Each block has a larger value than all before, or none; values whose exponentials would overflow."""
    rising = torch.linspace(-300.0, 300.0, 5000)
    check(torch.stack([rising, rising.flip(0), torch.zeros(5000), rising * 0.01]), plan)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=DTYPE_IDS.get)
def test_special_rows(level, dtype):
    """Wrong labels make NaN of their row, ignored rows are zero whatever they hold, -inf has probability 0."""
    logits = normal(6, 1100).to(dtype)
    logits[0, 1050], logits[1], logits[2, 5] = torch.nan, torch.nan, -torch.inf
    labels = torch.tensor([3, -100, 7, 1100, -1, 9])
    plan, weights = PLANS["plain"], torch.ones(1)
    found = native.forward(logits, labels, plan, True)
    wrong = torch.tensor([True, False, False, True, True, False])
    assert torch.equal(found.loss.isnan(), wrong) and found.loss[1] == 0.0 and found.entropy[2].isfinite()
    whole = native.backward(logits, labels, found.stats, weights, plan)
    packed = logits.clone()
    native.forward_backward_(packed, labels, weights, None, plan)
    for gradient in (whole, packed):
        assert gradient[wrong].isnan().all() and gradient[~wrong].isfinite().all()
        assert (gradient[1] == 0.0).all() and gradient[2, 5] == 0.0
    hidden = torch.full((2, 40), -torch.inf).to(dtype)
    assert native.forward(hidden, torch.zeros(2, dtype=torch.int64), plan).loss.isnan().all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=DTYPE_IDS.get)
def test_rows_whose_exponentials_are_not_kept(level, dtype):
    check((3.0 * normal(2, 66000)).to(dtype), PLANS["plain"])


@pytest.mark.parametrize("of_entropy", [False, True], ids=["loss", "entropy"])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000], ids=hex)
def test_a_weight_that_is_not_finite_reaches_the_gradient(level, bits, of_entropy):
    weights = torch.tensor([bits], dtype=torch.int32).view(F32)
    logits = normal(1, 200).to(BF16)
    given = (torch.ones(1), weights) if of_entropy else (weights, None)
    native.forward_backward_(logits, torch.tensor([3]), *given, PLANS["plain"])
    assert not logits.isfinite().any()


@pytest.mark.parametrize("n", [1, 31, 64, 70000])
def test_sums_in_two_parts_are_those_of_float32(level, n):
    nearest, rest = normal(n).to(BF16), torch.full((n,), -1, dtype=torch.int16)
    exact = nearest.float()
    for seed in range(1, 6):
        terms = (normal(n, seed=seed) * 10.0**-seed).to(BF16)
        native.add_to_sums(nearest, rest, terms, seed == 1)
        exact += terms.float()
        whole = (nearest.view(torch.int16).int() << 16) + rest.int()
        assert_bitwise(whole.view(F32), exact)
        assert ((nearest.double() - exact.double()).abs() <= (exact.to(BF16).double() - exact.double()).abs()).all()


def test_sums_in_two_parts_of_special_values(level):
    nearest = torch.tensor([torch.inf, torch.inf, torch.nan, 3.38e38, -0.0, 1.0]).to(BF16)
    terms = torch.tensor([1.0, -torch.inf, 1.0, 3.38e38, -0.0, torch.nan]).to(BF16)
    rest, exact = torch.zeros(6, dtype=torch.int16), nearest + terms
    native.add_to_sums(nearest, rest, terms, False)
    assert torch.equal(nearest.isnan(), exact.isnan()) and torch.equal(nearest.nan_to_num(), exact.nan_to_num())


def test_levels_with_fma_agree():
    logits, labels = 3.0 * normal(7, 1024), labels_of(7, 1024)
    stats = torch.tensor([[4.0, 3.5]]).expand(7, 2).contiguous()

    def results():
        largest = native.forward(logits, labels, PLANS["softcap"]).stats[:, 0].clone()
        return largest, native.backward(logits, labels, stats, torch.ones(1), PLANS["all"])

    for mine, other in zip(*at_levels_with_fused_multiply_add(results), strict=True):
        assert_bitwise(mine, other)


def test_large_outputs_are_streamed_to_the_same_bits():
    logits, labels = normal(1100, 2048), torch.arange(1100)
    found = native.forward(logits, labels, PLANS["plain"])
    whole = native.backward(logits, labels, found.stats, torch.ones(1), PLANS["plain"])
    part = native.backward(logits[:50], labels[:50], found.stats[:50].clone(), torch.ones(1), PLANS["plain"])
    assert_bitwise(whole[:50], part)
