"""Dropouts that no sum, attention or activation takes, without a mask in memory: nn.Dropout, and in a forward

    functional.dropout(x, p=self.p, training=self.training)    ->    function_dropped_(self, x, self.p, self.training)

where p and training may be any expressions. The kernel of residual sums, with nothing to add, draws the mask again in
backward. Under torch.compile the original runs: Inductor makes a dropout part of the kernels around it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import ops
from ..ops.common.tracing import is_transformed
from . import calls
from .classes import Rewrite, is_patched, method_of, rewrite_of
from .forward import Forward
from .residual.tails import Tail, returned_first
from .rewriting import InForward, Rewriting
from .source import calls_in
from .verify import RNG, MaskedDropout, check_function, kind_of

PATTERN = "dropout"
_SMALLEST = {"cpu": 1 << 13, "cuda": calls.SMALLEST}
"""Elements from which on the call is no slower than torch's. Forward and backward on an AMD EPYC with AVX2, 2 threads,
float32: 184 us for torch's 148 us with 4,096 elements, 243 and 275 us with 8,192, 4.1 and 28 ms with 2,359,296."""


@dataclass(frozen=True)
class Dropout:
    """An nn.Dropout, as a site."""

    device: torch.device
    """Where it is verified."""
    pattern = PATTERN
    detail = ""

    def rewrite(self, cls: type) -> Rewrite:
        """The forward as one operator call where the mask would be in memory."""
        source = "def forward(self, input):\n    return dropped(self, original, input)\n"
        return Rewrite(PATTERN, around=source, constants=(("dropped", _dropped),))

    def verify(self, module: Any) -> None:
        """Raise VerificationError unless the operator computes what the module does with the same mask."""
        _verify(float(module.p), self.device)


class _Found(NamedTuple):
    """A call of functional.dropout in a forward."""

    call: ast.Call
    operands: tuple[ast.expr, ast.expr, ast.expr]
    """x, p, training."""
    path: str
    """Of p in the module; empty where it is no attribute."""


def read_dropouts(forward: Forward) -> list[_Found]:
    """Those of a forward, but for that of a value that it returns alone or first: the caller's sum may draw it."""
    left = set()
    for place, value in returned_first(forward.tree.body):
        assigned = forward.value_of(value, place, place.position)
        left |= {id(value), id(assigned[0]) if assigned is not None else 0}
    dropped = ((call, forward.functional_dropout(call)) for call in calls_in(forward.tree) if id(call) not in left)
    return [_Found(call, found, forward.child(found[1])) for call, found in dropped if found is not None]


class FunctionalDropouts(InForward):
    """A module whose forward calls functional.dropout, as a site."""

    patterns, is_minor, in_wrapper = (PATTERN,), True, True
    read = staticmethod(read_dropouts)

    @staticmethod
    def is_of(module: Any, each: _Found, excluded: Container[int]) -> bool:
        """Whether its p is not the 0 of a model without dropout."""
        p: Any = reduce(lambda owner, name: inspect.getattr_static(owner, name, None), each.path.split("."), module)
        return type(p) not in (int, float) or p != 0

    def put(self, rewriting: Rewriting) -> None:
        """The operator in place of the calls."""
        rewriting.constants["function_dropped_"] = _functional
        for call, operands, _ in self.chosen:
            rewriting.put_other_call(call, "function_dropped_", *map(rewriting.copy_of, operands))

    def verify(self, module: Any) -> None:
        """Raise VerificationError unless the operator computes what the function does with the same mask."""
        _verify(0.25, kind_of(module)[0])


def _verify(p: float, device: torch.device) -> None:
    fused: Any = partial(ops.bias_dropout_residual, residual=None, dropout_p=p, rng=RNG)
    unfused: Any = partial(functional.dropout, p=p)
    with MaskedDropout():
        check_function(fused, unfused, {"x": (3, 4, 24)}, device, torch.float32)


def _dropped(module: Any, original: Callable[..., Tensor], x: Tensor) -> Tensor:
    return _fused(module, x, module.p, module.training and not module.inplace, lambda: original(module, x))


def _functional(module: Any, x: Tensor, p: Any, training: bool) -> Tensor:
    return _fused(module, x, p, training, lambda: functional.dropout(x, p=p, training=training))


def _fused(module: Any, x: Tensor, p: Any, drops: bool, original: Callable[[], Tensor]) -> Tensor:
    if (
        not drops
        or torch.compiler.is_compiling()
        or is_transformed()
        or type(p) not in (float, int)
        or not 0.0 < p <= 1.0
        or not isinstance(x, Tensor)
        or x.numel() < _SMALLEST.get(x.device.type, 1 << 62)
    ):
        return original()
    # torch's result has the strides of x, which code after it may view.
    if not calls.fits(x) or x.layout != torch.strided or not x.is_contiguous():
        calls.count_fallback(module)
        return original()
    calls.count_fused(module)
    return ops.bias_dropout_residual(x, None, dropout_p=p)


def uncalled_dropouts(modules: Iterable[nn.Module]) -> set[int]:
    """ids of the dropouts that no forward calls: sums and attention read their probability, or draw their mask."""
    modules = list(modules)
    values = (value for module in modules if is_patched(module) for _, value in rewrite_of(module).constants)
    tails = [value for value in values if isinstance(value, Tail)]
    opened = {(calls.original_class(tail.owner), name) for tail in tails for name in tail.dropouts}
    is_called: dict[int, bool] = {}
    for module in modules:
        for name, child in module._modules.items():
            if child is not None and calls.original_class(type(child)) is nn.Dropout:
                cls: Any = type(module)
                called = (calls.original_class(cls), name) not in opened and _calls(cls, name)
                is_called[id(child)] = is_called.get(id(child), False) or called
    return {found for found, called in is_called.items() if not called}


@cache
def _calls(cls: Any, name: str) -> bool:
    """Whether a method of the class calls self.<name>, or never mentions it: containers call what they hold."""
    source = _source(cls)
    return re.search(rf"\.{name}\(", source) is not None or re.search(rf"\.{name}\b", source) is None


@cache
def _source(cls: Any) -> str:
    """The methods of a class and its bases, as rewritten; empty where they cannot be read."""
    original = calls.original_class(cls)
    replaced = {} if original is cls else cls._onetrip_rewrite.replaced
    try:
        bases = original.__mro__[: original.__mro__.index(nn.Module)]
        source = "".join(inspect.getsource(base) for base in bases)
        for method, rewritten in replaced.items():
            source = source.replace(inspect.getsource(method_of(original, method)), "") + rewritten
        return source
    except (OSError, TypeError, ValueError):
        return ""
