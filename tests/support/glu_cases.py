"""glu as torch's own expression in any dtype, and inputs for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "relu": F.relu,
}


def unfused(gate: Tensor, up: Tensor | None = None, bias: Tensor | None = None, activation: str = "silu") -> Tensor:
    """act(gate) * up, or act(gate + bias), as one writes it in PyTorch."""
    y = ACTIVATIONS[activation](gate if bias is None else gate + bias)
    return y if up is None else y * up


def short(value: object) -> str:
    return str(value)[6:] if isinstance(value, torch.dtype) else str(value)
