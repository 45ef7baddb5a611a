"""Where the values of a forward go: which ones something else may keep, hook or write to.

A sum and its norm, fused, are one autograd node with two results. The gradient of the sum alone is then not the whole
one, which hooks and other owners of the sum would see.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from ..forward import Forward
from ..source import resolve

_CONTAINER_METHODS = frozenset({*vars(list), *vars(dict), *vars(set)})
_HARMLESS = ast.BinOp, ast.UnaryOp, ast.Compare, ast.Attribute, ast.Expr
"""Nodes that read a tensor for a new value: nothing keeps the tensor itself."""
_FOLLOWED = ast.Tuple, ast.List, ast.Dict, ast.Starred, ast.Subscript, ast.IfExp, ast.keyword
"""Nodes that pass a tensor on to the node around them: Values.parts follows it from there."""


class Values:
    """The values of one forward, by the names that they are read from."""

    def __init__(self, forward: Forward) -> None:
        self.forward, self.nodes = forward, list(ast.walk(forward.tree))
        self.assigned: dict[str, list[ast.expr]] = {}
        """name -> what is assigned or added to it."""
        for node in self.nodes:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AugAssign(target=ast.Name(id=name), value=value)
                ):
                    self.assigned.setdefault(name, []).append(value)
        outer = (node.names for node in self.nodes if isinstance(node, (ast.Global, ast.Nonlocal)))
        self.outer = {name for names in outer for name in names}

    @cached_property
    def returned(self) -> set[ast.Name]:
        """Where a name is read whose value the forward may return, as it is or in a container."""
        return self.sources((node.value for node in self.nodes if isinstance(node, ast.Return)), slices=False)

    @cached_property
    def exposed(self) -> set[ast.Name]:
        """Where a name is read whose value the forward may return, store or hook, or give to a function that is neither
        torch's nor the module's: that one may keep it or write to it. So may any read in a form that is not listed."""
        return self.sources(self.exposing())

    def sources(self, values: Iterable[ast.expr | None], slices: bool = True) -> set[ast.Name]:
        """Where the names are read that the values may come from, also by way of other names."""
        found: set[ast.Name] = set()
        names: set[str] = set()
        left = list(values)
        while left:
            parts = set(self.parts(left.pop(), slices))
            found |= parts
            left += [value for name in {part.id for part in parts} - names for value in self.assigned.get(name, ())]
            names |= {part.id for part in parts}
        return found

    def parts(self, value: ast.expr | None, slices: bool = True) -> Iterator[ast.Name]:
        """Names whose tensor an expression may be, view or hold. slices: also where it is a part of that tensor."""
        inner: list[ast.expr] = []
        match value:
            case ast.Name():
                yield value
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
                inner = parts
            case ast.Starred(value=part):
                inner = [part]
            case ast.Subscript(value=part) if slices:
                inner = [part]
            case ast.IfExp(body=left, orelse=right):
                inner = [left, right]
            case ast.BinOp(left=left, right=right) if self.is_container(left) or self.is_container(right):
                inner = [left, right]
            case ast.Call(func=function, keywords=keywords) if not self.forward.child(function):
                inner = [keyword.value for keyword in keywords]  # Output(hidden_states=x)
                if isinstance(function, ast.Attribute) and function.attr not in ("size", "dim"):
                    inner.append(function.value)  # x.view(...)
        for part in inner:
            yield from self.parts(part, slices)

    def is_container(self, value: ast.expr) -> bool:
        values = self.assigned.get(value.id, []) if isinstance(value, ast.Name) else [value]
        return any(isinstance(each, (ast.Tuple, ast.List)) for each in values)

    def exposing(self) -> Iterator[ast.expr]:
        """Expressions whose value may be kept, hooked or written to: all but those in the listed forms."""
        for node in self.nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr="register_hook" | "retain_grad")):
                    yield owner
                case ast.Call(func=function, args=args, keywords=keywords):
                    if not self.is_known(function):
                        yield from (*args, *(keyword.value for keyword in keywords))
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)) if (
                    name not in self.outer
                ):
                    pass  # followed by sources
                case _ if not isinstance(node, (*_HARMLESS, *_FOLLOWED)):
                    for child in ast.iter_child_nodes(node):
                        if isinstance(child, ast.expr) and isinstance(getattr(child, "ctx", ast.Load()), ast.Load):
                            yield child

    def is_known(self, function: ast.expr) -> bool:
        """Whether it is a child, or a method of the module, of torch or of a tensor."""
        known = resolve(function, self.forward.globals)
        if known is not None:
            name = getattr(known, "__name__", "")
            return known is getattr(torch, name, None) or known is getattr(functional, name, None)
        match function:
            case ast.Name(id=name):
                return name in ("isinstance", "len")
            case ast.Attribute(attr=name):
                return name not in _CONTAINER_METHODS and (self.forward.child(function) != "" or hasattr(Tensor, name))
        return False
