"""The native CPU kernels of row_norm against reference, at every level this machine has."""

from __future__ import annotations

import itertools

import pytest
import torch
from cpu_cases import (
    BF16,
    EPSILON,
    F16,
    F32,
    NORM_IDS,
    normal,
    same_bits,
)
from cpu_cases import row_norm_plan as plan_of
from onetrip.ops import row_norm_native as native
from onetrip.ops.common.backends import native as native_library
from onetrip.reference import row_norm as reference
from onetrip.reference.philox import keep_mask
from onetrip.reference.row_norm import NORM_LAYER, NORM_NONE, NORM_RMS, BackwardOperands, Dtypes, Operands
from pairwise import pairwise, short
from torch import Tensor

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="the native library was not built")

RNG = (2**40 + 12345, 2**33 + 4)
WIDTHS = (1, 3, 4, 15, 16, 63, 64, 65, 129, 1000, 1025, 4099)


def assert_as_accurate(name: str, ours: Tensor | None, expected: Tensor | None, exact: Tensor | None) -> None:
    """ours is off from exact (float64) by at most twice what torch in the same dtypes (expected) is, and a rounding."""
    assert (ours is None) == (expected is None), name
    if ours is None:
        return
    assert ours.dtype == expected.dtype and ours.shape == expected.shape, name
    assert ours.isfinite().all(), f"{name} has NaN or Inf"
    error = (ours.double() - exact).abs().max()
    # Inputs are of size 1, so float32 sums that cancel are still off by its roundings.
    allowed = 2 * (expected.double() - exact).abs().max() + EPSILON[ours.dtype] * max(1.0, exact.abs().max()) / 2
    assert error <= allowed, f"{name}: error {error:.3g} > {allowed:.3g}"


def in_double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def check_forward(x, residual, bias, weight, norm_bias, rng, plan):
    """Checks the native forward against reference and returns its (y, z, mean, rstd)."""
    ours = native.forward(Operands(x, residual, bias, weight, norm_bias), rng, plan)
    expected = reference.forward(Operands(x, residual, bias, weight, norm_bias), rng, plan)
    if plan.store_z and not plan.center_z:
        assert same_bits(ours[1], expected[1]), "z must have reference's bits"
    if plan.norm != NORM_NONE:
        z = reference.forward(Operands(x, residual, bias), rng, plan._replace(norm=NORM_NONE))[1]
        plan64 = plan._replace(z_dtype=torch.float64, y_dtype=torch.float64, n_dtype=F32, dropout_p=0.0)
        exact = reference.forward(Operands(z.double(), None, None, *in_double(weight, norm_bias)), None, plan64)
        for name, a, b, c in zip(("y", "z", "mean", "rstd"), ours, expected, exact, strict=True):
            assert_as_accurate(name, a, b, c)
    return ours


def check_backward(dy, dz, z, mean, rstd, weight, rng, plan, grad_dtypes):
    operands, wanted = BackwardOperands(dy, dz, z, mean, rstd, weight), Dtypes(*grad_dtypes)
    ours = native.backward(operands, rng, plan, wanted)
    expected = reference.backward(operands, rng, plan, wanted)
    exact = reference.backward(
        BackwardOperands(*in_double(*operands)),
        rng,
        plan._replace(z_dtype=torch.float64),
        Dtypes(*(dtype and torch.float64 for dtype in wanted)),
    )
    names = ("dx", "dresidual", "dbias", "dweight", "dnorm_bias")
    for name, a, b, c in zip(names, ours, expected, exact, strict=True):
        assert_as_accurate(name, a, b, c)
    return ours


@pairwise(
    n_cols={f"N{n}": n for n in WIDTHS},
    norm={name: norm for norm, name in NORM_IDS.items()},
    p={"p0": 0.0, "p0.3": 0.3},
)
def test_forward_and_backward_at_every_width(level, n_cols, norm, p):
    n_rows = 37
    x, residual, dy, dz = (normal(n_rows, n_cols, seed=seed) for seed in range(4))
    bias, weight, norm_bias = (normal(n_cols, seed=seed) for seed in range(4, 7))
    plan = plan_of(norm, dropout_p=p, weight_offset=0.5)
    _, z, mean, rstd = check_forward(x, residual, bias, weight, norm_bias, RNG, plan)
    if norm == NORM_NONE:
        check_backward(None, dz, None, None, None, None, RNG, plan, (F32, F32, F32, None, None))
    else:
        check_backward(dy, dz, z, mean, rstd, weight, RNG, plan, (F32, F32, F32, F32, F32))
        check_backward(dy, None, z, mean, rstd, None, RNG, plan, (F32, None, None, F32, None))


@pytest.mark.parametrize("z_dtype", [F32, F16, BF16], ids=lambda d: f"z_{short(d)}")
@pytest.mark.parametrize(
    "x_and_residual",
    list(itertools.product([F32, F16, BF16], [F32, F16, BF16, None])),
    ids=lambda pair: "-".join(map(str, pair)).replace("torch.", ""),
)
def test_every_mix_of_dtypes(level, x_and_residual, z_dtype):
    x_dtype, residual_dtype = x_and_residual
    n_rows, n_cols = 9, 147
    exists = z_dtype == F32 or z_dtype == x_dtype == (residual_dtype or x_dtype)
    other = {F32: BF16, F16: F32, BF16: F16}
    param_dtype, y_dtype = other[x_dtype], other[z_dtype]
    x, dy, dz = (
        normal(n_rows, n_cols, dtype=x_dtype),
        normal(n_rows, n_cols, dtype=y_dtype),
        normal(n_rows, n_cols, dtype=z_dtype),
    )
    residual = None if residual_dtype is None else normal(n_rows, n_cols, dtype=residual_dtype, seed=1)
    bias, weight, norm_bias = (normal(n_cols, dtype=d, seed=2) for d in (param_dtype, x_dtype, z_dtype))
    for n_dtype in (F32, F16, BF16):
        plan = plan_of(dropout_p=0.1, z_dtype=z_dtype, y_dtype=y_dtype, n_dtype=n_dtype)
        if not exists:
            with pytest.raises(TypeError, match="z_dtype must be float32"):
                native.forward(Operands(x, residual, bias, weight, norm_bias), RNG, plan)
            continue
        _, z, mean, rstd = check_forward(x, residual, bias, weight, norm_bias, RNG, plan)
    if not exists:
        stats = torch.zeros(n_rows)
        grads = Dtypes(x_dtype, residual_dtype)
        with pytest.raises(TypeError, match="z_dtype must be float32"):
            native.backward(BackwardOperands(dy, dz, dz, stats, stats, weight), RNG, plan, grads)
        return
    grads = (x_dtype, residual_dtype, param_dtype, x_dtype, z_dtype)
    check_backward(dy, dz, z, mean, rstd, weight, RNG, plan, grads)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=short)
@pytest.mark.parametrize("norm", [NORM_LAYER, NORM_RMS], ids=NORM_IDS.get)
def test_norm_alone_stores_no_z(level, norm, dtype):
    x, weight = normal(33, 200, dtype=dtype), normal(200, dtype=dtype, seed=1)
    plan = plan_of(norm, z_dtype=dtype, y_dtype=dtype, n_dtype=dtype, store_z=False)
    _, z, mean, rstd = check_forward(x, None, None, weight, None, None, plan)
    assert z is None
    check_backward(
        normal(33, 200, dtype=dtype, seed=2), None, x, mean, rstd, weight, None, plan, (dtype, None, None, dtype, None)
    )


@pytest.mark.parametrize("x_dtype", [F32, F16, BF16], ids=lambda d: f"x_{short(d)}")
def test_norm_alone_of_every_mix_of_dtypes(level, x_dtype):
    x, weight = normal(33, 200, dtype=x_dtype), normal(200, seed=1)
    for n_dtype, y_dtype in itertools.product([F32, F16, BF16], repeat=2):
        plan = plan_of(NORM_RMS, z_dtype=x_dtype, y_dtype=y_dtype, n_dtype=n_dtype, store_z=False)
        check_forward(x, None, None, weight, None, None, plan)


MIXES = [(BF16, BF16, BF16), (BF16, BF16, F32), (F16, F32, F32), (F32, BF16, F32), (F16, BF16, F32)]
"""Dtypes of x, residual and z."""


@pytest.mark.parametrize("wanted", range(1, 32), ids=lambda mask: f"{mask:05b}")
def test_every_choice_of_wanted_gradients(level, wanted):
    """With the mixes of dtypes in turn; of a norm, and of dz alone."""
    x_dtype, residual_dtype, z_dtype = MIXES[wanted % len(MIXES)]
    dtypes = (x_dtype, residual_dtype, F16, BF16, F32)
    grads = tuple(dtype if wanted >> i & 1 else None for i, dtype in enumerate(dtypes))
    x, residual, dy, dz = (
        normal(21, 77, dtype=dtype, seed=seed) for seed, dtype in enumerate((x_dtype, residual_dtype, BF16, z_dtype))
    )
    weight = normal(77, dtype=BF16, seed=4)
    plan = plan_of(dropout_p=0.1, z_dtype=z_dtype, y_dtype=BF16)
    _, z, mean, rstd = check_forward(x, residual, None, weight, None, RNG, plan)
    check_backward(dy, dz, z, mean, rstd, weight, RNG, plan, grads)
    if not any(grads[3:]):
        check_backward(None, dz, None, None, None, None, RNG, plan, grads)


def test_a_centred_z_is_float32(level):
    x = normal(3, 5, dtype=BF16)
    with pytest.raises(TypeError, match="z_dtype must be float32"):
        native.forward(Operands(x, x), None, plan_of(z_dtype=BF16, y_dtype=BF16, center_z=True))


def test_centred_z_needs_no_mean(level):
    x, residual, weight = normal(21, 77), normal(21, 77, seed=1) + 100, normal(77, seed=2)
    plan = plan_of(center_z=True)
    _, centred, mean, rstd = check_forward(x, residual, None, weight, None, None, plan)
    assert mean is None
    check_backward(normal(21, 77, seed=3), None, centred, None, rstd, weight, None, plan, (F32, None, None, F32, F32))


@pairwise(n_cols={f"N{n}": n for n in (1, 64, 100, 256, 257, 512)}, dtype=[F32, BF16], p={"p0": 0.0, "p0.3": 0.3})
def test_blocks_of_many_rows(level, n_cols, dtype, p):
    """1,100 rows are parts of 33: whole blocks, one after another, and a short one. A norm alone has a path of its
    own."""
    n_rows = 1100
    x, dy, dz = (normal(n_rows, n_cols, dtype=dtype, seed=seed) for seed in range(3))
    weight, norm_bias = normal(n_cols, dtype=dtype, seed=3), normal(n_cols, dtype=dtype, seed=4)
    for norm in (NORM_LAYER, NORM_RMS):
        plan = plan_of(norm, dropout_p=p, z_dtype=dtype, y_dtype=dtype)
        _, z, mean, rstd = native.forward(Operands(x, None, None, weight, norm_bias), RNG, plan)
        grads = (dtype, None, None, dtype, dtype)
        check_backward(dy, None, z, mean, rstd, weight, RNG, plan, grads)
        check_backward(dy, dz, z, mean, rstd, weight, RNG, plan, (dtype,) * 5)


@pytest.mark.parametrize("n_cols", [1, 2, 3, 5, 6, 7, 31, 1023, 1026, 4097, 8195], ids=lambda n: f"N{n}")
def test_mask_wherever_a_row_starts_in_a_group(level, n_cols):
    n_rows = 67 if n_cols < 5000 else 5
    plan = plan_of(NORM_NONE, dropout_p=0.5)
    _, z, _, _ = native.forward(Operands(torch.ones(n_rows, n_cols)), RNG, plan)
    keep = keep_mask((n_rows, n_cols), 0.5, RNG)
    assert torch.equal(z != 0, keep)
    dx, *_ = native.backward(BackwardOperands(dz=torch.ones(n_rows, n_cols)), RNG, plan, Dtypes(F32, *[None] * 4))
    assert torch.equal(dx != 0, keep)


def test_dropped_values_are_zero_whatever_they_were(level):
    x = torch.full((5, 100), float("nan"))
    for p in (0.5, 1.0):
        plan = plan_of(NORM_NONE, dropout_p=p)
        _, z, _, _ = native.forward(Operands(x), RNG, plan)
        keep = keep_mask((5, 100), p, RNG)
        assert torch.equal(z.isnan(), keep) and (z[~keep] == 0).all()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=short)
def test_conversions_of_every_half_and_around_every_midpoint(level, dtype):
    """z of a lone x is a conversion, as is the residual's gradient: every 16-bit value widens, and float32 around each
    rounds as torch does."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    plan = plan_of(NORM_NONE)
    widened = native.forward(Operands(halves.view(256, 256)), None, plan)[1].flatten()
    is_nan = halves.isnan()
    assert torch.equal(widened.isnan(), is_nan) and same_bits(widened[~is_nan], halves.float()[~is_nan])

    midpoints = (
        widened.view(torch.int32)[~is_nan, None] + torch.tensor([-1, 0, 1]) + (0x8000 if dtype == BF16 else 0x1000)
    ).view(F32)
    floats = torch.cat(
        [midpoints.flatten(), torch.tensor([1e-8, 1e-42, 65519.0, 65520.0, 1e38, -3.4e38, float("inf"), float("nan")])]
    )
    rows = floats[None]
    grads = Dtypes(residual=dtype)
    narrowed = native.backward(BackwardOperands(dz=rows), None, plan, grads)[1][0]
    is_nan = floats.isnan()
    assert torch.equal(narrowed.isnan(), is_nan) and same_bits(narrowed[~is_nan], floats.to(dtype)[~is_nan])


def test_a_saved_z_may_have_any_row_stride(level):
    """What tests/ops/test_contract.py asks of the other operands."""
    z, dy, rstd = normal(11, 203), normal(11, 203, seed=1), normal(11).abs()
    wide = torch.full((11, 206), torch.nan)
    wide[:, 3:] = z
    of_wide, of_z = (
        native.backward(BackwardOperands(dy, None, given, None, rstd), None, plan_of(NORM_RMS), Dtypes(F32, weight=F32))
        for given in (wide[:, 3:], z)
    )
    assert all(map(same_bits, of_wide, of_z))


def test_wide_rows_and_more_elements_than_a_buffer():
    n_cols = 262_147
    x, dy = normal(5, n_cols, dtype=BF16), normal(5, n_cols, dtype=BF16, seed=1)
    weight = normal(n_cols, dtype=BF16, seed=2)
    plan = plan_of(z_dtype=BF16, y_dtype=BF16, dropout_p=0.1)
    _, z, mean, rstd = check_forward(x, None, weight, weight, weight, RNG, plan)
    check_backward(dy, None, z, mean, rstd, weight, RNG, plan, (BF16, None, BF16, BF16, BF16))


@pytest.mark.parametrize("n_cols", [1024, 1000, 1001], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_large_outputs_which_pass_the_caches(level, dtype, n_cols):
    """Many rows have the bits of the same rows in a small call."""
    n_rows, few = 2200 if dtype == F32 else 4400, 64  # from 8 MiB on
    x, residual, dy = (normal(few, n_cols, dtype=dtype, seed=seed) for seed in range(3))
    weight = normal(n_cols, dtype=dtype)
    repeats = (n_rows + few - 1) // few

    def many(rows: Tensor) -> Tensor:
        return rows.repeat(repeats, 1)[:n_rows]

    for norm, center in ((NORM_LAYER, dtype == F32), (NORM_RMS, False), (NORM_NONE, False)):
        plan = plan_of(norm, z_dtype=dtype, y_dtype=dtype, center_z=center)
        small = native.forward(Operands(x, residual, weight, weight), None, plan)
        large = native.forward(Operands(many(x), many(residual), weight, weight), None, plan)
        assert all(b is None or same_bits(a, many(b)) for a, b in zip(large[:2], small[:2], strict=True))
        if norm != NORM_NONE:
            grads = Dtypes(dtype, dtype)
            small = native.backward(BackwardOperands(dy, None, *small[1:], weight), None, plan, grads)
            large = native.backward(BackwardOperands(many(dy), None, *large[1:], weight), None, plan, grads)
            assert same_bits(large[0], many(small[0])) and same_bits(large[1], many(small[1]))


def test_an_unknown_level_is_refused():
    before = library.cpu_level()
    assert not library.set_cpu_level("avx1024")
    assert library.cpu_level() == before
