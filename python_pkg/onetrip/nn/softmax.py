"""The module of the softmax family."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import softmax
from ..ops.common.checks import check_bool, check_finite, check_probability


class Softmax(torch.nn.Module):
    """dropout(softmax(scale * scores + mask)) over the last dimension: see onetrip.ops.softmax.

    scale, causal: as there. p: dropout probability, used while training.
    """

    def __init__(self, scale: float = 1.0, causal: bool = False, p: float = 0.0) -> None:
        super().__init__()
        check_finite("Softmax", "scale", scale)
        check_bool("Softmax", "causal", causal)
        check_probability("Softmax", "p", p)
        self.scale, self.causal, self.p = scale, causal, p

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """scores: (*, Q, K). mask: None, bool or floating, broadcastable to scores. Returns a tensor like scores."""
        return softmax(scores, mask, scale=self.scale, causal=self.causal, dropout_p=self.p if self.training else 0.0)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, causal={self.causal}, p={self.p}"
