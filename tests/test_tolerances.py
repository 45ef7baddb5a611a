"""The comparators fail where they must: a comparison that cannot fail proves nothing."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_bitwise, assert_like_torch, assert_ulps

NAN, INF = float("nan"), float("inf")


def changed(index: int, value: float | torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.linspace(1.0, 2.0, 50).to(dtype)
    tensor[index] = value
    return tensor


EXACT = torch.linspace(1.0, 2.0, 50, dtype=torch.float64)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1.9, 0.0])
def test_a_single_wrong_value_fails(value):
    for index in (0, 17):
        with pytest.raises(AssertionError):
            assert_ulps(changed(index, value), EXACT)
        with pytest.raises(AssertionError):
            assert_like_torch(changed(index, value), EXACT.float(), EXACT)
        with pytest.raises(AssertionError):
            assert_bitwise(changed(index, value), EXACT.float())
    if value in (INF, -INF) or value != value:
        with pytest.raises(AssertionError):
            assert_ulps(EXACT.float(), changed(3, value, torch.float64))
        assert_ulps(changed(3, value), changed(3, value, torch.float64))
    assert_ulps(EXACT.float(), EXACT)
    assert_like_torch(EXACT.float(), EXACT.float(), EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_ulp_passes_and_two_fail(dtype):
    right = EXACT.to(dtype)
    assert_ulps(changed(7, right[7] + torch.finfo(dtype).eps, dtype), right.double())
    with pytest.raises(AssertionError, match="1 such"):
        assert_ulps(changed(7, right[7] + 2 * torch.finfo(dtype).eps, dtype), right.double())


def test_like_torch_allows_twice_torchs_error_and_no_more():
    torchs = changed(5, EXACT[5] + 1e-3)
    assert_like_torch(changed(9, EXACT[9] + 1.9e-3), torchs, EXACT)
    with pytest.raises(AssertionError, match="max error"):
        assert_like_torch(changed(9, EXACT[9] + 2.1e-3), torchs, EXACT)


def test_aliases_empty_tensors_shapes_and_dtypes_fail():
    tensor, empty = EXACT.clone(), torch.empty(0, dtype=torch.float64)
    for compare in (assert_ulps, assert_bitwise):
        with pytest.raises(AssertionError, match="share memory"):
            compare(tensor, tensor)
        with pytest.raises(AssertionError, match="share memory"):
            compare(tensor[:9], tensor[:9])
        with pytest.raises(AssertionError, match="empty"):
            compare(empty.clone(), empty)
        with pytest.raises(AssertionError):
            compare(EXACT[:10].clone(), EXACT)
    with pytest.raises(AssertionError, match="compare with float64"):
        assert_ulps(EXACT.float(), EXACT.float().clone())
    with pytest.raises(AssertionError, match="expected"):
        assert_bitwise(EXACT.half(), EXACT.bfloat16())
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise(torch.zeros(2), -torch.zeros(2))
    with pytest.raises(AssertionError, match="torch gives"):
        assert_like_torch(EXACT.half(), EXACT.float(), EXACT)
