"""Modules around onetrip.ops: drop-in where torch.nn has one. Dropout follows self.training; state_dict keys are
torch's."""

from .cross_entropy import LinearCrossEntropyLoss
from .row_norm import BiasDropoutResidual, BiasDropoutResidualNorm, LayerNorm, RMSNorm
from .softmax import Softmax

__all__ = [
    "BiasDropoutResidual",
    "BiasDropoutResidualNorm",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "Softmax",
]
