"""Norms whose result only matrix products read: under autocast they round it themselves.

    h = self.norm(x)       # float32
    h = self.mlp(h)        # its forward: self.down(act(self.up(h)))

Autocast casts h for the products. Where the source of the block, and of the children that it hands h to, shows that
nothing else reads it, the norm returns it in autocast's dtype: the same bits for the products, without a float32 tensor
that is written once and read once, and without a cast in backward.
"""

from __future__ import annotations

import ast
import inspect
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.common.tracing import is_jit_tracing
from . import calls
from .classes import method_of, plain_forward, returns_as_is
from .forward import Forward, child_at, read_forward
from .report import Unsuitable
from .source import resolve

if TYPE_CHECKING:
    from .norms import NormSpec

_PRODUCTS = (functional.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm)
"""Functions whose operands autocast casts. So it does those of `@`."""
_SHAPES = frozenset({"shape", "device", "ndim", "is_cuda", "requires_grad"})
_SIZES = frozenset({"size", "dim", "numel"})
_VIEWS = frozenset({"view", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "permute", "contiguous"})
"""Attributes, methods that say nothing of values, and methods that only lay them out anew."""
_DEPTH = 8


def _class(module: nn.Module) -> Any:
    return calls.original_class(type(module))


class _Given(NamedTuple):
    """A child that is called with a value, and which argument it is."""

    path: str
    argument: int | str


class _Escapes(Exception):
    """Something other than a product may read the value."""


class _Flow:
    """Follows a value through a forward, under all names that it may have."""

    def __init__(self, forward: Forward, path: str) -> None:
        """path: of a child whose result is the value; empty for one that comes in as a parameter."""
        self.forward, self.path = forward, path
        self.given: dict[_Given, None] = {}
        nodes = list(ast.walk(forward.tree))
        self.local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        if any(isinstance(node, (ast.FunctionDef, ast.Lambda)) and node is not forward.tree for node in nodes):
            raise _Escapes  # what they read, they may read later
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        named = [node for node in nodes if path and isinstance(node, ast.Attribute) and path == forward.child(node)]
        if (path and not named) or any(id(node) not in called for node in named):
            raise _Escapes  # others call the child, or it has other names

    def block(self, statements: list[ast.stmt], names: frozenset[str]) -> frozenset[str]:
        """The value's names after the statements. names: those before."""
        for statement in statements:
            names = self.statement(statement, names)
        return names

    def statement(self, statement: ast.stmt, names: frozenset[str]) -> frozenset[str]:
        match statement:
            case ast.If(test=test, body=then, orelse=otherwise):
                self.ends(test, names)
                return self.block(then, names) | self.block(otherwise, names)
            case ast.For(body=body, orelse=otherwise) | ast.While(body=body, orelse=otherwise):
                self.ends(statement.iter if isinstance(statement, ast.For) else statement.test, names)
                while (after := names | self.block(body, names)) != names:
                    names = after
                return names | self.block(otherwise, names)
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                return names | {target} if self.is_value(value, names) else names - {target}
            case ast.Assign(targets=targets, value=value):
                self.ends(value, names)
                bound = {node.id for each in targets for node in ast.walk(each) if isinstance(node, ast.Name)}
                stored = {
                    node.id
                    for each in targets
                    for node in ast.walk(each)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                }
                if names & (bound - stored):
                    raise _Escapes  # written to
                return names - stored
            case ast.Expr(value=value):
                self.is_value(value, names)
                return names
            case ast.Return(value=value):
                if value is not None:
                    self.ends(value, names)
                return names
            case ast.Delete() | ast.Pass():
                return names
        for node in ast.walk(statement):  # in a with block autocast may be off
            if isinstance(node, ast.Name) and node.id in names:
                raise _Escapes
            if isinstance(node, ast.Call) and self.path and self.forward.child(node.func) == self.path:
                raise _Escapes
        return names

    def ends(self, node: ast.AST, names: frozenset[str]) -> None:
        """Raise _Escapes if what the node computes may be the value."""
        if self.is_value(node, names):
            raise _Escapes

    def is_value(self, node: ast.AST, names: frozenset[str]) -> bool:
        """Whether the node may compute the value. Raises _Escapes if it may read it otherwise than products do."""
        match node:
            case ast.Name(id=name):
                return name in names
            case ast.Attribute(value=inner, attr=attribute):
                if self.is_value(inner, names) and attribute not in _SHAPES:
                    raise _Escapes
                return False
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                self.is_value(left, names)
                return False
            case ast.IfExp(test=test, body=one, orelse=other):
                self.ends(test, names)
                return self.is_value(one, names) | self.is_value(other, names)
            case ast.BinOp(op=ast.MatMult(), left=left, right=right):
                self.is_value(left, names)
                self.is_value(right, names)
                return False
            case ast.Call():
                return self.is_value_called(node, names)
        for child in ast.iter_child_nodes(node):
            self.ends(child, names)
        return False

    def is_value_called(self, call: ast.Call, names: frozenset[str]) -> bool:
        function, path = call.func, self.forward.child(call.func)
        arguments = [*enumerate(call.args), *((each.arg, each.value) for each in call.keywords)]
        read = [place for place, each in arguments if self.is_value(each, names)]
        if path:
            if read and (path == self.path or None in read or any(isinstance(each, ast.Starred) for each in call.args)):
                raise _Escapes
            self.given |= {_Given(path, place): None for place in read if place is not None}
            return path == self.path
        if isinstance(function, ast.Attribute) and function.attr in _SIZES | _VIEWS:
            is_value = self.is_value(function.value, names)
            if read:
                raise _Escapes
            return is_value and function.attr in _VIEWS
        self.ends(function, names)
        if read and ("out" in read or not self.is_product(function)):
            raise _Escapes
        return False

    def is_product(self, function: ast.expr) -> bool:
        found = resolve(function, self.forward.globals)
        is_global = not any(isinstance(node, ast.Name) and node.id in self.local for node in ast.walk(function))
        return is_global and any(found is each for each in _PRODUCTS)


@cache
def _readers_of(cls: Any, path: str, parameter: str) -> tuple[_Given, ...] | None:
    """The children that a class's forward hands the result of its child at the path, or else a parameter; None where
    something else than them and products may read it."""
    if (cls.__call__ is not nn.Module.__call__ and not path) or not returns_as_is(plain_forward(cls)):
        return None
    if path and path.rpartition(".")[2] in _names_in_other_methods(cls):
        return None
    forward = read_forward(method_of(cls, "forward"))
    if isinstance(forward, Unsuitable):
        return None
    try:
        flow = _Flow(forward, path)
        flow.block(forward.tree.body, frozenset({parameter} if parameter else ()))
    except _Escapes:
        return None
    return tuple(flow.given)


def _names_in_other_methods(cls: Any) -> set[str]:
    """The attributes that methods of the class read, besides its forward."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    methods = [(name, each) for base in bases for name, each in vars(base).items() if isinstance(each, FunctionType)]
    return {read for name, each in methods if name not in ("forward", "__init__") for read in each.__code__.co_names}


def _parameter(cls: Any, argument: int | str) -> str | None:
    """The name of the parameter of a class's forward that an argument is."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    if isinstance(argument, int):
        named = parameters[argument] if argument < len(parameters) else None
    else:
        named = next((each for each in parameters if each.name == argument), None)
    return None if named is None or named.kind in (named.VAR_POSITIONAL, named.VAR_KEYWORD) else named.name


class _Step(NamedTuple):
    """A child that makes a norm's result or is handed it, by where it is found."""

    parent: weakref.ref[nn.Module]
    name: str
    cls: type | None
    """None where there is no such child."""

    def is_as_found(self) -> bool:
        parent = self.parent()
        child = None if parent is None else parent._modules.get(self.name)
        return child is None if self.cls is None else child is not None and calls.is_plain(child, self.cls)


def _steps(module: nn.Module, path: str, parameter: str, depth: int = 0) -> Iterator[_Step]:
    """All children that are handed the value. Raises _Escapes where something else may read it."""
    given = _readers_of(_class(module), path, parameter) if depth < _DEPTH else None
    if given is None:
        raise _Escapes
    for child_path, argument in given:
        *above, name = child_path.split(".")
        parent = child_at(module, ".".join(above)) if above else module
        if parent is None:
            raise _Escapes
        if not hasattr(parent, name):  # of another configuration
            yield _Step(weakref.ref(parent), name, None)
            continue
        child = parent._modules.get(name)
        if child is None:
            raise _Escapes
        cls = _class(child)
        taken = _parameter(cls, argument)
        if taken is None:
            raise _Escapes
        yield _Step(weakref.ref(parent), name, cls)
        yield from _steps(child, "", taken, depth + 1)


class _Known(NamedTuple):
    holder: weakref.ref[nn.Module]
    cls: type
    """Of what holds the norm."""
    steps: tuple[_Step, ...]

    def is_as_found(self) -> bool:
        holder = self.holder()
        if holder is None or _class(holder) is not self.cls or "forward" in holder.__dict__:
            return False
        return all(step.is_as_found() for step in self.steps)


_known: dict[int, _Known] = {}
"""id(norm) -> who is handed its result, of norms whose result only products read."""


def find_half_results(model: nn.Module, norms: Iterable[nn.Module]) -> None:
    """Find those of a model's norms whose result only products read."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for holder in model.modules():
        for name, child in holder._modules.items():
            holders.setdefault(id(child), []).append((holder, name))
    for norm in norms:
        held = holders.get(id(norm), [])
        was_known = _known.pop(id(norm), None) is not None
        if len(held) != 1:
            continue
        holder, name = held[0]
        try:
            steps = tuple(_steps(holder, name, ""))
        except _Escapes:
            continue
        place = weakref.ref(holder)
        _known[id(norm)] = _Known(place, _class(holder), (_Step(place, name, _class(norm)), *steps))
        if not was_known:
            weakref.finalize(norm, _known.pop, id(norm), None).atexit = False


def half_result(norm: nn.Module, spec: NormSpec, x: Tensor, z_dtype: torch.dtype | None = None) -> torch.dtype | None:
    """The dtype in which a norm may return what else is float32; None where it must be as ever. z_dtype: of what it
    normalises, if that is a sum with x."""
    if torch.compiler.is_compiling() or (z_dtype or x.dtype) != torch.float32 or is_jit_tracing():
        return None
    known = _known.get(id(norm))
    if known is None or x.is_meta or not calls.is_autocasting(x):
        return None
    weight: Tensor | None = None if spec.weight is None else getattr(norm, spec.weight)
    if weight is not None and weight.dtype != torch.float32:
        return None
    return torch.get_autocast_dtype(x.device.type) if known.is_as_found() else None
