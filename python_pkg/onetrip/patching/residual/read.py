"""Reading a forward for residual sums: which additions there are, and what each operand and each result is.

A class is read once. What a child is (a dropout, a norm, a linear layer) is a claim, checked per instance by choose.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import functional

from ..report import Unsuitable
from ..source import is_source_of, parse, resolve
from .inline import inlined


@dataclass(eq=False)
class Operand:
    """One side of a sum, taken apart from the outside in. Nodes are those of the forward's tree."""

    x: ast.expr
    """What is left when dropout and linear layer are taken off."""
    dropout: str = ""
    """Path of a child called with one argument: a dropout, if it is an nn.Dropout."""
    p: ast.expr | None = None
    """Arguments p and training of a functional dropout; None without one."""
    training: ast.expr | None = None
    linear: str = ""
    """Path of a child called with one argument: x is its input, if it is an nn.Linear."""
    statements: tuple[ast.stmt, ...] = ()
    """Assignments before the sum that the parts were taken from, the last one first: dropout, then linear layer."""
    opened: str = ""
    """Path of a child that made x, which only the sum reads: its own last dropout or linear layer may be taken off."""
    call: ast.Call | None = None
    """The child's call, which returns x, or a tuple with x first."""
    in_tuple: bool = False

    @property
    def is_dropped(self) -> bool:
        return self.dropout != "" or self.p is not None


@dataclass(eq=False)
class FoundSum:
    """`left + right` in a forward."""

    node: ast.BinOp
    block: list[ast.stmt]
    position: int
    """Position of its statement in the block."""
    target: str
    """The name that the sum itself is assigned to; empty where it is part of a larger expression."""
    operands: tuple[list[Operand], list[Operand]]
    """Ways to read each side, the one that takes most off first; the last one is the plain expression."""
    norms: list[tuple[str, ast.Call]]
    """(path of a child that is called with the sum alone, that call), in order."""
    has_inline_norm: bool
    """Whether norms' only call stands around the sum itself."""
    is_open: bool
    """Whether the sum may be linked to a norm at run time: it is returned, or passed alone to a child later. Not in a
    loop."""


@dataclass(eq=False)
class FoundSums:
    """A forward with sums."""

    tree: ast.FunctionDef
    sums: list[FoundSum]


def read_sums(forward: Any, source: str = "") -> FoundSums | Unsuitable | None:
    """The sums of a forward; None if it has none, or adds what cannot be tensors only. source: of its rewrite."""
    tree: Any = ast.parse(source).body[0] if source else parse(forward)
    if isinstance(tree, Unsuitable):
        return tree
    read = inlined(tree, forward)
    found = list(Reader(forward, read).read()) if tree.args.args else []
    if found and not source and not is_source_of(tree, forward):
        return Unsuitable("unknown_forward", "its source is not the code that runs")
    return FoundSums(read, found) if found else None


class Reader:
    """Reads one forward."""

    def __init__(self, forward: Any, tree: ast.FunctionDef) -> None:
        self.tree, self.globals = tree, forward.__globals__
        self.self_name = tree.args.args[0].arg
        self.returned = _returned_names(tree)

    def read(self) -> Iterator[FoundSum]:
        for block, in_loop in blocks(self.tree.body, False):
            for position, statement in enumerate(block):
                match statement:
                    case ast.Assign(targets=[ast.Name(id=target)], value=value):
                        pass
                    case ast.Return(value=ast.expr() as value):
                        target = ""
                    case ast.Assign(value=value):
                        target = ""
                    case _:
                        continue
                for node in self.sums_of(value):
                    yield self.sum(node, block, position, value, target, isinstance(statement, ast.Return), in_loop)

    def sums_of(self, value: ast.expr) -> Iterator[ast.BinOp]:
        """Additions of what may be tensors, the outermost first."""
        match value:
            case ast.BinOp(op=ast.Add(), left=left, right=right) if self.may_be_tensor(value):
                yield value
                yield from (each for side in (left, right) if _is_sum(side) for each in self.sums_of(side))
                return
            case ast.Lambda() | ast.IfExp() | ast.BoolOp() | ast.Subscript() | ast.Compare() | ast.JoinedStr():
                return
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                return
        for child in ast.iter_child_nodes(value):
            if isinstance(child, ast.keyword):
                child = child.value
            if isinstance(child, ast.expr):
                yield from self.sums_of(child)

    def may_be_tensor(self, side: ast.expr) -> bool:
        match side:
            case ast.Attribute():
                return self.child(side) == ""  # a parameter or a number of the module is no residual
            case ast.Name():
                return True
            case ast.Call(
                func=ast.Name(id="len" | "int" | "float" | "sum" | "max" | "min" | "list" | "tuple" | "range")
            ):
                return False
            case ast.Call(func=ast.Attribute(attr="size" | "dim" | "arange")):
                return False
            case ast.Call():
                return True
            case ast.Subscript(value=ast.Attribute(attr="shape"), slice=_) | ast.Subscript(slice=ast.Slice()):
                return False
            case ast.Subscript():
                return True
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self.may_be_tensor(left) and self.may_be_tensor(right)
            case ast.BinOp(op=ast.Mult(), left=left, right=right):
                return self.may_be_tensor(left) or self.may_be_tensor(right)
        return False

    def sum(
        self,
        node: ast.BinOp,
        block: list[ast.stmt],
        position: int,
        value: ast.expr,
        target: str,
        in_return: bool,
        in_loop: bool,
    ) -> FoundSum:
        whole: ast.expr = value
        while isinstance(whole, ast.Call) and isinstance(whole.func, ast.Attribute):  # (a + b).view(...)
            whole = whole.func.value
        assigned, target = target if whole is node else "", target if value is node else ""
        is_exposed = in_return or self.is_returned(assigned, block[position + 1 :])
        norms: list[tuple[str, ast.Call]] = []
        around = next((call for call in ast.walk(value) if isinstance(call, ast.Call) and call.args == [node]), None)
        inline = around is not None and (path := self.child(around.func)) != "" and not around.keywords
        if inline and around is not None:
            norms = [(path, around)]
        elif target and not is_exposed:
            norms = list(self.norms_after(block, position, target))
        operands = tuple(self.readings(side, block, position, in_loop) for side in (node.left, node.right))
        is_open = not in_loop and (is_exposed or self.is_passed_on(assigned, block[position]))
        return FoundSum(node, block, position, target, operands, norms, inline, is_open)  # type: ignore[arg-type]

    def is_returned(self, name: str, following: list[ast.stmt]) -> bool:
        """Whether the forward may return the value of a name, or of another name for it. following: in its block."""
        others = [
            statement.targets[0].id
            for statement in following
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(statement.value, ast.Name)
            and statement.value.id == name
        ]
        rebound = {_assigned(statement) for statement in following}
        return name in self.returned - rebound or any(other in self.returned for other in others)

    def is_passed_on(self, name: str, statement: ast.stmt) -> bool:
        """Whether a child is called with the name alone after the statement."""
        later = (node for node in ast.walk(self.tree) if getattr(node, "lineno", 0) > (statement.end_lineno or 0))
        called = (self.called(node) for node in later if isinstance(node, ast.Call))
        return any(each is not None and isinstance(each[1], ast.Name) and each[1].id == name for each in called)

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

    def functional_dropout(self, expression: ast.expr) -> tuple[ast.expr, ast.expr, ast.expr] | None:
        """(x, p, training) of a call of functional.dropout."""
        match expression:
            case ast.Call(func=function, args=[x, *rest], keywords=keywords) if (
                resolve(function, self.globals) is functional.dropout
            ):
                options = dict(zip(("p", "training", "inplace"), rest, strict=False)) | {
                    k.arg: k.value for k in keywords
                }
                if options.keys() == {"p", "training"}:
                    return x, options["p"], options["training"]
        return None

    def readings(self, side: ast.expr, block: list[ast.stmt], position: int, in_loop: bool) -> list[Operand]:
        """Ways to read an operand, from the most that can be taken off to the plain expression."""
        found = [Operand(side), *self.openings(Operand(side), block, position, position, in_loop)]
        outer = self.value_of(side, block, position, position, in_loop)
        for value, statements in ((side, ()), outer) if outer else ((side, ()),):
            dropouts: list[Operand] = []
            if (functional_ := self.functional_dropout(value)) is not None:
                dropouts.append(Operand(functional_[0], "", *functional_[1:], statements=statements))
            elif (called := self.called(value)) is not None:
                dropouts.append(Operand(called[1], called[0], statements=statements))
                found.append(Operand(called[1], linear=called[0], statements=statements))
            for each in dropouts:
                found.append(each)
                before = position - len(each.statements)
                found += self.openings(each, block, before, position, in_loop)
                inner = self.value_of(each.x, block, before, position, in_loop)
                for below, more in ((each.x, ()), inner) if inner else ((each.x, ()),):
                    if (called := self.called(below)) is not None:
                        found.append(
                            Operand(called[1], each.dropout, each.p, each.training, called[0], (*statements, *more))
                        )
        return found[::-1]

    def value_of(
        self, name: ast.expr, block: list[ast.stmt], position: int, last: int, in_loop: bool
    ) -> tuple[ast.expr, tuple[ast.stmt, ...]] | None:
        """What the statement before `position` assigned to the name, if only statement `position` reads that value,
        once. last: position of the sum."""
        if not isinstance(name, ast.Name) or position == 0:
            return None
        statement = block[position - 1]
        match statement:
            case ast.Assign(targets=[ast.Name(id=assigned)], value=value) if assigned == name.id:
                pass
            case _:
                return None
        if _calls_before(block[position], name) or not self.is_read_once(assigned, block, position, last, in_loop):
            return None
        return value, (statement,)

    def is_read_once(self, name: str, block: list[ast.stmt], position: int, last: int, in_loop: bool) -> bool:
        """Whether statement `position` reads the value of the name once, and nothing else does. last: of the sum."""
        reader, *later = block[position : last + 1]
        if _reads(reader, name) != 1:
            return False
        if _assigned(reader) == name:
            return True
        is_rebound = _assigned(block[last]) == name
        return not any(_reads(each, name) for each in later) and (
            is_rebound or not (in_loop or _uses_after(self.tree, name, block[last]))
        )

    def ends_at(self, name: str, block: list[ast.stmt], position: int, last: int, in_loop: bool) -> bool:
        """Whether only statement `last`, or one between it and `position`, which assigned the name, reads it, once."""
        first = next(index for index in range(position + 1, last + 1) if _reads(block[index], name))
        return _reads(self.tree, name) == 1 or self.is_read_once(name, block, first, last, in_loop)

    def openings(
        self, operand: Operand, block: list[ast.stmt], position: int, last: int, in_loop: bool
    ) -> Iterator[Operand]:
        """The operand with the call that made its x, if nothing else reads x. position: of the statement that does."""
        x, in_tuple = operand.x, False
        if isinstance(x, ast.Name):
            name = x.id
            earlier = (each for each in reversed(block[:position]) if mentions(each, name))
            match next(earlier, None):
                case ast.Assign(targets=[ast.Name(id=first)], value=value) if first == name:
                    x = value
                case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=first), *_])], value=value) if first == name:
                    x, in_tuple = value, True
            if not self.is_read_once(name, block, position, last, in_loop):
                return
        if isinstance(x, ast.Subscript) and isinstance(x.slice, ast.Constant) and x.slice.value == 0 and not in_tuple:
            x, in_tuple = x.value, True
        if isinstance(x, ast.Call) and (path := self.child(x.func)) != "":
            yield replace(operand, opened=path, call=x, in_tuple=in_tuple)

    def norms_after(self, block: list[ast.stmt], position: int, target: str) -> Iterator[tuple[str, ast.Call]]:
        """Calls of a child with the sum alone that surely follow, before the name is bound again."""
        for statement in block[position + 1 :]:
            if isinstance(statement, (ast.Assign, ast.Return, ast.Expr)):
                for node in evaluated(statement):
                    called = self.called(node) if isinstance(node, ast.Call) else None
                    if called is not None and isinstance(called[1], ast.Name) and called[1].id == target:
                        yield called[0], node  # type: ignore[misc]
            if may_change(statement, target):
                return


def blocks(body: list[ast.stmt], in_loop: bool) -> Iterator[tuple[list[ast.stmt], bool]]:
    yield body, in_loop
    for statement in body:
        match statement:
            case ast.If(body=then, orelse=otherwise):
                yield from blocks(then, in_loop)
                yield from blocks(otherwise, in_loop)
            case ast.With(body=inner):
                yield from blocks(inner, in_loop)
            case ast.For(body=inner) | ast.While(body=inner):
                yield from blocks(inner, True)


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes below that are evaluated whenever the statement is, once."""
    yield node
    if isinstance(node, (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    for child in ast.iter_child_nodes(node):
        yield from evaluated(child)


def may_change(statement: ast.stmt, name: str) -> bool:
    """Whether the statement may bind the name again, leave the block, or write to a tensor in place."""
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=bound, ctx=ast.Store() | ast.Del()) if bound == name:
                return True
            case ast.Return() | ast.Break() | ast.Continue() | ast.Raise() | ast.AugAssign() | ast.Yield():
                return True
            case ast.Subscript(ctx=ast.Store()):
                return True
            case ast.keyword(arg="inplace" | "out"):
                return True
            case ast.Call(func=ast.Attribute(attr=method)) if method.endswith("_") and not method.startswith("_"):
                return True
    return False


def _assigned(statement: ast.stmt) -> str:
    """The one name that the statement assigns; empty for other statements."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""


def _is_sum(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _reads(statement: ast.AST, name: str) -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(statement)
    )


def _calls_before(statement: ast.stmt, name: ast.expr) -> bool:
    """Whether the statement runs other code before it reads the name: moved there, the value may be another."""
    start = (name.lineno, name.col_offset)
    return any(
        isinstance(node, (ast.Call, ast.NamedExpr)) and (node.end_lineno or 0, node.end_col_offset or 0) <= start
        for node in ast.walk(statement)
    )


def _uses_after(tree: ast.FunctionDef, name: str, statement: ast.stmt) -> bool:
    """Whether the name occurs after the statement, or in a nested function, which may run then."""
    end = (statement.end_lineno or 0, statement.end_col_offset or 0)
    nested = [each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.Lambda)) and each is not tree]
    inner = {id(node) for function in nested for node in ast.walk(function)}
    return any(
        isinstance(node, ast.Name) and node.id == name and ((node.lineno, node.col_offset) >= end or id(node) in inner)
        for node in ast.walk(tree)
    )


def _returned_names(tree: ast.FunctionDef) -> set[str]:
    """Names whose value the forward returns, as it is or in a tuple or keyword."""
    names: set[str] = set()
    nodes = list(ast.walk(tree))
    tuples = {
        node.targets[0].id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Tuple)
    }

    def is_tuple(expression: ast.AST) -> bool:
        return isinstance(expression, ast.Tuple) or (isinstance(expression, ast.Name) and expression.id in tuples)

    def visit(expression: ast.AST | None) -> None:
        match expression:
            case ast.Name(id=name):
                names.add(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    visit(part)
            case ast.Starred(value=inner):
                visit(inner)
            case ast.BinOp(op=ast.Add(), left=left, right=right) if is_tuple(left) or is_tuple(right):
                visit(left)
                visit(right)
            case ast.IfExp(body=then, orelse=otherwise):
                visit(then)
                visit(otherwise)
            case ast.Call(func=function, keywords=keywords):
                if isinstance(function, ast.Attribute):  # x.view(...)
                    visit(function.value)
                for keyword in keywords:
                    visit(keyword.value)

    for node in nodes:
        if isinstance(node, ast.Return):
            visit(node.value)
    before = -1
    while before != len(names):
        before = len(names)
        for node in nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in names:
                    visit(value)
                case ast.AugAssign(target=ast.Name(id=name), value=value) if name in names:
                    visit(value)
    return names
