"""Activations in methods other than the forward.

Of every method gated products. transformers' mixtures of experts have them: a wrapper of the forward chooses among
implementations, the class's own loop over the experts, and functions of the library that call the class's method.

    gate, up = gate_up_out.chunk(2, dim=-1)     ->      gate = gate_up_out
    return self.act_fn(gate) * up                       return gated_0_(self, self.act_fn, gate)

Of methods that the forward names, as DistilBERT's and ALBERT's name the one that computes a chunk, all activations.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from ..classes import Rewrite, method_of
from . import Activation, Activations, FoundActivations, choose_activations, read_activations

if TYPE_CHECKING:
    from ..classify import InForward, Together


def read_methods(cls: type) -> list[FoundActivations]:
    """The activations of methods with one argument, of those that the forward does not name the gated products."""
    named = getattr(getattr(method_of(cls, "forward"), "__code__", None), "co_names", ())
    found = []
    for name, function in _functions(cls):
        is_named = name in named
        each = read_activations(function, method=name) if is_named or _may_gate(function) else None
        if each is not None and not is_named:
            each.found = [activation for activation in each.found if activation.product is not None]
        if each is not None:
            found.append(each)
    return found


def _functions(cls: type) -> Iterator[tuple[str, FunctionType]]:
    names = (name for each in cls.__mro__[: cls.__mro__.index(nn.Module)] for name in vars(each))
    for name in dict.fromkeys(names):
        method = inspect.getattr_static(cls, name)  # a staticmethod is no function here
        if isinstance(method, FunctionType) and name != "forward" and method.__code__.co_argcount == 2:
            yield name, method


def _may_gate(method: FunctionType) -> bool:
    """Whether the method multiplies."""
    instructions = dis.get_instructions(method.__code__)
    return any(each.argrepr == "*" or each.opname == "BINARY_MULTIPLY" for each in instructions)  # until Python 3.10


def choose_methods(
    module: nn.Module,
    found: list[FoundActivations],
    activation_of: Callable[[Any], Activation | None],
    excluded: Container[int],
    wanted: Container[str],
) -> tuple[Activations, ...]:
    """What can be fused of each."""
    sites = []
    for each in found:
        chosen = choose_activations(module, each, activation_of, excluded)
        if choices := tuple(choice for choice in chosen if choice.pattern in wanted):
            sites.append(Activations(each, choices))
    return tuple(sites)


@dataclass(frozen=True)
class InMethods:
    """A module with activations to fuse in several functions, as a site."""

    forward: InForward | Together | None
    """Site of the module's forward, where a part of that is fused."""
    methods: tuple[Activations, ...]

    @property
    def parts(self) -> list[InForward | Together]:
        return [*(() if self.forward is None else (self.forward,)), *self.methods]

    @property
    def pattern(self) -> str:
        return self.parts[0].pattern

    @property
    def detail(self) -> str:
        details = (getattr(site, "detail", "") for site in self.parts)
        return ", ".join(dict.fromkeys(filter(None, details)))

    def rewrite(self, module: nn.Module) -> Rewrite:
        """All functions with their activations fused."""
        first, *others = rewrites = [site.rewrite(module) for site in self.parts]
        constants = tuple(dict.fromkeys(each for part in rewrites for each in part.constants))
        return replace(first, constants=constants, others=tuple((each.method, each.source) for each in others))

    def verify(self, module: nn.Module, rewrite: Rewrite) -> None:
        """Raise VerificationError unless each computes the same as the original."""
        for site in self.parts:
            site.verify(module, rewrite)
