"""softmax with gradients: one forward and one backward for any backend, and autograd around them.

As row_norm_autograd.py: _Softmax for eager calls; for traced ones the operators onetrip::softmax and
onetrip::softmax_backward, with their fake versions and their autograd formula.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..reference import accumulator_dtype
from ..reference.philox import Rng
from ..reference.softmax import BackwardOperands, MaskLayout, Operands, SoftmaxPlan
from . import softmax_native
from .common.backends import DISPATCHER, KERNEL_DTYPES, choose, formulas
from .common.masks import contiguous_layout, kernel_mask, mask_layout
from .common.native import EagerCall, direct_apply, eager_backward, eager_forward, in_memory, matrix, reshaped
from .common.operators import filled, register, register_gradients
from .common.tracing import have_storage, refuse_double_backward


def forward(
    backend: str,
    scores: Tensor,
    mask: Tensor | None,
    rng: Rng | None,
    plan: SoftmaxPlan,
    may_overwrite: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """reference.softmax.forward on any backend, for scores of any rank, strides and size; y and p shaped like
    scores. A floating mask has one of the kernels' dtypes, or float64 beside float64 scores. may_overwrite: scores are
    not needed any more, y may take their memory."""
    shape = scores.shape
    if backend == DISPATCHER:
        if may_overwrite and scores.is_contiguous():
            y, p = scores, torch.ops.onetrip.softmax_(scores, mask, rng, *plan)
        else:
            y, p = torch.ops.onetrip.softmax(scores, mask, rng, *plan)
        return y, p if plan.store_p else None
    if scores.numel() == 0:
        y = scores.new_empty(shape)
        return y, torch.empty_like(y) if plan.store_p else None
    layout = None
    if mask is not None:
        mask = in_memory(mask)
        layout = mask_layout(shape, mask.shape, mask.stride())
        if layout is None:
            mask = mask.expand(shape).contiguous()
            layout = contiguous_layout(shape, shape)
    n_queries = shape[-2] if len(shape) > 1 else 1
    if backend in ("cpu", "cuda"):
        return softmax_native.forward((scores, mask, layout, n_queries), rng, plan, may_overwrite)
    y, p = formulas(backend, "softmax").forward(Operands(matrix(scores), mask, layout, n_queries), rng, plan)
    return reshaped(y, shape), None if p is None else reshaped(p, shape)


def backward(
    backend: str,
    dy: Tensor,
    p: Tensor,
    mask_shape: tuple[int, ...] | None,
    plan: SoftmaxPlan,
    wants_dscores: bool,
    may_overwrite: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """(dscores, dmask) on any backend. p: as reference.softmax.backward. mask_shape: of the mask whose gradient is
    wanted; dmask has it, in float32 (float64). may_overwrite: dy is not needed any more, dscores may take its
    memory."""
    shape, wants_dmask = dy.shape, mask_shape is not None
    if backend == DISPATCHER:
        if may_overwrite and wants_dscores and dy.is_contiguous():
            found = dy, torch.ops.onetrip.softmax_backward_(dy, p, mask_shape, *plan)
        else:
            found = torch.ops.onetrip.softmax_backward(dy, p, mask_shape, wants_dscores, *plan)
        return found[0] if wants_dscores else None, found[1] if wants_dmask else None
    if dy.numel() == 0:
        return gradients_of(dy, mask_shape, wants_dscores, dy.new_zeros)
    layout = None if mask_shape is None else contiguous_layout(shape, mask_shape)
    operands = BackwardOperands(dy, p, layout, shape[-2] if len(shape) > 1 else 1)
    if backend in ("cpu", "cuda"):
        dscores, dmask = softmax_native.backward(operands, plan, wants_dscores, wants_dmask, may_overwrite)
    else:
        operands = operands._replace(dy=matrix(dy), p=matrix(p))
        dscores, dmask = formulas(backend, "softmax").backward(operands, plan, wants_dscores, wants_dmask)
        dscores = None if dscores is None else dscores.view(shape)
    if dmask is not None and mask_shape is not None:
        dmask = _to_mask_shape(dmask, layout, shape, mask_shape)
    return dscores, dmask


def gradients_of(
    dy: Tensor, mask_shape: tuple[int, ...] | None, wants_dscores: bool, make: Any
) -> tuple[Tensor | None, Tensor | None]:
    """The tensors that backward writes; make: dy.new_empty, or anything that is called like it."""
    return (
        make(dy.shape, dtype=dy.dtype) if wants_dscores else None,
        None if mask_shape is None else make(mask_shape, dtype=accumulator_dtype(dy.dtype)),
    )


def _to_mask_shape(dmask: Tensor, layout: MaskLayout | None, shape: torch.Size, mask_shape: tuple[int, ...]) -> Tensor:
    """Kernels sum over the rows that share a mask row; a broadcast of columns, and masks of more dimensions than they
    know, are summed here."""
    n_cols = shape[-1]
    if layout is not None and dmask.shape[0] != prod(mask_shape[:-1]):
        return dmask.view(shape).sum_to_size(mask_shape)
    if mask_shape and mask_shape[-1] == n_cols:
        return dmask.view(mask_shape)
    return dmask.sum(dim=1).view(mask_shape)


Call = tuple[Rng | None, EagerCall | None, SoftmaxPlan, str, tuple[tuple[int, ...], torch.dtype] | None, Tensor | None]
"""rng, softmax_native.eager_call where it can read scores and mask as they are, plan, backend, the mask's shape and
dtype, and without that call the mask as backends take it."""


def _forward_of_any(ctx: Any, scores: Tensor, mask: Tensor | None, call: Call) -> Tensor:
    rng, _, plan, backend, _, kernel_mask = call
    y, p = forward(backend, scores, kernel_mask, rng, plan)
    ctx.save_for_backward(y if p is None else p)
    ctx.call = *call[:5], None
    return y


def _backward_of_any(ctx: Any, saved: tuple[Tensor, ...] | None, grads: tuple[Any, ...]) -> Any:
    refuse_double_backward("softmax")
    _, _, plan, backend, mask, _ = ctx.call
    (p,), (dy,) = saved or ctx.saved_tensors, grads
    needs_scores, needs_mask, _ = ctx.needs_input_grad
    shape = mask[0] if needs_mask else None
    p = p.to(dy.device, dy.dtype)  # whatever hooks made of it
    dscores, dmask = backward(backend if have_storage(dy) else "reference", dy, p, shape, plan, needs_scores)
    return dscores, None if dmask is None else dmask.to(mask[1]), None


class _Softmax(torch.autograd.Function):
    """The eager path. Saves one tensor: y, or where dropout made it another one, the probabilities."""

    forward = eager_forward("softmax", _forward_of_any)
    backward = eager_backward("softmax", _backward_of_any)


apply = direct_apply(_Softmax)


def _backend(tensor: Tensor) -> str:
    return choose("onetrip::softmax", tensor.device, tensor.dtype in KERNEL_DTYPES)


def _forward(scores: Tensor, mask: Tensor | None, rng: Tensor | None, *plan: Any) -> tuple[Tensor, ...]:
    return filled(scores, forward(_backend(scores), scores, kernel_mask(scores, mask), rng, SoftmaxPlan(*plan)))


def _backward(
    dy: Tensor, p: Tensor, mask_shape: list[int] | None, wants_dscores: bool, *plan: Any
) -> tuple[Tensor, ...]:
    shape = None if mask_shape is None else tuple(mask_shape)
    return filled(dy, backward(_backend(dy), dy, p, shape, SoftmaxPlan(*plan), wants_dscores))


def _forward_fake(scores: Tensor, mask: Tensor | None, rng: Tensor | None, *plan: Any) -> tuple[Tensor, ...]:
    y = scores.new_empty(scores.shape)
    return filled(scores, (y, torch.empty_like(y) if SoftmaxPlan(*plan).store_p else None))


def _backward_fake(dy: Tensor, p: Tensor, mask_shape: Any, wants_dscores: bool, *plan: Any) -> tuple[Tensor, ...]:
    return filled(dy, gradients_of(dy, mask_shape, wants_dscores, dy.new_empty))


def _forward_in_place(scores: Tensor, mask: Tensor | None, rng: Tensor | None, *plan: Any) -> Tensor:
    y, p = forward(_backend(scores), scores, mask, rng, SoftmaxPlan(*plan), may_overwrite=True)
    if y.data_ptr() != scores.data_ptr():
        scores.copy_(y)
    return scores.new_empty(0) if p is None else p


def _backward_in_place(dy: Tensor, p: Tensor, mask_shape: list[int] | None, *plan: Any) -> Tensor:
    shape = None if mask_shape is None else tuple(mask_shape)
    dscores, dmask = filled(dy, backward(_backend(dy), dy, p, shape, SoftmaxPlan(*plan), True, may_overwrite=True))
    if dscores.data_ptr() != dy.data_ptr():
        dy.copy_(dscores)
    return dmask


def _forward_in_place_fake(scores: Tensor, mask: Tensor | None, rng: Tensor | None, *plan: Any) -> Tensor:
    return torch.empty_like(scores) if SoftmaxPlan(*plan).store_p else scores.new_empty(0)


def _backward_in_place_fake(dy: Tensor, p: Tensor, mask_shape: Any, *plan: Any) -> Tensor:
    return _backward_fake(dy, p, mask_shape, False, *plan)[1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, mask, _, *plan = inputs
    ctx.plan = SoftmaxPlan(*plan)
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    y, p = output
    ctx.mark_non_differentiable(p)
    ctx.set_materialize_grads(False)  # or zeros of p's size are made for its gradient
    ctx.save_for_backward(p if ctx.plan.store_p else y)


def _autograd_backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * (3 + len(ctx.plan))
    (p,) = ctx.saved_tensors
    needs_scores, needs_mask = ctx.needs_input_grad[:2]
    shape = ctx.mask[0] if needs_mask else None
    dscores, dmask = torch.ops.onetrip.softmax_backward(dy, p, shape, needs_scores, *ctx.plan)
    gradients = dscores if needs_scores else None, dmask.to(ctx.mask[1]) if needs_mask else None
    return (*gradients, None, *([None] * len(ctx.plan)))


_PLAN_SCHEMA = "float scale, bool causal, float dropout_p, bool store_p"
register(
    f"softmax(Tensor scores, Tensor? mask, Tensor? rng, {_PLAN_SCHEMA}) -> (Tensor y, Tensor p)",
    _forward,
    _forward_fake,
)
register_gradients("softmax", _setup_context, _autograd_backward)
register(
    f"softmax_backward(Tensor dy, Tensor p, SymInt[]? mask_shape, bool wants_dscores, {_PLAN_SCHEMA}) "
    "-> (Tensor dscores, Tensor dmask)",
    _backward,
    _backward_fake,
)
# For attention, whose softmax takes the memory of its input on a CPU.
register(
    f"softmax_(Tensor(a!) scores, Tensor? mask, Tensor? rng, {_PLAN_SCHEMA}) -> Tensor p",
    _forward_in_place,
    _forward_in_place_fake,
)
register(
    f"softmax_backward_(Tensor(a!) dy, Tensor p, SymInt[]? mask_shape, {_PLAN_SCHEMA}) -> Tensor dmask",
    _backward_in_place,
    _backward_in_place_fake,
)
