"""The native CPU kernels of glu against reference, at every level this machine has."""

from __future__ import annotations

import itertools

import pytest
import torch
from cpu_cases import (
    BF16,
    F16,
    F32,
    at_levels_with_fused_multiply_add,
    normal,
)
from onetrip.ops import glu_native as native
from onetrip.ops.common.backends import native as native_library
from onetrip.reference import glu as reference
from onetrip.reference.glu import ACTIVATIONS, GluPlan, Operands
from pairwise import pairwise
from tolerances import assert_bitwise, assert_like_torch
from torch import Tensor

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="the native library was not built")
WIDTHS = (1, 3, 15, 16, 17, 64, 131, 1025)


def check(operands: Operands, dy: Tensor, plan: GluPlan) -> None:
    """Forward and backward against reference in float64, with reference in the same dtype as the measure."""
    wants = (True, operands.up is not None, operands.bias is not None)
    exact = Operands(*(None if tensor is None else tensor.double() for tensor in operands))
    y = native.forward(operands, plan)
    assert_like_torch(y, reference.forward(operands, plan), reference.forward(exact, plan))
    ours = native.backward(dy, operands, plan, wants)
    torchs = reference.backward(dy, operands, plan, wants)
    truth = reference.backward(dy.double(), exact, plan, wants)
    for name, one, other, true in zip(ours._fields, ours, torchs, truth, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert_like_torch(one, other, true, terms=len(dy) if name == "bias" else 1)


@pairwise(n_cols={f"N{n}": n for n in WIDTHS}, dtype=[F32, F16, BF16], activation=ACTIVATIONS)
def test_every_width(level, n_cols, dtype, activation):
    gate, up, dy = (2 * normal(37, n_cols, dtype=dtype, seed=seed) for seed in range(3))
    check(Operands(gate, up, None), dy, GluPlan(activation))
    check(Operands(gate, None, normal(n_cols, dtype=dtype, seed=3)), dy, GluPlan(activation))
    check(Operands(gate, None, normal(n_cols, seed=3)), dy, GluPlan(activation))
    for gate_first in (True, False):
        check(Operands(torch.cat((gate, up), 1), None, None), dy, GluPlan(activation, gate_first))


CLAMPED = GluPlan("silu", None, 0.0, False, 1.5, 1.702, 1.0)
INTERLEAVED = CLAMPED._replace(gate_first=True, interleaved=True)


@pairwise(n_cols={f"N{n}": n for n in WIDTHS}, dtype=[F32, F16, BF16])
def test_bounds_and_interleaved_columns(level, n_cols, dtype):
    """With values beyond the bounds and at them. Interleaved columns have the bits of two tensors."""
    gate, up, dy = (2 * normal(37, n_cols, dtype=dtype, seed=seed) for seed in range(3))
    gate[0, 0], up[0, 0], up[1, 0] = 1.5, 1.5, -1.5
    pairs = Operands(torch.stack((gate, up), 2).flatten(1))
    check(Operands(gate, up), dy, CLAMPED)
    check(Operands(torch.cat((up, gate), 1)), dy, CLAMPED._replace(gate_first=False))
    check(pairs, dy, GluPlan("silu", True, 0.0, True))
    assert_bitwise(native.forward(pairs, INTERLEAVED), native.forward(Operands(gate, up), CLAMPED))
    found = native.backward(dy, pairs, INTERLEAVED, (True, False, False)).gate
    expected = native.backward(dy, Operands(gate, up), CLAMPED, (True, True, False))
    assert_bitwise(found, torch.stack(expected[:2], 2).flatten(1))


def test_nan_stays_and_has_no_gradient(level):
    for dtype in (F32, F16, BF16):
        gate, up, dy = (normal(3, 40, dtype=dtype, seed=seed) for seed in range(3))
        gate[1, 20], up[2, 30] = torch.nan, torch.nan
        pairs = Operands(torch.stack((gate, up), 2).flatten(1))
        for operands, plan in ((Operands(gate, up), CLAMPED), (pairs, INTERLEAVED)):
            wants = (True, operands.up is not None, False)
            ours = native.forward(operands, plan), *native.backward(dy, operands, plan, wants)[:2]
            truth = reference.forward(operands, plan), *reference.backward(dy, operands, plan, wants)[:2]
            for one, other in zip(ours, truth, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one.isnan(), other.isnan())


@pytest.mark.slow
def test_large_outputs_are_streamed(level):
    """From 8 MiB on, in several tasks; rows that start on a cache line, and off it."""
    for n_cols in (2816, 2819):
        rows = 8 * 2**20 // 4 // n_cols + 3
        gate, up, dy = (normal(rows, n_cols, seed=seed) for seed in range(3))
        if n_cols % 16:
            check(Operands(gate, None, normal(n_cols, seed=3)), dy, GluPlan("relu2"))
            check(Operands(gate, up, None), dy, GluPlan("silu"))
        else:
            check(Operands(torch.cat((gate, up), 1), None, None), dy, GluPlan("relu2", True))
        check(Operands(torch.stack((gate, up), 2).flatten(1)), dy, INTERLEAVED)


@pytest.mark.parametrize("wants", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize("rows", [3, 800], ids=["small", "streamed"])
def test_some_gradients_have_the_bits_of_all(level, wants, rows):
    gate, up, dy = (normal(rows, 2819, seed=seed) for seed in range(3))
    for operands in (Operands(gate, up, None), Operands(gate, None, normal(2819, seed=3)), Operands(gate, None, None)):
        plan = GluPlan("gelu")
        for wanted, one, other in zip(
            wants,
            native.backward(dy, operands, plan, wants),
            native.backward(dy, operands, plan, (True, True, True)),
            strict=True,
        ):
            assert (one is None) == (other is None or not wanted)
            if one is not None:
                assert_bitwise(one, other)


def test_levels_with_fused_multiply_add_agree_bit_for_bit():
    gate, up, dy = (3 * normal(64, 515, seed=seed) for seed in range(3))
    bias = normal(515, seed=3)

    def results() -> list[Tensor]:
        tensors = []
        for plan in (*map(GluPlan, ACTIVATIONS), CLAMPED):
            tensors += [native.forward(Operands(gate, up, None), plan)]
            tensors += native.backward(dy, Operands(gate, up, None), plan, (True, True, False))[:2]
            if plan is not CLAMPED:
                tensors += native.backward(dy, Operands(gate, None, bias), plan, (True, False, True))[::2]
        return tensors

    for one, other in zip(*at_levels_with_fused_multiply_add(results), strict=True):
        assert_bitwise(one, other)
