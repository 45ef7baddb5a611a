"""Cross-entropy of rows in Triton: `forward`, `backward` and `forward_backward_` as every backend has them; and
`multiply_`, for the gradients of linear_cross_entropy."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..reference.cross_entropy import CrossEntropyPlan, RowStatistics
from .arithmetic import exp
from .launch import LAUNCHES, Launch, cdiv, kernel, next_power_of_2, on_device_of
from .tiles import MAX_REGISTERS, aligned, common_divisor, row_stride, with_divisor

_BLOCK_COLS, _COLS_PER_WARP = 2048, 256  # 8 elements a lane: the first walk keeps three sums of each in registers
_BLOCK_ELEMENTS = 8192
_LOWEST = tl.constexpr(-1000.0)  # e^_LOWEST is 0, and 0 * _LOWEST not NaN


@triton.jit
def _load_values(logits_ptr, cols, n_cols, scale, softcap, HAS_CAP: tl.constexpr):
    """(t, its derivative by the scaled logits) of these columns of a row; t is 0 where there is no column."""
    t = tl.load(logits_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) * scale
    slope = 1.0
    if HAS_CAP:
        e = exp(tl.abs(t) * (-2.0 / softcap))
        larger = 1.0 / (1.0 + e)
        magnitude = softcap * ((1.0 - e) * larger)
        t = tl.where(t < 0.0, -magnitude, magnitude)
        slope = 4.0 * e * larger * larger  # 1 - tanh^2 would cancel
    return t, slope


@kernel
def _cross_entropy_kernel(
    # operands: [n_rows, n_cols], [n_rows] int64
    logits_ptr,
    labels_ptr,
    # results, None where not wanted: [n_rows], [n_rows, 2], [n_rows] float32
    loss_ptr,
    stats_ptr,
    entropy_ptr,
    # of the gradient: [n_rows] or one number (stride 0); [n_rows] or None; [n_rows, n_cols] or None
    weights_ptr,
    entropy_weights_ptr,
    dlogits_ptr,
    # sizes, and strides in elements
    n_cols: tl.int32,
    logits_row_stride: tl.int64,
    dlogits_row_stride: tl.int64,
    weight_stride: tl.int64,
    # the plan
    ignore_index: tl.int64,
    label_smoothing: tl.float32,
    softcap: tl.float32,
    lse_square_scale: tl.float32,
    scale: tl.float32,
    # chosen when compiled
    HAS_STATS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    WANTS_ALL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """loss = lse - (1 - s) t[label] - s mean(t) + z lse^2, and the gradient of weights * loss + entropy_weights * H,
    t = softcap * tanh(scale * logits / softcap), lse = log(sum(exp(t))): reference/cross_entropy.py. H: entropy.

    One program takes one row, in two walks over its blocks: the first finds the largest value and the sum (not with
    HAS_STATS), the second writes the gradient, which may lie over the logits. Moves n_cols * (read logits + write
    dlogits) bytes a row, and reads the logits twice where the caches do not hold the row.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    logits_row_stride = with_divisor(logits_row_stride, ALIGN)
    dlogits_row_stride = with_divisor(dlogits_row_stride, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits_ptr += row * logits_row_stride
    if dlogits_ptr is not None:
        dlogits_ptr += row * dlogits_row_stride
    if label == ignore_index:
        if loss_ptr is not None:
            tl.store(loss_ptr + row, 0.0)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, 0.0)
        if stats_ptr is not None and not HAS_STATS:
            tl.store(stats_ptr + 2 * row, 0.0)
            tl.store(stats_ptr + 2 * row + 1, 0.0)
        if dlogits_ptr is not None:
            for first_col in range(0, n_cols, BLOCK_COLS):
                cols = first_col + tl.arange(0, BLOCK_COLS)
                zeros = tl.zeros([BLOCK_COLS], dlogits_ptr.dtype.element_ty)
                tl.store(dlogits_ptr + cols, zeros, mask=cols < n_cols)
    else:
        is_wrong = (label < 0) | (label >= n_cols)
        index = tl.where(is_wrong, 0, label).to(tl.int32)
        # Before the first reduction: no warp has overwritten it yet.
        t_label, _slope = _load_values(logits_ptr, index, n_cols, scale, softcap, HAS_CAP)
        mean_below = 0.0
        entropy = 0.0
        if HAS_STATS:
            largest = tl.load(stats_ptr + 2 * row)
            log_sum = tl.load(stats_ptr + 2 * row + 1)
        else:
            largest = tl.full([], float("-inf"), tl.float32)
            totals = tl.zeros([BLOCK_COLS], tl.float32)
            products = tl.zeros([BLOCK_COLS], tl.float32)
            plain = tl.zeros([BLOCK_COLS], tl.float32)  # sums of t - the largest so far
            moved = 0.0  # what their total lacks of t - largest
            for first_col in range(0, n_cols, BLOCK_COLS):
                cols = first_col + tl.arange(0, BLOCK_COLS)
                t, slope = _load_values(logits_ptr, cols, n_cols, scale, softcap, HAS_CAP)
                t = tl.where(cols < n_cols, t, float("-inf"))
                before = largest
                largest = tl.maximum(largest, tl.max(t, axis=0))
                shift = tl.where(largest == float("-inf"), 0.0, largest)
                step = before - shift
                factor = exp(step)
                below = t - shift
                e = exp(below)
                if WANTS_ALL:
                    plain += tl.where(cols < n_cols, below, 0.0)
                    moved += tl.where(first_col == 0, 0.0, first_col * step)
                    products = factor * (products + totals * tl.maximum(step, _LOWEST)) + e * tl.where(
                        below < _LOWEST, _LOWEST, below
                    )
                totals = totals * factor + e
            total = tl.sum(totals, axis=0)
            log_sum = tl.log(total)
            if WANTS_ALL:
                mean_below = (tl.sum(plain, axis=0) + moved) / n_cols
                entropy = log_sum - tl.sum(products, axis=0) / total
        log_sum = tl.where(is_wrong, float("nan"), log_sum)
        lse = largest + log_sum
        if loss_ptr is not None:
            loss = (1.0 - label_smoothing) * (log_sum - (t_label - largest)) + lse_square_scale * lse * lse
            if HAS_SMOOTHING:
                loss += label_smoothing * (log_sum - mean_below)
            tl.store(loss_ptr + row, loss)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, entropy + (log_sum - log_sum))
        if stats_ptr is not None and not HAS_STATS:
            tl.store(stats_ptr + 2 * row, largest)
            tl.store(stats_ptr + 2 * row + 1, log_sum)
        if dlogits_ptr is not None:
            weight = tl.load(weights_ptr + row * weight_stride) * scale
            of_p = weight * (1.0 + 2.0 * lse_square_scale * lse)
            of_all = -weight * label_smoothing / n_cols
            of_label = -weight * (1.0 - label_smoothing)
            if entropy_weights_ptr is not None:
                entropy_weight = tl.load(entropy_weights_ptr + row) * scale
                of_p -= entropy_weight * entropy
            for first_col in range(0, n_cols, BLOCK_COLS):
                cols = first_col + tl.arange(0, BLOCK_COLS)
                t, slope = _load_values(logits_ptr, cols, n_cols, scale, softcap, HAS_CAP)
                log_p = (t - largest) - log_sum
                of_each = of_p
                if entropy_weights_ptr is not None:
                    of_each = of_p - entropy_weight * tl.where(log_p < _LOWEST, _LOWEST, log_p)
                g = exp(log_p) * of_each + of_all
                g = tl.where(cols == index, g + of_label, g)
                if HAS_CAP:
                    g *= slope
                tl.store(dlogits_ptr + cols, g.to(dlogits_ptr.dtype.element_ty), mask=cols < n_cols)


def _run(
    logits: Tensor,
    labels: Tensor,
    results: tuple[Tensor | None, Tensor | None, Tensor | None],
    gradient: tuple[Tensor | None, Tensor | None, Tensor | None],
    plan: CrossEntropyPlan,
    has_stats: bool = False,
) -> None:
    """results: loss, stats, entropy. gradient: weights, entropy_weights, dlogits."""
    weights, entropy_weights, dlogits = gradient
    wants_entropy = results[2] is not None or entropy_weights is not None
    with on_device_of(logits):
        rows = logits if dlogits is logits else aligned(logits, common_divisor(logits.shape[1]))
        strides = row_stride(rows), row_stride(dlogits), 0 if weights is None or weights.numel() == 1 else 1
        launch = _launch_of(plan, logits.shape, strides, wants_entropy, has_stats)
        launch(rows, labels, *results, weights, entropy_weights, dlogits)


@lru_cache(maxsize=LAUNCHES)
def _launch_of(
    plan: CrossEntropyPlan, shape: torch.Size, strides: tuple[int, int, int], wants_entropy: bool, has_stats: bool
) -> Launch:
    """strides: of the rows of the logits and of their gradient, and of the weights."""
    n_rows, n_cols = shape
    block_cols = min(_BLOCK_COLS, next_power_of_2(n_cols))
    return Launch(
        _cross_entropy_kernel,
        (n_rows,),
        n_cols=n_cols,
        logits_row_stride=strides[0],
        dlogits_row_stride=strides[1],
        weight_stride=strides[2],
        **plan._asdict(),
        HAS_STATS=has_stats,
        HAS_CAP=plan.softcap != 0.0,
        HAS_SMOOTHING=plan.label_smoothing != 0.0,
        WANTS_ALL=plan.label_smoothing != 0.0 or wants_entropy,
        ALIGN=common_divisor(n_cols),
        BLOCK_COLS=block_cols,
        num_warps=max(1, block_cols // _COLS_PER_WARP),
        maxnreg=MAX_REGISTERS,
    )


def forward(logits: Tensor, labels: Tensor, plan: CrossEntropyPlan, wants_entropy: bool = False) -> RowStatistics:
    """reference.cross_entropy.forward, for logits of last stride 1 and contiguous labels."""
    loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
    stats = logits.new_empty((logits.shape[0], 2), dtype=torch.float32)
    entropy = torch.empty_like(loss) if wants_entropy else None
    _run(logits, labels, (loss, stats, entropy), (None, None, None), plan)
    return RowStatistics(loss, stats, entropy)


def backward(logits: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, plan: CrossEntropyPlan) -> Tensor:
    """reference.cross_entropy.backward. weights: contiguous, as stats."""
    dlogits = logits.new_empty(logits.shape)
    _run(logits, labels, (None, stats, None), (weights, None, dlogits), plan, has_stats=True)
    return dlogits


def backward_(logits: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, plan: CrossEntropyPlan) -> None:
    """reference.cross_entropy.backward_."""
    _run(logits, labels, (None, stats, None), (weights, None, logits), plan, has_stats=True)


def forward_backward_(
    logits: Tensor, labels: Tensor, weights: Tensor, entropy_weights: Tensor | None, plan: CrossEntropyPlan
) -> Tensor:
    """reference.cross_entropy.forward_backward_."""
    loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
    _run(logits, labels, (loss, None, None), (weights, entropy_weights, logits), plan)
    return loss


@kernel
def _multiply_kernel(values_ptr, factor_ptr, n_elements: tl.int64, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """values *= factor. Moves one read and one write of the values, or nothing where the factor is 1."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        n_elements = with_divisor(n_elements, ALIGN)
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + index, mask=index < n_elements).to(tl.float32)
        tl.store(values_ptr + index, (values * factor).to(values_ptr.dtype.element_ty), mask=index < n_elements)


def multiply_(values: Tensor, factor: Tensor) -> None:
    """values *= factor, in float32, rounded once. values: contiguous; factor: one float32, on the same device."""
    n_elements = values.numel()
    if n_elements == 0:
        return
    with on_device_of(values):
        _multiply_launch(n_elements)(values, factor)


@lru_cache(maxsize=LAUNCHES)
def _multiply_launch(n_elements: int) -> Launch:
    return Launch(
        _multiply_kernel,
        (cdiv(n_elements, _BLOCK_ELEMENTS),),
        n_elements=n_elements,
        ALIGN=common_divisor(n_elements),
        BLOCK=_BLOCK_ELEMENTS,
        num_warps=8,
    )
