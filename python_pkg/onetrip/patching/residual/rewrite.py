"""A forward with its sums rewritten: each becomes a call of a Sum, everything else stays as it was written."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..calls import linear_parts
from ..classes import Rewrite
from ..links import Sum, dropped
from ..source import bare
from .choose import PATTERNS, Choice
from .read import FoundSums, Operand


def rewrite_sums(sums: FoundSums, chosen: Sequence[Choice]) -> Rewrite:
    """The forward with the chosen sums fused."""
    tree = copy.deepcopy(sums.tree)
    copies = dict(zip(map(id, ast.walk(sums.tree)), ast.walk(tree), strict=True))
    rewriting = _Rewriting(tree.args.args[0].arg)
    for index, choice in enumerate(chosen):
        rewriting.add(index, choice, copies)
    rewriting.visit(tree)
    source = ast.unparse(bare(ast.fix_missing_locations(tree))) + "\n"
    absorbed = {choice.norm[0] for choice in chosen if choice.norm is not None and "." not in choice.norm[0]}
    return Rewrite(pattern_of(chosen), source, tuple(rewriting.constants.items()), tuple(sorted(absorbed)), True)


def pattern_of(chosen: Sequence[Choice]) -> str:
    """The pattern that fuses most, of those of the sums."""
    return min((choice.pattern for choice in chosen), key=PATTERNS.index)


class _Rewriting(ast.NodeTransformer):
    """Puts Sums into a copy of a forward's tree."""

    def __init__(self, own: str) -> None:
        """own: the name of the forward's first parameter."""
        self.own = own
        self.constants: dict[str, Any] = {}
        self.replaced: dict[int, Callable[[], ast.expr]] = {}
        self.removed: set[int] = set()
        self.added_targets: dict[int, str] = {}

    def add(self, index: int, choice: Choice, copies: dict[int, Any]) -> None:
        found, operand, norm = choice.found, choice.operand, choice.norm
        node, statement = copies[id(found.node)], copies[id(found.block[found.position])]
        sides: list[Callable[[], ast.expr]] = [lambda: self.visit(node.left), lambda: self.visit(node.right)]
        if operand is not None and choice.branch is not None:
            sides[choice.branch] = lambda: self.branch(operand, copies)
            self.removed |= {id(copies[id(each)]) for each in operand.statements}
            self.constants |= {"dropped_": dropped} if operand.dropout else {}
            self.constants |= {"linear_parts_": linear_parts} if operand.linear else {}

        def call() -> ast.expr:
            norms = [] if norm is None else [self.attribute(norm[0])]
            return ast.Call(ast.Name(name), [ast.Name(self.own), *(side() for side in sides), *norms], [])

        name, normed = f"sum_{index}_", f"normed_{index}_"
        returns_sum = norm is None or not (found.has_inline_norm or choice.norm_replaces_sum)
        self.constants[name] = Sum(index, choice.branch, choice.norm_class, choice.spec, returns_sum, found.is_open)
        if norm is not None and found.has_inline_norm:
            self.replaced[id(copies[id(norm[1])])] = call
            return
        self.replaced[id(node)] = call
        if norm is not None and returns_sum:
            self.replaced[id(copies[id(norm[1])])] = lambda: ast.Name(normed)
            self.added_targets[id(statement)] = normed
        elif norm is not None:
            self.removed.add(id(copies[id(found.block[found.position + 1])]))

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

    def branch(self, operand: Operand, copies: dict[int, Any]) -> ast.expr:
        """(x, bias, p) of the operand."""
        x: ast.expr = self.visit(copies[id(operand.x)])
        parts = [x]
        if operand.linear:
            parts = [ast.Starred(ast.Call(ast.Name("linear_parts_"), [self.attribute(operand.linear), x], []))]
        if operand.dropout:
            return ast.Call(ast.Name("dropped_"), [self.attribute(operand.dropout), *parts], [])
        if not operand.linear:
            parts.append(ast.Constant(None))
        p: ast.expr = ast.Constant(0.0)
        if operand.p is not None and operand.training is not None:
            p = ast.IfExp(copies[id(operand.training)], copies[id(operand.p)], ast.Constant(0.0))
        return ast.Tuple([*parts, p])


def describe(chosen: Sequence[Choice]) -> str:
    """The sums of a forward with several, for the report."""
    counts = Counter(choice.pattern for choice in chosen)
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) if len(chosen) > 1 else ""
