"""Activations in a forward of any length: `act(gate) * up`, and `act(dense(x))`, with the dropout that follows.

    h = self.act(self.gate(x)) * self.up(x)     ->      h = gated_0_(self, self.act, self.gate(x), self.up(x))

    gate, up = h.chunk(2, dim=-1)               ->      gate = h
    h = self.act(gate) * up                             h = gated_0_(self, self.act, gate)

    h = self.dense(h)                           ->      h = activated_0_(self, self.act, self.dense, h,
    h = self.act(h)                                                      dropout=self.drop)
    h = self.drop(h)

    gate, up = h[..., ::2], h[..., 1::2]        ->      gate = h
    gate = gate.clamp(max=self.limit)                   glu = gate
    up = up.clamp(min=-self.limit, max=self.limit)      h = gated_0_(self, None, glu, limit=self.limit,
    glu = gate * torch.sigmoid(gate * self.alpha)                    alpha=self.alpha)
    h = (up + 1) * glu

The activation is a child, a function of torch's, or a function or module of the model's file, recognised by what it
computes. A plain linear layer leaves its bias to the activation. Halves that only the product reads stay one tensor,
whose gradient is then written as one. Everything else of the forward stays as it was written.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ... import ops
from ..calls import Configuration, configuration, original_class
from ..clones import clone
from ..forward import child_at, has_bias_at
from ..rewriting import InForward, Rewriting
from ..source import has_effects, is_pure, resolve
from ..verify import RNG, MaskedDropout, check_function, kind_of, undisturbed
from .fused import FORMULAS, Activated, Gated, is_alpha, is_limit
from .read import Bounds, Dropped, FoundActivation, bounds_itself, read_activations

__all__ = [
    "PATTERNS",
    "Activation",
    "Activations",
    "FoundActivation",
    "choose_activations",
    "recognise_activation",
]

GATED, ACTIVATED = "gated_mlp", "bias_activation"
PATTERNS = (GATED, ACTIVATED)


@dataclass(frozen=True)
class Activation:
    """What an activation module computes."""

    name: str
    """Key in FORMULAS."""
    n_operators: int
    """Number of torch operators that its forward calls."""
    configuration: Configuration = ()


def recognise_activation(act: Any) -> Activation | None:
    """What a module without parameters and children, or a function, computes, by probing it; None for anything else."""
    found = () if isinstance(act, FunctionType) else configuration(act)
    if found is None:
        return None
    if isinstance(act, FunctionType):
        if len(inspect.signature(act).parameters) != 1 or not is_pure(act):
            return None
    elif act._modules or act._parameters or act._buffers or "forward" in vars(act) or has_effects(type(act).forward):
        return None
    large = (1e-4, 60.0, 200.0, 1e4)  # the last two where bounds of the input show
    numbers = [*(k / 16 for k in range(-190, 191)), *large, *(-x for x in large), 0.5]
    values = torch.tensor(numbers, device="cpu").double()
    order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(0), device="cpu")
    try:
        with undisturbed(torch.device("cpu")):
            given, shuffled, counter = values.clone(), values[order].view(2, 3, 5, 13), _Counter()
            flat = _copied(act, True)(given)
            with counter:
                mixed = _copied(act, False)(shuffled)
            passes_nan = _copied(act, True)(torch.full((2,), math.nan, dtype=values.dtype, device="cpu")).isnan().all()
    except Exception:  # no function of one tensor
        return None
    if not torch.equal(given, values) or not passes_nan:  # in place: others may read what it writes
        return None
    if not all(isinstance(y, Tensor) and y.numel() == values.numel() for y in (flat, mixed)):
        return None
    for name, formula in FORMULAS.items():
        exact = formula(values)
        if torch.allclose(flat, exact, 1e-8, 1e-9) and torch.allclose(mixed.flatten(), exact[order], 1e-8, 1e-9):
            return Activation(name, counter.n_calls, found)
    return None


def _copied(act: Any, training: bool) -> Any:
    """A clone of a module, in that mode."""
    return act if isinstance(act, FunctionType) else clone(act).train(training)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.n_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_calls += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Choice:
    """One activation of one instance."""

    found: FoundActivation
    fused: Gated | Activated
    """What is called in its place."""
    has_bias: bool
    drops: bool

    @property
    def pattern(self) -> str:
        return ACTIVATED if self.found.product is None else GATED


def choose_activations(
    module: nn.Module,
    found: Iterable[FoundActivation],
    activation_of: Callable[[Any], Activation | None],
    excluded: Container[int],
) -> list[Choice]:
    """The activations that can be fused, where something is gained: a product, a bias, several operators, a dropout."""
    chosen = []
    taken: set[ast.expr] = set()
    for each in found:
        if each.call in taken or (each.product is not None and each.product in taken):
            continue
        act = _called(module, each)
        activation = Activation(each.function, 1) if each.function else None
        if act is not None and id(act) not in excluded:
            activation = activation_of(act)
        if activation is None or (each.bounds is not None and not _has_bounds(module, each.bounds, each.alpha)):
            continue
        if each.bounds is not None and activation.name != "silu":
            continue
        has_bias = has_bias_at(module, each.linear, excluded)
        drops = each.dropped is not None and _drops(module, each.dropped, excluded)
        is_dropped = drops and each.dropped is not None and each.dropped.path != ""
        if each.product is not None or has_bias or activation.n_operators > 1 or is_dropped:
            taken |= {each.call} if each.product is None else {each.call, each.product}
            original = act if act is None or isinstance(act, FunctionType) else original_class(type(act))
            gains_bias_alone = activation.n_operators == 1 and not drops
            fused = _fused_call(each, (activation.name, original, activation.configuration), gains_bias_alone)
            chosen.append(Choice(each, fused, has_bias, drops))
    return chosen


def _has_bounds(module: nn.Module, bounds: Bounds, alpha: ast.expr | None) -> bool:
    """Whether limit and alpha are numbers now that ops.glu takes."""
    return is_limit(_value(module, bounds.limit)) and (alpha is None or is_alpha(_value(module, alpha)))


def _value(module: nn.Module, expression: ast.expr) -> Any:
    """Of a constant, or of an attribute of the module."""
    root: Any = expression
    while isinstance(root, ast.Attribute):
        root = root.value
    return root.value if isinstance(root, ast.Constant) else resolve(expression, {root.id: module})


def _called(module: nn.Module, found: FoundActivation) -> Any:
    """The module or the model's own function that is called; None for a torch function."""
    return child_at(module, found.path) if found.path else found.own


def _fused_call(
    found: FoundActivation, known: tuple[str, type | FunctionType | None, Configuration], gains_bias_alone: bool
) -> Gated | Activated:
    if found.product is None:
        return Activated(*known, gains_bias_alone)
    halves, bounds = found.halves, found.bounds
    return Gated(
        *known,
        is_packed=halves is not None,
        gate_first=halves is None or halves.gate_first,
        interleaved=halves is not None and halves.interleaved,
        has_limit=bounds is not None,
        has_alpha=found.alpha is not None,
        up_offset=0.0 if bounds is None else bounds.up_offset,
    )


def _drops(module: nn.Module, dropped: Dropped, excluded: Container[int]) -> bool:
    """Whether the child is a dropout that drops; torch's function always is one."""
    child: Any = child_at(module, dropped.path) if dropped.path else None
    if child is None:
        return dropped.p is not None
    return (
        original_class(type(child)) is nn.Dropout and child.p > 0.0 and not child.inplace and id(child) not in excluded
    )


class Activations(InForward):
    """A module whose forward has activations to fuse, as a site."""

    patterns, in_wrapper = PATTERNS, True
    read = staticmethod(read_activations)

    @property
    def pattern(self) -> str:
        """gated_mlp where there is a product."""
        return GATED if any(choice.pattern == GATED for choice in self.chosen) else ACTIVATED

    @property
    def detail(self) -> str:
        return ", ".join(sorted({choice.fused.activation for choice in self.chosen}))

    def put(self, rewriting: Rewriting) -> None:
        """Fused calls in place of the activations."""
        method = "" if self.forward.method == "forward" else f"{self.forward.method}_"
        for index, choice in enumerate(self.chosen):
            kind = "activated" if choice.found.product is None else "gated"
            _put(rewriting, f"{kind}_{index}_{method}", choice)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless each activation, fused, computes what the module's own does."""
        device, dtype = kind_of(module)
        with MaskedDropout():
            for choice in self.chosen:
                act = _called(module, choice.found)
                act = FORMULAS[choice.fused.activation] if act is None else _copied(act, False)
                inputs = _shapes(choice)
                for p in (0.0, 0.25) if choice.drops else (0.0,):
                    fused, unfused = partial(_fused, choice, p), partial(_unfused, choice, act, p)
                    mode = f" of {choice.fused.activation}{' with dropout' if p else ''}"
                    check_function(fused, unfused, inputs, device, dtype, mode)


def _put(rewriting: Rewriting, name: str, choice: Choice) -> None:
    """The fused call in place of the activation. name: of what is called."""
    found, copy_of = choice.found, rewriting.copy_of
    act: ast.expr = ast.Constant(None)  # x * sigmoid(x * alpha) calls none
    if found.path:
        act = rewriting.attribute(found.path)
    elif isinstance(found.call, ast.Call):
        act = copy_of(found.call.func)
    arguments = _put_linear(rewriting, choice) if found.product is None else _put_factors(rewriting, found)
    options: dict[str, ast.expr | None] = {"alpha": found.alpha}
    if found.bounds is not None:
        _unbound(rewriting, found.bounds)
        options = {"limit": found.bounds.limit, **options}
    replaced: ast.expr = found.result
    if choice.drops and found.dropped is not None:
        dropped, replaced = found.dropped, found.dropped.call
        probability = rewriting.probability(dropped.p, dropped.training)
        options["dropout"] = rewriting.attribute(dropped.path) if dropped.path else probability
        if dropped.definition is not None:
            rewriting.remove(dropped.definition)

    def called() -> ast.expr:
        call = rewriting.call(name, act, *map(rewriting.visit, arguments))
        call.keywords = [ast.keyword(option, value) for option, value in options.items() if value is not None]
        return call

    rewriting.constants[name] = choice.fused
    rewriting.replace(replaced, called)


def _put_linear(rewriting: Rewriting, choice: Choice) -> list[ast.expr]:
    """(linear layer that leaves its bias to the activation, x), of which the activation is computed."""
    found = choice.found
    if not choice.has_bias or found.linear_x is None:
        return [ast.Constant(None), rewriting.copy_of(found.x)]
    if found.linear_definition is not None:
        rewriting.remove(found.linear_definition)
    return [rewriting.attribute(found.linear), rewriting.copy_of(found.linear_x)]


def _put_factors(rewriting: Rewriting, found: FoundActivation) -> list[ast.expr]:
    """(gate, up), or the tensor whose halves they are."""
    assert found.other is not None
    gate = rewriting.copy_of(found.x)
    if found.halves is not None:
        rewriting.put_part(found.halves.statement.value, found.halves.packed)
        rewriting.copy_of(found.halves.statement).targets = [ast.Name(gate.id)]
    if found.definition is not None:
        rewriting.put_part(found.call, found.x)
        gate = ast.Name(found.definition.targets[0].id)  # type: ignore[attr-defined]
    return [gate] if found.halves is not None else [gate, rewriting.copy_of(found.other)]


def _unbound(rewriting: Rewriting, bounds: Bounds) -> None:
    """Leaves the bounds out of the statements that give gate and up their values."""
    for statement in (bounds.gate, bounds.up):
        if bounds_itself(statement):
            rewriting.remove(statement)
        else:
            rewriting.put_part(statement.value, statement.value.func.value)  # type: ignore[attr-defined]


def _shapes(choice: Choice) -> dict[str, tuple[int, ...]]:
    if isinstance(choice.fused, Gated):
        return {"gate and up": (3, 4, 48)} if choice.fused.is_packed else {"gate": (3, 4, 24), "up": (3, 4, 24)}
    return {"x": (3, 4, 24), "bias": (24,)} if choice.has_bias else {"x": (3, 4, 24)}


def _limit_and_alpha(fused: Gated) -> tuple[float | None, float]:
    """What a site is verified with: many normal numbers are beyond the limit."""
    return 0.75 if fused.has_limit else None, 1.5 if fused.has_alpha else 1.0


def _unfused(
    choice: Choice, act: Callable[[Tensor], Tensor], p: float, x: Tensor, other: Tensor | None = None
) -> Tensor:
    if isinstance(choice.fused, Gated):
        y = choice.fused.by_torch(act, x, other, *_limit_and_alpha(choice.fused))
    else:
        y = act(x if other is None else x + other)
    return functional.dropout(y, p) if p else y


def _fused(choice: Choice, p: float, x: Tensor, other: Tensor | None = None) -> Tensor:
    dropout: Any = {"dropout_p": p, "rng": RNG if p else None}
    if isinstance(choice.fused, Gated):
        return choice.fused.fused(x, other, *_limit_and_alpha(choice.fused), **dropout)
    return ops.bias_activation(x, other, choice.fused.activation, **dropout)
