"""From tensors to the native softmax launchers. Allocates what they write."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..reference.philox import Rng
from ..reference.softmax import BackwardOperands, MaskLayout, OperandTuple, SoftmaxPlan
from .common.backends import native
from .common.native import DTYPE_CODE, DTYPE_OF_DIGIT, EagerCall, Launcher, in_memory, raise_error, rows, where

_MASK_CODE = {**DTYPE_CODE, torch.bool: 3}  # enum MaskType in csrc/launch.h
_NO_MASK = MaskLayout((), (), 0)


@lru_cache(maxsize=4096)
def _forward_launcher(plan: SoftmaxPlan, scores: torch.dtype, mask: torch.dtype | None, layout: MaskLayout) -> Launcher:
    return native().softmax_forward(DTYPE_CODE[scores], plan.scale, plan.dropout_p, _MASK_CODE[mask], *layout)


@lru_cache(maxsize=4096)
def _backward_launcher(plan: SoftmaxPlan, dtype: torch.dtype, layout: MaskLayout) -> Launcher:
    return native().softmax_backward(DTYPE_CODE[dtype], plan.scale, plan.dropout_p, layout.sizes, layout.strides)


def eager_call(plan: SoftmaxPlan, code: int, layout: MaskLayout | None) -> EagerCall:
    """The call for (scores, mask) of this code (read.scores). As a Function's forward it saves p, or y where it is the
    same."""
    scores, mask = DTYPE_OF_DIGIT[code // 2 // 8], (*DTYPE_OF_DIGIT, torch.bool)[code // 2 % 8]
    assert scores is not None
    launchers = (
        _forward_launcher(plan, scores, mask, layout or _NO_MASK),
        _backward_launcher(plan, scores, _NO_MASK),
    )
    return native().softmax_eager(*launchers, plan.causal, plan.store_p)


def _result(given: Tensor, may_overwrite: bool) -> Tensor:
    """What a kernel writes: given itself, where it may be overwritten and can be. The CPU kernels have read all of a
    row, or the same columns of it, when they write there."""
    if may_overwrite and given.is_cpu and given.is_contiguous() and in_memory(given) is given:
        return given
    return torch.empty_like(given, memory_format=torch.contiguous_format)


def forward(
    operands: OperandTuple, rng: Rng | None, plan: SoftmaxPlan, may_overwrite: bool = False
) -> tuple[Tensor, Tensor | None]:
    """reference.softmax.forward by the native library. scores: any rank and strides; y, p: contiguous, shaped like
    scores. may_overwrite: y may take the memory of scores (where a fresh one would cost a page fault every 4 KiB)."""
    scores, mask, layout, n_queries = operands
    n_cols = scores.shape[-1]
    launch = _forward_launcher(plan, scores.dtype, None if mask is None else mask.dtype, layout or _NO_MASK)
    y = _result(scores, may_overwrite)
    scores, row_stride = rows(scores, n_cols)
    p = torch.empty_like(y) if plan.store_p else None
    device, stream = where(scores)
    n_rows = y.numel() // n_cols
    n_queries = n_queries if plan.causal else 0
    code = launch(device, stream, n_rows, n_cols, scores, row_stride, mask, y, p, n_queries, rng)
    if code:
        raise_error("softmax forward", scores, code)
    return y, p


def backward(
    operands: BackwardOperands, plan: SoftmaxPlan, wants_dscores: bool, wants_dmask: bool, may_overwrite: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """reference.softmax.backward by the native library. dy, p: any rank and strides; dscores: contiguous, shaped like
    dy. may_overwrite: dscores may take the memory of dy."""
    dy, p, layout, n_queries = operands
    n_cols = dy.shape[-1]
    n_rows = dy.numel() // n_cols
    layout = layout or _NO_MASK
    dscores = _result(dy, may_overwrite) if wants_dscores else None
    dy, dy_row_stride = rows(dy, n_cols)
    p, p_row_stride = rows(p, n_cols)
    dmask = workspace = None
    device, stream = where(dy)
    if wants_dmask:
        dmask = torch.empty((layout.n_mask_rows, n_cols), dtype=torch.float32, device=dy.device)
        n_floats = native().softmax_workspace(device, n_rows, n_cols, layout.sizes, layout.strides)
        workspace = torch.empty(n_floats, dtype=torch.float32, device=dy.device)
    launch = _backward_launcher(plan, dy.dtype, layout)
    strided, outputs = (dy, dy_row_stride, p, p_row_stride), (dscores, dmask, workspace)
    code = launch(device, stream, n_rows, n_cols, *strided, *outputs, n_queries if plan.causal else 0)
    if code:
        raise_error("softmax backward", dy, code)
    return dscores, dmask
