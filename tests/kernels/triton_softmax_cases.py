"""What the Triton kernels of softmax must do, on whatever device they run.

test_triton_cases.py runs this file on the CPU, interpreted and as machine code, and on a GPU where there is one: in
processes of their own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton_runner
from onetrip import reference
from onetrip.kernels import softmax
from onetrip.kernels.tiles import TileRule, tile
from onetrip.reference.philox import keep_mask
from onetrip.reference.softmax import BackwardOperands, MaskLayout, Operands, SoftmaxPlan
from operator_cases import LAYOUTS
from pairwise import pairwise
from torch import Tensor
from triton_runner import DEVICE, EMULATED, INTERPRETED, memory_past_2_to_the_31

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = float("inf"), float("nan")
RNG = (0x0123456789ABCDEF, -5)
WIDTHS = (1, 3, 63, 64, 100, 1023, 1025)
B, H, Q = 2, 3, 4  # rows are B * H * Q
ALL_DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
BOTH_TILES = ("row-in-tile", "wide-row")
TILES = pytest.mark.parametrize("tiles", BOTH_TILES, indirect=True)
WIDTH = 24  # of most cases: a tile and a half of a wide row

# Sizes, and in which of them the mask moves.
MASKS = {
    "one-for-all": ((B * H * Q,), (0,)),
    "row-each": ((B * H * Q,), (1,)),
    "padding-B11K": ((B, H * Q), (1, 0)),
    "bias-1HQK": ((B, H * Q), (0, 1)),
    "bias-1H1K": ((B, H, Q), (0, 1, 0)),
    "mask-B1QK": ((B, H, Q), (1, 0, 1)),
    "bias-11QK": ((B * H, Q), (0, 1)),
    "4-dims": ((2, 3, 2, 2), (1, 0, 1, 0)),
    "4-dims-other": ((2, 3, 2, 2), (0, 1, 0, 1)),
}


@pytest.fixture(autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """wide-row: rows of more than 16 columns count as wide, and are walked 16 columns at a time."""
    choice = getattr(request, "param", "row-in-tile")
    if choice == "wide-row":
        rule = TileRule(elements=16, elements_per_lane=8, max_cols=16, wide_cols=16)
        for name in ("FORWARD", "FORWARD_BUSY", "BACKWARD", "BACKWARD_MASK"):
            monkeypatch.setattr(softmax, name, rule)
    return choice


def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def mask_of(name: str, n_cols: int, dtype: torch.dtype, col_stride: int = 1, pad: int = 0) -> tuple[Tensor, MaskLayout]:
    """A mask with rows `pad` elements apart, and the layout that reads it."""
    sizes, moves = MASKS[name]
    strides, stride = [], n_cols * max(col_stride, 1) + pad
    for size, move in zip(reversed(sizes), reversed(moves), strict=True):
        strides.insert(0, stride * move)
        stride *= size if move else 1
    mask = torch.rand(stride, device=DEVICE) < 0.7 if dtype == torch.bool else randn(stride, dtype=dtype)
    return mask, MaskLayout(sizes, tuple(strides), col_stride)


def assert_close(actual: Tensor | None, expected: Tensor | None, terms: int = 1) -> None:
    triton_runner.assert_close(actual, expected, terms=terms, may_flush=True)


def check_forward(
    scores: Tensor,
    mask: Tensor | None = None,
    layout: MaskLayout | None = None,
    n_queries: int = Q,
    rng: Any = RNG,
    **plan: Any,
) -> tuple[Tensor, Tensor | None]:
    chosen = SoftmaxPlan(**{"scale": 0.7, "causal": False, "dropout_p": 0.0, "store_p": False, **plan})
    y, p = softmax.forward(Operands(scores, mask, layout, n_queries), rng, chosen)
    expected_y, expected_p = reference.softmax.forward(Operands(scores, mask, layout, n_queries), rng, chosen)
    assert_close(y, expected_y)
    assert_close(p, expected_p)
    if chosen.dropout_p > 0.0:
        keep = keep_mask(tuple(y.shape), chosen.dropout_p, rng, DEVICE)
        assert torch.equal(y.masked_fill(keep, 0.0), torch.zeros_like(y)), "dropped values are exactly zero"
        if p is not None:
            seen = p.abs() > 0.0  # the sign of a hidden zero means nothing, nor that of NaN
            assert torch.equal(torch.signbit(p)[seen], ~keep[seen])
    return y, p


def check_backward(
    dy: Tensor,
    p: Tensor,
    layout: MaskLayout | None = None,
    wanted: tuple[bool, bool] = (True, False),
    n_queries: int = Q,
    **plan: Any,
) -> tuple[Tensor | None, Tensor | None]:
    chosen = SoftmaxPlan(**{"scale": 0.7, "causal": False, "dropout_p": 0.0, "store_p": False, **plan})
    results = softmax.backward(BackwardOperands(dy, p, layout, n_queries), chosen, *wanted)
    terms = 1 if layout is None else max(1, dy.shape[0] // layout.n_mask_rows)
    known = reference.softmax.backward(BackwardOperands(dy, p, layout, n_queries), chosen, *wanted)
    for actual, expected in zip(results, known, strict=True):
        assert_close(actual, expected, terms)
    return results


def probabilities(n_rows: int, n_cols: int, dtype: torch.dtype = F32, dropout_p: float = 0.0) -> Tensor:
    """As forward would have left them: with dropout, signed."""
    p = torch.softmax(randn(n_rows, n_cols), dim=1).to(dtype)
    return torch.where(torch.rand(n_rows, n_cols, device=DEVICE) < dropout_p, -p, p)


@TILES
@pytest.mark.parametrize("rule", ["FORWARD", "FORWARD_BUSY", "BACKWARD", "BACKWARD_MASK"])
def test_wide_rows_are_wider_than_a_tile(rule: str, tiles: str) -> None:
    """The fixture, which did nothing when its parameter did not reach it."""
    assert (tile(getattr(softmax, rule), WIDTH).cols < WIDTH) == (tiles == "wide-row")


@ALL_DTYPES
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_forward(n_cols: int, dtype: torch.dtype) -> None:
    check_forward(randn(5, n_cols, dtype=dtype))
    check_forward(randn(5, n_cols, dtype=dtype), dropout_p=0.3, store_p=True)


@ALL_DTYPES
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_backward(n_cols: int, dtype: torch.dtype) -> None:
    check_backward(randn(5, n_cols, dtype=dtype), probabilities(5, n_cols, dtype))
    check_backward(randn(5, n_cols, dtype=dtype), probabilities(5, n_cols, dtype, 0.3), dropout_p=0.3)


@pairwise(["tiles"], tiles=BOTH_TILES, name=list(MASKS), mask_dtype=[torch.bool, F32, F16, BF16])
def test_masks(name: str, mask_dtype: torch.dtype, tiles: str) -> None:
    scores = randn(B * H * Q, WIDTH, dtype=F16 if mask_dtype == F32 else F32)
    check_forward(scores, *mask_of(name, WIDTH, mask_dtype), dropout_p=0.2, store_p=True)


@pairwise(["tiles"], pad=[0, 5], col_stride=[0, 1, 2, 24], mask_dtype=[torch.bool, F16], tiles=BOTH_TILES)
def test_strides_of_the_mask(pad: int, col_stride: int, mask_dtype: torch.dtype, tiles: str) -> None:
    mask, layout = mask_of("mask-B1QK", WIDTH, mask_dtype, col_stride, pad)
    check_forward(randn(B * H * Q, WIDTH), mask, layout)


@pairwise(["tiles"], n_queries=[1, 4, 20], n_cols=[1, 4, 15, 23, 40], tiles=BOTH_TILES)
def test_causal(n_queries: int, n_cols: int, tiles: str) -> None:
    n_rows = max(n_queries, 12)
    y, _ = check_forward(randn(n_rows, n_cols), None, None, n_queries, causal=True, dropout_p=0.2, store_p=True)
    if n_cols < n_queries:
        assert not y[: n_queries - n_cols].any(), "queries before the first key see nothing"
    p = torch.where(y == 0.0, -y, y)
    check_backward(randn(n_rows, n_cols), p, None, (True, False), n_queries, causal=True, dropout_p=0.2)


@pytest.mark.parametrize(
    ("mask_dtype", "n_cols", "tiles"),
    [(torch.bool, 24, "row-in-tile"), (F32, 21, "row-in-tile"), (torch.bool, 21, "wide-row"), (F32, 24, "wide-row")],
    indirect=["tiles"],
)
def test_causal_beside_a_mask(mask_dtype: torch.dtype, n_cols: int, tiles: str) -> None:
    mask, layout = mask_of("padding-B11K", n_cols, mask_dtype)
    y, _ = check_forward(randn(B * H * Q, n_cols), mask, layout, causal=True)
    check_backward(randn(B * H * Q, n_cols), y, layout, (True, mask_dtype is F32), causal=True)


def test_hidden_columns_are_in_no_result() -> None:
    """The memory that causality hides is NaN."""
    scores = randn(100, 100)
    hidden = torch.ones(100, 100, dtype=torch.bool, device=DEVICE).triu(1)
    clean, _ = check_forward(scores.masked_fill(hidden, 1.0), n_queries=100, causal=True)
    y, _ = check_forward(scores.masked_fill(hidden, NAN), n_queries=100, causal=True)
    assert torch.equal(y, clean)


@pytest.mark.parametrize(
    ("wanted", "tiles"),
    [((True, False), "row-in-tile"), ((False, True), "row-in-tile"), ((True, True), "wide-row")],
    indirect=["tiles"],
    ids=["dscores", "dmask", "both-wide"],
)
def test_gradients_of_hidden_columns_are_in_no_result(wanted: tuple[bool, bool], tiles: str) -> None:
    """What causality hides of dy and p is NaN; and a NaN that is visible stays where its row sees."""
    hidden = torch.ones(WIDTH, WIDTH, dtype=torch.bool, device=DEVICE).triu(1)
    dy, p, layout = randn(WIDTH, WIDTH), probabilities(WIDTH, WIDTH), MaskLayout((6, 4), (0, WIDTH), 1)
    clean = check_backward(dy, p.masked_fill(hidden, 0.0), layout, wanted, WIDTH, causal=True)
    dirty = [tensor.masked_fill(hidden, NAN) for tensor in (dy, p)]
    for a, b in zip(clean, check_backward(*dirty, layout, wanted, WIDTH, causal=True), strict=True):
        assert a is b is None or torch.equal(a, b)
    dirty[0][20, 3] = NAN
    dscores, _ = check_backward(*dirty, layout, wanted, WIDTH, causal=True)
    assert dscores is None or (dscores[20, :21].isnan().all() and not dscores[20, 21:].any())


@pairwise(
    ["tiles"],
    rng={"0": (0, 0), "64-bit": RNG, "largest": (2**64 - 1, 2**34), "tensor": "tensor"},
    p=[1e-12, 0.1, 1.0],
    n_cols=[16, 22],
    tiles=BOTH_TILES,
)
def test_dropout_is_the_references(rng: Any, p: float, n_cols: int, tiles: str) -> None:
    if rng == "tensor":
        rng = torch.tensor(RNG, device=DEVICE)
    scores = torch.zeros(9, n_cols, device=DEVICE)
    y, signed = check_forward(scores, rng=rng, dropout_p=p, store_p=True)
    keep = keep_mask((9, n_cols), p, rng, DEVICE)
    assert torch.equal(y != 0, keep) and torch.equal(~torch.signbit(signed), keep)
    check_backward(randn(9, n_cols), signed, dropout_p=p)


def test_dropped_zeros_keep_their_sign() -> None:
    """Probabilities that round to zero: backward must still see that they were dropped, whatever dy is there."""
    scores = torch.zeros(4, 64, device=DEVICE, dtype=F16)
    scores[:, 1:] = -60000.0
    keep = keep_mask((4, 64), 0.5, RNG, DEVICE)
    _, p = check_forward(scores, dropout_p=0.5, store_p=True)
    assert p is not None and torch.equal(torch.signbit(p), ~keep)
    dy = randn(4, 64, dtype=F16).masked_fill(~keep, NAN)
    dscores, _ = check_backward(dy, p, dropout_p=0.5)
    assert dscores is not None and dscores.isfinite().all()


@pairwise(["tiles"], tiles=BOTH_TILES, name=list(MASKS), dropout_p={"p0": 0.0, "p0.3": 0.3})
def test_mask_gradient(name: str, dropout_p: float, tiles: str) -> None:
    _, layout = mask_of(name, WIDTH, F32)
    for wanted in ((True, True), (False, True), (False, False)):
        check_backward(
            randn(B * H * Q, WIDTH),
            probabilities(B * H * Q, WIDTH, F32, dropout_p),
            layout,
            wanted,
            dropout_p=dropout_p,
        )


@ALL_DTYPES
@pytest.mark.parametrize("n_cols", [1, 7, 64, 300])
def test_mask_gradient_widths(n_cols: int, dtype: torch.dtype) -> None:
    layout = MaskLayout((5, 3, 4), (0, n_cols, 0), 1)
    check_backward(randn(60, n_cols, dtype=dtype), probabilities(60, n_cols, dtype), layout, (True, True))


@pytest.mark.parametrize(
    ("shared", "tiles"), [(1, "row-in-tile"), (37, "row-in-tile"), (5, "wide-row")], indirect=["tiles"]
)
@pytest.mark.parametrize("n_mask_rows", [1, 3])
@pytest.mark.parametrize(("few", "many"), [(512, 1024), (1, 2), (1, 1)])
def test_mask_gradient_partitions(
    few: int, many: int, n_mask_rows: int, shared: int, tiles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows a program, in more than one program, and one program for all."""
    monkeypatch.setattr(softmax, "_FEW_PROGRAMS", few)
    monkeypatch.setattr(softmax, "_MANY_PROGRAMS", many)
    layout = MaskLayout((shared, n_mask_rows), (0, WIDTH), 1)
    dy, p = randn(shared * n_mask_rows, WIDTH), probabilities(shared * n_mask_rows, WIDTH)
    check_backward(dy, p, layout, (True, True))


def test_partition_of_the_rows_that_share_a_mask_row() -> None:
    assert softmax.steps_per_program(n_tiles=6144, n_steps=8) == 8, "enough programs: no partial sums"
    assert softmax.steps_per_program(n_tiles=1, n_steps=100) == 1, "few tiles: all at once"
    assert softmax.steps_per_program(n_tiles=4, n_steps=1024) == 8, "512 programs"
    assert softmax.steps_per_program(n_tiles=1, n_steps=12000) == 16, "16 tiles a program"
    assert softmax.steps_per_program(n_tiles=1, n_steps=10**6) == 977, "at most 1024 programs"


def test_backward_repeats_bit_for_bit() -> None:
    layout = MaskLayout((8, 3, 4), (0, WIDTH, 0), 1)
    operands = BackwardOperands(randn(96, WIDTH), probabilities(96, WIDTH), layout, Q)
    plan = SoftmaxPlan(0.7, False, 0.0, False)
    first, second = (softmax.backward(operands, plan, True, True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pairwise(["tiles"], tiles=BOTH_TILES, n_cols=[22, 21, 24], layout=["expanded_rows", "one_element_off", "spread"])
def test_same_bits_wherever_the_tensors_lie(n_cols: int, layout: str, tiles: str) -> None:
    """Scores, dy and p lie in three ways, the mask one element off."""
    mask, of_mask = mask_of("bias-1H1K", n_cols, F32)
    shifted = torch.cat([mask[:1], mask])[1:]
    scores, dy = (LAYOUTS[layout](randn(B * H * Q, n_cols)) for _ in range(2))
    y, _ = check_forward(scores, shifted, of_mask)
    packed, _ = check_forward(scores.clone(memory_format=torch.contiguous_format), mask, of_mask)
    assert torch.equal(y, packed)
    p = y if layout == "expanded_rows" else LAYOUTS[layout](y)
    results = check_backward(dy, p, of_mask, (True, True))
    packed_results = check_backward(dy.clone(memory_format=torch.contiguous_format), packed, of_mask, (True, True))
    assert all(torch.equal(a, b) for a, b in zip(results, packed_results, strict=True))


def test_rows_past_2_to_the_31_elements() -> None:
    (memory, stride), (mask, _) = memory_past_2_to_the_31(), memory_past_2_to_the_31()
    scores = memory.as_strided((2, 16), (stride, 1)).copy_(randn(2, 16))
    mask.as_strided((2, 16), (stride, 1)).copy_(randn(2, 16))
    check_forward(scores, mask, MaskLayout((2,), (stride,), 1))


@TILES
@pytest.mark.parametrize("hide", ["bool", "-inf", "scores"])
def test_rows_without_a_visible_value_are_zero(hide: str, tiles: str) -> None:
    layout = MaskLayout((4,), (WIDTH,), 1)
    hidden = torch.rand(4, WIDTH, device=DEVICE) < 0.5
    hidden[1] = True
    scores, mask = randn(4, WIDTH), None
    if hide == "bool":
        mask = ~hidden
    elif hide == "-inf":
        mask = torch.zeros(4, WIDTH, device=DEVICE).masked_fill(hidden, -INF)
    else:
        scores, layout = scores.masked_fill(hidden, -INF), None
    y, p = check_forward(scores, mask, layout, dropout_p=0.2, store_p=True)
    assert p is not None and not y[1].any() and not p[1].any() and y[0].any()
    dscores, _ = check_backward(randn(4, WIDTH), p, dropout_p=0.2)
    assert dscores is not None and not dscores[1].any()


@TILES
def test_finite_masks_are_ordinary_numbers(tiles: str) -> None:
    lowest = torch.full((1, WIDTH), torch.finfo(F32).min, device=DEVICE)
    y, _ = check_forward(randn(4, WIDTH), lowest, MaskLayout((4,), (0,), 1))
    assert_close(y, torch.full((4, WIDTH), 1 / WIDTH, device=DEVICE))


@TILES
@pytest.mark.parametrize("bad", [NAN, INF], ids=["nan", "inf"])
def test_bad_values(bad: float, tiles: str) -> None:
    """They stay in their row, fill it, and do not come through a bool mask; through an additive one NaN does."""
    scores, layout = randn(5, WIDTH), MaskLayout((5,), (0,), 1)
    scores[2, 20] = bad
    clean = torch.arange(5, device=DEVICE) != 2
    y, p = check_forward(scores, dropout_p=0.2, store_p=True)
    assert y[clean].isfinite().all() and p is not None and p[2].isnan().all()
    dscores, _ = check_backward(randn(5, WIDTH), p, dropout_p=0.2)
    assert dscores is not None and dscores[clean].isfinite().all() and dscores[2].isnan().all()
    keep = torch.arange(WIDTH, device=DEVICE) != 20
    y, _ = check_forward(scores, keep, layout)
    assert y.isfinite().all() and not y[:, 20].any()
    y, _ = check_forward(scores, torch.where(keep, 0.0, -INF), layout)
    assert y[clean].isfinite().all() and y[2].isnan().all()


@TILES
@pytest.mark.parametrize("others", [-INF, 0.0], ids=["hidden", "visible"])
def test_a_row_of_nan_is_not_a_hidden_row(others: float, tiles: str) -> None:
    """Where its maximum is -Inf besides NaN too."""
    scores = torch.full((WIDTH, WIDTH), others, device=DEVICE)
    scores[:, 0] = NAN
    y, _ = check_forward(scores, n_queries=WIDTH, causal=True)
    visible = torch.ones_like(y, dtype=torch.bool).tril()
    assert y[visible].isnan().all() and not y[~visible].any()


@TILES
def test_a_maximum_that_moves(tiles: str) -> None:
    """The largest value at the end, after sums of smaller ones; and values that would overflow exp."""
    scores = torch.linspace(-200.0, 200.0, 40, device=DEVICE).expand(3, 40)
    check_forward(scores, scale=1.0)
    check_forward(scores, scale=-1.0)
    check_forward(scores, scale=0.0)


@pytest.mark.skipif(INTERPRETED or EMULATED, reason="millions of elements are too many without a GPU")
@pytest.mark.parametrize(
    "shape", [(4096, 1024), (516, 4096), (64, 8192), (32, 16384), (4, 32768), (4, 262144), (12, 1001)], ids=str
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_full_size(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    n_rows, n_cols = shape
    layout = MaskLayout((2, 2, n_rows // 4), (0, n_cols * (n_rows // 4), n_cols), 1)
    bias = randn(layout.n_mask_rows, n_cols)
    for dropout_p in (0.0, 0.1):
        scores = randn(n_rows, n_cols, dtype=dtype)
        y, p = check_forward(scores, bias, layout, dropout_p=dropout_p, store_p=dropout_p > 0.0)
        for wants_dmask in (False, True):
            kept = y if p is None else p
            check_backward(randn(n_rows, n_cols, dtype=dtype), kept, layout, (True, wants_dmask), dropout_p=dropout_p)
