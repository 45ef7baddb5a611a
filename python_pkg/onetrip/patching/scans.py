"""Scans over a sequence, as transformers writes them where the packages with their kernels are not installed.

    for i in range(n):                        steps, written = steps_of(x, 2, range(n)), Written(y, 2)
        state = decay * state + x[:, :, i]    for i in range(n):
        y[:, :, i] = state               ->       state = decay * state + steps[i]
                                                  written[i] = state
                                              y = written.joined()

Mamba's selective scan, the gated delta rule of Qwen3-Next and Qwen3.5. Of x[:, :, i] autograd writes a gradient of the
size of x, zero at the other steps, and adds them up; of y[:, :, i] it copies the gradient of y: bytes that grow with
the square of n. Steps are those of one unbind, and are joined by one stack: each gradient is written once.
The results have the same bits; gradients of a step that is read twice may be added up in another order.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import getattr_static
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from . import calls
from .classes import Rewrite, contents, method_of, plain_function, rewrapped, wrapped
from .forward import Forward, Place, assigned_name, mentions, places, read_forward, written_names
from .rewriting import InForward, Rewriting
from .source import calls_in, define, own_variables, resolve
from .verify import check_function, kind_of

PATTERN = "scan"

_NEW = (torch.zeros, torch.zeros_like, torch.empty, torch.empty_like)


class _Step(NamedTuple):
    """name[:, ..., i, ..., :], where i is the index of the loop and stands at position dim."""

    name: str
    dim: int


@dataclass(eq=False)
class _Loop:
    """`for i in range(...)`, what it reads of each step, and where it writes to each step."""

    statement: ast.For
    reads: dict[_Step, list[ast.Subscript]]
    writes: dict[_Step, ast.Assign]


@dataclass(frozen=True)
class Scan:
    """A function with such loops, in a rewritten forward."""

    function: Any
    """What is called: a function, or that of a method."""
    inner: FunctionType
    """The plain function in its wrappers."""
    source: str
    """That function rewritten."""
    fused: Callable[..., Any]

    def __call__(self, module: nn.Module, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__func__", None)
        if self.function not in (plain_function(function), method):
            calls.count_fallback(module)
        elif _need_gradient(*args, *kwargs.values(), *(module.parameters() if method else ())):
            calls.count_fused(module)
            return self.fused(*args, **kwargs) if method is None else self.fused(function.__self__, *args, **kwargs)
        return function(*args, **kwargs)


def _need_gradient(*read: Any) -> bool:
    """Whether autograd records, and no compiler or transform follows it."""
    wanted = torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in read)
    return wanted and not calls.is_followed()


class _Found(NamedTuple):
    call: ast.Call
    scan: Scan


def read_scans(forward: Forward) -> list[ast.Call]:
    """Calls of global functions, and of self.name."""
    own = forward.function.__code__.co_varnames
    return [
        call
        for call in calls_in(forward.tree)
        if (isinstance(call.func, ast.Name) and call.func.id not in own)
        or (isinstance(call.func, ast.Attribute) and forward.child(call.func) == call.func.attr)
    ]


class Scans(InForward):
    """A module whose forward calls functions or methods that scan a sequence, as a site."""

    patterns, is_minor, in_wrapper = (PATTERN,), True, True
    read = staticmethod(read_scans)

    @classmethod
    def choose(cls, module: nn.Module, found: Iterable[ast.Call], excluded: Container[int]) -> tuple[_Found, ...]:
        """Those that scan in the instance: a function may be its attribute (Qwen3-Next until transformers 5.2)."""
        names = method_of(type(module), "forward").__globals__
        scans = ((call, _scan_of(_called(module, call.func, names))) for call in found)
        return tuple(_Found(call, scan) for call, scan in scans if scan is not None)

    def put(self, rewriting: Rewriting) -> None:
        """The call through a Scan."""
        for position, found in enumerate(self.chosen):
            rewriting.constants[f"scan_{position}_"] = found.scan
            rewriting.put_call(found.call, f"scan_{position}_")

    def rewrite(self, cls: type) -> Rewrite:
        """The forward, and for the report the functions."""
        functions = dict.fromkeys((found.scan.inner, found.scan.source) for found in self.chosen)
        return replace(super().rewrite(cls), functions=tuple(functions))

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a small scan computes the same."""
        device, dtype = kind_of(module)

        def fused(x: Tensor) -> Tensor:
            written = Written(torch.zeros_like(x), 1)
            _sum_up(steps_of(x, 1, range(x.shape[1])), written, x.shape[1])
            return written.joined()

        def unfused(x: Tensor) -> Tensor:
            y = torch.zeros_like(x)
            _sum_up(_Steps(x, 1), _Steps(y, 1), x.shape[1])
            return y

        check_function(fused, unfused, {"x": (2, 5, 3)}, device, dtype)


def _sum_up(steps: Any, written: Any, n_steps: int) -> None:
    state = 0.0
    for i in range(n_steps):
        state = 0.5 * state + steps[i]
        written[i] = state


class _Steps:
    """x[:, ..., i, ...] at position dim, by i alone."""

    def __init__(self, x: Any, dim: int) -> None:
        self.x, self.before = x, (slice(None),) * dim

    def __getitem__(self, i: Any) -> Any:
        return self.x[(*self.before, i)]

    def __setitem__(self, i: Any, value: Any) -> None:
        self.x[(*self.before, i)] = value


def steps_of(x: Any, dim: int, indices: range) -> Any:
    """All steps of x in dimension dim; where the loop reads few of them, each when it is read."""
    is_plain = type(x) in (Tensor, FakeTensor) and x.dim() > dim
    return x.unbind(dim) if is_plain and 2 * len(indices) >= x.shape[dim] else _Steps(x, dim)


class Written:
    """What a loop writes to the steps of y, a new tensor, in dimension dim. Kept until all are written."""

    def __init__(self, y: Tensor, dim: int) -> None:
        self.y, self.dim = y, dim
        self.steps: list[tuple[Any, Any]] = []

    def __setitem__(self, i: Any, value: Any) -> None:
        self.steps.append((i, value))

    def joined(self) -> Tensor:
        """y with the steps: their stack, where they are all of it, in order and as y keeps them."""
        y, values = self.y, [value for _, value in self.steps]
        n_steps = y.shape[self.dim]
        if n_steps and y.is_contiguous() and [i for i, _ in self.steps] == [*range(n_steps)]:
            step = y.select(self.dim, 0)
            if all(type(each) is type(y) and calls.is_like(each, step) for each in values):
                return torch.stack(values, self.dim)
        steps = _Steps(y, self.dim)
        for i, value in self.steps:
            steps[i] = value
        return y


def _called(module: nn.Module, function: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a call's function is: a global one, a method, or an attribute of the instance."""
    if not isinstance(function, ast.Attribute):
        return plain_function(resolve(function, names))
    found = getattr_static(module, function.attr, None)
    is_method = function.attr not in vars(module) and isinstance(found, FunctionType)
    if is_method and found.__code__.co_argcount == 2:  # activations/methods.py may rewrite it
        return None
    return plain_function(found)


_known: WeakKeyDictionary[FunctionType, Scan | None] = WeakKeyDictionary()


def _scan_of(function: Any) -> Scan | None:
    """The function with its loops rewritten; None where there are none."""
    if not isinstance(function, FunctionType):
        return None
    if function not in _known:
        _known[function] = _read(function)
    return _known[function]


def _read(function: FunctionType) -> Scan | None:
    """None also where a wrapper may call another function, as transformers' do where a package has a kernel."""
    inner: Any = function
    while (within := wrapped(inner)) is not None:
        if any(callable(value) and value is not within for value in contents(inner)):
            return None
        inner = within
    forward = read_forward(inner) if "range" in inner.__code__.co_names else None
    if not isinstance(forward, Forward) or not (loops := _loops(forward)):
        return None
    rewriting = Rewriting(forward)
    for loop in loops:
        _put(rewriting, loop)
    source, names = rewriting.source(), rewriting.constants
    if own_variables(inner) & {"forward", *names}:
        return None
    return Scan(function, inner, source, rewrapped(function, define(inner, source, names, "forward", PATTERN)))


def _loops(forward: Forward) -> list[_Loop]:
    """The loops of a function, if once they run nothing writes to what they read or have written."""
    found = [loop for place in places(forward.tree.body) if (loop := _loop(forward, place)) is not None]
    if not found:
        return []
    first = min(loop.statement.lineno for loop in found)
    own = {id(write.targets[0]) for loop in found for write in loop.writes.values()}
    theirs = {""} | {step.name for loop in found for step in (*loop.reads, *loop.writes)}
    bodies = [node for loop in found for node in ast.walk(loop.statement)]
    theirs |= {node.id for node in bodies if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    later = [node for node in ast.walk(forward.tree) if getattr(node, "lineno", 0) >= first and id(node) not in own]
    return found if all(theirs.isdisjoint(written_names(node)) for node in later) else []


def _is_store(node: ast.AST) -> TypeGuard[ast.Subscript]:
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)


def _loop(forward: Forward, place: Place) -> _Loop | None:
    match place.statement:
        case ast.For(target=ast.Name(id=index), iter=ast.Call(func=ast.Name(id="range")), orelse=[]) as statement:
            pass
        case _:
            return None
    nodes = [node for each in statement.body for node in ast.walk(each)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    times = Counter(name.id for name in names)
    is_bound_again = any(name.id == index and isinstance(name.ctx, ast.Store) for name in names)
    binds = any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement.iter))
    if place.in_loop or is_bound_again or binds or not _computes(forward, statement):
        return None
    reads: dict[_Step, list[ast.Subscript]] = {}
    for node in nodes:
        if isinstance(node, ast.Subscript) and not _is_store(node) and (step := _step(node, index)):
            reads.setdefault(step, []).append(node)
    n_reads = Counter(step.name for step, where in reads.items() for _ in where)
    reads = {step: where for step, where in reads.items() if n_reads[step.name] == times[step.name]}
    writes: dict[_Step, ast.Assign] = {}
    for each in statement.body:
        step = _step(each.targets[0], index) if isinstance(each, ast.Assign) else None
        if isinstance(each, ast.Assign) and step and times[step.name] == 1 and _is_new(forward, step.name, place):
            writes[step] = each
    if sum(map(_is_store, nodes)) > len(writes) or _leaves(forward, statement, reads):
        return None
    return _Loop(statement, reads, writes) if reads or writes else None


_EXPRESSIONS = (
    *(ast.stmt, ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Slice, ast.Attribute),
    *(ast.Tuple, ast.keyword, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context),
)


def _computes(forward: Forward, loop: ast.For) -> bool:
    """Whether a loop's body gives names and steps values and appends them to lists, computed from others, and does
    nothing besides: the steps are all made before the loop, and what is written is read after it."""
    tensors: set[str] = set()

    def is_tensor(value: ast.expr) -> bool:
        match value:
            case ast.Name(id=name):
                return name in tensors
            case ast.Subscript(value=whole, slice=where):
                has_slices = isinstance(where, ast.Tuple) and any(isinstance(each, ast.Slice) for each in where.elts)
                return has_slices or is_tensor(whole)
        return isinstance(value, (ast.BinOp, ast.Call))  # calls are of tensors' methods, or of torch's functions

    def is_known(node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append")):
                return _is_new_list(forward, name)
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if resolve(node.func, forward.globals) is None:
                is_in_place = name.endswith("_") and not isinstance(value, ast.BinOp)
                return hasattr(Tensor, name) and is_tensor(value) and not is_in_place
            case ast.Call(func=function):
                return _computes_only(resolve(function, forward.globals))
            case ast.keyword(arg="out"):
                return False
        return isinstance(node, _EXPRESSIONS)

    for statement in loop.body:
        if not all(map(is_known, ast.walk(statement))):
            return False
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = list(zip(names, values, strict=False))
            case ast.Assign(targets=[ast.Name() | ast.Tuple() | ast.Subscript() as name], value=value):
                pairs = [(name, value)]
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(), attr="append"), args=[_])):
                pairs = []
            case _:
                return False
        tensors |= {name.id for name, value in pairs if isinstance(name, ast.Name) and is_tensor(value)}
    return True


def _computes_only(function: Any) -> bool:
    """Whether it is a function of torch's that writes to no argument."""
    name = getattr(function, "__name__", "")
    is_torchs = isinstance(function, BuiltinFunctionType) and getattr(torch, name, None) is function
    return is_torchs and not name.endswith(("_", "batch_norm", "instance_norm"))


def _is_new_list(forward: Forward, name: str) -> bool:
    stored = [node for node in ast.walk(forward.tree) if isinstance(node, ast.Name) and node.id == name]
    made = [ast.unparse(each.statement) for each in places(forward.tree.body) if assigned_name(each.statement) == name]
    return made == [f"{name} = []"] and sum(isinstance(node.ctx, ast.Store) for node in stored) == 1


def _leaves(forward: Forward, loop: ast.For, reads: Iterable[_Step]) -> bool:
    """Whether a step, or a view of one, may have a name or stand in a list after the loop: written to there, it would
    raise, as part of what unbind returns."""
    names = {step.name for step in reads}
    for statement in loop.body:
        match statement:
            case ast.Assign(targets=[ast.Name() | ast.Tuple() as target], value=value):
                if _may_view(value, names):
                    names |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
            case ast.Expr(value=ast.Call(args=[value])) if _may_view(value, names):
                return True
    inside = {id(node) for node in ast.walk(loop)}
    names -= {step.name for step in reads}
    return any(
        isinstance(node, ast.Name) and node.id in names and id(node) not in inside for node in ast.walk(forward.tree)
    )


def _may_view(value: ast.expr, names: Container[str]) -> bool:
    """Whether a value may be a view of one of the names, which torch's schemas say of its functions."""
    match value:
        case ast.BinOp() | ast.UnaryOp() | ast.Constant() | ast.Compare():
            return False
        case ast.Name(id=name):
            return name in names
        case ast.Call(func=ast.Attribute(attr=name)) if not _returns_view(name):
            return False
    return any(_may_view(each, names) for each in ast.iter_child_nodes(value) if isinstance(each, ast.expr))


def _returns_view(name: str) -> bool:
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    aliases = [each.alias_info for overload in overloads for each in overload._schema.returns]
    return not overloads or any(alias is not None and not alias.is_write for alias in aliases)


def _step(node: ast.AST, index: str) -> _Step | None:
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Tuple(elts=elements)):
            texts = [ast.unparse(each) for each in elements]
            is_step = texts.count(index) == 1 and all(text in (":", index) for text in texts)
            return _Step(name, texts.index(index)) if is_step else None
    return None


def _is_new(forward: Forward, name: str, place: Place) -> bool:
    """Whether the name is of a tensor that was made before the loop, and that nothing has read since."""
    before = [each for each in place.block[: place.position] if mentions(each, name)]
    match before[-1] if before else None:
        case ast.Assign(value=ast.Call(func=function)) as made:
            is_given = any(each.arg == "out" for each in made.value.keywords)  # type: ignore[attr-defined]
            return assigned_name(made) == name and resolve(function, forward.globals) in _NEW and not is_given
    return False


def _put(rewriting: Rewriting, loop: _Loop) -> None:
    """The loop with the steps made before it, and joined after it."""
    indices = _added(rewriting, "range")
    before, after = f"{indices} = {ast.unparse(loop.statement.iter)}\n", ""
    for step, reads in loop.reads.items():
        name = _added(rewriting, "steps")
        before += f"{name} = steps_of_({step.name}, {step.dim}, {indices})\n"
        for read in reads:
            copied = rewriting.copy_of(read)
            copied.value, copied.slice = ast.Name(name), copied.slice.elts[step.dim]
    for step, write in loop.writes.items():
        name = _added(rewriting, "written")
        before += f"{name} = Written_({step.name}, {step.dim})\n"
        after += f"{step.name} = {name}.joined()\n"
        target = rewriting.copy_of(write).targets[0]
        target.value, target.slice = ast.Name(name), target.slice.elts[step.dim]
    rewriting.constants |= {"steps_of_": steps_of, "Written_": Written}
    copied = rewriting.copy_of(loop.statement)

    def made() -> list[ast.stmt]:
        rewriting.generic_visit(copied)
        copied.iter = ast.Name(indices)
        return [*ast.parse(before).body, copied, *ast.parse(after).body]

    rewriting.replace(loop.statement, made)


def _added(rewriting: Rewriting, kind: str) -> str:
    """A new variable's name."""
    name = f"{kind}_{len(rewriting.constants)}_"
    rewriting.constants[name] = None
    return name
