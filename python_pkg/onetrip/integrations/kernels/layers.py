"""Stateless layers: their forward runs with the replaced module as self (the contract of Hugging Face kernels)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from onetrip import ops

_orders: dict[type, bool] = {}


@torch.compiler.assume_constant_result
def _casts_before_weight(cls: Any) -> bool:
    """Whether a class rounds before it multiplies by the weight (Llama's) or after (OLMo 2's), by its own forward.

    Raises TypeError for a class that computes something else.
    """
    if cls not in _orders:
        other = f"RMSNorm: {cls.__name__} is registered under this name and computes something else"
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(shape, generator=generator, device="cpu").bfloat16() for shape in ((64, 64), (64,)))
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                expected = cls.forward(SimpleNamespace(weight=weight, variance_epsilon=1e-6), x)
            except Exception as error:  # it uses more than these two
                raise TypeError(other) from error
            ours = {order: ops.rms_norm(x, weight, 1e-6, cast_before_weight=order) for order in (True, False)}
        different = {order: float((y != expected).float().mean()) for order, y in ours.items()}
        order = min(different, key=lambda each: different[each])
        if different[order] > 0.02:  # the other order differs in a quarter
            raise TypeError(other)
        _orders[cls] = order
    return _orders[cls]


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), rounded to x's dtype where the replaced class rounds."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(
            hidden_states, self.weight, self.variance_epsilon, cast_before_weight=_casts_before_weight(type(self))
        )


class SwiGLUMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    can_torch_compile = True
    has_backward = True
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.glu(self.gate_proj(x), self.up_proj(x)))


class RotaryEmbedding(nn.Module):
    """q and k, (batch, heads, positions, head_dim), or with heads and positions swapped where unsqueeze_dim is 2."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if cos.shape[-1] != q.shape[-1]:  # GPT-OSS's has the half, and means another rotation
            raise ValueError(f"rotary_pos_emb: cos must have the {q.shape[-1]} columns of q, got {cos.shape[-1]}")
        if unsqueeze_dim == 1:
            return ops.rotary_embedding(q, k, cos, sin)
        q, k = ops.rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)
