"""glu as torch's own expression in any dtype, and inputs for it."""

from __future__ import annotations

import torch
from pairwise import short as short
from tolerances import assert_like_torch, assert_ulps
from torch import Tensor
from torch.nn import functional as F

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def unfused(gate: Tensor, up: Tensor | None = None, bias: Tensor | None = None, activation: str = "silu") -> Tensor:
    """act(gate) * up, or act(gate + bias), as one writes it in PyTorch."""
    y = ACTIVATIONS[activation](gate if bias is None else gate + bias)
    return y if up is None else y * up


def randn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, scale: float = 2.0) -> Tensor:
    return (scale * torch.randn(*shape, device=device)).to(dtype)


def with_gradients(function, dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def check(fused, plain, dy: Tensor, *inputs: Tensor) -> None:
    """Result within an ulp of float64, gradients within twice the error of torch in the same dtype."""
    ours, torchs = with_gradients(fused, dy, *inputs), with_gradients(plain, dy, *inputs)
    truth = with_gradients(plain, dy, *(tensor.double() for tensor in inputs))
    assert_ulps(ours[0], truth[0])
    assert ours[0].is_contiguous()
    for one, torchs_one, exact in zip(ours, torchs, truth, strict=True):
        assert one.dtype == torchs_one.dtype
        assert_like_torch(one, torchs_one, exact, terms=max(1, dy.numel() // exact.numel()))
