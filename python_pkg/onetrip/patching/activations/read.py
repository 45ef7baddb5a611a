"""Reading a forward for activations: their products, linear layers, dropouts. What a child is, is a claim."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..forward import Forward, Place, evaluated, may_change, mentions, places
from ..source import resolve


@dataclass(eq=False)
class Halves:
    """`gate, up = packed.chunk(2, dim=-1)`."""

    statement: ast.Assign
    packed: ast.expr
    gate_first: bool


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

    call: ast.Call
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
                if gated is not None:
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
    """(node, place of its statement) of what assignments, calls and returns surely
    evaluate."""
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
        return _activation(forward, side)
    block, earlier = place.block, [i for i in range(place.position) if mentions(place.block[i], side.id)]
    match block[earlier[-1]] if earlier else None:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) as statement if name == side.id:
            found = _activation(forward, value)
            is_changed = any(may_change(each, name) for each in block[earlier[-1] + 1 : place.position])
            if found is not None and not is_changed and forward.is_read_once(name, place, place.position):
                found.definition = statement
                return found
    return None


def _halves(forward: Forward, found: FoundActivation, place: Place) -> Halves | None:
    """The halves that gate and other are, if nothing else reads them or changes them before the product."""
    if not (isinstance(found.x, ast.Name) and isinstance(found.other, ast.Name)) or found.x.id == found.other.id:
        return None
    gate, other, block = found.x.id, found.other.id, place.block
    for index in reversed(range(place.position)):
        match block[index]:
            case (
                ast.Assign(
                    targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])],
                    value=ast.Call(func=ast.Attribute(value=packed, attr="chunk"), args=args, keywords=keywords),
                ) as statement
            ) if {first, second} == {gate, other}:
                sizes = [ast.unparse(each) for each in (*args, *(k.value for k in keywords if k.arg == "dim"))]
                ends = {name: forward.ends_at(name, place, index) for name in (gate, other)}
                is_whole = sizes == ["2", "-1"] and len(args) + len(keywords) == 2
                return Halves(statement, packed, first == gate) if is_whole and all(ends.values()) else None
        if block[index] is not found.definition and any(mentions(block[index], name) for name in (gate, other)):
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
