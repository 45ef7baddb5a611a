"""Fused operators as functions of tensors: differentiable, deterministic, the same results on every backend.

A family is imported at the first use of one of its functions.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .common.rng import dropout_keep_mask
    from .cross_entropy import cross_entropy, linear_cross_entropy, linear_logprobs
    from .glu import bias_activation, glu, glu_packed
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
    "rms_norm",
    "rotary_embedding",
    "softmax",
]

_MODULES = {
    "common.rng": ("dropout_keep_mask",),
    "cross_entropy": ("cross_entropy", "linear_cross_entropy", "linear_logprobs"),
    "glu": ("bias_activation", "glu", "glu_packed"),
    "rotary": ("rotary_embedding",),
    "row_norm": ("bias_dropout_residual", "bias_dropout_residual_norm", "layer_norm", "rms_norm"),
    "softmax": ("softmax",),
}


class _Functions(ModuleType):
    """This module. Importing a submodule sets it as an attribute here: ops.softmax stays the function all the same."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Functions


def __getattr__(name: str) -> Any:
    for module, functions in _MODULES.items():
        if name in functions:
            value = globals()[name] = getattr(import_module(f".{module}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
