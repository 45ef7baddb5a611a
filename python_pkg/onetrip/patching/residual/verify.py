"""Verification of sums: each alone, with clones of the norm that follows, fused against torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..calls import linear_parts
from ..clones import clone
from ..links import Sum
from ..norms import ANY_WIDTH, n_cols_of
from ..verify import (
    RNG,
    MaskedDropout,
    Outcome,
    VerificationError,
    check_autocast,
    check_outcomes,
    kind_of,
    outcome,
    undisturbed,
)
from .choose import Choice, child_at

_N_INPUTS = 5
_P = 0.25


def verify_sum(module: nn.Module, choice: Choice) -> None:
    """Raise VerificationError unless the sum, fused, gives torch's outputs and gradients, with and without dropout."""
    with undisturbed(kind_of(module)[0]):
        alone, exact = _Alone(module, choice, None), _Alone(module, choice, torch.float64)
        total = Sum(0, 1, choice.norm_class, choice.spec, rng=RNG)
        for p, rank in ((0.0, 3), (0.0, 4), *(((_P, 3),) if choice.is_dropped else ())):
            inputs = alone.inputs(rank)
            with MaskedDropout():
                expected = alone.outcome(partial(alone.unfused, p), inputs)
                truth = exact.outcome(partial(exact.unfused, p), inputs)
                actual = alone.outcome(partial(alone.fused, total, p), inputs)
            check_outcomes(actual, expected, truth, " with dropout" if p else "")
        if choice.spec is not None and not choice.spec.autocast:  # then the norm is called
            return
        check_autocast(partial(alone.fused, total, 0.0), partial(alone.unfused, 0.0), alone.inputs(3))


class _Alone(nn.Module):
    """A sum, apart from its forward: the norm is a clone; a linear layer is a small one of the same dtype."""

    def __init__(self, module: nn.Module, choice: Choice, dtype: torch.dtype | None) -> None:
        """dtype: of the parameters; None for the module's."""
        super().__init__()
        norm = None if choice.norm is None else child_at(module, choice.norm[0])
        device, own_dtype = kind_of(module if norm is None or not list(norm.parameters()) else norm)
        self.like = torch.empty(0, dtype=dtype or own_dtype, device=device)
        self.norm = None if norm is None else clone(norm, dtype).eval()
        self.n_cols = ANY_WIDTH if norm is None else n_cols_of(norm)
        self.linear = None
        if choice.has_bias:
            self.linear = nn.Linear(_N_INPUTS, self.n_cols, device=device, dtype=self.like.dtype)
            generator = torch.Generator().manual_seed(2)
            for parameter in self.linear.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, device="cpu").to(own_dtype)
                parameter.data.copy_(drawn)

    def inputs(self, rank: int) -> list[Tensor]:
        """x and residual."""
        generator = torch.Generator().manual_seed(0)
        leading = (2, 3, 4)[: rank - 1]
        widths = (self.n_cols if self.linear is None else _N_INPUTS, self.n_cols)
        return [torch.randn(*leading, n, generator=generator, device="cpu").to(self.like) for n in widths]

    def unfused(self, p: float, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        """z and, where there is a norm, norm(z), by torch."""
        x = x if self.linear is None else self.linear(x)
        z = residual + (functional.dropout(x, p, True) if p else x)
        return (z,) if self.norm is None else (z, self.norm(z))

    def fused(self, total: Sum, p: float, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        x, bias = (x, None) if self.linear is None else linear_parts(self.linear, x)
        outputs: Any = total.fused(x, residual, bias, p, self.norm)
        if outputs is None:
            raise VerificationError("the norm's dtype is not one that the operators take")
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def outcome(self, compute: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> Outcome:
        """Named outputs and gradients."""
        x, residual = (each.to(self.like).requires_grad_() for each in inputs)
        outputs = {f"output {index}": y for index, y in enumerate(compute(x, residual))}
        return outcome(outputs, {"x": x, "residual": residual, **dict(self.named_parameters())})
