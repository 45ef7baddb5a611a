"""Gated products in methods other than the forward.

transformers' mixtures of experts have them. A wrapper of the forward chooses among implementations: the class's own
loop over the experts, and functions of the library that call the class's method for the gated product.

    gate, up = gate_up_out.chunk(2, dim=-1)     ->      gate = gate_up_out
    return self.act_fn(gate) * up                       return gated_0_(self, self.act_fn, gate)
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from ..classes import Rewrite
from . import GATED, Activation, Activations, FoundActivations, choose_activations, read_activations

if TYPE_CHECKING:
    from ..classify import InForward, Together


def read_methods(cls: type) -> list[FoundActivations]:
    """The gated products of methods with one argument."""
    found = [read_activations(function, method=name) for name, function in _functions(cls)]
    return [each for each in found if each is not None]


def _functions(cls: type) -> Iterator[tuple[str, Any]]:
    names = (name for each in cls.__mro__[: cls.__mro__.index(nn.Module)] for name in vars(each))
    for name in dict.fromkeys(names):
        method = inspect.getattr_static(cls, name)  # a staticmethod is no function here
        if isinstance(method, FunctionType) and name != "forward" and _may_gate(method):
            yield name, method


def _may_gate(method: FunctionType) -> bool:
    """Whether the method takes one argument and multiplies."""
    code = method.__code__
    multiplies = any(each.argrepr == "*" or each.opname == "BINARY_MULTIPLY" for each in dis.get_instructions(code))
    return code.co_argcount == 2 and multiplies  # BINARY_MULTIPLY: Python 3.10


def choose_methods(
    module: nn.Module,
    found: list[FoundActivations],
    activation_of: Callable[[nn.Module], Activation | None],
    excluded: Container[int],
    wanted: Container[str],
) -> tuple[Activations, ...]:
    """What can be fused of each. Of methods only products: where else a method is called from is not known."""
    sites = []
    for each in found:
        chosen = choose_activations(module, each, activation_of, excluded)
        products = tuple(choice for choice in chosen if choice.pattern == GATED and GATED in wanted)
        if products:
            sites.append(Activations(each, products))
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
