"""Helper functions that drop and add, in a forward's syntax tree: Bloom's and Falcon's.

output = dropout_add(h, residual, self.rate, self.training)
->
output = residual + F.dropout(h, p=self.rate, training=self.training)
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

from ..forward import Forward
from ..report import Unsuitable
from ..source import Substitution, calls_in, deep_copy, parse


def inlined(forward: Forward) -> Forward:
    """The forward with what such helpers of its file return in place of their calls. Itself where there are none."""
    functions = {node.func.id for node in calls_in(forward.tree) if isinstance(node.func, ast.Name)}
    helpers: dict[str, Any] = {name: each for name in functions if _drops(each := forward.globals.get(name), forward)}
    if not helpers:
        return forward
    return replace(forward, tree=_Inlining(helpers, forward.function).visit(deep_copy(forward.tree)))


def _drops(function: Any, forward: Forward) -> bool:
    return (
        isinstance(function, FunctionType)
        and function.__globals__ is forward.globals  # its names mean the same in the forward
        and "dropout" in function.__code__.co_names
    )


class _Inlining(ast.NodeTransformer):
    def __init__(self, helpers: Mapping[str, FunctionType], forward: Any) -> None:
        self.helpers, self.locals = helpers, frozenset(forward.__code__.co_varnames)

    def visit_Call(self, call: ast.Call) -> ast.expr:
        self.generic_visit(call)
        function = self.helpers.get(call.func.id) if isinstance(call.func, ast.Name) else None
        returned = None if function is None else _returned(function, call)
        if returned is None or self.locals & (_names(returned) - _names(call)) or self.locals & _names(call.func):
            return call
        for node in ast.walk(returned):
            ast.copy_location(node, call)
        return returned


def _returned(function: FunctionType, call: ast.Call) -> ast.BinOp | None:
    """The sum that the call returns, as an expression of its arguments; None if it does anything else."""
    tree = parse(function)
    if isinstance(tree, Unsuitable):
        return None
    parameters = [each.arg for each in tree.args.args]
    given = dict(zip(parameters, call.args, strict=False)) | {each.arg: each.value for each in call.keywords}
    if given.keys() != set(parameters) or len(given) != len(call.args) + len(call.keywords):
        return None
    if not all(isinstance(each, (ast.Name, ast.Attribute, ast.Constant)) for each in given.values()):
        return None
    n_calls = sum(len(calls_in(statement)) for statement in tree.body)
    values: dict[str, ast.expr] = {str(name): value for name, value in given.items()}
    for statement in tree.body:
        match statement:
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = Substitution(values).visit(value)
            case ast.Return(value=ast.expr() as value):
                value = Substitution(values).visit(value)
                if len(calls_in(value)) != n_calls:  # a dropout that ran twice would draw two masks
                    return None
                return value if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) else None
            case _:
                return None
    return None


def _names(expression: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
