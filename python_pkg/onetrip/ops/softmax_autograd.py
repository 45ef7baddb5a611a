"""Autograd around the softmax kernels, and the way of a call to its backend."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..reference import softmax as reference
from ..reference.philox import Rng
from ..reference.softmax import MaskLayout, SoftmaxPlan
from . import softmax_native
from .backends import REHEARSALS
from .masks import contiguous_layout, mask_layout
from .native import in_memory, two_dimensional
from .tracing import have_storage, refuse_double_backward


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
    needed no more, y may take their memory."""
    if scores.numel() == 0 or backend in REHEARSALS:
        overwrites = may_overwrite and backend == "rehearsal cpu" and scores.is_contiguous()
        y = scores if overwrites else scores.new_empty(scores.shape)
        return y, torch.empty_like(y) if plan.store_p else None
    shape = scores.shape
    n_cols = shape[-1]
    n_queries = _n_queries(shape)
    layout = None
    if mask is not None:
        mask = in_memory(mask)
        layout = mask_layout(shape, mask.shape, mask.stride())
        if layout is None:
            mask = mask.expand(shape).contiguous()
            layout = contiguous_layout(shape, shape)
    if backend in ("cpu", "cuda"):
        return softmax_native.forward(scores, mask, layout, n_queries, rng, plan, may_overwrite)
    module = reference if backend == "reference" else importlib.import_module("onetrip.kernels.softmax")
    y, p = module.forward(two_dimensional(scores, n_cols), mask, layout, n_queries, rng, plan)
    return y.view(shape), None if p is None else p.view(shape)


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
    wanted; dmask has it, in float32 (float64). may_overwrite: dy is needed no more, dscores may take its memory."""
    shape = dy.shape
    acc = torch.float64 if dy.dtype == torch.float64 else torch.float32
    if dy.numel() == 0 or backend in REHEARSALS:
        overwrites = may_overwrite and backend == "rehearsal cpu" and dy.is_contiguous()
        return (
            None if not wants_dscores else dy if overwrites else dy.new_zeros(shape),
            None if mask_shape is None else dy.new_zeros(mask_shape, dtype=acc),
        )
    n_cols, n_queries = shape[-1], _n_queries(shape)
    layout = None if mask_shape is None else contiguous_layout(shape, mask_shape)
    if backend in ("cpu", "cuda"):
        dscores, dmask = softmax_native.backward(
            dy, p, layout, n_queries, plan, wants_dscores, mask_shape is not None, may_overwrite
        )
    else:
        module = reference if backend == "reference" else importlib.import_module("onetrip.kernels.softmax")
        rows = two_dimensional(dy, n_cols), two_dimensional(p, n_cols)
        dscores, dmask = module.backward(*rows, layout, n_queries, plan, wants_dscores, mask_shape is not None)
        dscores = None if dscores is None else dscores.view(shape)
    if dmask is not None and mask_shape is not None:
        dmask = _to_mask_shape(dmask, layout, shape, mask_shape)
    return dscores, dmask


def _n_queries(shape: torch.Size) -> int:
    return shape[-2] if len(shape) > 1 else 1


def _to_mask_shape(dmask: Tensor, layout: MaskLayout | None, shape: torch.Size, mask_shape: tuple[int, ...]) -> Tensor:
    """Kernels sum over the rows that share a mask row; a broadcast of columns, and masks of more dimensions than they
    know, are summed here."""
    n_cols = shape[-1]
    if layout is not None and dmask.shape[0] != _product(mask_shape[:-1]):
        return dmask.view(shape).sum_to_size(mask_shape)
    if mask_shape and mask_shape[-1] == n_cols:
        return dmask.view(mask_shape)
    return dmask.sum(dim=1).view(mask_shape)


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


class _Softmax(torch.autograd.Function):
    """The eager path. Saves one tensor: y, or where dropout made it another one, the probabilities."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, mask: Tensor | None, call: tuple[Rng | None, SoftmaxPlan, str, Tensor | None]
    ) -> Tensor:
        rng, plan, backend, kernel_mask = call
        y, p = forward(backend, scores, kernel_mask, rng, plan)
        ctx.save_for_backward(y if p is None else p)
        ctx.call = plan, backend, None if mask is None else (tuple(mask.shape), mask.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_double_backward("softmax")
        plan, backend, mask = ctx.call
        (p,) = ctx.saved_tensors
        needs_scores, needs_mask, _ = ctx.needs_input_grad
        dscores, dmask = backward(
            backend if have_storage(grads[0]) else "reference",
            grads[0],
            p,
            mask[0] if needs_mask else None,
            plan,
            needs_scores,
        )
        return dscores, None if dmask is None else dmask.to(mask[1]), None


# As row_norm_autograd.apply: less the search for functorch transforms.
apply = super(torch.autograd.Function, _Softmax).apply
