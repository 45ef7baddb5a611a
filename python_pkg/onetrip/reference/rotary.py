"""y = x * cos + rotate(x) * sin for the heads of q and of k: rotary position embedding (Su et al. 2021, RoFormer).

rotate(x) = cat(-x2, x1) of the two halves x1, x2 of what is rotated (GPT-NeoX, Llama); interleaved: the pairs
(x0, x1), (x2, x3), ... become (-x1, x0), (-x3, x2), ... (GPT-J, GLM, Cohere). Columns past those of cos are copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryPlan(NamedTuple):
    """Everything about one call that is not a tensor."""

    interleaved: bool
    inverse: bool
    """The transposed map, x * cos + rotate^T(x * sin): gradients of q and k. For a rotation it is the inverse one."""
    dtype: torch.dtype | None = None
    """Of the results; None: that of q and k."""

    def of_gradients(self, dtype: torch.dtype) -> RotaryPlan:
        """The plan of backward; dtype: that of q and k."""
        return self._replace(inverse=not self.inverse, dtype=None if self.dtype is None else dtype)


class Operands(NamedTuple):
    """What both passes read."""

    q: Tensor | None
    """(batch, heads, positions, head_dim); k: the same with its own number of heads. None: not wanted."""
    k: Tensor | None
    cos: Tensor
    """(positions, d) or (batch or 1, positions, d); sin: the same. d is even, at most head_dim."""
    sin: Tensor


OperandTuple = tuple[Tensor | None, Tensor | None, Tensor, Tensor]


def rotate(operands: OperandTuple, plan: RotaryPlan) -> tuple[Tensor | None, Tensor | None]:
    """Returns (q, k) rotated; differentiable in every operand."""
    q, k, cos, sin = operands
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # every head
    return None if q is None else _rotated(q, cos, sin, plan), None if k is None else _rotated(k, cos, sin, plan)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, plan: RotaryPlan) -> Tensor:
    """Products and sum are rounded to the dtype of x, cos and the result; with different ones, to at least float32."""
    n = cos.shape[-1]
    dtype, of_result = x.dtype, plan.dtype or x.dtype
    if not dtype == cos.dtype == of_result:
        dtype = torch.promote_types(torch.promote_types(dtype, cos.dtype), torch.float32)
    part = x if n == x.shape[-1] else x[..., :n]
    part, cos, sin = part.to(dtype), cos.to(dtype), sin.to(dtype)
    turned = -_turn(part * sin, plan.interleaved) if plan.inverse else _turn(part, plan.interleaved) * sin
    y = (part * cos + turned).to(of_result)
    return y if n == x.shape[-1] else torch.cat([y, x[..., n:].to(of_result)], dim=-1)


def _turn(x: Tensor, interleaved: bool) -> Tensor:
    """A quarter turn of every pair: its transpose is its negative."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).reshape(x.shape)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def empty_adjacent(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What backends write: as torch.empty_like(x), whose columns are adjacent; but for tensors whose values overlap, of
    which that can give others. dtype: None for x's."""
    made = torch.empty_like(x, dtype=dtype)
    return made if made.stride(-1) == 1 else made.contiguous()
