"""Scores that a mask fills with the lowest finite number before their softmax, as DeBERTa-v2's.

    scores = scores.masked_fill(mask, torch.finfo(x.dtype).min)
    weights = dropout(softmax(scores, dim=-1))
    context = torch.bmm(weights.view(-1, weights.size(-2), weights.size(-1)), values)

The fused softmax adds that number instead. The weights of finite scores are the same: 0 under the mask, and equal in a
row that is masked everywhere. So are the gradients, but in such a row: there the original gives its scores none. So
hidden rows of the weights pass none on, neither from the product nor from what else reads the weights.

In float16 scores may overflow under the mask, which an addition would not hide: there the fill stays a statement.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops.common.tracing import is_jit_tracing, is_transformed
from .. import calls
from ..forward import Forward
from ..source import calls_in, first_match, resolve
from .region_softmax import is_mask_of

_LEFT = ("W.view(-1, W.size(-2), W.size(-1))",)


@dataclass(frozen=True)
class AddedMask:
    """A mask of scores, for the fused softmax and what reads its weights."""

    mask: Tensor
    """float32, added to the scores: the lowest number where they are masked, 0 elsewhere."""
    hidden: Tensor
    """bool [..., queries, 1] of the scores' shape: rows that are masked everywhere."""

    def product(self, weights: Tensor, values: Tensor) -> Tensor:
        """torch.bmm(weights, values). The first dimensions of the weights have been joined."""
        if not torch.is_grad_enabled():
            return torch.bmm(weights, values)
        half = calls.autocast_dtype(weights)
        if half is not None:
            weights, values = weights.to(half), values.to(half)
        return _Product.apply(weights, values, self._rows(weights))

    def read(self, weights: Tensor) -> Tensor:
        """The weights, for other readers."""
        return _Read.apply(weights, self._rows(weights)) if torch.is_grad_enabled() else weights

    def _rows(self, weights: Tensor) -> Tensor:
        return self.hidden.reshape(*weights.shape[:-1], 1)


class _Product(torch.autograd.Function):
    """weights @ values, with no gradient for hidden rows of the weights."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        return torch.bmm(weights, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (weights, values, hidden) = gradients, ctx.saved_tensors
        of_weights = gradient.masked_fill(hidden, 0.0) @ values.mT if ctx.needs_input_grad[0] else None
        return of_weights, weights.mT @ gradient if ctx.needs_input_grad[1] else None, None


class _Read(torch.autograd.Function):
    """The weights as they are, with no gradient for hidden rows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, hidden: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].masked_fill(ctx.saved_tensors[0], 0.0), None


def added_mask(scores: Tensor, mask: Any) -> AddedMask | None:
    """None where an added mask may not do what masked_fill does."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or scores.dtype == torch.float16:
        return None
    if mask.dim() == 0 or not is_mask_of(scores, mask):
        return None
    if not torch.compiler.is_compiling() and (is_transformed() or is_jit_tracing()):
        return None
    added = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(mask, torch.finfo(torch.float32).min)
    return AddedMask(added, mask.all(-1, keepdim=True).expand(*scores.shape[:-1], 1))


def read_fill(statement: ast.stmt, scores: str, forward: Forward) -> str:
    """The mask of `scores = scores.masked_fill(mask, torch.finfo(dtype).min)`, which may be evaluated twice; empty for
    another statement."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == scores:
            found = first_match(("X.masked_fill(M, F(T.dtype).min)",), value)
        case _:
            return ""
    if found is None or resolve(found[1]["F"], forward.globals) is not torch.finfo:
        return ""
    filled, mask, like = (found[1][name] for name in "XMT")
    if ast.unparse(filled) != scores or calls_in(mask) or calls_in(like):
        return ""
    return ast.unparse(mask)


def read_product(statement: ast.stmt, weights: str, forward: Forward, *names: str) -> str:
    """The statement `context = torch.bmm(weights.view(...), values)`, by AddedMask.product; empty where it is another
    one. names: more that must keep what they are."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)], value=ast.Call(func=function, args=[left, values], keywords=[])
        ) if name not in (weights, *names) and resolve(function, forward.globals) is torch.bmm:
            found = first_match(_LEFT, left)
            read = {node.id for node in ast.walk(values) if isinstance(node, ast.Name)}
            if found is not None and ast.unparse(found[1]["W"]) == weights and weights not in read:
                return f"{name} = added_.product({ast.unparse(left)}, {ast.unparse(values)})"
    return ""
