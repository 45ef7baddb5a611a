"""A constant for each class that is added to logits, as the bias of the output layer's product.

    lm_logits = self.lm_head(outputs[0])
    lm_logits = lm_logits + self.final_logits_bias.to(lm_logits.device)

becomes a call of biased_logits: F.linear(outputs[0], self.lm_head.weight, self.final_logits_bias).

Logits are the largest tensor of a step: the sum reads and writes them once more (BART, Marian, Pegasus). The product
adds the constant before it rounds: zeros, which these models have, give the same values. Under autocast the constant
is float32, and the sum's result, too. There zeros only convert the logits, which the loss reads unconverted
(watched_logits.py).
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Container
from functools import partial
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from .. import calls
from ..classes import is_patched
from ..forward import Forward, linear_at, places
from ..rewriting import InForward, Rewriting
from ..verify import check_function, kind_of

PATTERN = "biased_logits"


class _Found(NamedTuple):
    """`self.path(x) + self.bias`, or `+ self.bias.to(logits.device)`."""

    node: ast.BinOp
    path: str
    x: ast.expr
    bias: ast.expr
    name: str
    is_moved: bool
    statements: tuple[ast.stmt, ...]
    """The one before that calls the layer, if another one adds to its result."""


def read_biased_logits(forward: Forward) -> list[_Found]:
    """Results of children that the next statement, or the same one, adds an attribute to."""
    found = []
    for place in places(forward.tree.body):
        match place.statement:
            case ast.Assign(value=ast.BinOp(left=left, op=ast.Add(), right=right) as node):
                bias = _moved(right, left)
                is_moved = bias is not right
                value, statements = forward.value_of(left, place, place.position, 1 + is_moved) or (left, ())
                called, name = forward.called(value), forward.child(bias)
                if called is not None and name:
                    found.append(_Found(node, *called, bias, name, is_moved, statements))
    return found


def _moved(bias: ast.expr, logits: ast.expr) -> ast.expr:
    """x of `x.to(logits.device)`; anything else as it is."""
    match bias, logits:
        case (
            ast.Call(
                func=ast.Attribute(value=x, attr="to"),
                args=[ast.Attribute(value=ast.Name(id=owner), attr="device")],
                keywords=[],
            ),
            ast.Name(id=name),
        ) if owner == name:
            return x
    return bias


class BiasedLogits(InForward):
    """A module that adds a buffer to the result of a linear layer, as a site."""

    patterns, is_minor, in_wrapper = (PATTERN,), True, True
    read = staticmethod(read_biased_logits)

    @staticmethod
    def is_of(module: nn.Module, each: _Found, excluded: Container[int]) -> bool:
        """Whether it is of a linear layer without bias, and of a buffer with a number for each of its outputs."""
        head, bias = linear_at(module, each.path, excluded), module._buffers.get(each.name)
        return head is not None and head.bias is None and bias is not None and bias.numel() == head.out_features

    def put(self, rewriting: Rewriting) -> None:
        """biased_logits in place of the layer's call and the sum."""
        rewriting.constants |= {"biased_logits_": biased_logits, "add_": add, "add_moved_": add_moved}
        for found in self.chosen:
            rewriting.replace(found.node, partial(_call, rewriting, found))
            rewriting.remove(*found.statements)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a small layer computes the same."""
        device, dtype = kind_of(module)
        head = nn.Linear(8, 11, bias=False, device=device, dtype=dtype)
        bias = torch.linspace(-1, 1, 11, device=device, dtype=dtype)[None]

        def fused(x: Tensor) -> Tensor:
            return _biased(head, x, bias)

        def unfused(x: Tensor) -> Tensor:
            return head(x) + bias

        check_function(fused, unfused, {"x": (7, 8)}, device, dtype)


def _call(rewriting: Rewriting, found: _Found) -> ast.expr:
    head, x = rewriting.attribute(found.path), rewriting.visit(rewriting.copy_of(found.x))
    total = ast.Name("add_moved_" if found.is_moved else "add_")
    return rewriting.call("biased_logits_", head, x, rewriting.copy_of(found.bias), total)


def add_moved(logits: Any, bias: Any) -> Any:
    """logits + bias, which may be on another device."""
    return logits + bias.to(logits.device)


def biased_logits(module: nn.Module, head: Any, x: Any, bias: Any, total: Callable[[Any, Any], Any]) -> Any:
    """total(head(x), bias), where total is add or add_moved."""
    if not _is_bias(head, x, bias):
        return total(head(x), bias)
    dtype = calls.autocast_dtype(x) or x.dtype
    if bias.dtype != dtype and (bias.dtype != torch.float32 or not _answer(bias, None)):
        return total(head(x), bias)
    calls.count_fused(module)
    logits = _biased(head, x, bias.to(dtype))
    return logits if bias.dtype == dtype else logits.float()


_answers: dict[int, tuple[weakref.ref[Tensor], int, torch.dtype | None, bool]] = {}
"""id(constant) -> (constant, its version, a dtype, whether it has the same values in that; without one, whether all are
0). Asked once: a GPU would wait for it each time. Tensor.data changes a tensor without a new version: what is computed
by an answer must be right without it, within rounding."""


def is_exact(constant: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast to dtype changes none of the values."""
    return _answer(constant, dtype)


def _answer(constant: Tensor, dtype: torch.dtype | None) -> bool:
    if isinstance(constant, FakeTensor):  # has no values
        return True
    if constant.is_inference() or constant.is_meta or constant.requires_grad:
        return False
    known = _answers.get(id(constant))
    if known is None or known[0]() is not constant or known[1:3] != (constant._version, dtype):
        same = torch.zeros_like(constant) if dtype is None else constant.to(dtype).to(constant.dtype)
        is_same = torch.equal(same, constant)
        known = _answers[id(constant)] = calls.forgetting(constant, _answers), constant._version, dtype, is_same
    return known[3]


def _biased(head: Any, x: Tensor, bias: Tensor) -> Any:
    bias = bias.reshape(-1)
    return head(x, bias) if is_patched(head) else functional.linear(x, head.weight, bias)


def _is_bias(head: Any, x: Any, bias: Any) -> bool:
    """Whether head's product can add it, and has the sum's shape."""
    if calls.is_followed() or not all(type(each) is Tensor or isinstance(each, FakeTensor) for each in (x, bias)):
        return False
    if x.is_nested or x.dim() == 0 or not calls.is_large(x, x.shape[:-1].numel() * bias.numel()):
        return False
    return (
        calls.multiplies(head, x)
        and head.bias is None
        and bias.dim() <= x.dim()
        and bias.shape[-1:] == head.weight.shape[:1]
        and bias.numel() == bias.shape[-1]
        and bias.device == x.device
        and not bias.requires_grad
    )
