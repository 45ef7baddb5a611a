"""Stateless layers: their forward runs with the replaced module as self (the contract of Hugging Face kernels)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onetrip import ops


class RMSNorm(nn.Module):
    """weight * (x / sqrt(mean(x^2) + eps)), the quotient rounded to x's dtype: Llama's."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon, cast_before_weight=True)


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
        if unsqueeze_dim == 1:
            return ops.rotary_embedding(q, k, cos, sin)
        q, k = ops.rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)
