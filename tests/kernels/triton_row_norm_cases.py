"""What the Triton kernels of row_norm must do, on whatever device they run.

test_triton_cases.py runs this file on the CPU, interpreted and as machine code, and on a GPU where there is one: in
processes of their own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from onetrip import reference
from onetrip.kernels import philox, row_norm, sum_partials, unavailable_reason
from onetrip.reference.philox import keep_mask
from onetrip.reference.philox import philox as reference_philox
from onetrip.reference.row_norm import NORM_LAYER, NORM_NONE, NORM_RMS, BackwardOperands, Dtypes, Operands, RowNormPlan
from operator_cases import LAYOUTS
from pairwise import pairwise
from torch import Tensor
from triton_runner import DEVICE, EMULATED, INTERPRETED, assert_close, memory_past_2_to_the_31

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
RNG = (0x0123456789ABCDEF, -5)
WIDTHS = (1, 3, 63, 64, 100, 1023, 1025)
NORMS = {"none": NORM_NONE, "layer": NORM_LAYER, "rms": NORM_RMS}
DTYPES = {
    "f32": (F32, F32, F32),
    "f16": (F16, F16, F16),
    "bf16": (BF16, BF16, BF16),
    "bf16-residual-f32": (BF16, F32, F32),
    "f16-weights-f32": (F16, F16, F32),
}  # of x, residual, parameters
all_norms = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
TRUE_NORMS = {"layer": NORM_LAYER, "rms": NORM_RMS}
true_norms = pytest.mark.parametrize("norm", TRUE_NORMS.values(), ids=TRUE_NORMS)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows wider than 128 (forward) and 64 (backward) columns count as wide, and a backward program takes many rows."""
    monkeypatch.setattr(row_norm, "FORWARD", row_norm.TileRule(256, 16, max_cols=128, wide_cols=64))
    rule = row_norm.TileRule(256, 8, max_cols=64, wide_cols=32)
    monkeypatch.setattr(row_norm, "BACKWARD", rule)
    monkeypatch.setattr(row_norm, "BACKWARD_ONE_SUM", rule)
    monkeypatch.setattr(row_norm, "ROW_MEANS", row_norm.TileRule(256, 8, max_cols=0, wide_cols=32))
    monkeypatch.setattr(sum_partials, "_MANY_PROGRAMS", 3)


def plan_of(norm: int, z_dtype: torch.dtype, **changes: Any) -> RowNormPlan:
    plan = RowNormPlan(norm, 1e-5, 0.0, 0.0, z_dtype, F32, z_dtype, True, False, norm != NORM_NONE)
    return plan._replace(**changes)


def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check_forward(
    x: Tensor, residual: Tensor | None, parameters: list[Tensor | None], rng: Any, plan: RowNormPlan
) -> tuple[Tensor | None, ...]:
    bias, weight, norm_bias = parameters
    results = row_norm.forward(Operands(x, residual, bias, weight, norm_bias), rng, plan)
    expected = reference.row_norm.forward(
        Operands(x, residual, bias, weight, norm_bias), rng, plan._replace(center_z=False)
    )
    y, z, mean, rstd = results
    if not plan.center_z:
        assert_close(z, expected[1])
    if z is not None and plan.norm != NORM_NONE and not plan.center_z:
        # From the very z that was stored: the interpreter truncates to bfloat16, and a unit there is many in the sums.
        expected = reference.row_norm.forward(
            Operands(z, None, None, weight, norm_bias), None, plan._replace(dropout_p=0.0)
        )
    assert_close(y, expected[0], roundings=2)
    assert_close(mean, None if plan.center_z else expected[2])
    assert_close(rstd, expected[3])
    return results


def backward_arguments(*arguments: Any) -> tuple[BackwardOperands, Any, RowNormPlan, Dtypes]:
    *tensors, rng, plan, wanted = arguments
    return BackwardOperands(*tensors), rng, plan, Dtypes(*wanted)


def check_backward(*tensors_rng_plan_wanted: Any) -> tuple[Tensor | None, ...]:
    arguments = backward_arguments(*tensors_rng_plan_wanted)
    results = row_norm.backward(*arguments)
    for actual, expected in zip(results, reference.row_norm.backward(*arguments), strict=True):
        assert_close(actual, expected)
    return results


def backward_inputs(n_rows: int, n_cols: int, norm: int, dtype: torch.dtype) -> list[Any]:
    """dy, dz, z, mean, rstd as a forward would have left them."""
    z = randn(n_rows, n_cols, dtype=dtype)
    dy, dz = randn(n_rows, n_cols, dtype=dtype), randn(n_rows, n_cols, dtype=dtype)
    if norm == NORM_NONE:
        return [None, dz, None, None, None]
    mean = z.float().mean(1) if norm == NORM_LAYER else None
    rstd = torch.rsqrt((z.float() - (0.0 if mean is None else mean[:, None])).square().mean(1) + 1e-5)
    return [dy, dz, z, mean, rstd]


def test_available() -> None:
    assert unavailable_reason(DEVICE) == ""
    assert "not on meta" in unavailable_reason(torch.device("meta"))


@pairwise(norm=NORMS, n_cols=WIDTHS, dtypes=DTYPES)
def test_forward(norm: int, n_cols: int, dtypes: tuple[torch.dtype, ...]) -> None:
    x_dtype, residual_dtype, parameter_dtype = dtypes
    plan = plan_of(norm, torch.promote_types(x_dtype, residual_dtype), dropout_p=0.3)
    x, residual = randn(5, n_cols, dtype=x_dtype), randn(5, n_cols, dtype=residual_dtype)
    parameters = [randn(n_cols, dtype=parameter_dtype) for _ in range(3)]
    check_forward(x, residual, parameters, RNG, plan)


@pairwise(norm=NORMS, n_cols=WIDTHS, dtypes=DTYPES)
def test_backward(norm: int, n_cols: int, dtypes: tuple[torch.dtype, ...]) -> None:
    x_dtype, residual_dtype, parameter_dtype = dtypes
    z_dtype = torch.promote_types(x_dtype, residual_dtype)
    weight = None if norm == NORM_NONE else randn(n_cols, dtype=parameter_dtype)
    check_backward(
        *backward_inputs(7, n_cols, norm, z_dtype),
        weight,
        RNG,
        plan_of(norm, z_dtype, dropout_p=0.3, weight_offset=1.0),
        (x_dtype, residual_dtype, parameter_dtype, parameter_dtype, parameter_dtype),
    )


@pairwise(
    norm=TRUE_NORMS,
    weight_offset=[0.0, 1.0],
    y_dtype={"y-f32": F32, "y-f16": F16, "y-bf16": BF16},
    n_dtype={"n-f32": F32, "n-f16": F16, "n-bf16": BF16},
)
def test_cast_orders(norm: int, weight_offset: float, y_dtype: torch.dtype, n_dtype: torch.dtype) -> None:
    if INTERPRETED and BF16 in (n_dtype, y_dtype):
        pytest.skip("the interpreter truncates to bfloat16: an order of roundings cannot be told from its error")
    plan = plan_of(norm, F16, n_dtype=n_dtype, y_dtype=y_dtype, weight_offset=weight_offset)
    arguments = (Operands(randn(8, 256, dtype=F16), None, None, randn(256)), None)
    y = row_norm.forward(*arguments, plan)[0].double()
    right = reference.row_norm.forward(*arguments, plan)[0]
    assert right.dtype == y_dtype
    # Sums in another order turn a rounding here and there: nearly all elements must agree to float32 accuracy, and
    # without the rounding of n, or with one more, nearly none would.
    agree = (y - right.double()).abs() <= 4 * torch.finfo(F32).eps * right.abs()
    assert agree.double().mean() > 0.95
    assert ((y - right.double()).abs() <= 2 * torch.finfo(BF16).eps * right.abs()).all()


@pairwise(
    rng={"0": (0, 0), "64-bit": RNG, "largest": (2**64 - 1, 2**34), "tensor": "tensor"},
    p=[1e-12, 0.1, 0.5, 1 - 1e-12, 1.0],
    n_cols=[64, 63, 300],
)
def test_mask_is_the_references(rng: Any, p: float, n_cols: int, small_tiles: None) -> None:
    if rng == "tensor":
        rng = torch.tensor(RNG, device=DEVICE)
    plan = plan_of(NORM_NONE, F32, dropout_p=p)
    x = torch.ones(9, n_cols, device=DEVICE)
    keep = keep_mask((9, n_cols), p, rng, DEVICE)
    _, z, _, _ = row_norm.forward(Operands(x), rng, plan)
    assert z is not None and torch.equal(z != 0, keep)
    dx, *_ = row_norm.backward(BackwardOperands(dz=x), rng, plan, Dtypes(F32, None, None, None, None))
    assert dx is not None and torch.equal(dx, z)


@pytest.mark.parametrize("n_cols", [16, 12, 13])
def test_bits_at_the_threshold(n_cols: int) -> None:
    """An element is kept iff its bits are at least the threshold: the bits themselves are, one more is not."""
    words = torch.stack(reference_philox((7, 8), torch.arange(1, device=DEVICE))).flatten().tolist()
    x = torch.ones(1, n_cols, device=DEVICE)
    for element in range(8):
        bits = words[element // 2] >> element % 2 * 16 & 0xFFFF
        for threshold, kept in ((bits, True), (bits + 1, False)):
            plan = plan_of(NORM_NONE, F32, dropout_p=threshold / 2**16)
            _, z, _, _ = row_norm.forward(Operands(x), (7, 8), plan)
            assert bool(z[0, element] != 0) is kept


@triton.jit
def _keep_kernel(keep_ptr, first_row: tl.int64, n_cols, PHILOX_COLS: tl.constexpr):
    """keep: [4, 16] of rows first_row ... first_row + 3."""
    rows = tl.arange(0, 4)[:, None]
    seed, offset = philox.load_rng(None, tl.full((), 7, tl.int64), tl.full((), 8, tl.int64))
    limit = tl.full((), 2147483647, tl.int64)
    keep = philox.keep_tile(seed, offset, first_row + rows, 0, n_cols, limit, PHILOX_COLS, 4, 16)
    cols = tl.arange(0, 16)[None, :]
    tl.store(keep_ptr + rows * n_cols + cols, keep.to(tl.int8), mask=cols < n_cols)


@pytest.mark.parametrize("n_cols", [16, 12, 13])
def test_mask_past_2_to_the_35_elements(n_cols: int) -> None:
    first_row = 2**33 + 3
    keep = torch.empty(4, n_cols, dtype=torch.int8, device=DEVICE)
    _keep_kernel[(1,)](keep, first_row, n_cols, PHILOX_COLS=philox.philox_cols(n_cols))
    assert torch.equal(keep.bool(), keep_mask((4, n_cols), 0.5, (7, 8), DEVICE, first_element=first_row * n_cols))


@pytest.mark.parametrize("n_cols", [129, 300, 320])
@all_norms
def test_wide_rows(norm: int, n_cols: int, small_tiles: None) -> None:
    x, residual, parameters = randn(5, n_cols) + 3.0, randn(5, n_cols), [randn(n_cols) for _ in range(3)]
    plan = plan_of(norm, F32, dropout_p=0.3)
    check_forward(x, residual, parameters, RNG, plan)
    inputs = backward_inputs(5, n_cols, norm, F32)
    check_backward(*inputs, parameters[1], RNG, plan, (F32,) * 5)


@pytest.mark.parametrize("n_rows", [1, 2, 50, 131])
@pytest.mark.parametrize("n_cols", [5, 48])
def test_programs_of_many_rows(n_cols: int, n_rows: int, small_tiles: None) -> None:
    check_backward(*backward_inputs(n_rows, n_cols, NORM_LAYER, F32), None, None, plan_of(NORM_LAYER, F32), (F32,) * 5)


@pytest.mark.parametrize("wide", [False, True], ids=["row-in-tile", "wide-row"])
def test_centred_z(wide: bool, request: pytest.FixtureRequest) -> None:
    if wide:
        request.getfixturevalue("small_tiles")
    plan = plan_of(NORM_LAYER, F32, center_z=True)
    x = randn(3, 200) + 5.0
    _, z, mean, rstd = check_forward(x, None, [None, None, None], None, plan)
    assert mean is None
    assert_close(z, x - x.mean(1, keepdim=True))
    check_backward(randn(3, 200), None, z, None, rstd, None, None, plan, (F32, None, None, F32, F32))


def _packed(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("layout", ["expanded_rows", "one_element_off", "spread"])
@pytest.mark.parametrize("n_cols", [63, 64])
def test_strides(n_cols: int, layout: str) -> None:
    plan = plan_of(NORM_LAYER, F32, dropout_p=0.3)
    x, residual, *matrices = (LAYOUTS[layout](randn(6, n_cols)) for _ in range(5))
    parameters = [LAYOUTS[layout](randn(2, n_cols))[1] for _ in range(3)]
    strided = check_forward(x, residual, parameters, RNG, plan)
    packed = row_norm.forward(Operands(*map(_packed, (x, residual, *parameters))), RNG, plan)
    assert all(torch.equal(a, b) for a, b in zip(strided, packed, strict=True))
    _, _, _, mean, rstd = backward_inputs(6, n_cols, NORM_LAYER, F32)
    gradients = check_backward(*matrices, mean, rstd, parameters[1], RNG, plan, (F32,) * 5)
    matrices, weight = [_packed(matrix) for matrix in matrices], _packed(parameters[1])
    packed = row_norm.backward(*backward_arguments(*matrices, mean, rstd, weight, RNG, plan, (F32,) * 5))
    assert all(torch.equal(a, b) for a, b in zip(gradients, packed, strict=True))


def test_rows_past_2_to_the_31_elements() -> None:
    storage, stride = memory_past_2_to_the_31()
    x = storage.as_strided((2, 16), (stride, 1)).copy_(randn(2, 16))
    check_forward(x, None, [None, None, None], None, plan_of(NORM_RMS, F16))


@pytest.mark.parametrize("n_cols", [63, 64])
def test_dropped_nan_is_zero(n_cols: int) -> None:
    plan = plan_of(NORM_NONE, F32, dropout_p=0.5)
    keep = keep_mask((4, n_cols), 0.5, RNG, DEVICE)
    x = randn(4, n_cols).masked_fill(~keep, float("nan"))
    check_forward(x, randn(4, n_cols), [None, None, None], RNG, plan)
    dx, *_ = check_backward(None, x, None, None, None, None, RNG, plan, (F32, None, F32, None, None))
    assert (dx[~keep] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("wide", [False, True], ids=["row-in-tile", "wide-row"])
@true_norms
def test_bad_values_stay_in_their_row(norm: int, wide: bool, bad: float, request: pytest.FixtureRequest) -> None:
    if wide:
        request.getfixturevalue("small_tiles")
    x = randn(5, 150)
    x[2, 149] = bad
    y, _, _, rstd = row_norm.forward(Operands(x), None, plan_of(norm, F32))
    clean = torch.arange(5, device=DEVICE) != 2
    assert y[clean].isfinite().all() and rstd[clean].isfinite().all()
    assert y[2].isnan().any() and not rstd[2] > 0


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_only_what_is_wanted(norm: int) -> None:
    dy, dz, z, mean, rstd = backward_inputs(4, 40, norm, F32)
    weight, plan = randn(40), plan_of(norm, F32, dropout_p=0.3)
    upstream = [(None, dz)] if norm == NORM_NONE else [(dy, None), (None, dz), (dy, dz)]
    for (dy, dz), wanted in itertools.product(upstream, itertools.product((F32, None), repeat=5)):
        check_backward(dy, dz, z, mean, rstd, weight, RNG, plan, wanted)


@pytest.mark.parametrize("store_z", [True, False], ids=["z", "no-z"])
@pytest.mark.parametrize("store_stats", [True, False], ids=["stats", "no-stats"])
@true_norms
def test_stores_what_the_plan_asks_for(norm: int, store_stats: bool, store_z: bool) -> None:
    plan = plan_of(norm, F32, store_z=store_z, store_stats=store_stats)
    check_forward(randn(3, 40), None, [None, randn(40), None], None, plan)


@pytest.mark.parametrize("n_cols", [1000, 300])
def test_large_mean(n_cols: int, request: pytest.FixtureRequest) -> None:
    """mean / std = 1e4: a one-pass variance would be all error."""
    if n_cols == 300:
        request.getfixturevalue("small_tiles")
    x = randn(4, n_cols) + 1e4
    plan = plan_of(NORM_LAYER, F32)
    exact = torch.nn.functional.layer_norm(x.double(), (n_cols,))
    torchs = (torch.nn.functional.layer_norm(x, (n_cols,)).double() - exact).abs().max()
    y, *_ = row_norm.forward(Operands(x), None, plan)
    # Half a unit in the last place of the mean, which both round to float32, is 5e-4 standard deviations.
    assert (y.double() - exact).abs().max() <= 2 * torchs + 5e-4


def test_backward_repeats_bit_for_bit() -> None:
    tensors, plan = (*backward_inputs(40, 72, NORM_LAYER, F32), randn(72)), plan_of(NORM_LAYER, F32, dropout_p=0.1)
    first, second = (row_norm.backward(*backward_arguments(*tensors, RNG, plan, (F32,) * 5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(INTERPRETED or EMULATED, reason="millions of elements are too many without a GPU")
@pytest.mark.parametrize(
    "shape", [(4096, 1024), (517, 4096), (64, 8192), (33, 16384), (3, 32768), (2, 262144)], ids=str
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@all_norms
def test_full_size(norm: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    n_rows, n_cols = shape
    plan = plan_of(norm, dtype, dropout_p=0.1)
    parameters = [randn(n_cols, dtype=dtype) for _ in range(3)]
    check_forward(randn(n_rows, n_cols, dtype=dtype), randn(n_rows, n_cols, dtype=dtype), parameters, RNG, plan)
    weight = None if norm == NORM_NONE else parameters[1]
    check_backward(*backward_inputs(n_rows, n_cols, norm, dtype), weight, RNG, plan, (dtype, dtype, F32, F32, F32))
