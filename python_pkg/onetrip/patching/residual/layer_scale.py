"""LayerScale, and factors of residual branches, in the linear layer before them.

    h, _ = self.attention(h)                h, _ = unscaled_0_(self.attention, h)
    h = self.layer_scale1(h)         ->     h = scaled_0_(self, self.layer_scale1, h)

Where the attention ends in a linear layer, and its result is multiplied by a vector s (DINOv2, BEiT), the layer has the
weight diag(s) W and the bias s b instead. No pass reads or writes activations for it, and none are kept. Where these
have few rows, passes over W cost more, and the result is multiplied.

    h = residual + h * self.residual_multiplier

A number (Granite) is the alpha of the matrix products, forward and backward: no pass at all, and one rounding less.

The linear layer runs where the product stands: nothing else may be called between the child and that.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import calls
from ..classes import plain_forward
from ..forward import Forward, Place, child_at, linear_at, places, read_forward, writes_to_tensors
from ..linear.readers import Readers, linear
from ..report import Unsuitable
from ..rewriting import InForward, Rewriting
from ..verify import check_function, kind_of
from .read import Operand, SumReader
from .tails import Tail, tail_of

PATTERN = "layer_scale"

_ROWS_PER_COLUMN = 2
"""Rows of x per column of W from which on W is multiplied. The product takes 6 passes over n_rows x n_outputs elements,
forward and backward, and the weight's 8 over n_columns x n_outputs."""


class Unscaled(NamedTuple):
    """dense(x), to be multiplied."""

    dense: Any
    x: Tensor


@dataclass(frozen=True)
class Scaled:
    """dropout(x) * factor, where x is what a Tail, or the child itself, returned."""

    cls: type | None
    """That of the module with the vector; None where the factor itself is given, a vector or a number."""
    attribute: str
    """The vector's name in that module."""

    def __call__(self, module: nn.Module, scale: Any, x: Any, dropout: Any = None) -> Tensor:
        if isinstance(x, Unscaled):
            can_follow = dropout is None or calls.is_plain_dropout(dropout)
            y = _fused(*x, self._factor(scale)) if can_follow else None
            if y is not None:
                calls.count_fused(module)
                return y if dropout is None else dropout(y)
            x = x.dense(x.x)
        calls.count_fallback(module)
        if dropout is not None:
            x = dropout(x)
        product: Tensor = scale(x) if self.cls is not None else x * scale
        return product

    def _factor(self, scale: Any) -> Any:
        if self.cls is None:
            return scale
        return getattr(scale, self.attribute) if calls.is_plain(scale, self.cls) else None


class _ScaledWeight(torch.autograd.Function):
    """diag(vector) @ weight. The gradient of the vector is summed in float32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, vector: Tensor) -> Tensor:
        ctx.save_for_backward(weight, vector)
        return weight * vector[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gradient,), (weight, vector) = grads, ctx.saved_tensors
        needs_weight, needs_vector = ctx.needs_input_grad
        dweight = gradient * vector[:, None] if needs_weight else None
        products = gradient.float() * weight if needs_vector else None
        return dweight, None if products is None else products.sum(1).to(vector.dtype)


def folded(x: Tensor, weight: Tensor, bias: Tensor | None, vector: Tensor) -> Tensor:
    """(x @ weight.T + bias) * vector, in the dtype of that product. weight: (n_outputs, n_inputs); bias, vector:
    (n_outputs,)."""
    scaled: Any = _ScaledWeight.apply(weight, vector)
    y = functional.linear(x, scaled, None if bias is None else bias * vector)
    return y.to(torch.promote_types(y.dtype, vector.dtype))  # float32 under autocast


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    """(x @ weight.T + bias) * factor, in the dtype of that product."""
    dtype = calls.autocast_dtype(x) or x.dtype
    cast = x if x.dtype == dtype else x.detach().to(dtype)
    return linear(x, weight, bias, cast, Readers(x, cast), scale=float(factor))


def _fused(dense: Any, x: Tensor, factor: Any) -> Tensor | None:
    """dense(x) * factor; None where that may differ by more than roundings, or costs more than it saves."""
    is_number = calls.is_factor(factor)
    if calls.is_followed() or not calls.fits(x) or (is_number and not calls.is_large(x)):
        return None
    if not calls.multiplies(dense, x):
        return None
    if is_number:
        n_outputs, n_columns = dense.weight.shape
        is_worth = n_outputs >= n_columns or calls.is_large(x, x.numel() // n_columns * n_outputs)
        return multiplied(x, dense.weight, dense.bias, factor) if is_worth else None
    return folded(x, dense.weight, dense.bias, factor) if _is_foldable(dense.weight, x, factor) else None


def _is_foldable(weight: Tensor, x: Tensor, vector: Any) -> bool:
    """Not where the weight has no gradient otherwise, nor beside a frozen vector, where the product is kept for
    backward and x * vector keeps nothing. Not in float16, where a weight times a small vector may vanish."""
    return (
        isinstance(vector, Tensor)
        and vector.dtype == weight.dtype
        and vector.shape == weight.shape[:1]
        and not calls.is_distributed(vector)
        and ((weight.requires_grad and vector.requires_grad) or not torch.is_grad_enabled())
        and (calls.autocast_dtype(x) or x.dtype) != torch.float16
        and x.numel() >= _ROWS_PER_COLUMN * weight.shape[1] ** 2
    )


@dataclass(eq=False)
class FoundScale:
    """`self.path(x)`, `x * self.path`, or `x * 0.5`."""

    expression: ast.expr
    scale: ast.expr
    """self.path, or the number."""
    path: str
    is_child: bool
    x: list[Operand]
    """Ways to read x as the result of a child, dropped out or not."""


def read_scales(forward: Forward) -> list[FoundScale]:
    """The products of a vector or a number and the result of a child."""
    if writes_to_tensors(forward.tree):
        return []
    reader, found = SumReader(forward), []
    for place in places(forward.tree.body):
        match place.statement:
            case ast.Assign(targets=[ast.Name()], value=value) | ast.Return(value=ast.expr() as value):
                terms = _terms(value) if not place.in_loop else ()
            case _:
                continue
        for expression, scale, x in (each for term in terms for each in _products(forward, term)):
            ways = [each for each in reader.readings(x, place) if each.opened and not each.linear and each.p is None]
            ways = [each for each in ways if _runs_at_once(each, expression, place)]
            if ways:
                path, is_child = forward.child(scale), isinstance(expression, ast.Call)
                found.append(FoundScale(expression, scale, path, is_child, ways))
    return found


def _runs_at_once(operand: Operand, expression: ast.expr, place: Place) -> bool:
    """Whether nothing but the operand's dropout is called between the child and the product, and no attribute set: it
    might change what the linear layer reads, which also stays in memory until then."""
    assert operand.call is not None
    start = operand.call.end_lineno or 0, operand.call.end_col_offset or 0
    end = expression.lineno, expression.col_offset
    between = (each for each in place.block[: place.position + 1] if each not in operand.statements)
    return not any(
        start <= (node.lineno, node.col_offset) < end
        for each in between
        for node in ast.walk(each)
        if isinstance(node, ast.Call) or (isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load))
    )


def _terms(value: ast.expr) -> tuple[ast.expr, ...]:
    """The sides of a sum, or the value."""
    match value:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return left, right
    return (value,)


def _products(forward: Forward, term: ast.expr) -> Iterator[tuple[ast.expr, ast.expr, ast.expr]]:
    """(term, what may multiply, x): both sides of a product may."""
    called = forward.called(term)
    match term:
        case ast.Call(func=scale) if called is not None:
            yield term, scale, called[1]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            for scale, x in ((left, right), (right, left)):
                if forward.child(scale) or isinstance(scale, ast.Constant):
                    yield term, scale, x


class Choice(NamedTuple):
    found: FoundScale
    operand: Operand
    tail: Tail
    scaled: Scaled


class LayerScales(InForward):
    """A module with LayerScale, as a site."""

    patterns = (PATTERN,)
    read = staticmethod(read_scales)

    @classmethod
    def choose(cls, module: nn.Module, found: Any, excluded: Container[int]) -> tuple[Choice, ...]:
        chosen = (_choice(module, each, excluded) for each in found)
        return tuple(each for each in chosen if each is not None)

    def put(self, rewriting: Rewriting) -> None:
        """The child's second form, and what multiplies its result."""
        for index, choice in enumerate(self.chosen):
            rewriting.constants[f"scaled_{index}_"] = choice.scaled
            rewriting.remove(*choice.operand.statements)
            rewriting.put_tail(f"unscaled_{index}_", choice.tail, choice.operand)
            rewriting.replace(choice.found.expression, partial(_call, rewriting, index, choice))

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a small layer that multiplies computes its scaled result."""
        shapes = {"x": (2, 9, 8), "weight": (4, 8), "bias": (4,)}
        are_numbers = {calls.is_factor(_given(module, choice.found)) for choice in self.chosen}
        if True in are_numbers:
            fused, unfused = (partial(each, factor=0.3) for each in (multiplied, _unfused))
            check_function(fused, unfused, shapes, *kind_of(module))
        if False in are_numbers:
            check_function(folded, _unfused, shapes | {"vector": (4,)}, *kind_of(module))


def _unfused(x: Tensor, weight: Tensor, bias: Tensor, factor: Any) -> Tensor:
    return functional.linear(x, weight, bias) * factor


def _call(rewriting: Rewriting, index: int, choice: Choice) -> ast.Call:
    operand = choice.operand
    x = rewriting.visit(rewriting.copy_of(operand.x))
    dropout = [rewriting.attribute(operand.dropout)] if operand.dropout else []
    return rewriting.call(f"scaled_{index}_", rewriting.copy_of(choice.found.scale), x, *dropout)


def _choice(module: nn.Module, found: FoundScale, excluded: Container[int]) -> Choice | None:
    scaled = _scaled(module, found, excluded)
    if scaled is None:
        return None
    for operand in found.x:
        if not operand.dropout or calls.is_plain_dropout(child_at(module, operand.dropout)):
            tail = tail_of(module, operand, excluded, partial(_ends_in_linear, excluded), _unscaled)
            if tail is not None:
                return Choice(found, operand, tail, scaled)
    return None


def _scaled(module: nn.Module, found: FoundScale, excluded: Container[int]) -> Scaled | None:
    """None where the module has neither a vector nor a number there."""
    if not found.is_child:
        given = _given(module, found)
        return Scaled(None, "") if isinstance(given, Tensor) or calls.is_factor(given) else None
    child: Any = child_at(module, found.path)
    if child is None or id(child) in excluded:
        return None
    cls: Any = calls.original_class(type(child))
    attribute = vector_of(cls)
    return Scaled(cls, attribute) if attribute and calls.is_plain(child, cls) else None


def _given(module: nn.Module, found: FoundScale) -> Any:
    """The number, or the instance's attribute or parameter of that name; None for anything else."""
    if isinstance(found.scale, ast.Constant):
        return found.scale.value
    return vars(module).get(found.path, module._parameters.get(found.path))


@cache
def vector_of(cls: Any) -> str:
    """The attribute by which the class's forward multiplies its argument; empty where it does anything else."""
    forward = read_forward(plain_forward(cls))
    if isinstance(forward, Unsuitable):
        return ""
    match forward.tree.args.args, forward.tree.body:
        case [_, ast.arg(arg=name)], [ast.Return(value=ast.BinOp(left=left, op=ast.Mult(), right=right))]:
            for side, other in ((left, right), (right, left)):
                if isinstance(side, ast.Name) and side.id == name and "." not in (path := forward.child(other)):
                    return path
    return ""


def _ends_in_linear(excluded: Container[int], child: nn.Module, operand: Operand) -> bool:
    return not operand.is_dropped and linear_at(child, operand.linear, excluded) is not None


def _unscaled(rewriting: Rewriting, operand: Operand) -> Callable[[], ast.expr]:
    """Makes an Unscaled of what a linear layer makes."""
    rewriting.remove(*operand.statements)
    rewriting.constants["Unscaled_"] = Unscaled

    def made() -> ast.expr:
        x = rewriting.visit(rewriting.copy_of(operand.x))
        return ast.Call(ast.Name("Unscaled_"), [rewriting.attribute(operand.linear), x], [])

    return made
