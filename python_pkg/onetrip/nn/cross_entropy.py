"""The module of the cross_entropy family."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.cross_entropy import check_chunk_rows, checked_plan, linear_cross_entropy


class LinearCrossEntropyLoss(torch.nn.Module):
    """Cross-entropy of hidden @ weight.T + bias without its logits: see onetrip.ops.linear_cross_entropy.

    ignore_index to n_classes: as there. It has no parameters: the weight, often that of an embedding, is an argument.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        lse_square_scale: float = 0.0,
        reduction: str = "mean",
        chunk_rows: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        n_classes: int | None = None,
    ) -> None:
        super().__init__()
        function = "LinearCrossEntropyLoss"
        checked_plan(function, ignore_index, label_smoothing, softcap, lse_square_scale, reduction)
        check_chunk_rows(function, chunk_rows)
        self.ignore_index, self.label_smoothing, self.softcap = ignore_index, label_smoothing, softcap
        self.lse_square_scale, self.reduction, self.chunk_rows = lse_square_scale, reduction, chunk_rows
        self.process_group, self.n_classes = process_group, n_classes

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden: (*, n_hidden). weight: (n_classes, n_hidden). labels: (*) int64. Returns the loss."""
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            lse_square_scale=self.lse_square_scale,
            reduction=self.reduction,
            chunk_rows=self.chunk_rows,
            process_group=self.process_group,
            n_classes=self.n_classes,
        )

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, softcap={self.softcap}, "
            f"lse_square_scale={self.lse_square_scale}, reduction={self.reduction!r}, chunk_rows={self.chunk_rows}, "
            f"n_classes={self.n_classes}"
        )
