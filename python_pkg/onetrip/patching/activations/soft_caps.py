"""Soft caps in one pass: cap * tanh(x / cap) (Gemma 2).

    logits = logits / self.config.final_logit_softcapping
    logits = torch.tanh(logits)                              ->    logits = softcap_(self, logits, self.config...)
    logits = logits * self.config.final_logit_softcapping

The loss of capped logits reads them before the cap (watched_logits.py): one pass is left, for what the model returns.
"""

from __future__ import annotations

import ast
from collections.abc import Container
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ... import ops
from .. import calls
from ..forward import Forward, Place, places, writes_to_tensors
from ..rewriting import InForward, Rewriting
from ..source import is_same
from ..verify import check_function, kind_of
from ..watched_logits import WatchedLogits

PATTERN = "softcap"


class _Found(NamedTuple):
    """`torch.tanh(x / cap) * cap`, in one statement or in consecutive ones."""

    node: ast.BinOp
    x: ast.expr
    cap: ast.expr
    statements: tuple[ast.stmt, ...]
    """Those before the last one."""


def read_soft_caps(forward: Forward) -> list[_Found]:
    """The soft caps, by a cap that no call gives, of a forward that writes to no tensor: x is kept for backward, where
    torch keeps the result of tanh."""
    if writes_to_tensors(forward.tree):
        return []
    found = []
    for place in places(forward.tree.body):
        match place.statement:
            case ast.Assign(value=ast.BinOp(left=left, op=ast.Mult(), right=right) as node):
                made = (_found(forward, place, node, *sides) for sides in ((left, right), (right, left)))
                found += [each for each in made if each is not None][:1]
    return found


def _found(forward: Forward, place: Place, node: ast.BinOp, tanh: ast.expr, cap: ast.expr) -> _Found | None:
    value, last = forward.value_of(tanh, place, place.position) or (tanh, ())
    match value:
        case ast.Call(func=function, args=[argument], keywords=[]) if forward.resolved(function) is torch.tanh:
            position = place.position - len(last)
            divided, first = forward.value_of(argument, place, position) or (argument, ())
            match divided:
                case ast.BinOp(left=x, op=ast.Div(), right=other) if is_same(cap, other) and not _calls(cap):
                    return _Found(node, x, cap, (*first, *last))
    return None


def _calls(expression: ast.expr) -> bool:
    return any(isinstance(each, (ast.Call, ast.NamedExpr)) for each in ast.walk(expression))


class SoftCaps(InForward):
    """A module that caps a tensor, as a site."""

    patterns, is_minor, in_wrapper = (PATTERN,), True, True
    read = staticmethod(read_soft_caps)

    @staticmethod
    def is_of(module: nn.Module, each: _Found, excluded: Container[int]) -> bool:
        """Every instance has it."""
        return True

    def put(self, rewriting: Rewriting) -> None:
        """softcap_ in place of the statements."""
        rewriting.constants["softcap_"] = soft_cap
        for found in self.chosen:
            rewriting.replace(found.node, partial(_call, rewriting, found))
            rewriting.remove(*found.statements)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless the operator computes the same."""
        device, dtype = kind_of(module)
        check_function(lambda x: ops.softcap(x, 2.0), lambda x: torch.tanh(x / 2.0) * 2.0, {"x": (7, 8)}, device, dtype)


def _call(rewriting: Rewriting, found: _Found) -> ast.expr:
    x = rewriting.visit(rewriting.copy_of(found.x))
    return rewriting.call("softcap_", x, rewriting.copy_of(found.cap))


def soft_cap(module: nn.Module, x: Any, cap: Any) -> Any:
    """torch.tanh(x / cap) * cap."""
    is_watched = type(x) is WatchedLogits and torch.is_grad_enabled()
    is_tensor = is_watched or type(x) is Tensor or isinstance(x, FakeTensor)
    if (
        not (is_tensor and calls.is_factor(cap) and cap > 0)
        or calls.is_followed()
        or not (calls.fits(x) and calls.is_large(x))
    ):
        return torch.tanh(x / cap) * cap
    calls.count_fused(module)
    return x.capped(cap) if is_watched else ops.softcap(x, cap)
