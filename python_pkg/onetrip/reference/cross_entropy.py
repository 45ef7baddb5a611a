"""Cross-entropy of rows of logits with their labels, its gradient, and the entropy of the rows.

t = softcap * tanh(scale * logits / softcap), or scale * logits without a cap;  lse = log(sum of exp(t));
loss = lse - (1 - label_smoothing) * t[label] - label_smoothing * mean(t) + lse_square_scale * lse^2.
Label smoothing: Szegedy et al. 2016; the square of lse (z-loss): PaLM, Chowdhery et al. 2022; soft cap: Gemma 2, 2024.
The loss of a plain row is minus the log-probability of its label. Sums are float32 (float64 for float64).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import accumulator_dtype

NO_INDEX = -(2**62)
"""An ignore_index that no label has."""


class CrossEntropyPlan(NamedTuple):
    """Everything about one call that is not a tensor."""

    ignore_index: int = NO_INDEX
    """Rows with this label: loss 0, gradient 0, whatever their logits are. Other labels outside the row give NaN."""
    label_smoothing: float = 0.0
    softcap: float = 0.0
    """0: no cap."""
    lse_square_scale: float = 0.0
    scale: float = 1.0
    """Factor of the logits, before all else: 1 / temperature."""


class RowStatistics(NamedTuple):
    """What forward finds of each row."""

    loss: Tensor
    """[n_rows] float32 (float64), as the others."""
    stats: Tensor
    """[n_rows, 2]: the largest t, and lse less it. Backward reads them."""
    entropy: Tensor | None
    """[n_rows]: -sum of p * log(p), p = exp(t - lse); None where not wanted."""


def values(logits: Tensor, plan: CrossEntropyPlan) -> Tensor:
    """t, float32 (float64)."""
    t = logits.to(accumulator_dtype(logits.dtype)) * plan.scale
    return plan.softcap * torch.tanh(t / plan.softcap) if plan.softcap else t


def _one_label(labels: Tensor, n_cols: int, plan: CrossEntropyPlan) -> tuple[Tensor, Tensor, Tensor]:
    """(ignored, spoilt, index): all [n_rows, 1]; index is 0 in rows that are ignored, or spoilt by a wrong label."""
    labels = labels[:, None]
    ignored = labels == plan.ignore_index
    spoilt = ((labels < 0) | (labels >= n_cols)) & ~ignored
    return ignored, spoilt, labels.masked_fill(ignored | spoilt, 0)


def forward(logits: Tensor, labels: Tensor, plan: CrossEntropyPlan, wants_entropy: bool = False) -> RowStatistics:
    """logits: [n_rows, n_cols], n_cols >= 1. labels: [n_rows] int64. Differentiable."""
    t = values(logits, plan)
    ignored, spoilt, index = _one_label(labels, logits.shape[1], plan)
    t = t.masked_fill(ignored, 0.0).masked_fill(spoilt, torch.nan)
    largest = t.detach().amax(dim=1, keepdim=True)
    below = t - largest.masked_fill(largest == -torch.inf, 0.0)
    log_sum = torch.logsumexp(below, dim=1, keepdim=True)
    lse = largest + log_sum
    loss = (1.0 - plan.label_smoothing) * (log_sum - (t.gather(1, index) - largest))
    if plan.label_smoothing:
        loss = loss + plan.label_smoothing * (log_sum - below.mean(dim=1, keepdim=True))
    loss = (loss + plan.lse_square_scale * lse * lse)[:, 0].masked_fill(ignored[:, 0], 0.0)  # no view
    entropy = None
    if wants_entropy:
        log_p = (below - log_sum).clamp_min(-1000.0)  # 0 * log(0) is 0
        entropy = -(log_p.exp() * log_p).sum(dim=1).masked_fill(ignored[:, 0], 0.0)
    return RowStatistics(loss, torch.cat([largest, log_sum], dim=1).masked_fill(ignored, 0.0), entropy)


def backward(logits: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, plan: CrossEntropyPlan) -> Tensor:
    """dlogits, like logits, from forward's stats. weights: [n_rows] or [1] float32 (float64): the gradient of loss."""
    return _gradient(logits, labels, stats, None, weights, None, plan)


def backward_(logits: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, plan: CrossEntropyPlan) -> None:
    """As backward; the gradient is written over the logits, which are contiguous."""
    logits.copy_(backward(logits, labels, stats, weights, plan))


def forward_backward_(
    logits: Tensor, labels: Tensor, weights: Tensor, entropy_weights: Tensor | None, plan: CrossEntropyPlan
) -> Tensor:
    """The loss of each row; their gradient, times weights ([n_rows] or [1]), is written over the logits. Where
    entropy_weights ([n_rows]) are given, the gradient of the rows' entropy, times these, is added to it."""
    loss, stats, entropy = forward(logits, labels, plan, entropy_weights is not None)
    logits.copy_(_gradient(logits, labels, stats, entropy, weights, entropy_weights, plan))
    return loss


def _gradient(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    entropy: Tensor | None,
    weights: Tensor,
    entropy_weights: Tensor | None,
    plan: CrossEntropyPlan,
) -> Tensor:
    n_cols = logits.shape[1]
    t = values(logits, plan)
    ignored, spoilt, index = _one_label(labels, n_cols, plan)
    largest, log_sum = stats[:, :1], stats[:, 1:]
    weight = weights[:, None]
    log_p = (t - largest) - log_sum
    p = log_p.exp()
    g = weight * (1.0 + 2.0 * plan.lse_square_scale * (largest + log_sum)) * p
    if entropy_weights is not None:
        assert entropy is not None
        g = g - entropy_weights[:, None] * p * (log_p.clamp_min(-1000.0) + entropy[:, None])
    g = g - weight * plan.label_smoothing / n_cols
    g = g.scatter_add(1, index, (-weight * (1.0 - plan.label_smoothing)).expand_as(index))
    if plan.softcap:
        g = g * (1.0 - (t / plan.softcap) ** 2)
    return (g * plan.scale).masked_fill(spoilt, torch.nan).masked_fill(ignored, 0.0).to(logits.dtype)
