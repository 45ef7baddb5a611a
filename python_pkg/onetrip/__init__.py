"""Fused kernels for training transformers: every tensor makes one trip through memory."""

from . import nn, ops
from .ops.backends import available_backends, set_backend, use_backend

__version__ = "0.1.0"

__all__ = ["__version__", "available_backends", "nn", "ops", "set_backend", "use_backend"]
