"""Children whose forward ends in a dropout or a linear layer, and whose result the parent only adds to a residual.

    h = self.dense(h)
    h = self.dropout(h)           ->      return dropped_(self.dropout, *linear_parts_(self.dense, h))
    return h

This second forward returns a Branch: its caller still has to add the bias and to apply the dropout. The parent's
rewritten sum does so, where calling the second forward is the same as calling the child (calls.is_plain).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from ..calls import is_plain, original_class
from ..classes import Rewrite, plain_forward
from ..source import is_source_of, parse
from .read import Operand, Reader
from .rewrite import Rewriting


@dataclass(frozen=True)
class Tail:
    """The second forward of a class, original or patched."""

    owner: type
    forward: Callable[..., Any]
    drops: bool
    linear: bool
    """Whether a dropout and a bias are left to the caller."""
    in_tuple: bool
    """Whether the Branch is the first element of a tuple."""

    def __call__(self, child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """child(*args, **kwargs), with a Branch for the result where hooks and wrappers allow it."""
        if type(child) is self.owner and is_plain(child, original_class(self.owner)):
            return self.forward(child, *args, **kwargs)
        return child(*args, **kwargs)


@dataclass(eq=False)
class Returns:
    """The values that a forward returns first or alone: (value, ways to read it)."""

    cls: Any
    tree: ast.FunctionDef
    rewrite: Rewrite | None
    """Of a patched class."""
    found: tuple[tuple[ast.expr, list[Operand]], ...]
    in_tuple: bool


@cache
def read_returns(cls: Any) -> Returns | None:
    """What instances of a class return; None where a second forward could not replace a call of the first. Cached:
    parents of one class share a rewritten class only if they call the same functions."""
    original = original_class(cls)
    forward = getattr(original, "forward", None)
    rewrite: Rewrite | None = getattr(cls, "_onetrip_rewrite", None)
    if forward is None or plain_forward(original) is not forward or original.__call__ is not nn.Module.__call__:
        return None
    tree: Any = parse(forward)
    if rewrite is not None and rewrite.in_module:
        tree = ast.parse(rewrite.source).body[0]
    elif rewrite is not None or not isinstance(tree, ast.FunctionDef) or not is_source_of(tree, forward):
        return None
    reader = Reader(forward, tree)
    found, kinds = [], set()
    for block, position, statement in _returns(tree.body):
        in_tuple = isinstance(statement.value, ast.Tuple)
        value = statement.value.elts[0] if isinstance(statement.value, ast.Tuple) else statement.value
        if value is not None and not isinstance(value, ast.Starred):
            kinds.add(in_tuple)
            found.append((value, reader.readings(value, block, position, False)))
    return Returns(cls, tree, rewrite, tuple(found), kinds.pop()) if len(kinds) == 1 else None


def _returns(block: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int, ast.Return]]:
    for position, statement in enumerate(block):
        if isinstance(statement, ast.Return):
            yield block, position, statement
        elif isinstance(statement, ast.If):  # a caller is outside of any with block
            yield from _returns(statement.body)
            yield from _returns(statement.orelse)


@cache
def open_tail(returns: Returns, operands: tuple[Operand | None, ...]) -> Tail:
    """The second forward. operands: how to read each value; None for one that is returned as it is."""
    rewriting = Rewriting(returns.tree)
    for (value, _), operand in zip(returns.found, operands, strict=True):
        if operand is not None:
            rewriting.put_branch(value, operand)
    source, before = rewriting.source(), () if returns.rewrite is None else returns.rewrite.constants
    rewrite = Rewrite("dropout_add", source, (*before, *rewriting.constants.items()), in_module=True)
    read = [operand for operand in operands if operand is not None]
    drops, linear = any(each.is_dropped for each in read), any(each.linear for each in read)
    return Tail(returns.cls, rewrite.compile(original_class(returns.cls)), drops, linear, returns.in_tuple)
