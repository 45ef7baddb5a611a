"""Reading a forward for activations: their products, linear layers, dropouts. What a child is, is a claim."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..forward import Forward, Place, evaluated, mentions, places
from ..source import Inliner, first_match, is_same, resolve


@dataclass(eq=False)
class Halves:
    """`gate, up = packed.chunk(2, dim=-1)`, or `gate, up = packed[..., ::2], packed[..., 1::2]`."""

    statement: ast.Assign
    packed: ast.expr
    gate_first: bool
    interleaved: bool = False


@dataclass(eq=False)
class Bounds:
    """`gate = x.clamp(max=limit)`, `up = y.clamp(min=-limit, max=limit)`, which only the product reads."""

    gate: ast.Assign
    up: ast.Assign
    limit: ast.expr
    up_offset: float
    """A constant that is added to up."""


@dataclass(eq=False)
class Dropped:
    """A dropout, of a value that nothing else reads."""

    call: ast.Call
    definition: ast.stmt | None
    """The statement that gave the value a name."""
    path: str = ""
    """Path of the child that is called: a dropout, if it is an nn.Dropout."""
    p: ast.expr | None = None
    training: ast.expr | None = None
    """Arguments p and training of functional.dropout; None where a child is called."""


@dataclass(eq=False)
class FoundActivation:
    """A call that may be an activation."""

    call: ast.expr
    x: ast.expr
    path: str
    """Path of the child that is called; empty for a function."""
    function: str
    """Key in FORMULAS, where torch's function is called; empty for a child."""
    own: Any = None
    """A function or a module of the forward's globals, where that is called."""
    product: ast.BinOp | None = None
    """Its product with another expression."""
    other: ast.expr | None = None
    definition: ast.Assign | None = None
    """The statement that gave the activation's result a name, which only the product reads."""
    halves: Halves | None = None
    """The statement that gave the gate and the other factor their names."""
    alpha: ast.expr | None = None
    """Where call is x * sigmoid(x * alpha)."""
    bounds: Bounds | None = None
    linear: str = ""
    """Path of a child called with one argument, whose result only the activation reads."""
    linear_x: ast.expr | None = None
    linear_definition: ast.stmt | None = None
    dropped: Dropped | None = None
    """The dropout of the result."""

    @property
    def result(self) -> ast.expr:
        """The activation, or its product."""
        return self.call if self.product is None else self.product


def read_activations(forward: Forward) -> list[FoundActivation]:
    """The activations of a forward, those with a product first. A call may be in several of them."""
    found = list(_read(forward))
    dropped = dict(_dropouts(forward))
    for each in found:
        each.dropped = dropped.get(each.result)
    return found


def _read(forward: Forward) -> Iterator[FoundActivation]:
    for node, place in _nodes(forward):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for side, other in ((node.left, node.right), (node.right, node.left)):
                gated = None if isinstance(other, ast.Constant) else _factor(forward, side, place)
                if gated is None:
                    continue
                if (bounds := _bounds(forward, gated, other, place)) is not None:
                    up = other.left if isinstance(other, ast.BinOp) else other
                    bounded = replace(gated, product=node, other=up, bounds=bounds)
                    bounded.halves = _halves(forward, bounded, place)
                    yield bounded
                if gated.alpha is None:
                    gated.product, gated.other = node, other
                    gated.halves = _halves(forward, gated, place)
                    yield gated
    for node, place in _nodes(forward):
        found = _activation(forward, node) if isinstance(node, ast.Call) else None
        if found is None:
            continue
        inner = forward.value_of(found.x, place, place.position) or (found.x, ())
        if (called := forward.called(inner[0])) is not None:
            found.linear, found.linear_x = called
            found.linear_definition = inner[1][0] if inner[1] else None
        yield found


def _nodes(forward: Forward) -> Iterator[tuple[ast.AST, Place]]:
    """(node, place of its statement) of what assignments, calls and returns surely evaluate."""
    for place in places(forward.tree.body):
        if isinstance(place.statement, (ast.Assign, ast.Return, ast.Expr)):
            yield from ((node, place) for node in evaluated(place.statement))


def _dropouts(forward: Forward) -> Iterator[tuple[ast.expr, Dropped]]:
    """What may be dropouts, by the expression that they drop."""
    for node, place in _nodes(forward):
        if not isinstance(node, ast.Call):
            continue
        if (of_function := forward.functional_dropout(node)) is not None:
            x, dropped = of_function[0], Dropped(node, None, "", *of_function[1:])
        elif (called := forward.called(node)) is not None:
            x, dropped = called[1], Dropped(node, None, called[0])
        else:
            continue
        if (inner := forward.value_of(x, place, place.position)) is not None:
            x, (dropped.definition,) = inner
        yield x, dropped


def _factor(forward: Forward, side: ast.expr, place: Place) -> FoundActivation | None:
    """The activation that a factor of a product is, or that the factor's name was given to."""
    if not isinstance(side, ast.Name):
        return _activation(forward, side) or _scaled_silu(forward, side)
    statement = forward.assignment_of(side.id, place, place.position)
    value = None if statement is None else statement.value
    found = None if value is None else _activation(forward, value) or _scaled_silu(forward, value)
    if found is not None:
        found.definition = statement
    return found


def _scaled_silu(forward: Forward, expression: ast.expr) -> FoundActivation | None:
    """x * sigmoid(x * alpha) of a name, and a number."""
    found = first_match(("X * sigmoid(X * A)", "X * sigmoid(A * X)"), Inliner(forward.globals, {}).inline(expression))
    match expression:
        case ast.BinOp(left=ast.Name() as x, right=ast.Call(func=function)) if found is not None:
            alpha = found[1]["A"]
            if not _is_local(function, forward) and _is_number(alpha, forward):
                return FoundActivation(expression, x, "", "silu", alpha=alpha)
    return None


def _is_number(expression: ast.expr, forward: Forward) -> bool:
    """Whether it may be a number: a constant, or an attribute of the module."""
    return forward.child(expression) != "" or (isinstance(expression, ast.Constant) and _is_real(expression.value))


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bounds(forward: Forward, found: FoundActivation, other: ast.expr, place: Place) -> Bounds | None:
    """The bounds of gate and of up, if nothing else reads the values within them."""
    up_offset = 0.0
    match other:
        case ast.BinOp(left=ast.Name() as up, op=ast.Add(), right=ast.Constant(value=value)) if _is_real(value):
            other, up_offset = up, float(value)  # type: ignore[arg-type]
    if not (isinstance(found.x, ast.Name) and isinstance(other, ast.Name)) or found.x.id == other.id:
        return None
    reader = place.position if found.definition is None else place.block.index(found.definition)
    gate = _clamp(forward, found.x.id, place, reader, 1 if found.alpha is None else 2)
    up_clamp = _clamp(forward, other.id, place, place.position, 1)
    if gate is None or up_clamp is None or gate[1].keys() != {"A"} or up_clamp[1].keys() != {"A", "B"}:
        return None
    limit = gate[1]["A"]
    is_one = is_same(limit, up_clamp[1]["A"]) and is_same(limit, up_clamp[1]["B"])
    return Bounds(gate[0], up_clamp[0], limit, up_offset) if is_one and _is_number(limit, forward) else None


_CLAMPS = ("X.clamp(max=A)", "X.clamp(min=None, max=A)", "X.clamp(min=-B, max=A)", "X.clamp(-B, A)")


def _clamp(
    forward: Forward, name: str, place: Place, position: int, n_reads: int
) -> tuple[ast.Assign, dict[str, ast.expr]] | None:
    """The statement that gave the name the value that statement `position` reads, a clamp, and its numbers by their
    names in _CLAMPS; None if anything else reads that value or changes it."""
    statement = forward.assignment_of(name, place, position, n_reads)
    found = None if statement is None else first_match(_CLAMPS, Inliner(forward.globals, {}).inline(statement.value))
    if statement is None or found is None:
        return None
    del found[1]["X"]
    return statement, found[1]


def bounds_itself(statement: ast.Assign) -> bool:
    """Whether the clamp is of the value that the name had before."""
    return ast.unparse(statement.value.func.value) == ast.unparse(statement.targets[0])  # type: ignore[attr-defined]


_SPLITS = {"X.chunk(2, dim=-1)": False, "X.chunk(2, -1)": False, "(X[..., ::2], X[..., 1::2])": True}
"""Two halves of X, and whether their columns alternate."""


def _halves(forward: Forward, found: FoundActivation, place: Place) -> Halves | None:
    """The halves that gate and other are, if nothing else reads them or changes them before the product."""
    if not (isinstance(found.x, ast.Name) and isinstance(found.other, ast.Name)) or found.x.id == found.other.id:
        return None
    gate, other, block = found.x.id, found.other.id, place.block
    bounds = [] if found.bounds is None else [found.bounds.gate, found.bounds.up]
    own = [found.definition, *filter(bounds_itself, bounds)]
    for index in reversed(range(place.position)):
        match block[index]:
            case (
                ast.Assign(
                    targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])], value=value
                ) as statement
            ) if {first, second} == {gate, other}:
                split = first_match(tuple(_SPLITS), value)
                if split is None or not all(forward.ends_at(name, place, index) for name in (gate, other)):
                    return None
                packed, alternates = split[1]["X"], _SPLITS[split[0]]
                may_alternate = isinstance(packed, ast.Name) and first == gate and found.bounds is not None
                is_known = may_alternate or not alternates
                return Halves(statement, packed, first == gate, alternates) if is_known else None
        if block[index] not in own and any(mentions(block[index], name) for name in (gate, other)):
            return None
    return None


def _activation(forward: Forward, expression: ast.expr) -> FoundActivation | None:
    """The call of a child, of a function of torch's, or of a global function or module, with one argument."""
    if (called := forward.called(expression)) is not None and isinstance(expression, ast.Call):
        return FoundActivation(expression, called[1], called[0], "")
    match expression:
        case ast.Call(func=function, args=[x], keywords=keywords):
            resolved = None if _is_local(function, forward) else resolve(function, forward.globals)
            options = {each.arg: ast.unparse(each.value) for each in keywords}
            if resolved is functional.silu and not options:
                return FoundActivation(expression, x, "", "silu")
            if resolved in (functional.relu, torch.relu) and not options:
                return FoundActivation(expression, x, "", "relu")
            if resolved is functional.gelu and options in ({}, {"approximate": "'none'"}):
                return FoundActivation(expression, x, "", "gelu")
            if resolved is functional.gelu and options == {"approximate": "'tanh'"}:
                return FoundActivation(expression, x, "", "gelu_tanh")
            if isinstance(resolved, (nn.Module, FunctionType)) and not options and not isinstance(x, ast.Starred):
                return FoundActivation(expression, x, "", "", resolved)
    return None


def _is_local(function: ast.expr, forward: Forward) -> bool:
    """Whether the first of its names is the forward's own, whatever binds it."""
    while isinstance(function, ast.Attribute):
        function = function.value
    code = forward.function.__code__
    return isinstance(function, ast.Name) and function.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
