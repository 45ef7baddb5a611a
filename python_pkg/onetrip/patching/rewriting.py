"""Rewriting a forward: other expressions in some places of its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from .classes import Rewrite
from .forward import Forward
from .source import bare, deep_copy


class Rewriting(ast.NodeTransformer):
    """A copy of a forward, with other expressions in some places. The nodes given are those of the original."""

    def __init__(self, forward: Forward) -> None:
        self.method, self.own, self.tree = forward.method, forward.self_name, deep_copy(forward.tree)
        self.copies: dict[int, Any] = dict(zip(map(id, ast.walk(forward.tree)), ast.walk(self.tree), strict=True))
        self.constants: dict[str, Any] = {}
        self.replaced: dict[int, Callable[[], ast.expr]] = {}
        self.removed: set[int] = set()
        self.added_targets: dict[int, str] = {}

    def source(self) -> str:
        """The rewritten forward."""
        self.visit(self.tree)
        return ast.unparse(bare(ast.fix_missing_locations(self.tree))) + "\n"

    def rewrite(self, pattern: str, absorbed: Iterable[str] = ()) -> Rewrite:
        """The rewritten forward as a Rewrite."""
        source = self.source()  # names the constants that it uses
        constants = tuple(self.constants.items())
        return Rewrite(pattern, ((self.method, source),), constants=constants, absorbed=tuple(absorbed))

    def put_call(self, call: ast.Call, name: str, *more: str) -> None:
        """name(self, function, more, ...) in place of function(...). more: expressions."""
        copied = self.copy_of(call)
        first = [ast.parse(each, mode="eval").body for each in more]
        copied.args = [ast.Name(self.own), copied.func, *first, *copied.args]
        copied.func = ast.Name(name)

    def put_around(self, expression: ast.expr, name: str) -> None:
        """name(self, expression) in place of the expression."""
        self.replace(expression, lambda: self.call(name, self.visit(self.copy_of(expression))))

    def put_part(self, expression: ast.expr, part: ast.expr) -> None:
        """A part of the expression in place of all of it."""
        self.replace(expression, lambda: self.visit(self.copy_of(part)))

    def replace(self, expression: ast.expr, made: Callable[[], ast.expr]) -> None:
        """What made() returns in place of the expression. It is called when the copy is written: what it visits is
        rewritten then."""
        self.replaced[id(self.copy_of(expression))] = made

    def remove(self, *statements: ast.stmt) -> None:
        self.removed.update(id(self.copy_of(each)) for each in statements)

    def copy_of(self, node: ast.AST) -> Any:
        """The node's counterpart in the copy."""
        return self.copies[id(node)]

    def call(self, name: str, *arguments: ast.expr) -> ast.Call:
        """name(self, arguments, ...)."""
        return ast.Call(ast.Name(name), [ast.Name(self.own), *arguments], [])

    def visit(self, node: ast.AST) -> Any:
        if id(node) in self.removed:
            return None
        if id(node) in self.replaced:
            return self.replaced.pop(id(node))()
        self.generic_visit(node)
        if isinstance(node, ast.Assign) and id(node) in self.added_targets:
            node.targets = [ast.Tuple([*node.targets, ast.Name(self.added_targets[id(node)])])]
        return node

    def attribute(self, path: str) -> ast.expr:
        return ast.parse(f"{self.own}.{path}", mode="eval").body

    def probability(self, p: ast.expr | None, training: ast.expr | None) -> ast.expr:
        """Probability of a functional dropout: p in training, else 0; 0 where there is none."""
        if p is None or training is None:
            return ast.Constant(0.0)
        return ast.IfExp(self.copy_of(training), self.copy_of(p), ast.Constant(0.0))
