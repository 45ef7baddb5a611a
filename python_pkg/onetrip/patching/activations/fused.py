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
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
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


@dataclass(frozen=True)
class Gated(_Fused):
    """dropout(act(gate) * (up + up_offset)) in a rewritten forward; with a limit, of gate and up within its bounds."""

    is_packed: bool = False
    """Whether one tensor holds gate and up, which is given as gate, without up."""
    gate_first: bool = True
    interleaved: bool = False
    has_limit: bool = False
    has_alpha: bool = False
    """Whether act is x sigmoid(alpha x)."""
    up_offset: float = 0.0

    def __call__(
        self,
        module: nn.Module,
        act: Any,
        gate: Tensor,
        up: Any = None,
        *,
        limit: Any = None,
        alpha: Any = 1.0,
        dropout: Any = 0.0,
    ) -> Tensor:
        takes_limit = not self.has_limit or (is_limit(limit) and is_alpha(alpha))
        if self.is_still(act) and takes_limit and self._fits(gate, up):
            calls.count_fused(module)
            p, after = _probability(dropout)
            return after(self.fused(gate, up, limit, alpha, dropout_p=p))
        calls.count_fallback(module)
        return _dropped(self.by_torch(act, gate, up, limit, alpha), dropout)

    def _fits(self, gate: Tensor, up: Any) -> bool:
        return calls.fits(gate) and (gate.shape[-1] % 2 == 0 if self.is_packed else calls.is_like(up, gate))

    def fused(self, gate: Tensor, up: Any, limit: float | None, alpha: float, **dropout: Any) -> Tensor:
        options = {"limit": limit, "alpha": alpha, "up_offset": self.up_offset, **dropout}
        if not self.is_packed:
            return ops.glu(gate, up, self.activation, **options)
        return ops.glu_packed(
            gate, self.activation, gate_first=self.gate_first, interleaved=self.interleaved, **options
        )

    def by_torch(self, act: Any, gate: Tensor, up: Any, limit: Any, alpha: Any) -> Tensor:
        """The same without its dropout, by torch's functions."""
        if self.is_packed:
            first, second = (gate[..., ::2], gate[..., 1::2]) if self.interleaved else gate.chunk(2, dim=-1)
            gate, up = (first, second) if self.gate_first else (second, first)
        if self.has_limit:
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
    if calls.is_plain_dropout(dropout):
        return float(dropout.p) if dropout.training else 0.0, _as_it_is
    return 0.0, dropout


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _dropped(x: Tensor, dropout: Any) -> Tensor:
    return functional.dropout(x, dropout) if isinstance(dropout, (int, float)) else dropout(x)
