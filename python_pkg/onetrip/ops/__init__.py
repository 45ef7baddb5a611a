"""Fused operators as functions of tensors: differentiable, deterministic, the same results on every backend."""

from .common.rng import dropout_keep_mask
from .cross_entropy import cross_entropy, linear_cross_entropy, linear_logprobs
from .glu import bias_activation, glu, glu_packed, softcap
from .moe import moe_combine, moe_dispatch
from .rotary import rotary_embedding
from .row_norm import bias_dropout_residual, bias_dropout_residual_norm, layer_norm, rms_norm
from .softmax import softmax

__all__ = [
    "bias_activation",
    "bias_dropout_residual",
    "bias_dropout_residual_norm",
    "cross_entropy",
    "dropout_keep_mask",
    "glu",
    "glu_packed",
    "layer_norm",
    "linear_cross_entropy",
    "linear_logprobs",
    "moe_combine",
    "moe_dispatch",
    "rms_norm",
    "rotary_embedding",
    "softcap",
    "softmax",
]
