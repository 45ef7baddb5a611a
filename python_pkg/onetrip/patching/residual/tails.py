"""Children whose forward ends in a dropout or a linear layer, and whose result the parent only adds to a residual.

    h = self.dense(h)
    h = self.dropout(h)           ->      return dropped_linear_(self.dropout, self.dense, h)
    return h

This second forward (or the second form of a method that the parent's forward calls) returns a Branch: its caller still
has to add the bias and to apply the dropout. The parent's rewritten sum does so, where calling the second forward is
the same as calling the child (calls.is_plain).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cache
from inspect import getattr_static
from types import FunctionType
from typing import Any

from torch import nn

from ..calls import is_plain, original_class
from ..classes import Rewrite, method_of, plain_forward, returns_as_is, rewrapped
from ..forward import Forward, Place, child_at, read_forward
from ..report import Unsuitable
from ..source import define, own_variables
from .read import Operand, SumReader
from .rewrite import IN_BRANCHES, SumRewriting


@dataclass(frozen=True)
class Tail:
    """The second forward of a class, original or patched; or the second form of a method that a forward calls."""

    owner: type
    method: str
    function: Callable[..., Any]
    drops: bool
    linear: bool
    """Whether a dropout and a bias are left to the caller."""
    dropouts: tuple[str, ...]
    """Paths of the children whose dropout is left to the caller."""

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """module(*args, **kwargs), or a call of its method, with a Branch for the result where that is the same."""
        if self.method != "forward":
            if self.method in module.__dict__:
                return getattr(module, self.method)(*args, **kwargs)
        elif not (type(module) is self.owner and is_plain(module, original_class(self.owner))):
            return module(*args, **kwargs)
        return self.function(module, *args, **kwargs)


@dataclass(eq=False)
class Returns:
    """The values that a method returns first or alone: (value, ways to read it)."""

    cls: Any
    forward: Forward
    constants: tuple[tuple[str, Any], ...]
    """Names in the forward, other than globals."""
    found: tuple[tuple[ast.expr, list[Operand]], ...]
    in_tuple: bool


@cache
def read_returns(cls: Any, name: str) -> Returns | None:
    """What a method of the class's instances returns; None where a second form could not replace a call of the first.

    Cached: parents of one class share a rewritten class only if they call the same functions.
    """
    original = original_class(cls)
    outer = plain_forward(original)
    is_called = outer is original.forward and returns_as_is(outer) and original.__call__ is nn.Module.__call__
    if not isinstance(getattr_static(original, name, None), FunctionType) or (name == "forward" and not is_called):
        return None
    rewrite: Rewrite | None = getattr(cls, "_onetrip_rewrite", None)
    if rewrite is not None and rewrite.around and name == "forward":
        return None
    source = "" if rewrite is None else dict(rewrite.sources).get(name, "")
    forward = read_forward(method_of(original, name), source, name)
    if isinstance(forward, Unsuitable) or own_variables(forward.function) & IN_BRANCHES.keys():
        return None
    reader = SumReader(forward)
    found, kinds = [], set()
    for place, value in returned_first(forward.tree.body):
        kinds.add(value is not place.statement.value)  # type: ignore[attr-defined]
        found.append((value, reader.readings(value, place)))
    constants = rewrite.constants if rewrite is not None and source else ()
    return Returns(cls, forward, constants, tuple(found), kinds.pop()) if len(kinds) == 1 else None


def returned_first(block: list[ast.stmt]) -> Iterator[tuple[Place, ast.expr]]:
    """What a block's return statements return first or alone: (statement, value)."""
    for position, statement in enumerate(block):
        match statement:
            case ast.Return(value=ast.Tuple(elts=[ast.expr() as value, *_])) | ast.Return(value=ast.expr() as value):
                if not isinstance(value, ast.Starred):
                    yield Place(block, position, in_loop=False), value
            case ast.If(body=then, orelse=otherwise):  # a caller is outside of any with block
                yield from returned_first(then)
                yield from returned_first(otherwise)


Make = Callable[[Any, Operand], Callable[[], ast.expr]]
"""(rewriting, operand) -> what makes the expression that is returned in the operand's place."""


def tail_of(
    module: nn.Module,
    operand: Operand,
    closed: Container[int],
    takes: Callable[[nn.Module, Operand], bool],
    make: Make = SumRewriting.branch,
) -> Tail | None:
    """The second form of the child, or of the module's own method, that makes the operand; None if nothing is left to
    the caller.

    closed: ids of children that stay as they are. takes: whether that is so of a way to read a value, in the child.
    """
    child, name = child_at(module, operand.opened), "forward"
    if child is None and operand.opened not in vars(module):
        child, name = module, operand.opened
    if child is None or id(child) in closed:
        return None
    cls: Any = type(child) if name == "forward" else original_class(type(child))
    returns = read_returns(cls, name)
    if returns is None or returns.in_tuple != operand.in_tuple:
        return None
    read = tuple(
        next((each for each in ways if each.call is None and takes(child, each)), None) for _, ways in returns.found
    )
    return open_tail(returns, read, make) if any(read) else None


@cache
def open_tail(returns: Returns, operands: tuple[Operand | None, ...], make: Make) -> Tail:
    """The second form. operands: how to read each value; None for one that is returned as it is."""
    forward = returns.forward
    rewriting = SumRewriting(forward)
    for (value, _), operand in zip(returns.found, operands, strict=True):
        if operand is not None:
            rewriting.replace(value, make(rewriting, operand))
    source, names = rewriting.source(), dict(returns.constants) | rewriting.constants
    function = define(forward.function, source, names, "forward", "dropout_add")
    if forward.method == "forward":
        function = rewrapped(plain_forward(original_class(returns.cls)), function)
    read = [operand for operand in operands if operand is not None]
    drops, linear = any(each.is_dropped for each in read), any(each.linear for each in read)
    dropouts = tuple(each.dropout for each in read if each.dropout)
    return Tail(returns.cls, forward.method, function, drops, linear, dropouts)
