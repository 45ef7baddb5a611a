"""What the tests of cross-entropy share: the formula by torch's own operators, and labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "z-loss": {"lse_square_scale": 0.01},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "lse_square_scale": 0.02, "ignore_index": 1},
}


def unfused(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """In the dtype of the logits. The mean of no rows is 0."""
    t = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    t, rows = t.reshape(-1, t.shape[-1]), labels.reshape(-1)
    loss = F.cross_entropy(t, rows, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    kept = rows != ignore_index
    loss = loss + lse_square_scale * (torch.logsumexp(t, 1) ** 2).masked_fill(~kept, 0.0)
    if reduction == "none":
        return loss.view(labels.shape)
    return loss.sum() / kept.sum().clamp_min(1) if reduction == "mean" else loss.sum()


def make_labels(*shape: int, n_classes: int, ignored: float = 0.3, device: str = "cpu") -> Tensor:
    """Some of them -100; never 1 with more than two classes unless drawn."""
    labels = torch.randint(0, n_classes, shape, device=device)
    return labels.masked_fill(torch.rand(shape, device=device) < ignored, -100)
