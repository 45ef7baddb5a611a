"""onetrip.ops.moe_combine and moe_dispatch against float64 and against transformers' expression."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip import ops
from onetrip.measure import saved_bytes
from onetrip.ops import moe_autograd
from operator_cases import LAYOUTS
from pairwise import pairwise
from targets import TARGETS_WITHOUT_CUDA_KERNELS, target_fixture
from tolerances import assert_bitwise, assert_like_torch, assert_ulps
from torch import Tensor

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
LAYOUTS = {name: LAYOUTS[name] for name in ("spread", "column_major", "expanded_rows", "lazily_negated")}


target = target_fixture(TARGETS_WITHOUT_CUDA_KERNELS)


def order_of(n_tokens: int, k: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(perm, places): the order of tokens * k choices by one of five experts, and its inverse."""
    perm = torch.sort(torch.randint(5, (n_tokens * k,), device=device)).indices
    places = torch.empty_like(perm)
    places[perm] = torch.arange(n_tokens * k, device=device)
    return perm, places.view(n_tokens, k)


def combined(y: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """As grouped_mm_experts_forward of transformers."""
    n_tokens, k = places.shape
    perm = torch.empty_like(places.view(-1))
    perm[places.view(-1)] = torch.arange(n_tokens * k, device=y.device)
    weighted = y if weights is None else y * weights.reshape(-1)[perm].unsqueeze(-1)
    return weighted[places.view(-1)].view(n_tokens, k, y.shape[1]).sum(dim=1)


def dispatched(x: Tensor, places: Tensor) -> Tensor:
    perm = torch.empty_like(places.view(-1))
    perm[places.view(-1)] = torch.arange(places.numel(), device=x.device)
    return x[perm // places.shape[1]]


def gradients(function: Any, leaves: list[Tensor], *others: Any, dout: Tensor) -> list[Tensor]:
    """The result and the gradient of each leaf; leaves come first and last among the arguments."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    result = function(leaves[0], *others, *leaves[1:])
    return [result.detach(), *torch.autograd.grad(result, leaves, dout.to(result.dtype))]


@pairwise(
    dtype=(F32, F16, BF16),
    weights_dtype=(F32, BF16, F16, None),
    k={"k1": 1, "k2": 2, "k4": 4, "k8": 8},
    n_cols={"N1": 1, "N33": 33, "N64": 64, "N4104": 4104},
    n_tokens={"T1": 1, "T37": 37},
    layout=LAYOUTS,
)
def test_combine_and_its_gradients(target, dtype, weights_dtype, k, n_cols, n_tokens, layout):
    """Of the dtypes of transformers' expression; within one rounding of float64, sums over columns as near as torch."""
    _, places = order_of(n_tokens, k, target.device)
    leaves = [layout(torch.randn(n_tokens * k, n_cols, device=target.device).to(dtype))]
    if weights_dtype is not None:
        leaves.append(torch.rand(n_tokens, k, device=target.device).to(weights_dtype))
    dout = layout(torch.randn(n_tokens, n_cols, device=target.device).to(dtype))
    ours = gradients(ops.moe_combine, leaves, places, dout=dout)
    torchs = gradients(combined, leaves, places, dout=dout)
    truth = gradients(combined, [leaf.double() for leaf in leaves], places, dout=dout.double())
    assert [each.dtype for each in ours] == [each.dtype for each in torchs]
    for our, true in zip(ours[:2], truth, strict=False):
        assert_ulps(our, true)
    if weights_dtype is not None:
        assert_like_torch(ours[2], torchs[2], truth[2], terms=n_cols)


@pairwise(
    dtype=(F32, F16, BF16, F64),
    k={"k1": 1, "k2": 2, "k4": 4, "k8": 8},
    n_cols={"N1": 1, "N33": 33, "N64": 64, "N4104": 4104},
    layout=LAYOUTS,
)
def test_dispatch_and_its_gradient(target, dtype, k, n_cols, layout):
    if dtype == F64 and target.backend != "reference":
        pytest.skip("float64 is computed by reference")
    _, places = order_of(19, k, target.device)
    x = layout(torch.randn(19, n_cols, device=target.device).to(dtype))
    dout = layout(torch.randn(19 * k, n_cols, device=target.device).to(dtype))
    y, dx = gradients(ops.moe_dispatch, [x], places, dout=dout)
    assert_bitwise(y, dispatched(x, places))
    assert_ulps(dx, gradients(dispatched, [x.double()], places, dout=dout.double())[1])


def test_a_result_of_another_dtype_is_rounded_once(target):
    _, places = order_of(9, 4, target.device)
    y, weights = torch.randn(36, 40, device=target.device).bfloat16(), torch.rand(9, 4, device=target.device)
    wide = ops.moe_combine(y, places, weights)
    assert wide.dtype == F32
    assert_bitwise(ops.moe_combine(y, places, weights, dtype=BF16), wide.bfloat16())


def test_ties_are_rounded_to_even(target):
    """Half of the sums of two bfloat16 numbers of one exponent are ties."""
    _, places = order_of(30, 2, target.device)
    y = (1.0 + torch.rand(60, 40, device=target.device)).bfloat16()
    assert_bitwise(ops.moe_combine(y, places), (y[places[:, 0]].float() + y[places[:, 1]].float()).bfloat16())


@pytest.mark.parametrize("wanted", ["y", "weights"])
def test_only_the_wanted_gradient(target, wanted, monkeypatch):
    asked, compute = [], moe_autograd.combine_backward

    def record(*arguments):
        asked.append(arguments[-1])
        return compute(*arguments)

    monkeypatch.setattr(moe_autograd, "combine_backward", record)
    _, places = order_of(5, 2, target.device)
    y, weights = torch.randn(10, 24, device=target.device), torch.rand(5, 2, device=target.device)
    leaf = (y if wanted == "y" else weights).requires_grad_()
    (ours,) = torch.autograd.grad(ops.moe_combine(y, places, weights).sum(), leaf)
    (truth,) = torch.autograd.grad(combined(y.double(), places, weights.double()).sum(), leaf)
    assert_ulps(ours, truth.double())
    assert asked == [(wanted == "y", wanted == "weights")]


def test_saves_what_backward_reads():
    _, places = order_of(16, 4)
    y, x = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    weights = torch.rand(16, 4)
    assert saved_bytes(lambda: ops.moe_dispatch(x, places)) == 8 * 64
    assert saved_bytes(lambda: ops.moe_combine(y, places)) == 8 * 64
    of_leaf = saved_bytes(lambda: ops.moe_combine(2.0 * y, places, weights)) - saved_bytes(lambda: 2.0 * y)
    assert of_leaf == 4 * 64 * 32 + (4 + 8) * 64


def test_places_out_of_range(target):
    """Nothing is read or written elsewhere."""
    _, places = order_of(6, 2, target.device)
    places[2, 1] = 1 << 40
    y, x = torch.randn(12, 33, device=target.device), torch.randn(6, 33, device=target.device)
    if target.device == "cpu":
        for call in (lambda: ops.moe_combine(y, places), lambda: ops.moe_dispatch(x, places)):
            with pytest.raises((IndexError, RuntimeError)):
                call()
        return
    out = ops.moe_combine(y, places)
    assert out[2].isnan().all() and out.isnan().sum() == 33
    ops.moe_dispatch(x, places)


def test_under_autocast(target):
    """The dtypes of the operands decide, as of any operator that autocast does not list."""
    _, places = order_of(6, 2, target.device)
    y, weights = torch.randn(12, 8, device=target.device).bfloat16(), torch.rand(6, 2, device=target.device)
    expected = ops.moe_combine(y, places, weights, dtype=BF16)
    with torch.autocast(target.device, BF16):
        assert_bitwise(ops.moe_combine(y, places, weights, dtype=BF16), expected)


GIVEN: dict[str, Any] = {"y": torch.ones(6, 4), "places": torch.arange(6).view(3, 2), "weights": torch.ones(3, 2)}
BAD = {
    "no-tensor": ({"y": [1.0]}, TypeError, "y must be a Tensor, got list"),
    "integers": ({"y": torch.ones(6, 4, dtype=torch.int64)}, TypeError, "y must be float32, .* got int64"),
    "rank": ({"y": torch.ones(6)}, ValueError, r"y must have shape \(rows, n_cols\), got \(6,\)"),
    "rows": ({"y": torch.ones(5, 4)}, ValueError, "y must have 6 rows, one for each of places, got 5"),
    "places-dtype": ({"places": torch.ones(3, 2)}, TypeError, "places must be int64, got float32"),
    "places-rank": ({"places": torch.arange(6)}, ValueError, r"places must have shape \(n_tokens, k\), got \(6,\)"),
    "places-device": (
        {"places": torch.ones(3, 2, dtype=torch.int64, device="meta")},
        ValueError,
        "places must be on the device of y, cpu, got meta",
    ),
    "weights-shape": ({"weights": torch.ones(2, 3)}, ValueError, r"weights must have the shape of .* got \(2, 3\)"),
    "weights-device": (
        {"weights": torch.ones(3, 2, device="meta")},
        ValueError,
        "weights must be on the device of y, cpu, got meta",
    ),
    "dtype": ({"dtype": torch.int64}, TypeError, "dtype must be float32, .* or float64, got torch.int64"),
    "dtype-8": ({"dtype": torch.float8_e4m3fn}, TypeError, "dtype must be float32, .*, got torch.float8_e4m3fn"),
}


@pytest.mark.parametrize("change, error, message", BAD.values(), ids=BAD.keys())
def test_bad_input(change, error, message):
    with pytest.raises(error, match=f"^moe_combine: {message}"):
        ops.moe_combine(**(GIVEN | change))


def test_bad_input_of_dispatch():
    with pytest.raises(ValueError, match=r"^moe_dispatch: x must have 3 rows, as places has, got 4"):
        ops.moe_dispatch(torch.ones(4, 8), GIVEN["places"])
    with pytest.raises(TypeError, match=r"^moe_dispatch: x must be a Tensor, got list"):
        ops.moe_dispatch([1.0], GIVEN["places"])
