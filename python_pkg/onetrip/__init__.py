"""Fused kernels for training transformers: every tensor makes one trip through memory."""

from . import nn, ops, optim
from .ops.common.backends import available_backends, set_backend, use_backend
from .patching import PatchReport, patch_model, patched, register_attention, unpatch_model

__version__ = "0.1.0"

__all__ = [
    "PatchReport",
    "__version__",
    "available_backends",
    "nn",
    "ops",
    "optim",
    "patch_model",
    "patched",
    "register_attention",
    "set_backend",
    "unpatch_model",
    "use_backend",
]
