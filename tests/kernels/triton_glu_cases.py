"""What the Triton kernels of glu must do, on whatever device they run: see test_triton_cases.py."""

from __future__ import annotations

import pytest
import torch
from onetrip.kernels import glu, sum_partials
from onetrip.kernels.tiles import Tile
from onetrip.reference import glu as formula
from onetrip.reference.glu import ACTIVATIONS, GluPlan, Operands
from pairwise import pairwise
from torch import Tensor
from triton_runner import DEVICE, EMULATED, INTERPRETED

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = {"f32": F32, "f16": F16, "bf16": BF16}
EVERY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)


def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return (2.0 * torch.randn(*shape, device=DEVICE)).to(dtype)


def assert_close(actual: Tensor | None, exact: Tensor | None, terms: int = 1) -> None:
    """Within one rounding of float64 and float32's arithmetic. The interpreter truncates bfloat16: one ulp."""
    assert (actual is None) == (exact is None)
    if actual is None or exact is None:
        return
    assert actual.shape == exact.shape and torch.equal(actual.isnan(), exact.isnan())
    ulps = 1.0 if INTERPRETED and actual.dtype == BF16 else 0.5
    relative = 2e-6 + (0.0 if actual.dtype == F32 else 1.01 * ulps * torch.finfo(actual.dtype).eps)
    smallest = 6e-8 if actual.dtype == F16 else 0.0
    difference = (actual.double() - exact).abs()
    excess = difference - relative * exact.abs() - 2e-6 * terms**0.5 - smallest
    assert (excess[~exact.isnan()] <= 0.0).all(), f"{difference.max()} from float64"


def check(
    operands: Operands,
    dy: Tensor,
    plan: GluPlan,
    wants: tuple[bool, bool, bool] | None = None,
    rng: tuple[int, int] | Tensor | None = None,
) -> None:
    wants = wants or (True, operands.up is not None, operands.bias is not None)
    exact = Operands(*(None if tensor is None else tensor.double() for tensor in operands))
    y = glu.forward(operands, plan, rng)
    assert y.dtype == operands.gate.dtype and y.is_contiguous()
    assert_close(y, formula.forward(exact, plan, rng))
    ours = glu.backward(dy, operands, plan, wants, rng)
    truth = formula.backward(dy.double(), exact, plan, wants, rng)
    for name, one, true, given in zip(ours._fields, ours, truth, operands, strict=True):
        assert one is None or one.dtype == given.dtype
        assert_close(one, true, terms=16 * len(dy) if name == "bias" else 4)


@pairwise(n_cols=[1, 3, 64, 520, 1030], dtype=DTYPES, activation=ACTIVATIONS[:-1])
def test_widths(n_cols, dtype, activation):
    check_width(n_cols, dtype, activation)


@pairwise(n_cols=[3, 520], dtype=DTYPES)
def test_quick_gelu(n_cols, dtype):
    check_width(n_cols, dtype, "quick_gelu")


@pairwise(n_cols=[3, 520], dtype=DTYPES)
def test_softcap(n_cols, dtype):
    x, dy = (randn(5, n_cols, dtype=dtype) for _ in range(2))
    check(Operands(x, None, None), dy, GluPlan("softcap", alpha=1.5))


def check_width(n_cols, dtype, activation):
    n_rows = 5 if n_cols > 512 else 13
    gate, up, dy = (randn(n_rows, n_cols, dtype=dtype) for _ in range(3))
    check(Operands(gate, up, None), dy, GluPlan(activation))
    check(Operands(gate, None, randn(n_cols, dtype=dtype)), dy, GluPlan(activation))


@pairwise(n_cols=[1, 3, 12, 64, 1030], dtype=DTYPES, activation=ACTIVATIONS, in_memory=[True, False])
def test_dropout(n_cols, dtype, activation, in_memory):
    """Rows that are no multiple of eight elements, and rows of two tiles; rng as numbers and as a tensor."""
    n_rows = 5 if n_cols > 512 else 13
    gate, up, dy = (randn(n_rows, n_cols, dtype=dtype) for _ in range(3))
    rng = torch.tensor([3, 8], device=DEVICE) if in_memory else (3, 8)
    check(Operands(gate, up, None), dy, GluPlan(activation, None, 0.25), rng=rng)
    check(Operands(torch.cat((gate, up), 1)), dy, GluPlan(activation, True, 0.25), rng=rng)
    bias = randn(n_cols, dtype=dtype)
    check(Operands(gate, None, bias), dy, GluPlan(activation, None, 0.25), rng=rng)
    if activation == "relu":  # gate is forward's y
        y = glu.forward(Operands(gate, None, bias), GluPlan(activation, None, 0.25), rng)
        ours, redrawn = (
            glu.backward(dy, Operands(y, None, bias), GluPlan(activation, None, 0.25), (True, False, True), each)
            for each in (None, rng)
        )
        assert torch.equal(ours.gate, redrawn.gate) and torch.equal(ours.bias, redrawn.bias)


@pytest.mark.parametrize("gate_first", [True, False], ids=["gate-first", "up-first"])
@pytest.mark.parametrize("n_cols", [3, 64, 1040])
def test_packed(n_cols, gate_first):
    dy = randn(5, n_cols)
    for dtype in DTYPES.values():
        check(Operands(randn(5, 2 * n_cols, dtype=dtype)), dy.to(dtype), GluPlan("silu", gate_first))


@pytest.mark.parametrize("layout", ["two", "halves", "interleaved"])
@pairwise(n_cols=[1, 3, 64, 1030], dtype=DTYPES, p=[0.0, 0.25])
def test_clamped(layout, n_cols, dtype, p):
    """With values beyond the bounds, at them, and NaN."""
    gate, up, dy = (randn(5, n_cols, dtype=dtype) for _ in range(3))
    gate[0, 0], up[0, 0], up[1, 0], gate[2, 0], up[3, 0] = 1.5, 1.5, -1.5, torch.nan, torch.nan
    plan = GluPlan("silu", None if layout == "two" else True, p, layout == "interleaved", 1.5, 1.702, 1.0)
    operands = {
        "two": Operands(gate, up),
        "halves": Operands(torch.cat((gate, up), 1)),
        "interleaved": Operands(torch.stack((gate, up), 2).flatten(1)),
    }[layout]
    rng = (3, 8) if p else None
    check(operands, dy, plan, rng=rng)
    check(operands, dy, plan._replace(limit=None, alpha=1.0, up_offset=0.0), rng=rng)
    if layout == "two":
        for wants in ((True, False, False), (False, True, False)):
            check(operands, dy, plan, wants, rng)


@pytest.mark.parametrize("n_cols", [7, 64, 600])
def test_strides(n_cols):
    wide = randn(9, 3 * n_cols + 5)
    gate, up, dy = wide[:, 1 : n_cols + 1], wide[:, n_cols : 2 * n_cols], wide[:, 2 * n_cols : 3 * n_cols]
    check(Operands(gate, up, None), dy, GluPlan("gelu"))
    check(Operands(gate, None, wide[0, 1 : n_cols + 1]), dy, GluPlan("gelu"))


@pytest.mark.parametrize("wants", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_one_gradient_alone(wants):
    gate, dy = randn(9, 40), randn(9, 40)
    up, bias = (None, randn(40)) if wants[2] else (randn(9, 40), None)
    check(Operands(gate, up, bias), dy, GluPlan("gelu_tanh"), wants)


@EVERY_ACTIVATION
def test_tails_and_special_values(activation):
    x = torch.cat((torch.linspace(-30, 30, 400), torch.tensor([torch.nan, 3e38, -3e38, 1e20, -1e20]))).to(DEVICE)
    x = x.view(1, -1)
    operands, plan = Operands(x), GluPlan(activation)
    assert_close(glu.forward(operands, plan)[:, :-4], formula.forward(Operands(x.double()), plan)[:, :-4])
    assert not glu.forward(operands, plan)[:, -4:].isnan().any()
    dx = glu.backward(torch.ones_like(x), operands, plan, (True, False, False)).gate
    assert dx is not None and not dx[:, -4:].isnan().any() and dx[0, 400].isnan() != (activation == "relu")
    if activation in ("relu", "relu2"):
        infinite = torch.full_like(x, torch.inf)
        dx = glu.backward(infinite, Operands(x, infinite), plan, (True, False, False)).gate
        assert dx is not None and (dx[x <= 0.0] == 0.0).all()
    if activation == "gelu":  # as exact in the tail
        inner = (x > -12.0) & (x < -1.0)
        y, exact = glu.forward(operands, plan)[inner].double(), formula.forward(Operands(x.double()), plan)[inner]
        assert ((y / exact - 1.0).abs() <= 1e-5).all()


@pytest.mark.parametrize(("n_rows", "most_programs"), [(1, 1024), (8, 1024), (9, 1024), (300, 1024), (300, 3)])
def test_partial_sums_of_the_bias(n_rows, most_programs, monkeypatch):
    """Rows in one part, in many, and in parts of several steps that the last one does not fill; the same bits again."""
    monkeypatch.setattr(sum_partials, "_MANY_PROGRAMS", most_programs)
    x, dy, bias = randn(n_rows, 40), randn(n_rows, 40), randn(40, dtype=BF16)
    check(Operands(x, None, bias), dy, GluPlan("relu2"))
    one, other = (glu.backward(dy, Operands(x, None, bias), GluPlan("gelu"), (True, False, True)) for _ in range(2))
    assert torch.equal(one.bias, other.bias)


def test_partition_of_the_rows():
    wide, narrow = Tile(1, 1024, 8), Tile(8, 128, 8)
    assert sum_partials.rows_per_program(250, wide, 3) == 1  # a program a row and tile
    assert sum_partials.rows_per_program(10_000, wide, 3) == 30  # 1024 programs
    assert sum_partials.rows_per_program(10_000, narrow, 1) == 16
    assert sum_partials.rows_per_program(4_000_000, wide, 4) * 1024 >= 16_000_000


@pytest.mark.skipif(INTERPRETED or EMULATED, reason="needs 13 GB of a GPU's memory")
def test_more_than_2_to_the_31_elements():
    n_cols = 4096
    x = torch.zeros(2**31 // n_cols + 2, n_cols, dtype=BF16, device=DEVICE)
    x[-1] = 1.0
    y = glu.forward(Operands(x), GluPlan("relu2"))
    assert (y[-1] == 1.0).all() and (y[:5] == 0.0).all()
