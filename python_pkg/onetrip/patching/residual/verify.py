"""Verification of sums: each alone, with clones of the norm that follows, fused against torch's operators."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..calls import linear_parts
from ..clones import clone
from ..forward import child_at
from ..links import Sum
from ..norms import ANY_WIDTH, n_cols_of
from ..verify import RNG, MaskedDropout, VerificationError, check_autocast, check_function, drawn, kind_of
from .choose import Choice

_N_INPUTS = 5
_P = 0.25


def verify_sum(module: nn.Module, choice: Choice) -> None:
    """Raise VerificationError unless the sum, fused, gives torch's outputs and gradients, with and without dropout."""
    norm = None if choice.norm is None else child_at(module, choice.norm[0])
    device, dtype = kind_of(module if norm is None or not list(norm.parameters()) else norm)
    n_cols = ANY_WIDTH if norm is None else n_cols_of(norm)
    total = Sum(0, 1, choice.norm_class, choice.spec, rng=RNG)

    def make_parts(dtype: torch.dtype | None) -> nn.Module:
        """A clone of the norm, and a small linear layer in place of the branch's."""
        parts: Any = nn.Module()
        parts.norm = None if norm is None else clone(norm, dtype).eval()
        parts.linear = clone(linear, dtype) if choice.has_bias else None
        return parts

    def shapes(rank: int) -> dict[str, tuple[int, ...]]:
        leading = (2, 3, 4)[: rank - 1]
        return {"x": (*leading, _N_INPUTS if choice.has_bias else n_cols), "residual": (*leading, n_cols)}

    torch.manual_seed(0)  # the caller restores the random state
    linear = nn.Linear(_N_INPUTS, n_cols, device="cpu").to(device, dtype)
    for p, rank in ((0.0, 3), (0.0, 4), *(((_P, 3),) if choice.is_dropped else ())):
        fused, unfused, mode = partial(_fused, total, p), partial(_unfused, p), " with dropout" if p else ""
        with MaskedDropout():
            check_function(fused, unfused, shapes(rank), device, dtype, mode, make_parts)
    if choice.spec is not None and not choice.spec.autocast:  # then the norm is called
        return
    parts, given = make_parts(None), [x.to(device, dtype) for x in drawn(shapes(3)).values()]
    check_autocast(partial(_fused, total, 0.0, parts), partial(_unfused, 0.0, parts), given)


def _unfused(p: float, parts: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """z and, where there is a norm, norm(z), by torch."""
    x = x if parts.linear is None else parts.linear(x)
    z = residual + (functional.dropout(x, p, True) if p else x)
    return (z,) if parts.norm is None else (z, parts.norm(z))


def _fused(total: Sum, p: float, parts: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    x, bias = (x, None) if parts.linear is None else linear_parts(parts.linear, x)
    outputs: Any = total.fused(x, residual, bias, p, parts.norm)
    if outputs is None:
        raise VerificationError("the norm's dtype is not one that the operators take")
    return outputs if isinstance(outputs, tuple) else (outputs,)
