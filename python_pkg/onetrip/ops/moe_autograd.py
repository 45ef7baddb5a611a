"""moe_combine and moe_dispatch with gradients: each on any backend, and autograd around them.

_Combine and _Dispatch for eager calls; for traced ones the operators onetrip::moe_combine, moe_combine_backward and
moe_dispatch, with their fake versions and their autograd formulas. Dispatch and the combination without weights are
each other's gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .common.backends import KERNEL_DTYPES, choose, formulas
from .common.native import direct_apply, made_like, matrix, vector
from .common.operators import filled, register, register_gradients, unfilled
from .common.tracing import have_storage, refuse_double_backward


def combine(backend: str, y: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """reference.moe.combine on any backend, for any strides and sizes."""
    if places.numel() == 0 or y.numel() == 0:
        return y.new_zeros((places.shape[0], y.shape[1]), dtype=dtype)
    y, places, weights = matrix(y), places.contiguous(), vector(weights)
    is_one_dtype = dtype == y.dtype and (weights is None or weights.dtype == y.dtype)
    if backend == "cpu" and is_one_dtype and dtype != torch.bfloat16:  # of which ties are not rounded to even
        # One pass, sums in float32. 2048 tokens of 4 x 768 float32, two threads of an AMD EPYC: 1 ms; composed 7 ms.
        return functional.embedding_bag(places, y, mode="sum", per_sample_weights=weights)
    found: Tensor = formulas(_torch_or(backend), "moe").combine(y, places, weights, dtype)
    return found


def combine_backward(
    backend: str, dout: Tensor, y: Tensor, places: Tensor, weights: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """reference.moe.combine_backward on any backend, for any strides and sizes; gradients are contiguous."""
    if places.numel() == 0 or y.numel() == 0:
        dy, dweights = made_like((y, weights), wants, torch.zeros_like)
        return dy, dweights
    places, weights = places.contiguous(), vector(weights)
    found: tuple[Tensor | None, Tensor | None] = formulas(_torch_or(backend), "moe").combine_backward(
        matrix(dout), matrix(y), places, weights, wants
    )
    return found


def dispatch(backend: str, x: Tensor, places: Tensor) -> Tensor:
    """reference.moe.dispatch on any backend, for any strides and sizes."""
    if places.numel() == 0 or x.numel() == 0:
        return x.new_zeros((places.numel(), x.shape[1]))
    found: Tensor = formulas(_torch_or(backend), "moe").dispatch(matrix(x), places.contiguous())
    return found


def _torch_or(backend: str) -> str:
    """On the CPU torch's operators are the backend."""
    return "reference" if backend == "cpu" else backend


class _Combine(torch.autograd.Function):
    """The eager path. Saves y, places and weights; without weights places only."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype, backend: str
    ) -> Tensor:
        ctx.save_for_backward(places, *(() if weights is None else (y, weights)))
        ctx.backend, ctx.dtype = backend, y.dtype
        return combine(backend, y, places, weights, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_double_backward("moe")
        (dout,), (places, *others) = grads, ctx.saved_tensors
        backend = ctx.backend if have_storage(dout) else "reference"
        if not others:
            return dispatch(backend, dout.to(ctx.dtype), places), None, None, None, None
        y, weights = others
        wants = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        dy, dweights = combine_backward(backend, dout, y, places, weights, wants)
        return dy, None, dweights, None, None


class _Dispatch(torch.autograd.Function):
    """The eager path. Saves places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(places)
        ctx.backend = backend
        return dispatch(backend, x, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_double_backward("moe")
        (drows,), (places,) = grads, ctx.saved_tensors
        backend = ctx.backend if have_storage(drows) else "reference"
        return combine(backend, drows, places, None, drows.dtype), None, None


apply_combine = direct_apply(_Combine)
apply_dispatch = direct_apply(_Dispatch)


def _backend(operator: str, places: Tensor, *dtypes: torch.dtype) -> str:
    return choose(f"onetrip::{operator}", places.device, KERNEL_DTYPES.issuperset(dtypes), "moe")


def _combine(y: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    dtypes = (y.dtype, dtype) if weights is None else (y.dtype, weights.dtype, dtype)
    return combine(_backend("moe_combine", places, *dtypes), y, places, weights, dtype)


def _combine_backward(
    dout: Tensor, y: Tensor, places: Tensor, weights: Tensor, wants_y: bool, wants_weights: bool
) -> tuple[Tensor, ...]:
    backend = _backend("moe_combine_backward", places, y.dtype, weights.dtype, dout.dtype)
    return filled(y, combine_backward(backend, dout, y, places, weights, (wants_y, wants_weights)))


def _dispatch(x: Tensor, places: Tensor) -> Tensor:
    return dispatch(_backend("moe_dispatch", places, x.dtype), x, places)


def _combine_fake(y: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    return y.new_empty((places.shape[0], y.shape[1]), dtype=dtype)


def _combine_backward_fake(
    dout: Tensor, y: Tensor, places: Tensor, weights: Tensor, wants_y: bool, wants_weights: bool
) -> tuple[Tensor, ...]:
    return filled(y, made_like((y, weights), (wants_y, wants_weights), torch.empty_like))


def _dispatch_fake(x: Tensor, places: Tensor) -> Tensor:
    return x.new_empty((places.shape[0] * places.shape[1], x.shape[1]))


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, places, weights, _ = inputs
    ctx.save_for_backward(places, *(() if weights is None else (y, weights)))
    ctx.dtype = y.dtype


def _autograd_combine(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    places, *others = ctx.saved_tensors
    if not others:
        return torch.ops.onetrip.moe_dispatch(dout.to(ctx.dtype), places), None, None, None
    wants = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    found = torch.ops.onetrip.moe_combine_backward(dout, others[0], places, others[1], *wants)
    dy, dweights = unfilled(found, wants)
    return dy, None, dweights, None


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _autograd_dispatch(ctx: Any, drows: Tensor) -> tuple[Any, ...]:
    return torch.ops.onetrip.moe_combine(drows, *ctx.saved_tensors, None, drows.dtype), None


register("moe_combine(Tensor y, Tensor places, Tensor? weights, ScalarType dtype) -> Tensor", _combine, _combine_fake)
register(
    "moe_combine_backward(Tensor dout, Tensor y, Tensor places, Tensor weights, bool wants_y, bool wants_weights) -> "
    "(Tensor dy, Tensor dweights)",
    _combine_backward,
    _combine_backward_fake,
)
register("moe_dispatch(Tensor x, Tensor places) -> Tensor", _dispatch, _dispatch_fake)
register_gradients("moe_combine", _save_combine, _autograd_combine)
register_gradients("moe_dispatch", _save_dispatch, _autograd_dispatch)
