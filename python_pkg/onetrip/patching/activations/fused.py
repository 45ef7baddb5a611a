"""Activations in a rewritten forward: the calls that replace them, and what they do where they do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import ops
from ...ops.common.tracing import is_transformed
from .. import calls
from ..calls import Configuration, has_configuration, is_plain
from ..linear.readers import linear_parts

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
    "relu": functional.relu,
}
"""The activations of ops.glu, by torch's functions."""


@dataclass(frozen=True)
class _Fused:
    """An activation in a rewritten forward."""

    activation: str
    original: type | FunctionType | None
    """Class of the module that is called, or the model's own function; None for a torch function."""
    configuration: Configuration
    """Configuration of the module."""

    def is_still(self, act: Any) -> bool:
        """Whether what is called computes what it did at patching."""
        if isinstance(self.original, type):
            return is_plain(act, self.original) and has_configuration(act, self.configuration)
        return self.original is None or act is self.original

    def unfused(self, act: Any, x: Tensor) -> Tensor:
        return (FORMULAS[self.activation] if self.original is None else act)(x)


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


@dataclass(frozen=True)
class GatedWithin(_Fused):
    """dropout(act(gate) * (up + up_offset)) within bounds, in a rewritten forward. act: silu, or x sigmoid(alpha x)."""

    has_alpha: bool
    up_offset: float
    gate_first: bool
    interleaved: bool
    """Of one tensor that holds gate and up, which is given as gate, without up."""

    def __call__(
        self, module: nn.Module, act: Any, gate: Tensor, up: Tensor | None, limit: Any, alpha: Any, dropout: Any = 0.0
    ) -> Tensor:
        if self.is_still(act) and is_limit(limit) and is_alpha(alpha) and self._fits(gate, up):
            calls.count_fused(module)
            p, after = _probability(dropout)
            return after(self.fused(gate, up, limit, alpha, dropout_p=p))
        calls.count_fallback(module)
        return _dropped(self.bounded(act, gate, up, limit, alpha), dropout)

    def _fits(self, gate: Tensor, up: Tensor | None) -> bool:
        return calls.fits(gate) and (gate.shape[-1] % 2 == 0 if up is None else calls.is_like(up, gate))

    def fused(self, gate: Tensor, up: Tensor | None, limit: float, alpha: float, **dropout: Any) -> Tensor:
        options = {"limit": limit, "alpha": alpha, "up_offset": self.up_offset, **dropout}
        if up is not None:
            return ops.glu(gate, up, "silu", **options)
        return ops.glu_packed(gate, "silu", gate_first=self.gate_first, interleaved=self.interleaved, **options)

    def bounded(self, act: Any, gate: Tensor, up: Tensor | None, limit: Any, alpha: Any) -> Tensor:
        """The same by torch's functions. With has_alpha act is x sigmoid(alpha x)."""
        if up is None:
            first, second = (gate[..., ::2], gate[..., 1::2]) if self.interleaved else gate.chunk(2, dim=-1)
            gate, up = (first, second) if self.gate_first else (second, first)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        y = gate * torch.sigmoid(gate * alpha) if self.has_alpha else self.unfused(act, gate)
        return y * (up + self.up_offset) if self.up_offset else y * up


def is_limit(value: object) -> bool:
    """Whether it is a number that ops.glu takes; infinite for no limit."""
    return isinstance(value, (int, float)) and value > 0.0


def is_alpha(value: object) -> bool:
    return isinstance(value, (int, float)) and 0.0 < value < math.inf


@dataclass(frozen=True)
class Activated(_Fused):
    """dropout(act(x)), or dropout(act(dense(x))), in a rewritten forward."""

    gains_bias_alone: bool
    """Whether nothing is gained but the pass over act's gradient in which the bias has its own.

    On a GPU that takes a large x, of as many tokens as links do. H100, as many elements as BERT-large has with 16 x 512
    tokens: 0.25 ms for GELU, the bias and backward, 0.17 ms fused; addmm adds the bias for nothing, which is about 0.07
    of it (glu.json). Calls of Triton take 0.3 ms more of the host, for which that step waits (host_time.txt in
    benchmarks/results/nvidia-h100-80gb-hbm3)."""

    def __call__(self, module: nn.Module, act: Any, dense: Any, x: Tensor, dropout: Any = 0.0) -> Tensor:
        if self.gains_bias_alone and x.is_cuda and not calls.is_large(x) and not torch.compiler.is_compiling():
            return self.unfused(act, dense(x))
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
