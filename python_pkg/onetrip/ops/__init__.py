"""Fused operators as functions of tensors: differentiable, deterministic, the same results on every backend."""

# Registers the operators that graphs hold: torch.jit.load looks for them before anything of onetrip is called.
from . import row_norm_library, softmax_library  # noqa: F401
from .rng import dropout_keep_mask
from .row_norm import bias_dropout_residual, bias_dropout_residual_norm, layer_norm, rms_norm
from .softmax import softmax

__all__ = [
    "bias_dropout_residual",
    "bias_dropout_residual_norm",
    "dropout_keep_mask",
    "layer_norm",
    "rms_norm",
    "softmax",
]
