"""Dropout of glu's operators, and ReLU, whose backward reads the result."""

from __future__ import annotations

import pytest
import torch
from glu_cases import ACTIVATIONS, DTYPES, check, randn, unfused
from onetrip import ops
from onetrip.measure import saved_tensors
from onetrip.ops.common.rng import dropout_scale
from pairwise import pairwise
from targets import TARGETS_WITHOUT_CUDA_KERNELS, target_fixture
from tolerances import assert_bitwise

target = target_fixture(TARGETS_WITHOUT_CUDA_KERNELS)


RNG = (3, 8)


@pairwise(
    dtype=DTYPES,
    activation=list(ACTIVATIONS),
    shape=[(3, 5, 70), (40, 130), (7, 1), (2, 1031)],
    form=["glu", "packed", "bias", "alone"],
    p=[0.1, 0.75],
)
def test_dropout(target, dtype, activation, shape, form, p):
    """By dropout_keep_mask, forward and backward, beside torch's operators with the same mask."""
    keep = ops.dropout_keep_mask(shape, p, RNG, target.device)
    options = {"activation": activation, "dropout_p": p, "rng": RNG}
    gate, up, dy = (randn(*shape, device=target.device, dtype=dtype) for _ in range(3))
    bias = randn(shape[-1], device=target.device, dtype=dtype)

    def dropped(y):
        return torch.where(keep, y * dropout_scale(p), torch.zeros_like(y))

    if form == "glu":
        check(
            lambda g, u: ops.glu(g, u, **options),
            lambda g, u: dropped(unfused(g, u, None, activation)),
            dy,
            *(gate, up),
        )
    elif form == "packed":
        check(
            lambda x: ops.glu_packed(x, **options),
            lambda x: dropped(unfused(*x.chunk(2, -1), None, activation)),
            dy,
            torch.cat((gate, up), -1),
        )
    else:
        check(
            lambda x, b=None: ops.bias_activation(x, b, **options),
            lambda x, b=None: dropped(unfused(x, None, b, activation)),
            dy,
            *((gate, bias) if form == "bias" else (gate,)),
        )


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_dropout_of_everything_and_of_nothing(target, activation):
    x = torch.full((4, 70), torch.nan, device=target.device)
    assert (ops.bias_activation(x, None, activation, dropout_p=1.0) == 0.0).all()
    x = randn(4, 70, device=target.device).requires_grad_()
    y = ops.bias_activation(x, None, activation, dropout_p=1.0)
    assert (y == 0.0).all() and (torch.autograd.grad(y, x, torch.ones_like(y))[0] == 0.0).all()
    assert_bitwise(
        ops.bias_activation(x, None, activation, dropout_p=0), ops.bias_activation(x, None, activation, rng=(1, 2))
    )


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_relu_saves_its_result_only(target, p):
    """The next layer keeps it anyway."""
    x, bias = (randn(*shape, device=target.device).requires_grad_() for shape in ((6, 10), (10,)))
    y, saved = saved_tensors(lambda: ops.bias_activation(x, bias, "relu", dropout_p=p))
    assert [each.tensor.data_ptr() for each in saved] == [y.data_ptr(), bias.data_ptr()]


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_relu_passes_gradients_as_torch_does(target, activation):
    """Where x is NaN, and not where x is negative, whatever the gradient and up are."""
    x = torch.tensor([[-1.0, 0.0, 1.0, torch.nan, -torch.inf, torch.inf]], device=target.device).requires_grad_()
    for value in (2.0, torch.inf, torch.nan):
        given, ones = torch.full_like(x, value), torch.ones_like(x)
        for dy, up, y in (
            (given, None, ops.bias_activation(x, None, activation)),
            (ones, given, ops.glu(x, given, activation)),
            (ones, given, ops.glu_packed(torch.cat([x, given], 1), activation)),
        ):
            (ours,) = torch.autograd.grad(y, x, dy)
            (torchs,) = torch.autograd.grad(unfused(x, up, activation=activation), x, dy)
            torch.testing.assert_close(ours, torchs, equal_nan=True)
