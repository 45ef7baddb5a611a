"""Masks as kernels take them: their dtype, and the dimensions of the scores folded to the few along which they move."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...reference.softmax import MaskLayout

MAX_DIMS = 4
"""Dimensions of MaskLayout, and of struct MaskRows in csrc/launch.h."""


def kernel_mask(scores: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as backends take it: a float64 mask of narrower scores is rounded to float32 (at its own size)."""
    if mask is None or mask.dtype != torch.float64 or scores.dtype == torch.float64:
        return mask
    return mask.detach().float()


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a tensor of that shape can be read as one of shape `to`. Sizes may be symbolic."""
    missing = len(to) - len(shape)
    if missing < 0:
        return False
    for size, of in zip(shape, to[missing:], strict=True):  # noqa: SIM110  a generator costs as much as all other checks
        if size != 1 and size != of:
            return False
    return True


@lru_cache(maxsize=1024)
def mask_layout(
    scores_shape: tuple[int, ...], mask_shape: tuple[int, ...], mask_strides: tuple[int, ...]
) -> MaskLayout | None:
    """The layout of a mask that broadcasts to scores_shape; None where more than 4 dimensions stay.

    Neighbouring dimensions become one where a single stride walks through both: those of a contiguous mask, and those
    along which it is broadcast.
    """
    missing = len(scores_shape) - len(mask_shape)
    strides = [0] * missing + [
        0 if size == 1 else stride for size, stride in zip(mask_shape, mask_strides, strict=True)
    ]
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(scores_shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if sizes and steps[-1] == stride * size:  # 0 = 0 * size joins broadcast dimensions
            sizes[-1] *= size
            steps[-1] = stride
        else:
            sizes.append(size)
            steps.append(stride)
    if len(sizes) > MAX_DIMS:
        return None
    return MaskLayout(tuple(sizes), tuple(steps), strides[-1])


@lru_cache(maxsize=1024)
def contiguous_layout(scores_shape: tuple[int, ...], mask_shape: tuple[int, ...]) -> MaskLayout:
    """The layout of a contiguous mask of that shape. One that moves along more dimensions than a layout has is taken
    as being shaped like the scores."""
    strides = []
    step = 1
    for size in reversed(mask_shape):
        strides.append(step)
        step *= size
    layout = mask_layout(scores_shape, mask_shape, tuple(reversed(strides)))
    return layout if layout is not None else contiguous_layout(scores_shape, scores_shape)
