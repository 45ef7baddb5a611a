"""Factors of logits, moved to what the output layer reads, where that changes no bit.

    logits = self.lm_head(h)
    logits = logits * self.logit_scale

becomes a call of scaled_logits: self.lm_head(h * self.logit_scale).

Logits are the largest tensor of a step, h is a small one (Cohere; Granite, which divides). A power of two changes
exponents alone: the products' sums and roundings are the same.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import calls
from ..classes import Rewrite
from ..forward import Forward, linear_at, places
from ..rewriting import Rewriting
from ..verify import check_function, kind_of

PATTERN = "scaled_logits"


class _Found(NamedTuple):
    """`self.path(x) * factor`, or `/`."""

    node: ast.BinOp
    path: str
    x: ast.expr
    statements: tuple[ast.stmt, ...]
    """The one before that calls the layer, if another one scales its result."""


def read_scaled_logits(forward: Forward) -> list[_Found]:
    """Results of children that the next statement, or the same one, multiplies by an attribute or a number."""
    return list(_found(forward))


def _found(forward: Forward) -> Iterator[_Found]:
    for place in places(forward.tree.body):
        match place.statement:
            case ast.Assign(value=ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=factor) as node):
                if not isinstance(factor, ast.Constant) and not forward.child(factor):
                    continue
                value, statements = forward.value_of(left, place, place.position) or (left, ())
                if (called := forward.called(value)) is not None:
                    yield _Found(node, *called, statements)


def choose_scaled_logits(module: nn.Module, found: list[_Found], excluded: Container[int]) -> tuple[_Found, ...]:
    """Those of linear layers without bias whose result is larger than what they read."""
    return tuple(each for each in found if _is_chosen(linear_at(module, each.path, excluded)))


def _is_chosen(dense: nn.Linear | None) -> bool:
    return dense is not None and dense.bias is None and dense.out_features > dense.in_features


@dataclass(frozen=True)
class ScaledLogits:
    """A module that scales the result of its output layer, as a site."""

    forward: Forward
    chosen: tuple[_Found, ...]
    pattern = PATTERN
    detail = ""

    def rewrite(self, cls: type) -> Rewrite:
        """The forward with scaled_logits in place of layer and factor."""
        rewriting = Rewriting(self.forward)
        for found in self.chosen:
            rewriting.replace(found.node, partial(_call, rewriting, found))
            rewriting.remove(*found.statements)
        rewriting.constants["scaled_logits_"] = scaled_logits
        return rewriting.rewrite(PATTERN)

    def verify(self, module: nn.Module, rewrite: Rewrite) -> None:
        """Raise VerificationError unless a small layer computes the same of what is scaled before it."""

        def fused(x: Tensor, weight: Tensor) -> Tensor:
            return functional.linear(x * 0.125, weight)

        def unfused(x: Tensor, weight: Tensor) -> Tensor:
            return functional.linear(x, weight) * 0.125

        check_function(fused, unfused, {"x": (7, 8), "weight": (11, 8)}, *kind_of(module))


def _call(rewriting: Rewriting, found: _Found) -> ast.expr:
    head, x = rewriting.attribute(found.path), rewriting.visit(rewriting.copy_of(found.x))
    divides = ast.Constant(isinstance(found.node.op, ast.Div))
    return rewriting.call("scaled_logits_", head, x, rewriting.copy_of(found.node.right), divides)


def scaled_logits(module: nn.Module, head: Any, x: Any, factor: Any, divides: bool) -> Any:
    """head(x) * factor, or head(x) / factor."""
    is_exact = type(factor) in (float, int) and abs(math.frexp(factor)[0]) == 0.5
    is_usable = is_exact and isinstance(x, Tensor) and not torch.compiler.is_compiling()
    if is_usable and calls.is_plain_linear(head) and head.bias is None:
        calls.count_fused(module)
        return head(x if factor == 1 else x / factor if divides else x * factor)
    y = head(x)
    return y / factor if divides else y * factor
