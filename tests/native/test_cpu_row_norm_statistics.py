"""Mean and rstd of the native CPU kernels' rows, at every level this machine has: rows that are hard to sum."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_cases import BF16, EPSILON, F32, NORM_IDS, normal, same_bits
from cpu_cases import row_norm_plan as plan_of
from onetrip.ops import row_norm_native as native
from onetrip.ops.common.backends import native as native_library
from onetrip.reference.row_norm import NORM_LAYER, NORM_RMS, BackwardOperands, Dtypes, Operands
from pairwise import pairwise, short
from torch import Tensor

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")


@pytest.mark.promise("N3")
@pytest.mark.parametrize("ratio", [1e4, 1e5], ids=["1e4", "1e5"])
@pytest.mark.parametrize("n_cols", [64, 1000, 16384], ids=lambda n: f"N{n}")
def test_mean_of_many_deviations(level, n_cols, ratio):
    """The mean is held to more digits than one float32 has: y and rstd lose none, and the saved one is rounded once."""
    x, dy = normal(16, n_cols) + ratio, normal(16, n_cols, seed=1)
    plan, grads = plan_of(store_z=False), Dtypes(F32, None, None, F32, F32)
    y, _, mean, rstd = native.forward(Operands(x), None, plan)
    gradients = native.backward(BackwardOperands(dy, None, x, mean, rstd), None, plan, grads)

    def by_torch(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype), torch.ones(n_cols, dtype=dtype), torch.zeros(n_cols, dtype=dtype)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        torchs = torch.nn.functional.layer_norm(leaves[0], (n_cols,), *leaves[1:])
        return [torchs.detach(), *torch.autograd.grad(torchs, leaves, dy.to(dtype))]

    double, spacing = x.double(), 2.0 ** (math.floor(math.log2(ratio)) - 23)
    exact, torchs = by_torch(torch.float64), by_torch(F32)
    exact_rstd = (double.var(1, correction=0) + 1e-5).rsqrt()
    assert (mean - double.mean(1)).abs().max() <= 0.501 * spacing
    assert (rstd / exact_rstd - 1).abs().max() <= 1e-6
    assert (y - exact[0]).abs().max() <= 4e-6
    found = (y, gradients[0], *gradients[3:])
    for name, ours, expected, truth in zip(("y", "dx", "dweight", "dbias"), found, torchs, exact, strict=True):
        allowed = 2 * (expected - truth).abs().max() + EPSILON[F32] * truth.abs().max()
        assert (ours - truth).abs().max() <= allowed, name


@pairwise(
    n_cols={f"N{n}": n for n in (100, 512, 5000, 262144)},
    distance=[10.0, 1e3, 1e6, 1e18],
    n_first=[1, 16, 40],
    has_residual={"norm_alone": False, "with_residual": True},
)
def test_first_columns_unlike_the_others(level, n_cols, distance, n_first, has_residual):
    """A row is summed about the mean of its first columns: where that is far from its own, nothing is lost."""
    x = normal(4, n_cols)
    x[:, :n_first] += distance
    plan = plan_of(store_z=False)
    residual = torch.zeros_like(x) if has_residual else None
    y, _, mean, rstd = native.forward(Operands(x, residual), None, plan)
    double = x.double()
    variance, exact_mean = torch.var_mean(double, 1, correction=0)
    exact_rstd = (variance + 1e-5).rsqrt()
    assert (rstd / exact_rstd - 1).abs().max() <= 4e-6
    assert ((mean - exact_mean) * exact_rstd).abs().max() <= 4e-6
    exact = (double - exact_mean[:, None]) * exact_rstd[:, None]
    assert (y - exact).abs().max() <= 4e-6 * exact.abs().max()


def test_a_quarter_of_a_deviation_is_far_in_a_wide_row(level):
    """All distances from the first columns' mean are of one sign, and round alike."""
    n_cols, low, high = 262144, 1.17384514, 1.49815347
    n_low = round(0.3724 * n_cols)
    x = torch.cat([torch.full((n_low,), low), torch.full((n_cols - n_low,), high)])[None]
    x[0, :16] = x.double().mean() + 0.9448 * x.double().std()
    y, _, _, _ = native.forward(Operands(x), None, plan_of(store_z=False, eps=0.0))
    double = x.double()
    exact = (double - double.mean()) / double.std(correction=0)
    assert (y - exact).abs().max() <= 5e-6


def test_sums_that_overflow_give_what_torch_gives(level):
    x = torch.tensor([[3e37] * 16 + [-3e37] * 16])
    y, _, _, _ = native.forward(Operands(x), None, plan_of(store_z=False))
    assert torch.equal(y, torch.nn.functional.layer_norm(x, x.shape[1:]))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
@pytest.mark.parametrize("n_cols", [3, 64, 100, 512, 513], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("norm", [NORM_LAYER, NORM_RMS], ids=NORM_IDS.get)
def test_no_bit_of_a_row_depends_on_its_neighbours(level, norm, n_cols, dtype):
    x = normal(7, n_cols, dtype=dtype)
    x[2, :16] += 1000.0
    x[5, -1] = float("nan")
    plan = plan_of(norm, store_z=False, z_dtype=dtype, y_dtype=dtype)

    def forward(rows: Tensor) -> tuple[Tensor | None, ...]:
        return native.forward(Operands(rows), None, plan)

    together, alone = forward(x), [forward(x[i : i + 1]) for i in range(7)]
    for whole, *parts in zip(together, *alone, strict=True):
        assert whole is None or same_bits(whole, torch.cat(parts))
