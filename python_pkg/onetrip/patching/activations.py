"""Activations in a forward of any length: `act(gate) * up`, and `act(dense(x))`, with the dropout that follows.

    h = self.act(self.gate(x)) * self.up(x)     ->      h = gated_0_(self, self.act, self.gate(x), self.up(x))

    gate, up = h.chunk(2, dim=-1)               ->      gate = h
    h = self.act(gate) * up                             h = gated_0_(self, self.act, gate)

    h = self.dense(h)                           ->      h = activated_0_(self, self.act, self.dense, h, self.drop)
    h = self.act(h)
    h = self.drop(h)

The activation is a child or a function of torch's, recognised by what it computes. A plain linear layer leaves its bias
to the activation. Halves that only the product reads stay one tensor, whose gradient is then written as one. Everything
else of the forward stays as it was written.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from .. import ops
from ..ops.common.tracing import is_transformed
from . import calls
from .calls import Configuration, configuration, has_configuration, is_plain, original_class
from .classes import Rewrite
from .clones import clone
from .readers import linear_parts
from .report import Unsuitable
from .residual.choose import child_at
from .residual.read import Reader, blocks, evaluated, may_change, mentions
from .residual.rewrite import Rewriting
from .source import is_source_of, parse, resolve
from .verify import RNG, MaskedDropout, check_outcomes, kind_of, outcome_of, undisturbed

GATED, ACTIVATED = "gated_mlp", "bias_activation"
PATTERNS = (GATED, ACTIVATED)
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
    "relu": functional.relu,
}
"""The activations of ops.glu, by torch's functions."""


@dataclass(eq=False)
class Halves:
    """`gate, up = packed.chunk(2, dim=-1)`."""

    statement: ast.Assign
    packed: ast.expr
    gate_first: bool


@dataclass(eq=False)
class Dropped:
    """A dropout, of a value that nothing else reads."""

    call: ast.Call
    definition: ast.stmt | None
    """The statement that gave the value a name."""
    path: str = ""
    """Of the child that is called: a dropout, if it is an nn.Dropout."""
    p: ast.expr | None = None
    training: ast.expr | None = None
    """Of torch's function."""


@dataclass(eq=False)
class Found:
    """A call that may be an activation."""

    call: ast.Call
    x: ast.expr
    path: str
    """Of the child that is called; empty for a function."""
    function: str
    """Of FORMULAS, where torch's function is called."""
    product: ast.BinOp | None = None
    """Its product with another expression."""
    other: ast.expr | None = None
    definition: ast.Assign | None = None
    """The statement that gave the activation's result a name, which only the product reads."""
    halves: Halves | None = None
    """The statement that gave the gate and the other factor their names."""
    linear: str = ""
    """Path of a child called with one argument, whose result only the activation reads."""
    linear_x: ast.expr | None = None
    linear_definition: ast.stmt | None = None
    dropped: Dropped | None = None
    """The dropout of the result."""

    @property
    def result(self) -> ast.expr:
        """The activation, or its product."""
        return self.call if self.product is None else self.product


@dataclass(eq=False)
class FoundActivations:
    """A forward with activations."""

    tree: ast.FunctionDef
    found: list[Found]
    """Those with a product first. A call may be in several of them."""
    method: str = "forward"
    """The name of the function that was read."""


def read_activations(forward: Any, source: str = "", method: str = "forward") -> FoundActivations | None:
    """The activations of a forward; None if it has none. source: of its rewrite. method: its name in its class."""
    tree: Any = ast.parse(source).body[0] if source else parse(forward)
    if isinstance(tree, Unsuitable) or not tree.args.args:
        return None
    reader = Reader(forward, tree)
    found = list(_read(reader))
    dropped = dict(_dropouts(reader))
    for each in found:
        each.dropped = dropped.get(each.result)
    return FoundActivations(tree, found, method) if found and (source or is_source_of(tree, forward)) else None


def _read(reader: Reader) -> Iterator[Found]:
    places = []
    for block, in_loop in blocks(reader.tree.body, False):
        for position, statement in enumerate(block):
            if isinstance(statement, (ast.Assign, ast.Return, ast.Expr)):
                places.append((block, position, in_loop, list(evaluated(statement))))
    for block, position, in_loop, nodes in places:
        for node in nodes:
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                for side, other in ((node.left, node.right), (node.right, node.left)):
                    gated = None if isinstance(other, ast.Constant) else _factor(reader, side, block, position, in_loop)
                    if gated is not None:
                        gated.product, gated.other = node, other
                        gated.halves = _halves(reader, gated, block, position, in_loop)
                        yield gated
    for block, position, in_loop, nodes in places:
        for node in nodes:
            found = _activation(reader, node) if isinstance(node, ast.Call) else None
            if found is None:
                continue
            inner = reader.value_of(found.x, block, position, position, in_loop) or (found.x, ())
            if (called := reader.called(inner[0])) is not None:
                found.linear, found.linear_x = called
                found.linear_definition = inner[1][0] if inner[1] else None
            yield found


def _dropouts(reader: Reader) -> Iterator[tuple[ast.expr, Dropped]]:
    """What may be dropouts, by the expression that they drop."""
    for block, in_loop in blocks(reader.tree.body, False):
        for position, statement in enumerate(block):
            nodes = evaluated(statement) if isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) else ()
            for node in nodes:
                if not isinstance(node, ast.Call):
                    continue
                if (of_function := reader.functional_dropout(node)) is not None:
                    x, dropped = of_function[0], Dropped(node, None, "", *of_function[1:])
                elif (called := reader.called(node)) is not None:
                    x, dropped = called[1], Dropped(node, None, called[0])
                else:
                    continue
                if (inner := reader.value_of(x, block, position, position, in_loop)) is not None:
                    x, (dropped.definition,) = inner
                yield x, dropped


def _factor(reader: Reader, side: ast.expr, block: list[ast.stmt], position: int, in_loop: bool) -> Found | None:
    """The activation that a factor of a product is, or that the factor's name was given to."""
    if not isinstance(side, ast.Name):
        return _activation(reader, side)
    for index in reversed(range(position)):
        statement = block[index]
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == side.id:
                found = _activation(reader, value)
                between = block[index + 1 : position]
                if (
                    found is None
                    or any(may_change(each, name) for each in between)
                    or not reader.is_read_once(name, block, position, position, in_loop)
                ):
                    return None
                found.definition = statement
                return found
        if mentions(statement, side.id):
            return None
    return None


def _halves(reader: Reader, found: Found, block: list[ast.stmt], position: int, in_loop: bool) -> Halves | None:
    """The halves that gate and other are, if nothing else reads them or changes them before the product."""
    if not (isinstance(found.x, ast.Name) and isinstance(found.other, ast.Name)) or found.x.id == found.other.id:
        return None
    gate, other = found.x.id, found.other.id
    for index in reversed(range(position)):
        match block[index]:
            case (
                ast.Assign(
                    targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])],
                    value=ast.Call(func=ast.Attribute(value=packed, attr="chunk"), args=args, keywords=keywords),
                ) as statement
            ) if {first, second} == {gate, other}:
                sizes = [ast.unparse(each) for each in (*args, *(k.value for k in keywords if k.arg == "dim"))]
                ends = {name: reader.ends_at(name, block, index, position, in_loop) for name in (gate, other)}
                is_whole = sizes == ["2", "-1"] and len(args) + len(keywords) == 2
                return Halves(statement, packed, first == gate) if is_whole and all(ends.values()) else None
        if block[index] is not found.definition and any(mentions(block[index], name) for name in (gate, other)):
            return None
    return None


def _activation(reader: Reader, expression: ast.expr) -> Found | None:
    """The call of a child, or of a function of torch's, with one argument."""
    if (called := reader.called(expression)) is not None and isinstance(expression, ast.Call):
        return Found(expression, called[1], called[0], "")
    match expression:
        case ast.Call(func=function, args=[x], keywords=keywords):
            resolved = resolve(function, reader.globals)
            options = {each.arg: ast.unparse(each.value) for each in keywords}
            if resolved is functional.silu and not options:
                return Found(expression, x, "", "silu")
            if resolved in (functional.relu, torch.relu) and not options:
                return Found(expression, x, "", "relu")
            if resolved is functional.gelu and options in ({}, {"approximate": "'none'"}):
                return Found(expression, x, "", "gelu")
            if resolved is functional.gelu and options == {"approximate": "'tanh'"}:
                return Found(expression, x, "", "gelu_tanh")
    return None


@dataclass(frozen=True)
class Activation:
    """What an activation module computes."""

    name: str
    """Of FORMULAS."""
    n_operators: int
    """Of torch's that its forward calls."""
    configuration: Configuration = ()


def recognise_activation(module: nn.Module) -> Activation | None:
    """What a module without parameters and children computes, by probing a clone; None for anything else."""
    found = configuration(module)
    if module._modules or module._parameters or module._buffers or "forward" in vars(module) or found is None:
        return None
    values = torch.tensor([*(k / 16 for k in range(-192, 193)), 1e-4, -1e-4, 60.0, -60.0, 0.5], device="cpu").double()
    order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(0), device="cpu")
    try:
        with undisturbed(torch.device("cpu")):
            given, shuffled, counter = values.clone(), values[order].view(2, 3, 5, 13), _Counter()
            flat = clone(module).train()(given)
            with counter:
                mixed = clone(module).eval()(shuffled)
    except Exception:  # no function of one tensor
        return None
    if not torch.equal(given, values):  # in place: others may read what it writes
        return None
    if not all(isinstance(y, Tensor) and y.numel() == values.numel() for y in (flat, mixed)):
        return None
    for name, formula in FORMULAS.items():
        exact = formula(values)
        if torch.allclose(flat, exact, 1e-8, 1e-9) and torch.allclose(mixed.flatten(), exact[order], 1e-8, 1e-9):
            return Activation(name, counter.n_calls, found)
    return None


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.n_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_calls += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Fused:
    """An activation in a rewritten forward."""

    activation: str
    cls: type | None
    """Of the child; None for a function of torch's."""
    configuration: Configuration
    """Of the child."""

    def is_still(self, act: Any) -> bool:
        """Whether the child computes what it did at patching."""
        return self.cls is None or (is_plain(act, self.cls) and has_configuration(act, self.configuration))

    def unfused(self, act: Any, x: Tensor) -> Tensor:
        return (FORMULAS[self.activation] if self.cls is None else act)(x)


class Gated(_Fused):
    """dropout(act(gate) * up) in a rewritten forward."""

    def __call__(self, module: nn.Module, act: Any, gate: Tensor, up: Tensor, dropout: Any = 0.0) -> Tensor:
        if self.is_still(act) and calls.fits(gate) and calls.is_like(up, gate):
            calls.count_fused(module)
            p, after = _probability(dropout)
            return after(ops.glu(gate, up, self.activation, dropout_p=p))
        calls.count_fallback(module)
        return _dropped(self.unfused(act, gate) * up, dropout)


@dataclass(frozen=True)
class GatedHalves(_Fused):
    """dropout(act(gate) * up) of two halves of one tensor, in a rewritten forward."""

    gate_first: bool

    def __call__(self, module: nn.Module, act: Any, packed: Tensor, dropout: Any = 0.0) -> Tensor:
        if self.is_still(act) and calls.fits(packed) and packed.shape[-1] % 2 == 0:
            calls.count_fused(module)
            p, after = _probability(dropout)
            return after(ops.glu_packed(packed, self.activation, gate_first=self.gate_first, dropout_p=p))
        calls.count_fallback(module)
        first, second = packed.chunk(2, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return _dropped(self.unfused(act, gate) * up, dropout)


class Activated(_Fused):
    """dropout(act(x)), or dropout(act(dense(x))), in a rewritten forward."""

    def __call__(self, module: nn.Module, act: Any, dense: Any, x: Tensor, dropout: Any = 0.0) -> Tensor:
        if self.is_still(act) and not x.is_nested:
            x, bias = (x, None) if dense is None else linear_parts(module, dense, x)
            if calls.fits(x):
                calls.count_fused(module)
                p, after = _probability(dropout)
                return after(ops.bias_activation(x, bias, self.activation, dropout_p=p))
            x = x if bias is None else x + bias
        elif dense is not None:
            x = dense(x)
        calls.count_fallback(module)
        return _dropped(self.unfused(act, x), dropout)


def _probability(dropout: Any) -> tuple[float, Callable[[Tensor], Tensor]]:
    """(p of a dropout, what is still to do of it), of a probability or a child. What is no plain nn.Dropout any more is
    called."""
    if not torch.compiler.is_compiling() and is_transformed():  # vmap has randomness of its own
        return 0.0, partial(_dropped, dropout=dropout)
    if isinstance(dropout, (int, float)):
        return dropout, _as_it_is
    if is_plain(dropout, nn.Dropout) and not dropout.inplace:
        return dropout.p if dropout.training else 0.0, _as_it_is
    return 0.0, dropout


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _dropped(x: Tensor, dropout: Any) -> Tensor:
    return functional.dropout(x, dropout) if isinstance(dropout, (int, float)) else dropout(x)


@dataclass(frozen=True)
class Choice:
    """One activation of one instance."""

    found: Found
    activation: str
    cls: type | None
    configuration: Configuration
    has_bias: bool
    drops: bool

    @property
    def pattern(self) -> str:
        return ACTIVATED if self.found.product is None else GATED


def choose_activations(
    module: nn.Module,
    found: FoundActivations,
    activation_of: Callable[[nn.Module], Activation | None],
    excluded: Container[int],
) -> list[Choice]:
    """The activations that can be fused, where something is gained: a product, a bias, several operators, a dropout."""
    chosen = []
    taken: set[ast.expr] = set()
    for each in found.found:
        if each.call in taken or (each.product is not None and each.product in taken):
            continue
        child = child_at(module, each.path) if each.path else None
        activation = Activation(each.function, 1) if each.function else None
        if child is not None and id(child) not in excluded:
            activation = activation_of(child)
        if activation is None:
            continue
        linear: Any = child_at(module, each.linear) if each.linear else None
        has_bias = (
            linear is not None
            and id(linear) not in excluded
            and original_class(type(linear)) is nn.Linear
            and linear.bias is not None
        )
        drops = each.dropped is not None and _drops(module, each.dropped, excluded)
        is_dropped = drops and each.dropped is not None and each.dropped.path != ""
        if each.product is not None or has_bias or activation.n_operators > 1 or is_dropped:
            taken |= {each.call} if each.product is None else {each.call, each.product}
            cls = None if child is None else original_class(type(child))
            chosen.append(Choice(each, activation.name, cls, activation.configuration, has_bias, drops))
    return chosen


def _drops(module: nn.Module, dropped: Dropped, excluded: Container[int]) -> bool:
    """Whether the child is a dropout that drops; torch's function always is one."""
    child: Any = child_at(module, dropped.path) if dropped.path else None
    if child is None:
        return dropped.p is not None
    return (
        original_class(type(child)) is nn.Dropout and child.p > 0.0 and not child.inplace and id(child) not in excluded
    )


@dataclass(frozen=True)
class Activations:
    """A module whose forward has activations to fuse, as a site."""

    forward: FoundActivations
    chosen: tuple[Choice, ...]

    @property
    def pattern(self) -> str:
        """gated_mlp where there is a product."""
        return GATED if any(choice.pattern == GATED for choice in self.chosen) else ACTIVATED

    @property
    def detail(self) -> str:
        return ", ".join(sorted({choice.activation for choice in self.chosen}))

    def rewrite(self, module: nn.Module) -> Rewrite:
        """The forward with its activations fused."""
        return self._rewrite

    @cached_property
    def _rewrite(self) -> Rewrite:
        rewriting, method = Rewriting(self.forward.tree), self.forward.method
        for index, choice in enumerate(self.chosen):
            _put(rewriting, f"{index}_" if method == "forward" else f"{index}_{method}_", choice)
        constants = tuple(rewriting.constants.items())
        return Rewrite(self.pattern, rewriting.source(), constants, method=method, in_module=True)

    def verify(self, module: nn.Module, rewrite: Rewrite) -> None:
        """Raise VerificationError unless each activation, fused, computes what the module's own does."""
        device, dtype = kind_of(module)
        with undisturbed(device), MaskedDropout():
            for choice in self.chosen:
                child = child_at(module, choice.found.path) if choice.found.path else None
                act: Any = FORMULAS[choice.activation] if child is None else clone(child).eval()
                inputs = _inputs(choice)
                for p in (0.0, 0.25) if choice.drops else (0.0,):
                    fused, unfused = partial(_fused, choice, p), partial(_unfused, act, p)
                    expected, actual = (outcome_of(compute, inputs, device, dtype) for compute in (unfused, fused))
                    truth = outcome_of(unfused, inputs, device, torch.float64)
                    dropout = " with dropout" if p else ""
                    check_outcomes(actual, expected, truth, f" of {choice.activation}{dropout}")


def _put(rewriting: Rewriting, suffix: str, choice: Choice) -> None:
    """The fused call in place of the activation. suffix: of its name."""
    found, copies = choice.found, rewriting.copies
    act = rewriting.attribute(found.path) if found.path else copies[id(found.call.func)]
    name = f"{'activated' if found.product is None else 'gated'}_{suffix}"

    def called(*arguments: ast.expr) -> ast.expr:
        return ast.Call(ast.Name(name), [ast.Name(rewriting.own), act, *arguments, *dropout()], [])

    def dropout() -> list[ast.expr]:
        dropped = found.dropped if choice.drops else None
        if dropped is None or dropped.path:
            return [] if dropped is None else [rewriting.attribute(dropped.path)]
        return [rewriting.probability(dropped.p, dropped.training)]

    replaced: ast.expr = found.result
    if choice.drops and found.dropped is not None:
        replaced = found.dropped.call
        if found.dropped.definition is not None:
            rewriting.removed.add(id(copies[id(found.dropped.definition)]))

    if found.product is not None:
        known = (choice.activation, choice.cls, choice.configuration)
        rewriting.constants[name] = (
            Gated(*known) if found.halves is None else GatedHalves(*known, found.halves.gate_first)
        )
        x, other = copies[id(found.x)], copies[id(found.other)]
        gate = x
        if found.definition is not None:
            gate = ast.Name(found.definition.targets[0].id)  # type: ignore[attr-defined]
            rewriting.replaced[id(copies[id(found.call)])] = lambda: rewriting.visit(x)
        factors = [gate, other]
        if found.halves is not None:
            statement, packed, factors = copies[id(found.halves.statement)], copies[id(found.halves.packed)], [gate]
            rewriting.replaced[id(statement.value)] = lambda: rewriting.visit(packed)
            statement.targets = [ast.Name(x.id)]
        rewriting.replaced[id(copies[id(replaced)])] = lambda: called(*map(rewriting.visit, factors))
        return
    rewriting.constants[name] = Activated(choice.activation, choice.cls, choice.configuration)
    dense: ast.expr = ast.Constant(None)
    x = copies[id(found.x)]
    if choice.has_bias:
        dense, x = rewriting.attribute(found.linear), copies[id(found.linear_x)]
        if found.linear_definition is not None:
            rewriting.removed.add(id(copies[id(found.linear_definition)]))
    rewriting.replaced[id(copies[id(replaced)])] = lambda: called(dense, rewriting.visit(x))


def _inputs(choice: Choice) -> list[Tensor]:
    """gate and up; or x and, where there is one, the bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 24)] + ([(3, 4, 24)] if choice.found.product is not None else [(24,)] if choice.has_bias else [])
    return [2.0 * torch.randn(shape, generator=generator, device="cpu") for shape in shapes]


def _unfused(act: Callable[[Tensor], Tensor], p: float, x: Tensor, other: Tensor | None = None) -> Tensor:
    if other is None:
        y = act(x)
    else:
        y = act(x) * other if other.shape == x.shape else act(x + other)
    return functional.dropout(y, p) if p else y


def _fused(choice: Choice, p: float, x: Tensor, other: Tensor | None = None) -> Tensor:
    dropout: Any = {"dropout_p": p, "rng": RNG if p else None}
    if choice.found.product is None:
        return ops.bias_activation(x, other, choice.activation, **dropout)
    assert other is not None
    halves = choice.found.halves
    if halves is None:
        return ops.glu(x, other, choice.activation, **dropout)
    packed = torch.cat([x, other] if halves.gate_first else [other, x], dim=-1)
    return ops.glu_packed(packed, choice.activation, gate_first=halves.gate_first, **dropout)
