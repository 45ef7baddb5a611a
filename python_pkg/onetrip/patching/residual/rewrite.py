"""A forward with its sums rewritten: each becomes a call of a Sum, everything else stays as it was written."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..calls import Branch, dropped, dropped_linear, linear_parts, undropped
from ..linear.readers import multiplied
from ..links import Sum
from ..rewriting import Rewriting
from .read import Operand

if TYPE_CHECKING:
    from .choose import Choice


IN_BRANCHES: dict[str, Any] = {
    "dropped_": dropped,
    "dropped_linear_": partial(dropped_linear, under_autocast=multiplied),
    "linear_parts_": partial(linear_parts, under_autocast=multiplied),
    "undropped_": undropped,
    "Branch_": Branch,
}
"""What is called for a Branch, by its name in a rewritten forward."""


class SumRewriting(Rewriting):
    """A copy of a forward with sums and their branches in place of additions."""

    def put_sum(self, index: int, choice: Choice) -> None:
        """A Sum in place of an addition and the norm that follows."""
        found, operand, norm = choice.found, choice.operand, choice.norm
        left, right = self.copy_of(found.node.left), self.copy_of(found.node.right)
        sides: list[Callable[[], ast.expr]] = [lambda: self.visit(left), lambda: self.visit(right)]
        if operand is not None and choice.branch is not None:
            sides[choice.branch] = self.branch(operand)
        if operand is not None and choice.tail is not None:
            self.put_tail(f"open_{index}_", choice.tail, operand)

        def call() -> ast.expr:
            norms = [] if norm is None else [self.attribute(norm[0])]
            return self.call(name, *(side() for side in sides), *norms)

        name, normed = f"sum_{index}_", f"normed_{index}_"
        returns_sum = norm is None or not (found.has_inline_norm or choice.norm_replaces_sum)
        self.constants[name] = Sum(index, choice.branch, choice.norm_class, choice.spec, returns_sum, found.is_open)
        if norm is not None and found.has_inline_norm:
            self.replace(norm[1], call)
            return
        self.replace(found.node, call)
        if norm is not None and returns_sum:
            self.replace(norm[1], lambda: ast.Name(normed))
            self.added_targets[id(self.copy_of(found.place.statement))] = normed
        elif norm is not None:
            self.remove(found.place.following[0])

    def branch(self, operand: Operand) -> Callable[[], ast.expr]:
        """Makes a Branch of the operand, once it is wanted."""
        self.remove(*operand.statements)

        def called(name: str, *arguments: ast.expr) -> ast.Call:
            self.constants[name] = IN_BRANCHES[name]
            return ast.Call(ast.Name(name), list(arguments), [])

        def made() -> ast.expr:
            x: ast.expr = self.visit(self.copy_of(operand.x))
            if operand.opened and not operand.is_dropped:
                return x
            if operand.linear and operand.dropout:
                return called("dropped_linear_", self.attribute(operand.dropout), self.attribute(operand.linear), x)
            parts = [x]
            if operand.linear:
                parts = [ast.Starred(called("linear_parts_", self.attribute(operand.linear), x))]
            elif operand.opened:
                parts = [ast.Starred(called("undropped_", x))]
            if operand.dropout:
                return called("dropped_", self.attribute(operand.dropout), *parts)
            if len(parts) == 1 and not isinstance(parts[0], ast.Starred):
                parts.append(ast.Constant(None))
            return called("Branch_", *parts, self.probability(operand.p, operand.training))

        return made
