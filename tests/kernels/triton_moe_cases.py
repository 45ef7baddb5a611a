"""What the Triton kernels of mixtures of experts must do, on whatever device they run.

test_triton_cases.py runs this file on the CPU, interpreted and as machine code, and on a GPU where there is one: in
processes of their own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import pytest
import torch
from onetrip.kernels import moe
from onetrip.reference import moe as reference
from pairwise import pairwise
from torch import Tensor
from triton_runner import DEVICE, INTERPRETED, memory_past_2_to_the_31

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def places_of(n_tokens: int, k: int) -> Tensor:
    return torch.randperm(n_tokens * k).view(n_tokens, k).to(DEVICE)


def check(ours: Tensor | None, expected: Tensor | None) -> None:
    """The reference's bits. Interpreted, bfloat16 is truncated and not rounded: within an ulp."""
    if expected is None:
        assert ours is None
        return
    assert ours is not None and ours.dtype == expected.dtype and ours.is_contiguous()
    if INTERPRETED and expected.dtype == BF16:
        assert ((ours.double() - expected.double()).abs() <= torch.finfo(BF16).eps * expected.double().abs()).all()
    else:
        assert torch.equal(ours, expected), f"off by {(ours.double() - expected.double()).abs().max()}"


@pairwise(
    dtype=(F32, F16, BF16),
    weights_dtype=(F32, F16, BF16, None),
    out_dtype=(F32, F16, BF16),
    k={"k1": 1, "k2": 2, "k4": 4, "k8": 8, "k3": 3},
    n_cols={"N1": 1, "N33": 33, "N64": 64, "N1032": 1032, "N2100": 2100, "N4500": 4500},
    n_tokens={"T1": 1, "T9": 9},
)
def test_widths_and_dtypes(dtype, weights_dtype, out_dtype, k, n_cols, n_tokens):
    """Rows of one tile and of several, several tokens in a tile; a result and gradients of other dtypes."""
    places, y = places_of(n_tokens, k), torch.randn(n_tokens * k, n_cols, device=DEVICE).to(dtype)
    x = torch.randn(n_tokens, n_cols, device=DEVICE).to(dtype)
    weights = None if weights_dtype is None else torch.rand(n_tokens, k, device=DEVICE).to(weights_dtype)
    check(moe.combine(y, places, weights, out_dtype), reference.combine(y, places, weights, out_dtype))
    check(moe.dispatch(x, places), reference.dispatch(x, places))
    if weights is None:
        return
    dout = torch.randn(n_tokens, n_cols, device=DEVICE).to(out_dtype)
    dy, dweights = moe.combine_backward(dout, y, places, weights, (True, True))
    expected_dy, expected_dweights = reference.combine_backward(dout, y, places, weights, (True, True))
    check(dy, expected_dy)
    # The sum over columns runs in another order.
    exact = torch.einsum("tn,tkn->tk", dout.double(), y.double()[places])
    size = torch.einsum("tn,tkn->tk", dout.double().abs(), y.double().abs()[places])
    bound = 8 * torch.finfo(F32).eps * size + torch.finfo(dweights.dtype).eps * exact.abs()
    assert dweights.dtype == expected_dweights.dtype and ((dweights.double() - exact).abs() <= bound).all()


def test_one_gradient():
    places, weights = places_of(5, 2), torch.rand(5, 2, device=DEVICE)
    y, dout = torch.randn(10, 40, device=DEVICE), torch.randn(5, 40, device=DEVICE)
    both = moe.combine_backward(dout, y, places, weights, (True, True))
    for wants in ((True, False), (False, True)):
        found = moe.combine_backward(dout, y, places, weights, wants)
        for wanted, ours, expected in zip(wants, found, both, strict=True):
            check(ours, expected if wanted else None)


@pytest.mark.parametrize("n_cols", [24, 33])
def test_strides(n_cols):
    """Rows of a wider matrix, aligned or not; one row many times."""
    places, weights = places_of(5, 2), torch.rand(5, 2, device=DEVICE)
    wide, short = torch.randn(10, n_cols + 8, device=DEVICE), torch.randn(1, n_cols, device=DEVICE)
    for y in (wide[:, :n_cols], wide[:, 3 : n_cols + 3], short.expand(10, n_cols)):
        check(moe.combine(y, places, weights, F32), reference.combine(y, places, weights, F32))
        check(moe.dispatch(y[:5], places), reference.dispatch(y[:5], places))
        ours = moe.combine_backward(y[:5], y, places, weights, (True, True))
        check(ours[0], reference.combine_backward(y[:5], y, places, weights, (True, False))[0])


@pytest.mark.parametrize("n_cols", [24, 4500])
@pytest.mark.parametrize("bad", [-1, 10, 1 << 40])
def test_a_place_out_of_range_gives_nan_and_touches_nothing(bad, n_cols):
    places, weights = places_of(5, 2), torch.rand(5, 2, device=DEVICE)
    y, dout = torch.randn(10, n_cols, device=DEVICE), torch.randn(5, n_cols, device=DEVICE)
    row = int(places[3, 1])
    places[3, 1] = bad
    out = moe.combine(y, places, weights, F32)
    assert out.isnan().all(1).tolist() == [token == 3 for token in range(5)] and out.isnan().sum() == n_cols
    dy, dweights = moe.combine_backward(dout, y, places, weights, (True, True))
    assert dweights.isnan().nonzero().tolist() == [[3, 1]]
    assert dy.isnan().any(1).nonzero().tolist() == [[row]]  # of uninitialised_memory_is_nan


def test_special_values_stay_in_their_row():
    places, weights = places_of(5, 2), torch.rand(5, 2, device=DEVICE)
    y, dout = torch.randn(10, 40, device=DEVICE), torch.randn(5, 40, device=DEVICE)
    y[places[3, 1], 7] = torch.nan
    out = moe.combine(y, places, weights, F32)
    assert out.isnan().nonzero().tolist() == [[3, 7]]
    dy, dweights = moe.combine_backward(dout, y, places, weights, (True, True))
    assert dy.isfinite().all() and dweights.isnan().nonzero().tolist() == [[3, 1]]


def test_rows_2_to_the_31_elements_apart():
    """Addresses past 2^31, of a view of memory that is not there in between."""
    storage, stride = memory_past_2_to_the_31()
    y = storage.as_strided((2, 8), (stride, 1))
    y.copy_(torch.randn(2, 8))
    places = torch.tensor([[1, 0]], device=DEVICE)
    weights = torch.rand(1, 2, device=DEVICE)
    check(moe.combine(y, places, weights, F32), reference.combine(y, places, weights, F32))
    assert torch.equal(moe.dispatch(y, torch.tensor([[1], [0]], device=DEVICE)), y.flip(0))
    _, dweights = moe.combine_backward(torch.ones(1, 8, device=DEVICE), y, places, weights, (False, True))
    torch.testing.assert_close(dweights, y.float().sum(1).flip(0)[None])
