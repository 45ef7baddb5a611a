"""Dropouts that no sum, attention or activation takes: nn.Dropout without a mask in memory.

The kernel of residual sums, with nothing to add, draws the mask again in backward. Under torch.compile the original
runs: Inductor makes a dropout part of the kernels around it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import ops
from ..ops.common.tracing import is_transformed
from . import calls
from .classes import Rewrite, is_patched, method_of, rewrite_of
from .residual.tails import Tail
from .verify import RNG, MaskedDropout, check_function

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
        return Rewrite(PATTERN, source, (("dropped", _dropped),))

    def verify(self, module: Any, rewrite: Rewrite) -> None:
        """Raise VerificationError unless the operator computes what the module does with the same mask."""
        fused: Any = partial(ops.bias_dropout_residual, residual=None, dropout_p=module.p, rng=RNG)
        unfused: Any = partial(functional.dropout, p=module.p)
        with MaskedDropout():
            check_function(fused, unfused, {"x": (3, 4, 24)}, self.device, torch.float32)


def _dropped(module: Any, original: Callable[..., Tensor], x: Tensor) -> Tensor:
    p = module.p
    if (
        not module.training
        or p == 0.0
        or module.inplace
        or torch.compiler.is_compiling()
        or is_transformed()
        or x.numel() < _SMALLEST.get(x.device.type, 1 << 62)
    ):
        return original(module, x)
    if not calls.fits(x):
        calls.count_fallback(module)
        return original(module, x)
    calls.count_fused(module)
    return ops.bias_dropout_residual(x, None, dropout_p=p)


def uncalled_dropouts(modules: Iterable[nn.Module]) -> set[int]:
    """ids of the dropouts that no forward calls: sums and attention read their probability, or draw their mask."""
    modules = list(modules)
    tails = [tail for module in modules for tail in _tails(module)]
    opened = {(calls.original_class(tail.owner), name) for tail in tails for name in tail.dropouts}
    is_called: dict[int, bool] = {}
    for module in modules:
        for name, child in module._modules.items():
            if child is not None and calls.original_class(type(child)) is nn.Dropout:
                cls: Any = type(module)
                called = (calls.original_class(cls), name) not in opened and _calls(cls, name)
                is_called[id(child)] = is_called.get(id(child), False) or called
    return {found for found, called in is_called.items() if not called}


def _tails(module: nn.Module) -> Iterator[Tail]:
    constants = rewrite_of(module).constants if is_patched(module) else ()
    yield from (value for _, value in constants if isinstance(value, Tail))


@cache
def _calls(cls: Any, name: str) -> bool:
    """Whether a method of the class calls self.<name>, or never mentions it: containers call what they hold."""
    source = _source(cls)
    return re.search(rf"\.{name}\(", source) is not None or re.search(rf"\.{name}\b", source) is None


@cache
def _source(cls: Any) -> str:
    """The methods of a class and its bases, as rewritten; empty where they cannot be read."""
    original = calls.original_class(cls)
    try:
        bases = original.__mro__[: original.__mro__.index(nn.Module)]
        source = "".join(inspect.getsource(base) for base in bases)
        if original is cls:
            return source
        rewrite: Rewrite = cls.__dict__["_onetrip_rewrite"]
        for method, rewritten in ((rewrite.method, rewrite.source), *rewrite.others):
            source = source.replace(inspect.getsource(method_of(original, method)), "") + rewritten
        return source
    except (OSError, TypeError, ValueError):
        return ""
