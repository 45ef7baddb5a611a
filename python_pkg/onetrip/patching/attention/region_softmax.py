"""The fused call of a softmax region (softmax_regions.py), and whether it may run."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ...ops import softmax
from ...ops.attention import saturated_mask
from ...ops.common.backends import HALF, KERNEL_DTYPES
from ...ops.common.masks import broadcasts
from ...ops.common.tracing import is_transformed
from .. import calls

Masks = tuple[Tensor | None, ...]


def in_dtype_of(scores: Tensor, mask: Any) -> Any:
    """The mask in the scores' dtype, which an addition in place keeps."""
    return mask.to(scores.dtype) if isinstance(mask, Tensor) else mask


class _Biased(torch.autograd.Function):
    """The scores as they are: the softmax adds the biases, detached. Backward sums the gradient to their shapes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, scale: float, *biases: Tensor) -> Tensor:
        return scores.view_as(scores)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.scale, *biases = inputs
        ctx.biases = [(bias.shape, bias.dtype) for bias in biases]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient, None, *(_summed(gradient, *bias) / ctx.scale for bias in ctx.biases)


def _summed(gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """sum_to_size, summed and returned in dtype."""
    sizes = (1,) * (gradient.dim() - len(shape)) + shape
    dims = [dim for dim, size in enumerate(sizes) if size == 1 < gradient.shape[dim]]
    return (gradient.sum(dims, dtype=dtype) if dims else gradient.to(dtype)).view(shape)


def region_softmax(scores: Tensor, masks: Masks, like: Tensor | None, *, scale: float = 1.0, **options: Any) -> Tensor:
    """ops.softmax, with masks saturated as an addition in the scores' dtype would, in like's dtype or in that of
    half-precision scores."""
    there = [mask for mask in masks if mask is not None]
    if len(there) > 1 and scores.dtype == torch.float32:
        there = [mask.float() for mask in there]
    # A single broadcast mask has its gradient from the softmax; that of one of the scores' shape would be float32.
    is_one_broadcast = len(there) == 1 and there[0].shape != scores.shape
    learned = [] if is_one_broadcast else [mask for mask in there if mask.requires_grad]
    if learned and scale and not is_transformed() and torch.is_grad_enabled():
        scores, there = _Biased.apply(scores, scale, *learned), [mask.detach() for mask in there]
    saturated: Any = [saturated_mask(mask, scores) for mask in there]
    weights = softmax(scores, reduce(torch.add, saturated) if saturated else None, scale=scale, **options)
    return weights if like is None or weights.dtype in HALF else weights.to(like.dtype)


def fits_region(
    scores: Tensor, masks: tuple[Any, ...], scale: object, like: Tensor | None, for_products: bool = False
) -> bool:
    """Whether the fused call equals the statements: dtypes, shapes, and a number as scale.

    for_products: as Region's. Where the statements make float32 of scores in autocast's dtype, each product casts it to
    that again; so the fused call may round it.
    """
    dtype = scores.dtype if like is None else like.dtype
    if scores.dtype not in KERNEL_DTYPES or dtype not in KERNEL_DTYPES or not isinstance(scale, (int, float)):
        return False
    if calls.is_distributed(scores) or not all(mask is None or _fits_mask(scores, mask) for mask in masks):
        return False
    if scores.dtype == torch.float32:
        return True
    half = calls.autocast_dtype(scores)
    casts_in_cuda_autocast = like is None and scores.is_cuda and half is not None
    has_float32 = any(mask is not None and mask.dtype == torch.float32 for mask in masks)
    is_added_in_float32 = (like is None or like is scores) and has_float32
    if dtype == torch.float32 or casts_in_cuda_autocast or is_added_in_float32:
        return for_products and scores.dtype == half
    return dtype == scores.dtype


def _fits_mask(scores: Tensor, mask: Any) -> bool:
    if not isinstance(mask, Tensor) or mask.dtype not in KERNEL_DTYPES:
        return False
    if torch.float32 not in (mask.dtype, scores.dtype) and mask.dtype != scores.dtype:
        return False
    return is_mask_of(scores, mask)


def is_mask_of(scores: Tensor, mask: Tensor) -> bool:
    """Whether the softmax of the scores takes a mask of that shape and device."""
    return broadcasts(mask.shape, scores.shape) and mask.device == scores.device and not calls.is_distributed(mask)
