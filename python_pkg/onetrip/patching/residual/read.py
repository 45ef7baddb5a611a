"""Reading a forward for residual sums: which additions there are, and what each operand and each result is.

A class is read once. What a child is (a dropout, a norm, a linear layer) is a claim, checked per instance by choose.py.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace

from ..forward import Forward, Place, assigned_name, evaluated, may_change, mentions, places
from ..source import calls_in
from .inline import inlined
from .values import Values


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
    place: Place
    target: str
    """The name that the sum itself is assigned to; empty where it is part of a larger expression."""
    operands: tuple[list[Operand], list[Operand]]
    """Ways to read each side, the one that takes most off first; the last one is the plain expression."""
    norm: tuple[str, ast.Call] | None
    """(path of the child that is called with the sum alone, before any other has the sum, that call)."""
    has_inline_norm: bool
    """Whether that call stands around the sum itself."""
    is_open: bool
    """Whether the sum may be linked to a norm at run time: it is returned, or passed alone to a child later. Not in a
    loop."""


def read_sums(forward: Forward) -> tuple[Forward, list[FoundSum]]:
    """The sums of a forward, and the forward that they stand in: with helper functions that add written out."""
    forward = inlined(forward)
    return forward, list(SumReader(forward).read())


class SumReader:
    """Reads the sums of one forward."""

    def __init__(self, forward: Forward) -> None:
        self.forward, self.values = forward, Values(forward)

    def read(self) -> Iterator[FoundSum]:
        for place in places(self.forward.tree.body):
            match place.statement:
                case ast.Assign(targets=[ast.Name(id=target)], value=value):
                    pass
                case ast.Assign(value=value) | ast.Return(value=ast.expr() as value):
                    target = ""
                case _:
                    continue
            for node in self.sums_of(value):
                yield self.sum(node, place, value, target)

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
                return self.forward.child(side) == ""  # a parameter or a number of the module is no residual
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

    def sum(self, node: ast.BinOp, place: Place, value: ast.expr, target: str) -> FoundSum:
        whole: ast.expr = value
        while isinstance(whole, ast.Call) and isinstance(whole.func, ast.Attribute):  # (a + b).view(...)
            whole = whole.func.value
        assigned, target = target if whole is node else "", target if value is node else ""
        is_returned = isinstance(place.statement, ast.Return) or self.is_read_by(self.values.returned, assigned, place)
        norm: tuple[str, ast.Call] | None = None
        around = next((call for call in ast.walk(value) if isinstance(call, ast.Call) and call.args == [node]), None)
        inline = around is not None and (path := self.forward.child(around.func)) != "" and not around.keywords
        if inline and around is not None:
            norm = path, around
        elif target and not self.is_read_by(self.values.exposed, target, place):
            norm = self.norm_after(place.following, target)
        operands = self.readings(node.left, place), self.readings(node.right, place)
        is_open = not place.in_loop and (is_returned or self.is_passed_on(assigned, place.statement))
        return FoundSum(node, place, target, operands, norm, inline, is_open)

    def is_read_by(self, readers: Iterable[ast.Name], name: str, place: Place) -> bool:
        """Whether one of the readers may read the value that the name has after the statement at this place."""
        start = _end(place.statement)
        end = next((_end(each) for each in place.following if assigned_name(each) == name), None)
        for reader in readers:
            is_after = (reader.lineno, reader.col_offset) >= start
            if reader.id == name and (is_after or place.in_loop) and (end is None or start <= _end(reader) <= end):
                return True
        return False

    def is_passed_on(self, name: str, statement: ast.stmt) -> bool:
        """Whether a child is called with the name alone after the statement."""
        later = (
            node for node in ast.walk(self.forward.tree) if getattr(node, "lineno", 0) > (statement.end_lineno or 0)
        )
        called = (self.forward.called(node) for node in later if isinstance(node, ast.Call))
        return any(each is not None and isinstance(each[1], ast.Name) and each[1].id == name for each in called)

    def readings(self, side: ast.expr, place: Place) -> list[Operand]:
        """Ways to read an operand, from the most that can be taken off to the plain expression."""
        found = [Operand(side), *self.openings(Operand(side), place, place.position)]
        outer = self.forward.value_of(side, place, place.position)
        for value, statements in ((side, ()), outer) if outer else ((side, ()),):
            dropouts: list[Operand] = []
            if (functional_ := self.forward.functional_dropout(value)) is not None:
                dropouts.append(Operand(functional_[0], "", *functional_[1:], statements=statements))
            elif (called := self.forward.called(value)) is not None:
                dropouts.append(Operand(called[1], called[0], statements=statements))
                found.append(Operand(called[1], linear=called[0], statements=statements))
            for each in dropouts:
                found.append(each)
                before = place.position - len(each.statements)
                found += self.openings(each, place, before)
                inner = self.forward.value_of(each.x, place, before)
                for below, more in ((each.x, ()), inner) if inner else ((each.x, ()),):
                    if (called := self.forward.called(below)) is not None:
                        found.append(
                            Operand(called[1], each.dropout, each.p, each.training, called[0], (*statements, *more))
                        )
        return found[::-1]

    def openings(self, operand: Operand, place: Place, position: int) -> Iterator[Operand]:
        """The operand with the call that made its x, if nothing else reads x. position: of the statement that does."""
        x, in_tuple = operand.x, False
        if isinstance(x, ast.Name):
            name = x.id
            earlier = (each for each in reversed(place.block[:position]) if mentions(each, name))
            match next(earlier, None):
                case ast.Assign(targets=[ast.Name(id=first)], value=value) if first == name:
                    x = value
                case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=first), *_])], value=value) if first == name:
                    x, in_tuple = value, True
            if not self.forward.is_read_only_at(name, place, position):
                return
        if isinstance(x, ast.Subscript) and isinstance(x.slice, ast.Constant) and x.slice.value == 0 and not in_tuple:
            x, in_tuple = x.value, True
        if isinstance(x, ast.Call) and (path := self.forward.child(x.func)) != "":
            yield replace(operand, opened=path, call=x, in_tuple=in_tuple)

    def norm_after(self, following: list[ast.stmt], target: str) -> tuple[str, ast.Call] | None:
        """The first child that is given the sum, if that surely happens: others may write to it. None if the name is
        bound again before, or anything else may change."""
        names = {target}
        for statement in following:
            given = [call for call in calls_in(statement) if self.is_given(call, names)]
            if given:
                is_simple = isinstance(statement, (ast.Assign, ast.Return))
                surely = [node for node in evaluated(statement) if node in given] if is_simple else []
                called = self.forward.called(surely[0]) if len(surely) == len(given) else None
                if called is not None and isinstance(called[1], ast.Name) and called[1].id == target:
                    return called[0], surely[0]
                return None
            if may_change(statement, target):
                return None
            if isinstance(statement, ast.Assign) and self.may_be(statement.value, names):
                names.add(assigned_name(statement))
        return None

    def is_given(self, call: ast.Call, names: Container[str]) -> bool:
        """Whether a child, or a method of the module, is called with the tensor of one of the names."""
        arguments = (*call.args, *(keyword.value for keyword in call.keywords))
        return self.forward.child(call.func) != "" and any(self.may_be(each, names) for each in arguments)

    def may_be(self, value: ast.expr, names: Container[str]) -> bool:
        return any(part.id in names for part in self.values.parts(value))


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _is_sum(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
