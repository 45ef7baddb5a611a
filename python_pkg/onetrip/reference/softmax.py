"""y = dropout(softmax(scale * scores + mask)) over the last dimension, and its gradients.

Softmax: Bridle 1990; as attention weights, with mask and dropout, Vaswani et al. 2017, section 3.2. The largest value
is subtracted first; sums are float32 (float64 for float64). A row without a finite value (every position masked) gives
zeros and no gradient.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from . import accumulator_dtype
from .philox import Rng, dropout_scale, keep_mask


class SoftmaxPlan(NamedTuple):
    """Everything about one call that is not a tensor."""

    scale: float
    causal: bool
    """Query i of n_queries sees the keys up to n_cols - n_queries + i."""
    dropout_p: float
    store_p: bool
    """Keep the probabilities for backward, beside y; only where dropout makes the two differ."""


class MaskLayout(NamedTuple):
    """Where the mask of row r starts: r counts in `sizes`, slowest first; each index moves by its stride."""

    sizes: tuple[int, ...]
    """At most 4; their product is n_rows."""
    strides: tuple[int, ...]
    """In elements of the mask; 0 where it is broadcast."""
    col_stride: int

    @property
    def n_mask_rows(self) -> int:
        """Rows of the mask that differ: rows of its gradient."""
        return prod(size for size, stride in zip(self.sizes, self.strides, strict=True) if stride)


class Operands(NamedTuple):
    """What forward reads. Here and in Triton scores are [n_rows, n_cols]; in ops of any rank."""

    scores: Tensor
    mask: Tensor | None = None
    """Bool (True keeps) or floating (added), any shape, read by layout; without one, shaped like scores."""
    layout: MaskLayout | None = None
    n_queries: int = 1
    """Row r is query r % n_queries; used where causal."""


OperandTuple = tuple[Tensor, Tensor | None, MaskLayout | None, int]
"""Operands, or the same as a plain tuple, which an eager call makes faster."""


class BackwardOperands(NamedTuple):
    """What backward reads."""

    dy: Tensor
    p: Tensor
    """y where nothing was dropped, else p as forward stored it."""
    layout: MaskLayout | None = None
    """Layout of the mask whose gradient is wanted."""
    n_queries: int = 1
    """As forward's."""


def hidden_columns(n_rows: int, n_cols: int, n_queries: int, device: torch.device) -> Tensor:
    """Bool [n_rows, n_cols]: what causality hides from each row."""
    query = torch.arange(n_rows, device=device) % n_queries
    key = torch.arange(n_cols, device=device)
    return key[None, :] > query[:, None] + (n_cols - n_queries)


def forward(operands: Operands, rng: Rng | None, plan: SoftmaxPlan) -> tuple[Tensor, Tensor | None]:
    """Returns (y, p), both like scores; p is None where the plan does not store it. Differentiable.

    p: the probabilities before dropout; the sign bit is set where dropout drops.
    """
    scores, mask, layout, n_queries = operands
    n_rows, n_cols = scores.shape
    acc = accumulator_dtype(scores.dtype)
    values = scores.to(acc) * plan.scale
    if mask is not None:
        rows = mask
        if layout is not None:
            rows = mask.as_strided((*layout.sizes, n_cols), (*layout.strides, layout.col_stride)).reshape(
                n_rows, n_cols
            )
        values = values.masked_fill(~rows, -torch.inf) if rows.dtype == torch.bool else values + rows.to(acc)
    hidden = None
    if plan.causal:
        hidden = hidden_columns(n_rows, n_cols, n_queries, scores.device)
        values = values.masked_fill(hidden, -torch.inf)
    reduce = torch.amax if n_cols else torch.sum  # amax of no columns raises
    largest = reduce(values.detach(), dim=1, keepdim=True)
    is_masked = largest == -torch.inf
    exponentials = torch.exp(values - largest.masked_fill(is_masked, 0.0))
    p = exponentials / exponentials.sum(dim=1, keepdim=True).masked_fill(is_masked, 1.0)
    if hidden is not None:
        p = p.masked_fill(hidden, 0.0)  # in a row with a NaN too: kernels do not compute what no query sees
    if plan.dropout_p == 0.0:
        return p.to(scores.dtype), None
    assert rng is not None
    keep = keep_mask((n_rows, n_cols), plan.dropout_p, rng, scores.device)
    y = torch.where(keep, p * dropout_scale(plan.dropout_p), 0.0).to(scores.dtype)
    p = p.to(scores.dtype)
    return y, torch.where(keep, p, -p) if plan.store_p else None


def backward(
    operands: BackwardOperands, plan: SoftmaxPlan, wants_dscores: bool, wants_dmask: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Returns (dscores, dmask); what is not wanted is None.

    What causality hides has no gradient and is in no other one, whatever dy and p hold there.
    dscores: like dy. dmask: [layout.n_mask_rows, n_cols] float32 (float64), summed over the rows that share a mask row;
    a broadcast of columns is left to the caller.
    """
    dy, p, layout, n_queries = operands
    acc = accumulator_dtype(dy.dtype)
    gradient, probability = dy.to(acc), p.to(acc)
    if plan.dropout_p > 0.0:
        gradient = torch.where(torch.signbit(p), 0.0, gradient * dropout_scale(plan.dropout_p))
        probability = probability.abs()
    product = probability * gradient
    hidden = hidden_columns(dy.shape[0], dy.shape[1], n_queries, dy.device) if plan.causal else None
    if hidden is not None:
        product = product.masked_fill(hidden, 0.0)
    g = product - probability * product.sum(dim=1, keepdim=True)
    if hidden is not None:
        g = g.masked_fill(hidden, 0.0)
    dmask = None
    if wants_dmask:
        assert layout is not None
        shared = [i for i, stride in enumerate(layout.strides) if stride == 0]
        rows = g.view(*layout.sizes, dy.shape[1])
        dmask = (rows.sum(dim=shared) if shared else rows).reshape(-1, dy.shape[1])
    return (g * plan.scale).to(dy.dtype) if wants_dscores else None, dmask
