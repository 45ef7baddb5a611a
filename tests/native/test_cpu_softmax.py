"""The native CPU kernels of softmax against reference, at every level this machine has."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import (
    BF16,
    F16,
    F32,
    at_levels_with_fused_multiply_add,
    normal,
)
from onetrip.ops import softmax_native as native
from onetrip.ops.common.backends import native as native_library
from onetrip.ops.common.masks import contiguous_layout, mask_layout
from onetrip.reference import softmax as reference
from onetrip.reference.philox import keep_mask
from onetrip.reference.softmax import BackwardOperands, Operands, SoftmaxPlan
from pairwise import pairwise, short
from tolerances import assert_bitwise, assert_like_torch
from torch import Tensor

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="the native library was not built")

RNG = (2**40 + 12345, 2**33 + 4)
WIDTHS = (1, 3, 4, 15, 16, 63, 64, 65, 129, 1000, 1025, 4099)
INF, NAN = torch.inf, torch.nan


def plan_of(scale: float = 1.0, causal: bool = False, p: float = 0.0) -> SoftmaxPlan:
    return SoftmaxPlan(scale, causal, p, store_p=p > 0.0)


def forward(scores: Tensor, mask: Tensor | None = None, plan: SoftmaxPlan | None = None, rng=RNG):
    """Native (y, p) of scores [..., queries, columns] and a mask that broadcasts to them."""
    layout = None if mask is None else mask_layout(tuple(scores.shape), tuple(mask.shape), mask.stride())
    return native.forward(Operands(scores, mask, layout, scores.shape[-2]), rng, plan or plan_of())


def rows_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def check(scores: Tensor, mask: Tensor | None, dy: Tensor, plan: SoftmaxPlan) -> None:
    """Forward and backward against reference in float64, with reference in the same dtypes as the measure."""
    shape = tuple(scores.shape)
    y, p = forward(scores, mask, plan)
    whole = None if mask is None else rows_of(mask.expand(shape))
    expected = reference.forward(Operands(rows_of(scores), whole, None, shape[-2]), RNG, plan)
    exact = reference.forward(Operands(rows_of(scores.double()), whole, None, shape[-2]), RNG, plan)
    assert_like_torch(rows_of(y), expected[0], exact[0])
    assert (p is None) == (plan.dropout_p == 0.0)
    if p is not None:
        assert_like_torch(rows_of(p.abs()), expected[1].abs(), exact[1].abs())
        visible = exact[1] != 0
        assert torch.equal(rows_of(p).signbit()[visible], exact[1].signbit()[visible])
        assert (y[p.signbit()] == 0).all()
    saved = y if p is None else p
    gives_dmask = mask is not None and mask.is_floating_point()
    shared = contiguous_layout(shape, tuple(mask.shape)) if gives_dmask else None
    ours = native.backward(BackwardOperands(dy, saved, shared, shape[-2]), plan, True, gives_dmask)
    expected, exact = (
        reference.backward(
            BackwardOperands(rows_of(dy.to(t)), rows_of(saved.to(t)), shared, shape[-2]), plan, True, gives_dmask
        )
        for t in (scores.dtype, torch.float64)
    )
    assert_like_torch(rows_of(ours[0]), expected[0], exact[0])
    if gives_dmask:
        assert ours[1].dtype == F32
        assert_like_torch(ours[1], expected[1], exact[1], terms=rows_of(dy).shape[0] // ours[1].shape[0])


@pairwise(n_cols={f"N{n}": n for n in WIDTHS}, p={"p0": 0.0, "p0.3": 0.3}, causal={"full": False, "causal": True})
def test_every_width(level, n_cols, p, causal):
    scores, dy = normal(2, 37, n_cols), normal(2, 37, n_cols, seed=1)
    check(scores, None, dy, plan_of(1.7, causal, p))
    check(scores, torch.rand(2, 1, n_cols) < 0.7, dy, plan_of(-0.3, causal, p))


@pytest.mark.parametrize("mask_dtype", [torch.bool, F32, F16, BF16], ids=lambda d: f"mask_{short(d)}")
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=short)
def test_every_pair_of_dtypes(level, dtype, mask_dtype):
    scores, dy = (normal(2, 3, 5, 131, dtype=dtype, seed=seed) for seed in (0, 1))
    bias = normal(2, 1, 5, 131, seed=2)
    mask = bias > 0 if mask_dtype == torch.bool else bias.to(mask_dtype)
    for p in (0.0, 0.2):
        check(scores, mask, dy, plan_of(0.5, False, p))


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["p0", "p0.3"])
@pytest.mark.parametrize("n_cols", [7, 64, 200], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("nan_bits", [0x7F81, 0x7FFF, -1, -0x7F], ids=lambda b: f"{b & 0xFFFF:x}")
def test_gradients_of_every_nan_are_nan(level, nan_bits, n_cols, p):
    """bfloat16 is rounded by carrying into its upper bits, which must never turn a NaN into a number."""
    scores, dy = (normal(1, 5, n_cols, dtype=BF16, seed=seed) for seed in (0, 1))
    plan = plan_of(p=p)
    y, saved = forward(scores, None, plan)
    saved = y if saved is None else saved
    column = int((~saved[0, 3].signbit()).nonzero()[-1])  # not dropped
    dy.view(torch.int16)[0, 3, column] = nan_bits
    dscores, _ = native.backward(BackwardOperands(dy, saved, None, 5), plan, True, False)
    assert dscores[0, 3].isnan().all() and dscores[0, [0, 1, 2, 4]].isfinite().all()
    dy[0, 3, column] = INF
    dscores, _ = native.backward(BackwardOperands(dy, saved, None, 5), plan, True, False)
    assert not dscores[0, 3].isfinite().any() and dscores[0, [0, 1, 2, 4]].isfinite().all()


def test_bfloat16_gradients_are_rounded_to_nearest_even(level):
    """Neighbours cancel in the sum of P * dP, so that each gradient is a product of two bfloat16 numbers, rounded."""
    p, dy = normal(64, 256, dtype=BF16).abs(), normal(64, 256, dtype=BF16, seed=1)
    p[:, 1::2], dy[:, 1::2] = p[:, ::2], -dy[:, ::2]
    dscores, _ = native.backward(BackwardOperands(dy, p, None, 1), plan_of(), True, False)
    products = p.float() * dy.float()
    assert (products.view(torch.int32) & 0xFFFF == 0x8000).any()  # ties
    assert_bitwise(dscores, products.to(BF16))


MASKS = {
    "rows_of_its_own": lambda b, h, q, k: normal(b, h, q, k),
    "keys": lambda b, h, q, k: normal(k),
    "batch_and_keys": lambda b, h, q, k: normal(b, 1, 1, k),
    "heads_and_queries": lambda b, h, q, k: normal(1, h, q, k),
    "batch_and_queries": lambda b, h, q, k: normal(b, 1, q, k),
    "keys_slowest": lambda b, h, q, k: normal(h, k, q).transpose(1, 2),
    "every_other_key": lambda b, h, q, k: normal(b, 1, q, 2 * k)[..., ::2],
    "one_key": lambda b, h, q, k: normal(h, q, 1),
    "one_number": lambda b, h, q, k: normal(1),
    "expanded": lambda b, h, q, k: normal(b, 1, 1, k).expand(b, h, q, k),
    "bool_keys_slowest": lambda b, h, q, k: (normal(k, q) > 0).t(),
    "bool_one_key": lambda b, h, q, k: normal(b, 1, q, 1) > 0,
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_are_read_in_place(level, kind):
    shape = (3, 4, 6, 37)
    scores, dy = normal(*shape, seed=3), normal(*shape, seed=4)
    mask = MASKS[kind](*shape)
    check(scores, mask, dy, plan_of(0.7))
    check(scores, mask, dy, plan_of(0.7, True, 0.2))


@pytest.mark.parametrize("n_keys", [4, 6, 9], ids=lambda k: f"Q6-K{k}")
def test_causal_rows_do_not_look_at_hidden_columns(level, n_keys):
    scores = normal(2, 6, n_keys)
    hidden = torch.ones(6, n_keys, dtype=torch.bool).triu(n_keys - 6 + 1)
    clean, p = forward(scores, None, plan_of(1.0, True, 0.5))
    assert (clean[:, hidden] == 0).all() and (p[:, hidden] == 0).all()
    dirty, _ = forward(scores.masked_fill(hidden, NAN), None, plan_of(1.0, True, 0.5))
    assert_bitwise(dirty, clean)
    assert_bitwise(forward(scores, ~hidden)[0], forward(scores, None, plan_of(1.0, True))[0])


@pytest.mark.parametrize("shape", [(2, 6, 4), (2, 6, 9), (3, 40, 40), (700, 64, 64)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_causal_gradients_do_not_look_at_hidden_columns(level, dtype, shape):
    """Whatever dy and p hold there: dscores and dmask are those of zeros, and zero there."""
    batch, n_queries, n_cols = shape
    hidden = torch.ones(n_queries, n_cols, dtype=torch.bool).triu(n_cols - n_queries + 1)
    p = torch.softmax(normal(*shape).masked_fill(hidden, -INF), -1).nan_to_num().to(dtype)
    dy = normal(*shape, dtype=dtype, seed=1)
    found = []
    for fill in (0.0, NAN):
        rows = dy.masked_fill(hidden, fill), p.masked_fill(hidden, fill)
        for mask_shape in (None, (1, n_queries, n_cols), (batch, 1, n_cols)):
            layout = None if mask_shape is None else contiguous_layout(shape, mask_shape)
            found.append(
                native.backward(
                    BackwardOperands(*rows, layout, n_queries), plan_of(causal=True), True, layout is not None
                )
            )
    half = len(found) // 2
    for clean, dirty in zip(found[:half], found[half:], strict=True):
        assert_bitwise(dirty[0], clean[0])
        assert (clean[0][:, hidden] == 0).all() and clean[0].isfinite().all()
        if clean[1] is not None:
            assert_bitwise(dirty[1], clean[1])
    dy[0, -1, 0] = NAN
    spoilt, _ = native.backward(BackwardOperands(dy, p, None, n_queries), plan_of(causal=True), True, False)
    assert spoilt[0, -1][~hidden[-1]].isnan().all() and (spoilt[0, -1][hidden[-1]] == 0).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=short)
@pytest.mark.parametrize("n_cols", [5, 16, 70], ids=lambda n: f"N{n}")
def test_rows_that_are_not_finite(level, n_cols, dtype):
    scores = normal(1, 8, n_cols, dtype=dtype)
    keep = torch.ones(1, 8, n_cols, dtype=torch.bool)
    additive = torch.zeros(1, 8, n_cols)
    scores[0, 0] = -INF  # nothing is left of it
    keep[0, 1] = False
    additive[0, 2] = -INF
    scores[0, 3, 2], scores[0, 4, 3], scores[0, 5, 4] = NAN, INF, NAN
    keep[0, 5, 4] = False  # a bool mask hides a NaN
    additive[0, 3, 2] = -INF  # an additive one does not
    scores[0, 6, 1] = NAN
    scores[0, 6, 2:] = scores[0, 6, 0] = -INF
    y, p = forward(scores, keep, plan_of(p=0.4))
    assert (y[0, :2] == 0).all() and (p[0, :2] == 0).all()
    assert p[0, 3:5].isnan().all() and p[0, 6].isnan().all()
    assert p[0, 5].isfinite().all() and p[0, 5, 4] == 0 and p[0, 7].isfinite().all()
    y, _ = forward(scores, additive)
    assert (y[0, :1] == 0).all() and (y[0, 2] == 0).all() and y[0, 3:7].isnan().all()
    zeros = native.backward(BackwardOperands(torch.ones_like(y), torch.zeros_like(y), None, 8), plan_of(), True, False)[
        0
    ]
    assert (zeros == 0).all()


def test_exponentials_are_within_two_units_in_the_last_place(level):
    """A row of 0 and x gives e^x / (1 + e^x): 1 + e^x and the quotient round once each, and half a unit more."""
    x = -torch.linspace(0.0, 87.3, 200_001)
    y = forward(torch.stack((torch.zeros_like(x), x), dim=1))[0][:, 1]
    exact = torch.sigmoid(x.double())
    assert ((y - exact).abs() / exact).max() <= 4 * 2**-23
    for smallest in (-88.0, -104.0, -1e30, -INF):
        assert forward(torch.tensor([[0.0, smallest]]))[0].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("n_cols", [7, 64, 500, 1030], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("rng", [RNG, torch.tensor([7, 2**31])], ids=["numbers", "state"])
def test_dropout_is_the_one_mask(level, n_cols, rng):
    scores = normal(2, 19, n_cols)
    y, p = forward(scores, None, plan_of(p=0.3), rng)
    kept = keep_mask((38, n_cols), 0.3, rng).view(scores.shape)
    assert torch.equal(y != 0, kept) and torch.equal(p.signbit(), ~kept)
    plain, _ = forward(scores)
    assert_bitwise(p.abs(), plain)
    y, p = forward(scores, None, plan_of(p=1.0), rng)
    assert (y == 0).all() and p.signbit().all()
    gone = native.backward(BackwardOperands(torch.full_like(y, NAN), p, None, 19), plan_of(p=1.0), True, False)[0]
    assert (gone == 0).all()


SHARED = {
    "one_row": ((4100, 1, 1), (1, 1, 1)),
    "few_rows_many_share": ((5, 7, 150), (5, 1, 1)),
    "many_rows_few_share": ((3, 4, 60), (1, 4, 60)),
    "many_rows_many_share": ((1100, 1, 70), (1, 1, 70)),
    "outer_and_inner": ((4, 30, 6), (4, 1, 6)),
    "no_row_is_shared": ((2, 5, 7), (2, 5, 7)),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("n_cols", [3, 33], ids=lambda n: f"N{n}")
def test_the_gradient_of_a_mask(level, case, n_cols):
    lead, mask_lead = SHARED[case]
    shape = (*lead, n_cols)
    dy, p = normal(*shape), torch.softmax(normal(*shape, seed=1), -1)
    layout = contiguous_layout(shape, (*mask_lead, n_cols))
    for wants_dscores in (True, False):
        ours = native.backward(BackwardOperands(dy, p, layout, 1), plan_of(0.5), wants_dscores, True)
        expected, exact = (
            reference.backward(
                BackwardOperands(rows_of(dy.to(t)), rows_of(p.to(t)), layout, 1), plan_of(0.5), wants_dscores, True
            )
            for t in (F32, torch.float64)
        )
        assert (ours[0] is None) == (not wants_dscores)
        assert_like_torch(ours[1], expected[1], exact[1], terms=rows_of(dy).shape[0] // ours[1].shape[0])


@pytest.mark.parametrize("n_cols", [1024, 1000, 1035], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_large_outputs_which_pass_the_caches(level, dtype, n_cols):
    """Many rows have the bits of the same rows in a small call."""
    few, repeats = 60, 40 if dtype == F32 else 80
    scores, dy = (normal(few, n_cols, dtype=dtype, seed=seed) for seed in range(2))
    keep = torch.arange(n_cols) < n_cols - 5

    def many(rows: Tensor) -> Tensor:
        return rows.repeat(repeats, 1)

    small, large = forward(scores, keep)[0], forward(many(scores), keep)[0]
    assert large.numel() * large.element_size() >= 8 << 20
    assert_bitwise(large, many(small))
    gradients = [
        native.backward(BackwardOperands(*rows), plan_of(), True, False)[0] for rows in ((dy, small), (many(dy), large))
    ]
    assert_bitwise(gradients[1], many(gradients[0]))
    y, p = forward(many(scores), keep, plan_of(p=0.1))
    assert_bitwise(p.abs(), many(small))
    assert torch.equal(p.signbit(), ~keep_mask(tuple(p.shape), 0.1, RNG))
    assert torch.equal(y[p.signbit()], torch.zeros_like(y[p.signbit()]))


@pytest.mark.parametrize("p", [0.0, 0.1], ids=["p0", "p0.1"])
def test_wide_rows_and_strides(p):
    n_cols = 262_147
    scores, dy = normal(2, 2 * n_cols, dtype=BF16)[:, 5 : n_cols + 5], normal(2, n_cols + 3, dtype=BF16)[:, 3:]
    check(scores, None, dy, plan_of(3.0, True, p))


def test_levels_with_a_fused_multiply_add_have_the_same_exponentials():
    rows = torch.stack((torch.zeros(5001), -torch.linspace(0.0, 90.0, 5001)), dim=1)
    assert_bitwise(*at_levels_with_fused_multiply_add(lambda: forward(rows)[0]))


@pytest.mark.parametrize("n_cols", [1, 33, 512, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("p", [0.0, 0.1], ids=["p0", "p0.1"])
def test_results_in_the_memory_of_what_they_are_made_of(p, dtype, n_cols):
    torch.manual_seed(0)
    plan = SoftmaxPlan(0.5, True, p, store_p=p > 0.0)
    scores, dy = torch.randn(2, 3, 40, n_cols).to(dtype), torch.randn(2, 3, 40, n_cols).to(dtype)
    y, stored = native.forward(Operands(scores, None, None, 40), RNG, plan)
    dscores, _ = native.backward(BackwardOperands(dy, y if stored is None else stored, None, 40), plan, True, False)
    overwritten = scores.clone()
    y_there, stored_there = native.forward(Operands(overwritten, None, None, 40), RNG, plan, may_overwrite=True)
    assert y_there.data_ptr() == overwritten.data_ptr()
    assert_bitwise(y_there, y)
    saved = y_there if stored_there is None else stored_there
    overwritten = dy.clone()
    dscores_there, _ = native.backward(
        BackwardOperands(overwritten, saved, None, 40), plan, True, False, may_overwrite=True
    )
    assert dscores_there.data_ptr() == overwritten.data_ptr()
    assert_bitwise(dscores_there, dscores)
