"""No number without a green check: every provider against the formula in float64, on the very inputs it is timed on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .cases import Operator, Outputs, one_line

BOUNDS = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest error over largest value that a provider may show: room for unfused code that rounds every step to the dtype.
The tests of the package hold the fused kernels to far less; this is what keeps a wrong one out of the tables."""

HALF_PARAMETER_BOUND = 0.5
"""The same for parameter gradients in float16 and bfloat16. On the CPU torch's own LayerNorm adds them up in that dtype
and is a quarter off over 65,536 rows: a stricter bound would leave nothing to compare with. The error is printed."""

_SIGMAS = 5


@dataclass(frozen=True)
class Check:
    passed: bool
    detail: str
    """The tensor that came closest to its bound, or why the provider failed."""
    largest_error: float | None = None
    """Largest error of all outputs and gradients, each relative to its largest value; None where there was nothing to
    compare."""


@dataclass(frozen=True)
class Inputs:
    """Random inputs of one case, and the gradients that are sent back through it."""

    tensors: dict[str, Tensor]
    grad_outputs: tuple[Tensor, ...]

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors.values() if tensor.requires_grad]

    def forward(self, function: Callable[..., Outputs]) -> tuple[Tensor, ...]:
        return as_tuple(function(**self.tensors))

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of the leaves."""
        return torch.autograd.grad(outputs, self.leaves, self.grad_outputs)

    def forward_backward(self, function: Callable[..., Outputs]) -> tuple[Tensor, ...]:
        return self.backward(self.forward(function))


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def make_inputs(
    operator: Operator, n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    tensors = {name: normal(n_rows, n_cols) for name in operator.matrices}
    # Around 1, so that a weight that is ignored or applied twice shows.
    tensors |= {name: (1 + 0.5 * normal(n_cols)).to(dtype) for name in operator.vectors}
    for name, shape in operator.weights(n_rows, n_cols).items():
        tensors[name] = (normal(*shape) * n_cols**-0.5).to(dtype)
    for tensor in tensors.values():
        tensor.requires_grad_()
    with torch.no_grad():
        constants = operator.constants(n_rows, n_cols, dtype, device)
        shapes = [output.shape for output in as_tuple(operator.eager(**tensors, **constants))]
    return Inputs(tensors | constants, tuple(normal(*shape) for shape in shapes))


class Truth:
    """Outputs and gradients in float64, kept where no random mask makes them a provider's own."""

    def __init__(self, operator: Operator, inputs: Inputs) -> None:
        self._operator, self._inputs = operator, inputs
        self._names = [f"output {i}" for i in range(len(inputs.grad_outputs))] + [
            f"d{name}" for name, tensor in inputs.tensors.items() if tensor.requires_grad
        ]
        self._given = inputs.tensors | {f"gradient of output {i}": grad for i, grad in enumerate(inputs.grad_outputs)}

    def _compute(self, keep: Tensor | None) -> list[Tensor]:
        scale = 1.0 / (1.0 - self._operator.dropout_p)  # onetrip's own is off by up to 8e-6 of it: p in 1/65536
        tensors = {
            name: tensor.detach().double().requires_grad_(tensor.requires_grad)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in self._inputs.tensors.items()
        }
        inputs = Inputs(tensors, tuple(grad.double() for grad in self._inputs.grad_outputs))

        def formula(**tensors: Tensor) -> Outputs:
            return self._operator.formula(lambda values: torch.where(keep, values * scale, 0.0), **tensors)

        outputs = inputs.forward(formula)
        return [tensor.detach() for tensor in (*outputs, *inputs.backward(outputs))]

    @cached_property
    def _without_mask(self) -> list[Tensor]:
        return self._compute(None)

    def _restore(self, copies: dict[str, Tensor]) -> list[str]:
        """Restores the inputs for the next provider; returns the names of those that had changed."""
        changed = [name for name, tensor in self._given.items() if not torch.equal(tensor, copies[name])]
        for name in changed:
            self._given[name].detach().copy_(copies[name])
        return changed

    def check(self, function: Callable[..., Outputs]) -> Check:
        """Runs the provider forward and backward, and compares every output and every gradient."""
        given = {name: tensor.detach().clone() for name, tensor in self._given.items()}
        try:
            torch.manual_seed(0)
            outputs = self._inputs.forward(function)
            grads = self._inputs.backward(outputs)
            # Cloned: a provider may write its next outputs into the same memory.
            outputs, grads = (tuple(tensor.detach().clone() for tensor in each) for each in (outputs, grads))
            keep = self._mask(function, outputs, grads) if self._operator.dropout_p > 0.0 else None
        except Exception as error:  # a provider that raises is reported, and the others are measured
            self._restore(given)
            return Check(False, one_line(error))
        if changed := self._restore(given):
            return Check(False, f"writes into what it is given: {', '.join(changed)}")
        if keep is not None:
            drawn = keep[self._compute(torch.ones_like(keep))[0] != 0]  # what is 0 without dropout shows no mask
            rate, expected = drawn.double().mean().item(), 1.0 - self._operator.dropout_p
            sigma = math.sqrt(expected * (1.0 - expected) / drawn.numel())
            if abs(rate - expected) > _SIGMAS * sigma:
                return Check(False, f"dropout keeps {rate:.5f}, expected {expected:.5f} +- {_SIGMAS * sigma:.5f}")
        return self._compare((*outputs, *grads), self._without_mask if keep is None else self._compute(keep))

    def _compare(self, found: tuple[Tensor, ...], expected: list[Tensor]) -> Check:
        dtype = self._inputs.leaves[0].dtype
        errors: dict[str, tuple[float, float]] = {}
        for name, got, want in zip(self._names, found, expected, strict=True):
            if got.shape != want.shape:
                return Check(False, f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
            error = ((got.detach().double() - want).abs().max() / want.abs().max()).item()
            if not math.isfinite(error):
                return Check(False, f"{name} is not finite")
            loose = dtype != torch.float32 and want.dim() == 1
            errors[name] = error, HALF_PARAMETER_BOUND if loose else BOUNDS[dtype]
        closest = max(errors, key=lambda name: errors[name][0] / errors[name][1])
        error, bound = errors[closest]
        detail = f"{closest}: {error:.1e} of its largest value (bound {bound:.0e})"
        return Check(error <= bound, detail, max(error for error, _ in errors.values()))

    def _mask(self, function: Callable[..., Outputs], outputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Tensor:
        """The mask that the provider used, whatever its generator: what is not zero where dropping gives zero.

        A kept element's gradient can be exactly zero by cancellation (about 1 in 10^8 in float32), so a second backward
        with the same seed and other incoming gradients has its say too.
        """
        if self._operator.mask_shows_in == "output":
            return outputs[0].detach() != 0
        torch.manual_seed(0)
        flipped = Inputs(self._inputs.tensors, tuple(grad.flip(0) for grad in self._inputs.grad_outputs))
        others = flipped.forward_backward(function)
        return (grads[0] != 0) | (others[0] != 0)
