"""Scores that a mask fills with the least number before their softmax, as DeBERTa's.

    scores = scores.masked_fill(mask, torch.finfo(x.dtype).min)
    weights = dropout(softmax(scores, dim=-1))
    context = torch.bmm(weights.view(...), values)

The fused softmax adds that number instead. The weights are the same: 0 under the mask, and all alike in a row that is
masked everywhere. So are the gradients, but in such a row: there the original gives its scores none. So hidden rows of
the weights pass none on, neither from the product nor from what else reads the weights.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops.common.tracing import is_transformed
from .. import calls
from ..forward import Forward
from ..source import calls_in, first_match, resolve

_PRODUCTS = (torch.matmul, torch.bmm)


@dataclass(frozen=True)
class Filled:
    """A mask of scores, for the fused softmax and what reads its weights."""

    mask: Tensor
    """float32, added to the scores: the least number where they are masked, 0 elsewhere."""
    hidden: Tensor
    """bool [..., queries, 1] of the scores' shape: rows that are masked everywhere."""

    def product(self, weights: Tensor, values: Tensor) -> Tensor:
        """weights @ values. The first dimensions of the weights may have been joined."""
        half = calls.autocast_dtype(weights)
        if half is not None:
            weights, values = weights.to(half), values.to(half)
        return _Product.apply(weights, values, self.hidden.reshape(*weights.shape[:-1], 1))

    def read(self, weights: Tensor) -> Tensor:
        """The weights, for other readers."""
        return _Read.apply(weights, self.hidden.reshape(*weights.shape[:-1], 1))


class _Product(torch.autograd.Function):
    """weights @ values, with no gradient for hidden rows of the weights. Autograd sums what was broadcast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        return torch.matmul(weights, values)

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


def filled(scores: Tensor, mask: Any, value: Any) -> Filled | None:
    """None where an added mask may not do what masked_fill does."""
    if not (isinstance(mask, Tensor) and mask.dtype == torch.bool and isinstance(value, float)):
        return None
    if calls.is_distributed(mask) or mask.device != scores.device or mask.dim() > scores.dim():
        return None
    if any(size not in (1, of) for size, of in zip(mask.shape[::-1], scores.shape[::-1], strict=False)):
        return None
    is_reverse = torch.compiler.is_compiling() or not is_transformed()
    if not is_reverse or value != torch.finfo(scores.dtype).min or mask.dim() == 0:
        return None
    added = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(mask, torch.finfo(torch.float32).min)
    return Filled(added, mask.all(-1, keepdim=True).expand(*scores.shape[:-1], 1))


def read_fill(statement: ast.stmt, scores: str, forward: Forward) -> tuple[str, str] | None:
    """(mask, value) of `scores = scores.masked_fill(mask, value)`, which may be evaluated twice."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == scores:
            found = first_match(("X.masked_fill(M, V)",), value)
        case _:
            return None
    if found is None or ast.unparse(found[1]["X"]) != scores or calls_in(found[1]["M"]):
        return None
    if any(resolve(call.func, forward.globals) is not torch.finfo for call in calls_in(found[1]["V"])):
        return None
    return ast.unparse(found[1]["M"]), ast.unparse(found[1]["V"])


def read_product(statement: ast.stmt, weights: str, forward: Forward) -> str:
    """The statement `context = weights @ values`, by Filled.product; empty where it is another one."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != weights:
            pass
        case _:
            return ""
    match value:
        case ast.BinOp(op=ast.MatMult(), left=left, right=values):
            pass
        case ast.Call(func=function, args=[left, values], keywords=[]):
            resolved = resolve(function, forward.globals)
            if not any(resolved is each for each in _PRODUCTS):
                return ""
        case _:
            return ""
    match left:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=read), attr="view" | "reshape")) | ast.Name(id=read):
            names = [node.id for node in ast.walk(values) if isinstance(node, ast.Name)]
            if read == weights and weights not in names:
                return f"{name} = filled_.product({ast.unparse(left)}, {ast.unparse(values)})"
    return ""
