"""Factors of logits, moved to what the output layer reads, where that changes no bit.

    logits = self.lm_head(h)
    logits = logits * self.logit_scale

becomes a call of scaled_logits: self.lm_head(h * self.logit_scale).

Logits are the largest tensor of a step, h is a small one (Cohere; Granite, which divides). A power of two changes
exponents alone: the products' sums and roundings are the same. Not in float16, whose exponents end close by.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container
from functools import partial
from operator import mul, truediv
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import calls
from ..forward import Forward, Place, evaluated, linear_at, places
from ..rewriting import InForward, Rewriting
from ..verify import check_function, kind_of

PATTERN = "scaled_logits"


class Scaled(NamedTuple):
    """`self.path(x) * factor`, or `/`."""

    node: ast.BinOp
    call: ast.Call
    path: str
    statements: tuple[ast.stmt, ...]
    """The one before that calls the layer, if another one scales its result."""


def read_scaled(forward: Forward) -> list[Scaled]:
    """Results of children that the next statement, or the same one, multiplies by an attribute or a number."""
    return [
        scaled
        for place in places(forward.tree.body)
        if isinstance(place.statement, (ast.Assign, ast.Return, ast.Expr))
        for node in evaluated(place.statement)
        if (scaled := _scaled(forward, place, node)) is not None
    ]


def _scaled(forward: Forward, place: Place, node: ast.AST) -> Scaled | None:
    match node:
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=factor):
            value, statements = forward.value_of(left, place, place.position) or (left, ())
            called = forward.called(value)
            if called is not None and (isinstance(factor, ast.Constant) or forward.child(factor)):
                return Scaled(node, value, called[0], statements)  # type: ignore[arg-type]
    return None


class ScaledLogits(InForward):
    """A module that scales the result of a linear layer, as a site."""

    patterns, is_minor, in_wrapper = (PATTERN,), True, True
    read = staticmethod(read_scaled)

    @staticmethod
    def is_of(module: nn.Module, each: Scaled, excluded: Container[int]) -> bool:
        """Whether it is of a linear layer without bias whose result is larger than what it reads."""
        head = linear_at(module, each.path, excluded)
        return head is not None and head.bias is None and head.out_features > head.in_features

    def put(self, rewriting: Rewriting) -> None:
        """scaled_logits in place of the layer's call and its factor."""
        rewriting.constants |= {"scaled_logits_": scaled_logits, "mul_": mul, "truediv_": truediv}
        for found in self.chosen:
            rewriting.replace(found.node, partial(_call, rewriting, found))
            rewriting.remove(*found.statements)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a small layer computes the same."""
        device, dtype = kind_of(module)
        head = nn.Linear(8, 11, bias=False, device=device, dtype=dtype)

        def fused(x: Tensor) -> Tensor:
            return scaled_logits(module, head, x, mul, 0.125) + scaled_logits(module, head, x, truediv, 4)

        def unfused(x: Tensor) -> Tensor:
            return head(x) * 0.125 + head(x) / 4

        check_function(fused, unfused, {"x": (7, 8)}, device, dtype)


def _call(rewriting: Rewriting, found: Scaled) -> ast.expr:
    head, x = rewriting.attribute(found.path), rewriting.visit(rewriting.copy_of(found.call.args[0]))
    scale = "truediv_" if isinstance(found.node.op, ast.Div) else "mul_"
    return rewriting.call("scaled_logits_", head, x, ast.Name(scale), rewriting.copy_of(found.node.right))


def scaled_logits(module: nn.Module, head: Any, x: Any, scale: Callable[[Any, Any], Any], factor: Any) -> Any:
    """scale(head(x), factor), where scale multiplies or divides."""
    if torch.compiler.is_compiling() or not _is_exact(head, x, factor):
        return scale(head(x), factor)
    calls.count_fused(module)
    return head(x if factor == 1 else scale(x, factor))


def _is_exact(head: Any, x: Any, factor: Any) -> bool:
    """Whether head gives the same bits of what is scaled before it."""
    return calls.is_plain_linear(head) and head.bias is None and calls.scales_exactly(factor, head, x)
