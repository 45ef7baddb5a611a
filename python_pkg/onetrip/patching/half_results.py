"""Norms whose result only matrix products read: under autocast they round it themselves.

    h = self.norm(x)       # float32
    h = self.mlp(h)        # its forward: self.down(act(self.up(h)))

Autocast casts h for the products. Where the source of the block, and of the children that it hands h to, shows that
nothing else reads it, the norm returns it in autocast's dtype: the same bits for the products (by Triton up to the
order of a row's sum), without a float32 tensor that is written once and read once, and without a cast in backward.
"""

from __future__ import annotations

import ast
import dis
import inspect
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from ..ops.common.tracing import is_jit_tracing
from . import calls
from .classes import method_of, plain_forward, returns_as_is
from .forward import Forward, child_at, read_forward
from .report import Unsuitable
from .source import code_in, resolve

if TYPE_CHECKING:
    from .norms import NormSpec

_PRODUCTS = (functional.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm)
"""Functions whose operands autocast casts. So it does those of `@`."""
_SHAPES = frozenset({"shape", "device", "ndim", "is_cuda", "requires_grad"})
_SIZES = frozenset({"size", "dim", "numel"})
_VIEWS = frozenset({"view", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "permute", "contiguous"})
"""Attributes, methods that say nothing of values, and methods that only lay them out anew."""
_STATEMENTS = (
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.If, ast.For, ast.With, ast.Raise, ast.Assert),
    *(ast.Pass, ast.Delete),
)
_OTHER_SCOPES = (
    *(ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.NamedExpr, ast.Await, ast.Yield),
    ast.YieldFrom,
)
"""What a forward may be made of, and what it may not: other scopes may read a name later, or bind it."""
_NAMESPACES = frozenset({"locals", "vars", "eval", "exec", "globals", "_modules", "__dict__", "children", "modules"})
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
        self.forward, self.path, code = forward, path, forward.function.__code__
        self.given: dict[_Given, None] = {}
        self.weights: set[str] = set()
        """Attributes of the module in products with the value."""
        self.local = {*code.co_varnames, *code.co_cellvars}
        nodes = [node for statement in forward.tree.body for node in ast.walk(statement)]
        statements = [node for node in nodes if isinstance(node, ast.stmt)]
        changed = [node for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)]
        if (
            not all(isinstance(node, _STATEMENTS) for node in statements)
            or any(isinstance(node, _OTHER_SCOPES) for node in nodes)
            or any(name in _NAMESPACES or "autocast" in name for name in code.co_names)
            or any(map(forward.child, changed))  # what is called may be another child
        ):
            raise _Escapes
        if path:
            self.check_child(nodes)

    def check_child(self, nodes: list[ast.AST]) -> None:
        """Raise _Escapes if the child, or the module itself, has other names than self."""
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        named = [node for node in nodes if isinstance(node, ast.Attribute) and self.path == self.forward.child(node)]
        if not named or any(id(node) not in called for node in named):
            raise _Escapes
        known = {id(node.value) for node in nodes if isinstance(node, (ast.Attribute, ast.FormattedValue))}
        for node in nodes:
            match node:
                case ast.Call(func=ast.Name(id="hasattr"), args=[module, ast.Constant()]):
                    known.add(id(module))
        if any(
            isinstance(each, ast.Name) and each.id == self.forward.self_name and id(each) not in known for each in nodes
        ):
            raise _Escapes

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
            case ast.For(iter=iterated, body=body, orelse=otherwise):
                self.ends(iterated, names)
                while (after := names | self.block(body, names)) != names:
                    names = after
                return names | self.block(otherwise, names)
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                return names | {target} if self.is_value(value, names) else names - {target}
            case ast.Assign(targets=targets, value=value):
                self.ends(value, names)
                nodes = [node for each in targets for node in ast.walk(each)]
                for each in nodes:
                    if not isinstance(getattr(each, "ctx", None), ast.Store) and isinstance(each, ast.expr):
                        self.ends(each, names)  # written to, or an index
                return names - {each.id for each in nodes if isinstance(each, ast.Name)}
            case ast.Expr(value=value):
                self.is_value(value, names)
                return names
            case ast.Return(value=value):
                if value is not None:
                    self.ends(value, names)
                return names
            case ast.Delete() | ast.Pass():
                return names
        for node in ast.walk(statement):
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
                if self.is_value(left, names) | self.is_value(right, names):
                    self.multiply(left, right)
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
        has_dtype = any(self.is_dtype(each) for _, each in arguments)
        if isinstance(function, ast.Attribute) and function.attr in _SIZES | _VIEWS:
            is_value = self.is_value(function.value, names)
            if read or (is_value and has_dtype):
                raise _Escapes
            return is_value and function.attr in _VIEWS
        self.ends(function, names)
        if read and (
            has_dtype or {"out", "out_dtype"} & {place for place, _ in arguments} or not self.is_product(function)
        ):
            raise _Escapes
        if read:
            self.multiply(*(each for _, each in arguments))
        return False

    def multiply(self, *operands: ast.expr) -> None:
        """Note what else takes part in a product: it decides what the product is."""
        self.weights |= {*filter(None, map(self.forward.child, operands))}

    def is_dtype(self, expression: ast.expr) -> bool:
        is_attribute = isinstance(expression, ast.Attribute) and expression.attr == "dtype"
        return is_attribute or isinstance(resolve(expression, self.forward.globals), torch.dtype)

    def is_product(self, function: ast.expr) -> bool:
        found = resolve(function, self.forward.globals)
        is_local = any(isinstance(node, ast.Name) and node.id in self.local for node in ast.walk(function))
        return not is_local and any(found is each for each in _PRODUCTS)


@cache
def _readers_of(cls: Any, function: Any, path: str, parameter: str) -> tuple[tuple[_Given, ...], frozenset[str]] | None:
    """The children that a class's forward (function) hands the result of its child at the path, or else a parameter,
    and the attributes in products with it; None where something else than them may read it."""
    if (cls.__call__ is not nn.Module.__call__ and not path) or not returns_as_is(plain_forward(cls)):
        return None
    if path and any(path.rpartition(".")[2] in reads.of_self for reads in _reads(cls)):
        return None
    forward = read_forward(function)
    if isinstance(forward, Unsuitable):
        return None
    try:
        flow = _Flow(forward, path)
        flow.block(forward.tree.body, frozenset({parameter} if parameter else ()))
    except _Escapes:
        return None
    return tuple(flow.given), frozenset(flow.weights)


class _Reads(NamedTuple):
    """Attributes that the functions of a class read."""

    of_self: frozenset[str]
    """In other functions than the forward; strings that may be such names, too."""
    of_others: frozenset[str]
    """Of anything else than self: `self.block.norm(x)`."""


@cache
def _reads_of(base: Any, forward: Any) -> _Reads:
    """By the functions that a class itself defines, of which forward is one."""
    of_self: set[str] = set()
    of_others: set[str] = set()
    for name, each in vars(base).items():
        for function in (each, *(getattr(each, part, None) for part in ("__func__", "func", "fget", "fset", "fdel"))):
            function = inspect.unwrap(function) if callable(function) else None
            code = getattr(function, "__code__", None)
            for one in (code, *code_in(code)) if isinstance(code, CodeType) else ():
                own, others = _reads_in(one)
                of_others |= others
                if name != "forward":
                    of_self |= own | {text for text in one.co_consts if isinstance(text, str)}
    return _Reads(frozenset(of_self), frozenset(of_others))


def _reads_in(code: CodeType) -> tuple[set[str], set[str]]:
    """(Attributes read of self, of anything else)."""
    own: set[str] = set()
    others: set[str] = set()
    last: Any = None
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            (own if last == "self" else others).add(str(each.argval))
        if each.opname not in ("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"):
            last = each.argval if each.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) else None
            last = last[-1] if isinstance(last, tuple) else last
    return own, others


def _reads(cls: Any) -> Iterator[_Reads]:
    """Those of the class and of all its bases but nn.Module."""
    return (_reads_of(base, vars(base).get("forward")) for base in cls.__mro__ if base not in (nn.Module, object))


def _parameter(cls: Any, argument: int | str) -> str | None:
    """The name of the parameter of a class's forward that an argument is."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    if isinstance(argument, int):
        positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        return positional[argument].name if argument < len(positional) else None
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return argument if argument in named else None


class _Step(NamedTuple):
    """A child that makes a norm's result or is handed it, by where it is found."""

    parent: weakref.ref[nn.Module]
    name: str
    child: weakref.ref[nn.Module] | None
    """None where there is no such child."""
    cls: Any
    function: Any
    """Of the child."""

    @classmethod
    def to(cls, parent: nn.Module, name: str, child: nn.Module | None) -> _Step:
        if child is None:
            return cls(weakref.ref(parent), name, None, None, None)
        return cls(weakref.ref(parent), name, weakref.ref(child), _class(child), _class(child).forward)

    def is_as_found(self) -> bool:
        parent = self.parent()
        if parent is None or self.name in parent.__dict__:
            return False
        child = parent._modules.get(self.name)
        if child is None or self.child is None:
            return child is self.child
        if child is not self.child() or self.cls.forward is not self.function or not calls.is_plain(child, self.cls):
            return False
        return _has_plain_parameters(child)


def _has_plain_parameters(module: nn.Module) -> bool:
    """Whether products of them are torch's: of no subclass, as torchao's."""
    tensors = *module._parameters.values(), *module._buffers.values()
    return all(each is None or type(each) in (nn.Parameter, Tensor, FakeTensor) for each in tensors)


def _steps(module: nn.Module, path: str, parameter: str, depth: int = 0) -> Iterator[_Step]:
    """All children that are handed the value. Raises _Escapes where something else may read it."""
    cls, found = _class(module), None
    if depth < _DEPTH:
        found = _readers_of(cls, method_of(cls, "forward"), path, parameter)
    if found is None or not found[1] <= {*module._parameters, *module._buffers}:
        raise _Escapes
    for child_path, argument in found[0]:
        *above, name = child_path.split(".")
        parent = child_at(module, ".".join(above)) if above else module
        if parent is None:
            raise _Escapes
        if not hasattr(parent, name):  # of another configuration
            yield _Step.to(parent, name, None)
            continue
        child = parent._modules.get(name)
        taken = None if child is None else _parameter(_class(child), argument)
        if child is None or taken is None:
            raise _Escapes
        yield _Step.to(parent, name, child)
        yield from _steps(child, "", taken, depth + 1)


class _Known(NamedTuple):
    holder: weakref.ref[nn.Module]
    cls: Any
    function: Any
    """Of what holds the norm."""
    steps: tuple[_Step, ...]

    def is_as_found(self) -> bool:
        holder = self.holder()
        if holder is None or _class(holder) is not self.cls or "forward" in holder.__dict__:
            return False
        if self.cls.forward is not self.function or not _has_plain_parameters(holder):
            return False
        return all(step.is_as_found() for step in self.steps)


_known: dict[int, _Known] = {}
"""id(norm) -> who is handed its result, of norms whose result only products read."""


def _listed(module: nn.Module) -> Iterator[Any]:
    """What is in lists, tuples and dictionaries of the module's own."""
    for name, value in vars(module).items():
        if isinstance(value, (list, tuple, dict)) and name != "_modules":
            yield from value.values() if isinstance(value, dict) else value


def find_half_results(model: nn.Module, norms: Iterable[nn.Module]) -> None:
    """Find those of a model's norms whose result only products read."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for holder in model.modules():
        for name, child in holder._modules.items():
            holders.setdefault(id(child), []).append((holder, name))
    classes = {_class(module) for module in model.modules()}
    read_elsewhere = {name for cls in classes for reads in _reads(cls) for name in reads.of_others}
    listed = {id(each) for module in model.modules() for each in _listed(module)}
    for norm in norms:
        held = holders.get(id(norm), [])
        was_known = _known.pop(id(norm), None) is not None
        if len(held) != 1 or held[0][1] in read_elsewhere or id(norm) in listed:
            continue
        holder, name = held[0]
        try:
            steps = _Step.to(holder, name, norm), *_steps(holder, name, "")
        except Exception:  # _Escapes, or what a property raises
            continue
        _known[id(norm)] = _Known(weakref.ref(holder), _class(holder), _class(holder).forward, steps)
        if not was_known:
            calls.forget_with(norm, _known, id(norm))


def half_result(norm: nn.Module, spec: NormSpec, x: Tensor, z_dtype: torch.dtype | None = None) -> torch.dtype | None:
    """The dtype in which a norm may return what else is float32; None where it must be as ever. z_dtype: of what it
    normalises, if that is a sum with x."""
    if torch.compiler.is_compiling() or (z_dtype or x.dtype) != torch.float32 or is_jit_tracing():
        return None
    known = _known.get(id(norm))
    dtype = None if known is None else calls.autocast_dtype(x)
    if known is None or dtype is None:
        return None
    weight: Tensor | None = None if spec.weight is None else getattr(norm, spec.weight)
    return dtype if (weight is None or weight.dtype == torch.float32) and known.is_as_found() else None
