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
from typing import Any

import torch
from torch import Tensor, nn

from .. import calls
from ..forward import ScaledCall, linear_at, scaled_calls
from ..rewriting import InForward, Rewriting
from ..verify import check_function, kind_of

PATTERN = "scaled_logits"


class ScaledLogits(InForward):
    """A module that scales the result of a linear layer, as a site."""

    patterns, is_minor, in_wrapper = (PATTERN,), True, True
    read = staticmethod(scaled_calls)

    @staticmethod
    def is_of(module: nn.Module, each: ScaledCall, excluded: Container[int]) -> bool:
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


def _call(rewriting: Rewriting, found: ScaledCall) -> ast.expr:
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
