"""A forward as data: its syntax tree, and what patterns ask about the children that it calls and the names it binds.

What a child is (a dropout, a norm, a linear layer) is a claim: each pattern checks it for one instance.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional

from .calls import is_transposed, original_class
from .report import Unsuitable
from .source import code_in, deep_copy, parse, resolve


def read_forward(
    function: Any, source: str = "", method: str = "forward", may_call_super: bool = False
) -> Forward | Unsuitable:
    """A function as data, if its source is the code that runs. source: of its rewrite, if that is to be read.
    method: its name in its class. may_call_super: whether it may call what it overrides."""
    tree: Any = ast.parse(source).body[0] if source else parse(function, may_call_super)
    if isinstance(tree, Unsuitable):
        return tree
    if not tree.args.args:
        return Unsuitable("unknown_forward", "has no parameters")
    for node in ast.walk(tree):
        match node:
            case (
                ast.Call(func=ast.Name(id="locals" | "vars" | "dir" as name), args=[])
                | ast.Call(func=ast.Name(id="eval" | "exec" as name))
            ):
                return Unsuitable("unknown_forward", f"calls {name}(), which sees its local names")
    return Forward(function, tree, method)


@dataclass(eq=False)
class Forward:
    """A forward, or another method. A name's value is followed within one block of statements."""

    function: Any
    tree: ast.FunctionDef
    method: str = "forward"

    @property
    def globals(self) -> dict[str, Any]:
        found: dict[str, Any] = self.function.__globals__
        return found

    @property
    def self_name(self) -> str:
        return self.tree.args.args[0].arg

    def child(self, function: ast.expr) -> str:
        """The path of self.a.b; empty for anything else."""
        match function:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == self.self_name:
                return name
            case ast.Attribute(value=inner, attr=name) if (path := self.child(inner)) != "":
                return f"{path}.{name}"
        return ""

    def called(self, expression: ast.expr) -> tuple[str, ast.expr] | None:
        """(path, argument) of a child's call with one argument."""
        match expression:
            case ast.Call(func=function, args=[argument], keywords=[]) if (path := self.child(function)) != "":
                return None if isinstance(argument, ast.Starred) else (path, argument)
        return None

    def resolved(self, function: ast.expr) -> Any:
        """The global that a dotted name stands for; None for local names."""
        is_local = self._locals & {each.id for each in ast.walk(function) if isinstance(each, ast.Name)}
        return None if is_local else resolve(function, self.globals)

    def evaluated(self, expression: ast.expr, module: nn.Module, without_key: Any = None) -> Any:
        """The value of an expression for an instance; None if it needs more than that. without_key: where a dict that
        it reads has no such key."""
        tree = ast.fix_missing_locations(ast.Expression(deep_copy(expression)))
        try:
            return eval(compile(tree, "<forward>", "eval"), self.globals, {self.self_name: module})
        except KeyError:
            return without_key
        except Exception:  # a local name, or anything that follows from its absence
            return None

    def functional_dropout(self, expression: ast.expr) -> tuple[ast.expr, ast.expr, ast.expr] | None:
        """(x, p, training) of a call of functional.dropout."""
        match expression:
            case ast.Call(func=function, args=[x, *rest], keywords=keywords) if self.resolved(
                function
            ) is functional.dropout and not any(isinstance(each, ast.Starred) for each in (x, *rest)):
                options = dict(zip(("p", "training", "inplace"), rest, strict=False)) | {
                    k.arg: k.value for k in keywords
                }
                if options.keys() == {"p", "training"}:
                    return x, options["p"], options["training"]
        return None

    def value_of(
        self, name: ast.expr, place: Place, position: int, times: int = 1
    ) -> tuple[ast.expr, tuple[ast.stmt, ...]] | None:
        """What the statement before `position` assigned to the name, if only statement `position`, at the place or
        before it, reads that value, `times` times."""
        match place.block[position - 1] if isinstance(name, ast.Name) and position > 0 else None:
            case ast.Assign(targets=[ast.Name(id=assigned)], value=value) as statement if assigned == name.id:  # type: ignore[attr-defined]
                if _calls_before(place.block[position], name):
                    return None
                return (value, (statement,)) if self.is_read_only_at(assigned, place, position, times) else None
        return None

    def assignment_of(self, name: str, place: Place, position: int, times: int = 1) -> ast.Assign | None:
        """The statement that gave the name the value that only statement `position`, at the place or before it, reads,
        `times` times; None if anything between them may change it."""
        last = max((i for i in range(position) if mentions(place.block[i], name)), default=-1)
        match place.block[last] if last >= 0 else None:
            case ast.Assign(targets=[ast.Name(id=assigned)]) as statement if assigned == name:
                is_changed = any(may_change(each, name) for each in place.block[last + 1 : position])
                return statement if not is_changed and self.is_read_only_at(name, place, position, times) else None
        return None

    def is_read_only_at(self, name: str, place: Place, position: int, times: int = 1) -> bool:
        """Whether statement `position`, at the place or before it, reads the value of the name `times` times,
        and nothing else does."""
        reader, *later = place.block[position : place.position + 1]
        if n_reads(reader, name) != times:
            return False
        if assigned_name(reader) == name:
            return True
        is_rebound = assigned_name(place.statement) == name
        return not any(n_reads(each, name) for each in later) and (
            is_rebound or not (place.in_loop or self._uses_after(name, place.statement))
        )

    def _uses_after(self, name: str, statement: ast.stmt) -> bool:
        """Whether the name occurs after the statement, or in a nested function, which may run then."""
        end = (statement.end_lineno or 0, statement.end_col_offset or 0)
        return any(
            is_nested or (node.lineno, node.col_offset) >= end for node, is_nested in self._occurrences.get(name, ())
        )

    @cached_property
    def _locals(self) -> frozenset[str]:
        """Names of parameters and variables, nested functions' too: none of them is the global one."""
        code = self.function.__code__
        return frozenset(name for each in (code, *code_in(code)) for name in (*each.co_varnames, *each.co_cellvars))

    @cached_property
    def _occurrences(self) -> dict[str, list[tuple[ast.Name, bool]]]:
        """Where each name occurs, and whether in a nested function."""
        nodes = list(ast.walk(self.tree))
        nested = [each for each in nodes[1:] if isinstance(each, (ast.FunctionDef, ast.Lambda))]
        inner = {id(node) for function in nested for node in ast.walk(function)}
        found: dict[str, list[tuple[ast.Name, bool]]] = {}
        for node in nodes:
            if isinstance(node, ast.Name):
                found.setdefault(node.id, []).append((node, id(node) in inner))
        return found

    def ends_at(self, name: str, place: Place, position: int) -> bool:
        """Whether only the place's statement, or one between it and `position`, which assigned the name, reads it,
        once."""
        first = next(i for i in range(position + 1, place.position + 1) if n_reads(place.block[i], name))
        return n_reads(self.tree, name) == 1 or self.is_read_only_at(name, place, first)


def child_at(module: nn.Module, path: str) -> nn.Module | None:
    """The child at a dotted path; None if there is none."""
    child: nn.Module | None = module
    for name in path.split("."):
        child = None if child is None else child._modules.get(name)
    return child


def linear_at(module: nn.Module, path: str, excluded: Container[int] = ()) -> nn.Linear | None:
    """The child at a path, if it is a plain nn.Linear. excluded: ids of modules that are to stay as they are."""
    child: Any = child_at(module, path) if path else None
    is_linear = child is not None and original_class(type(child)) is nn.Linear and id(child) not in excluded
    return child if is_linear else None


def has_bias_at(module: nn.Module, path: str, excluded: Container[int] = ()) -> bool:
    """Whether the child at a path is a linear layer with a bias that calls.linear_parts takes off."""
    child: Any = child_at(module, path) if path else None
    if child is None or id(child) in excluded or getattr(child, "bias", None) is None:
        return False
    cls = original_class(type(child))
    return cls is nn.Linear or is_transposed(cls)


class Place(NamedTuple):
    """A statement in its block."""

    block: list[ast.stmt]
    position: int
    in_loop: bool

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.position]

    @property
    def following(self) -> list[ast.stmt]:
        """The statements after it in the block."""
        return self.block[self.position + 1 :]


def places(block: list[ast.stmt], in_loop: bool = False) -> Iterator[Place]:
    """All statements of a block, then those of the blocks in it."""
    yield from (Place(block, position, in_loop) for position in range(len(block)))
    for statement in block:
        match statement:
            case ast.If(body=then, orelse=otherwise):
                yield from places(then, in_loop)
                yield from places(otherwise, in_loop)
            case ast.With(body=inner):
                yield from places(inner, in_loop)
            case ast.For(body=inner) | ast.While(body=inner):
                yield from places(inner, True)


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes below that are evaluated whenever the statement is, once."""
    yield node
    if isinstance(node, (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    for child in ast.iter_child_nodes(node):
        yield from evaluated(child)


class ScaledCall(NamedTuple):
    """`self.path(x) * factor`, or `/`."""

    node: ast.BinOp
    call: ast.Call
    path: str
    statements: tuple[ast.stmt, ...]
    """The one before that calls the child, if another one scales its result."""


def scaled_calls(forward: Forward) -> list[ScaledCall]:
    """Results of children that the next statement, or the same one, multiplies by an attribute or a number."""
    return [
        scaled
        for place in places(forward.tree.body)
        if isinstance(place.statement, (ast.Assign, ast.Return))
        for node in evaluated(place.statement)
        if (scaled := _scaled_call(forward, place, node)) is not None
    ]


def _scaled_call(forward: Forward, place: Place, node: ast.AST) -> ScaledCall | None:
    match node:
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=factor):
            value, statements = forward.value_of(left, place, place.position) or (left, ())
            called = forward.called(value)
            if called is not None and (isinstance(factor, ast.Constant) or forward.child(factor)):
                return ScaledCall(node, value, called[0], statements)  # type: ignore[arg-type]
    return None


_MAY_BE_IN_PLACE = frozenset(
    ("celu", "elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "relu", "relu6", "selu", "silu")
)
"""Functions of torch.nn.functional that work in place where their last argument is True."""


def _is_in_place(call: ast.Call) -> bool:
    """Whether such a function's last argument is given by position."""
    match call:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[_, *_, ast.Constant(value=True)]):
            return name in _MAY_BE_IN_PLACE
    return False


def may_change(statement: ast.stmt, name: str) -> bool:
    """Whether the statement may bind the name, leave the block, write to a tensor in place, set an attribute or
    call a function for its effect."""
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=bound, ctx=ast.Store() | ast.Del()) if bound == name:
                return True
            case ast.Return() | ast.Break() | ast.Continue() | ast.Raise() | ast.AugAssign() | ast.Yield():
                return True
            case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                return True
            case ast.keyword(arg="inplace" | "out") | ast.Expr(value=ast.Call()):
                return True
            case ast.Call(func=ast.Attribute(attr=method)) if method.endswith("_") and not method.startswith("_"):
                return True
            case ast.Call() if _is_in_place(node):
                return True
    return False


def writes_to_tensors(tree: ast.AST) -> bool:
    """Whether a forward may write to a tensor that it has a name for: a view or an omitted copy would change, too."""
    return any(written_names(node) for node in ast.walk(tree))


def written_names(node: ast.AST) -> set[str]:
    """Names of which one may be that of the tensor that a statement or an expression writes to; "" for any."""
    match node:
        case ast.AugAssign(target=written) | ast.Subscript(value=ast.Name() as written, ctx=ast.Store()):
            pass
        case ast.Call(func=ast.Attribute(value=written, attr=method)) if method.endswith("_"):
            if isinstance(written, ast.BinOp):  # a new one
                return set()
        case ast.keyword(arg="inplace" | "out", value=written):
            pass
        case ast.Call() if _is_in_place(node):
            written = node
        case _:
            return set()
    return {each.id for each in ast.walk(written) if isinstance(each, ast.Name)} or {""}


def assigned_name(statement: ast.stmt) -> str:
    """The one name that the statement assigns; empty for other statements."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""


def mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def n_reads(statement: ast.AST, name: str) -> int:
    """How often the name is read or deleted in the statement."""
    return sum(
        isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Store)
        for node in ast.walk(statement)
    )


def _calls_before(statement: ast.stmt, name: ast.expr) -> bool:
    """Whether the statement runs other code before it reads the name: moved there, the value may be another."""
    start = (name.lineno, name.col_offset)
    return any(
        isinstance(node, (ast.Call, ast.NamedExpr)) and (node.end_lineno or 0, node.end_col_offset or 0) <= start
        for node in ast.walk(statement)
    )
