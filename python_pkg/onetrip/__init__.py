"""Fused kernels for training transformers: every tensor makes one trip through memory."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import ops
from .ops.common.backends import available_backends, set_backend, use_backend, use_gpu_independent_sums

if TYPE_CHECKING:
    from . import nn, optim
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
    "use_gpu_independent_sums",
]


def __getattr__(name: str) -> Any:
    """Imports nn, optim and patching at their first use: users of one part do not load the others."""
    if name in ("nn", "optim", "patching"):
        return import_module(f".{name}", __name__)
    if name in __all__:
        value = globals()[name] = getattr(import_module(".patching", __name__), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
