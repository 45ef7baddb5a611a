"""Dropout of the row_norm operators: which elements, when the generator moves, recomputation, far indices."""

from __future__ import annotations

import pytest
import torch
from onetrip import ops
from onetrip.ops import row_norm_autograd as family
from onetrip.reference.philox import dropout_scale, keep_mask
from onetrip.reference.row_norm import NORM_NONE, BackwardOperands, Dtypes, RowNormPlan
from pairwise import pairwise
from row_norm_cases import DTYPES, make, short
from targets import Target, needs
from tolerances import assert_bitwise

ALL = "residual bias weight norm_bias"


def kept(shape: tuple[int, ...], p: float, rng: tuple[int, int] | None, device: str) -> torch.Tensor:
    """The mask that the kernel really used."""
    x = torch.ones(shape, device=device)
    return ops.bias_dropout_residual(x, torch.zeros_like(x), dropout_p=p, rng=rng) != 0


@pytest.mark.promise("D4")
@pairwise(
    rng=[(0, 0), (7, 12), (2**64 - 1, 2**64 - 4), (-1, 4), (-(2**63), 2**32)],
    p=[0.1, 0.5, 0.999],
    shape=[(1,), (3, 5), (7, 1), (2, 3, 33), (5, 1023), (64, 4)],
)
def test_mask_is_dropout_keep_mask_bit_for_bit(target, rng, p, shape):
    expected = ops.dropout_keep_mask(shape, p, rng, target.device)
    assert torch.equal(kept(shape, p, rng, target.device), expected)
    norm = ops.bias_dropout_residual_norm(
        torch.ones(shape, device=target.device), None, dropout_p=p, rng=rng, return_residual=True
    )
    assert torch.equal(norm[1] != 0, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_without_a_residual_it_is_dropout(target, dtype):
    leaves = make((9, 37), dtype, "bias", device=target.device).leaves()
    keep, scale = ops.dropout_keep_mask((9, 37), 0.5, (3, 8), target.device), dropout_scale(0.5)
    for bias in (None, leaves.bias):
        leaves.x.grad = None
        z = ops.bias_dropout_residual(leaves.x, None, bias, dropout_p=0.5, rng=(3, 8))
        v = leaves.x.detach() if bias is None else leaves.x.detach().float() + bias.detach().float()
        torch.testing.assert_close(z, torch.where(keep, v * scale, 0.0).to(dtype))
        z.backward(torch.ones_like(z))
        torch.testing.assert_close(leaves.x.grad, torch.where(keep, scale, 0.0).to(dtype))


@pytest.mark.parametrize("p", [1e-30, 1e-11, 2**-18, 1 - 2**-18, 1 - 1e-16])
def test_probabilities_that_round_at_the_ends(target, p):
    """They count as 1/65536, or as 65535/65536: something is dropped, something kept, and nothing is NaN."""
    rounded = 2**-16 if p < 0.5 else 1 - 2**-16
    x = torch.full((300, 1001), 0.5, device=target.device, requires_grad=True)
    z = ops.bias_dropout_residual(x, torch.zeros_like(x), dropout_p=p, rng=(1, 0))
    keep = ops.dropout_keep_mask((300, 1001), rounded, (1, 0), target.device)
    rare = keep if p > 0.5 else ~keep
    assert 0 < rare.sum() < 25
    expected = torch.where(keep, 0.5 * dropout_scale(rounded), 0.0)
    assert_bitwise(z.detach(), expected.float())
    z.backward(torch.full_like(z, 0.5))
    assert_bitwise(x.grad, expected.float())


@pytest.mark.promise("D7")
@pytest.mark.slow
def test_kernel_mask_beyond_element_2_to_the_32():
    """dbias of rows that overlap in memory: only elements past 2^32 have a gradient other than zero."""
    needs(Target("cpu", "cpu"))
    n_cols, first_rows, rows_beyond = 1 << 20, 1 << 12, 24
    n_rows = first_rows + rows_beyond
    buffer = torch.zeros(n_cols + n_rows)
    buffer[n_cols + first_rows :] = 1.0
    dz = buffer.as_strided((n_rows, n_cols), (1, 1))  # row r sees ones in its last r - first_rows columns
    plan = RowNormPlan(NORM_NONE, 0.0, 0.0, 0.5, *[torch.float32] * 3, store_z=True, center_z=False, store_stats=False)
    wanted = Dtypes(bias=torch.float32)
    dbias = family.backward("cpu", BackwardOperands(dz=dz), (3, 4), plan, wanted)[2]
    expected = torch.zeros(n_cols)
    for row in range(first_rows, n_rows):
        start = n_cols - (row - first_rows)
        mask = keep_mask((n_cols - start,), 0.5, (3, 4), first_element=row * n_cols + start)
        expected[start:] += 2.0 * mask
    assert torch.equal(dbias, expected) and dbias.count_nonzero() > rows_beyond // 2
