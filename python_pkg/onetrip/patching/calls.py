"""What rewritten forwards run at call time: checks of the children they look into, and the counts for the report."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import (  # torch 2.6 has no function that looks at them all
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

_counters: dict[int, list[int]] = {}
"""id(module) -> [fused, fallen back]. Kept outside the modules: an unpatched one carries no trace of the patch."""


def counter_of(module: nn.Module) -> list[int]:
    """The module's counter, made on first use and dropped when the module dies."""
    counter = _counters.get(id(module))
    if counter is None:
        counter = _counters[id(module)] = [0, 0]
        weakref.finalize(module, _counters.pop, id(module), None).atexit = False
    return counter


def count_fused(module: nn.Module) -> None:
    """Count one call of the fused operator. Nothing under torch.compile: it would guard on the count and recompile."""
    if not torch.compiler.is_dynamo_compiling():
        counter = _counters.get(id(module))
        if counter is not None:
            counter[0] += 1


def count_fallback(module: nn.Module) -> None:
    """Count one call that went through the original code."""
    if not torch.compiler.is_dynamo_compiling():
        counter = _counters.get(id(module))
        if counter is not None:
            counter[1] += 1


def original_class(cls: type) -> Any:
    """The class that a patched class stands for; any other class itself, one that inherits from a patched class too.

    Asked by attributes: Dynamo refuses to read a class's __dict__ once the code it compiles has changed any dictionary.
    """
    return cls._onetrip_original if getattr(cls, "_onetrip_class", None) is cls else cls


def is_plain(module: nn.Module, expected: type) -> bool:
    """Whether calling the module does exactly what expected.forward does: that type, no hooks, no forward of its own.

    Wrappers (PEFT, quantisation) change the type; FSDP, DeepSpeed and offloading hang hooks; accelerate and kernels
    replace forward on the instance.
    """
    return (
        original_class(type(module)) is expected
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
        and not _global_forward_hooks
        and not _global_forward_pre_hooks
        and not _global_backward_hooks
        and not _global_backward_pre_hooks
    )


def linear_parts(dense: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(product, bias) with dense(x) = product + bias. Any dense but a plain nn.Linear is called, and leaves no bias.

    The bias takes the product's dtype, as autocast would have cast it, so that the sum has the dtype of dense(x).
    """
    weight = dense.weight if is_plain(dense, nn.Linear) else None
    if weight is None or hasattr(type(weight), "__tensor_flatten__"):  # torchao's quantised weights, DTensor
        return dense(x), None
    product = functional.linear(x, weight)
    bias = dense.bias
    if bias is not None and bias.dtype != product.dtype:
        bias = bias.to(product.dtype)
    return product, bias


def is_distributed(x: Tensor) -> bool:
    """Whether x is a DTensor, whose shards the kernels cannot see together."""
    return type(x).__name__ == "DTensor"


def is_fusable(x: Tensor, residual: Tensor) -> bool:
    """Whether x and residual go element by element: one shape (no broadcasting), neither sharded."""
    return x.shape == residual.shape and (type(x) is Tensor or not (is_distributed(x) or is_distributed(residual)))


def is_autocasting(x: Tensor) -> bool:
    """Whether autocast is on for x's device."""
    return torch.is_autocast_enabled(x.device.type)
