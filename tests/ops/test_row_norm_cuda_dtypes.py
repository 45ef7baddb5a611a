"""What the CUDA kernels are asked for in every mix of dtypes, with the formulas in their place: no GPU is needed."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from onetrip import ops
from onetrip.ops import row_norm, row_norm_autograd, row_norm_native
from onetrip.ops.common.native import read
from onetrip.reference import row_norm as reference
from operator_cases import Watching
from torch import Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
PAIRS = {(F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)}
"""Dtypes of x and z: ONETRIP_ROW_NORM_PAIRS of csrc/cuda/row_norm.cu. The residual's is z's."""


def forward(operands, rng, plan):
    operands = reference.Operands(*operands)
    assert (operands.x.dtype, plan.z_dtype) in PAIRS
    assert operands.residual is None or operands.residual.dtype == plan.z_dtype
    return reference.forward(operands, rng, plan)


def backward(operands, rng, plan, wanted):
    assert (wanted.x or plan.z_dtype, plan.z_dtype) in PAIRS
    assert wanted.residual in (None, plan.z_dtype)
    return reference.backward(operands, rng, plan, wanted)


@pytest.fixture
def cuda(monkeypatch):
    for module in (row_norm, row_norm_autograd):
        monkeypatch.setattr(module, "choose", lambda *_: "cuda")
    monkeypatch.setattr(read, "operands", lambda _: -1)
    monkeypatch.setattr(row_norm_native, "forward", forward)
    monkeypatch.setattr(row_norm_native, "backward", backward)


def outcome(dtypes: tuple[torch.dtype, ...], p: float, normed: bool) -> tuple[Tensor, ...]:
    """y and the gradients of x, residual and bias."""
    generator = torch.Generator().manual_seed(0)
    x, residual, bias = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape, dtype in zip(((5, 12), (5, 12), (12,)), dtypes, strict=True)
    )
    if normed:
        y = ops.bias_dropout_residual_norm(x, residual, bias=bias, dropout_p=p, rng=(1, 4))
    else:
        y = ops.bias_dropout_residual(x, residual, bias, dropout_p=p, rng=(1, 4))
    dy = torch.randn(y.shape, generator=generator).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, (x, residual, bias), dy)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no_norm"])
@pytest.mark.parametrize("p", [0.0, 0.3], ids=["p0", "p0.3"])
def test_kernels_get_the_dtypes_that_they_have(p, normed, traced, request):
    mixes = list(itertools.product([F32, F16, BF16], repeat=3))
    expected = [outcome(mix, p, normed) for mix in mixes]
    request.getfixturevalue("cuda")
    for mix, right in zip(mixes, expected, strict=True):
        with Watching() if traced else contextlib.nullcontext():
            ours = outcome(mix, p, normed)
        for a, b in zip(ours, right, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_kernels_take_operands_as_they_are_in_these_mixes_only():
    for mix in itertools.product([F32, F16, BF16], repeat=3):
        x, residual, bias = (
            torch.zeros(shape, dtype=dtype) for shape, dtype in zip(((5, 12), (5, 12), (12,)), mix, strict=True)
        )
        code = read.operands((x, residual, bias, None, None))
        if code < 0:
            pytest.skip("needs the native library and torch 2.10")
        plan, _, _, calls = row_norm._prepare(False, 1, 1e-5, 0.0, False, 0.0, False, None, True, False, code)
        assert ("cuda" in calls) == ((x.dtype, plan.z_dtype) in PAIRS and residual.dtype == plan.z_dtype)
