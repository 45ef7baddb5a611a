"""Functions that rewritten forwards call: checks of the children whose parameters they read, and call counters."""

from __future__ import annotations

import ast
import math
import weakref
from collections.abc import Callable
from functools import cache, partial
from inspect import getattr_static, unwrap
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.modules.module import (  # torch 2.6 has no function that checks all four
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from ..ops.common.backends import KERNEL_DTYPES
from ..ops.common.native import current_stream
from ..ops.common.tracing import autocast_dtype as autocast_dtype
from ..ops.common.tracing import have_storage, is_jit_tracing, is_transformed
from ..ops.common.tracing import is_autocasting as is_autocasting
from .report import Unsuitable
from .source import Inliner, Unreadable, first_match, own_names, parse

SMALLEST = 1 << 18
"""Elements of a tensor from which on a pass over it costs more than the 10 to 25 us of Python of a link (links) or of a
gradient that its readers share (readers). Forward and backward of a linked pair, AMD EPYC, float32, 768 columns: 312 us
linked and 254 us apart with 128 rows, 715 and 740 us with 512."""
_GPU_IS_FASTER = 64
"""By what a GPU's memory is faster: it adds two 16-bit tensors of 2^24 elements in about 35 us. With 2^23 (BERT-large,
16 x 512 tokens) an H100 waited for its host, which took 1.3 ms longer than unpatched for a step of each layer."""

_counters: dict[int, list[int]] = {}
"""id(module) -> [fused, fallen back]. Kept outside the modules, which patching must not change."""


def forget_with(owner: nn.Module, table: dict[Any, Any], key: Any) -> None:
    """Remove a key from a table when its owner is gone."""
    weakref.finalize(owner, table.pop, key, None).atexit = False


def forgetting(x: Tensor, table: dict[int, Any]) -> weakref.ref[Tensor]:
    """A reference to x that removes id(x) from a table when x is gone."""
    key = id(x)
    return weakref.ref(x, lambda _: table.pop(key, None))


def counter_of(module: nn.Module) -> list[int]:
    """The module's counter, created at first use and deleted with the module."""
    counter = _counters.get(id(module))
    if counter is None:
        counter = _counters[id(module)] = [0, 0]
        forget_with(module, _counters, id(module))
    return counter


def count_fused(module: nn.Module) -> None:
    """Count one call of the fused operator. Not under torch.compile, which would recompile when the count changes."""
    if not torch.compiler.is_dynamo_compiling():
        counter = _counters.get(id(module))
        if counter is not None:
            counter[0] += 1


def count_fallback(module: nn.Module) -> None:
    """Count one call that ran the original code."""
    if not torch.compiler.is_dynamo_compiling():
        counter = _counters.get(id(module))
        if counter is not None:
            counter[1] += 1


def original_class(cls: type) -> Any:
    """The class that a patched class replaces; any other class itself, also if it inherits from a patched class.

    Reads attributes: Dynamo cannot read a class's __dict__ once the compiled code has changed any dictionary.
    """
    return cls._onetrip_original if getattr(cls, "_onetrip_class", None) is cls else cls


def is_large(x: Tensor, n_elements: int | None = None) -> bool:
    """Whether a pass over x, or over n_elements on its device, costs more than the Python that saves it."""
    return (x.numel() if n_elements is None else n_elements) >= (SMALLEST * _GPU_IS_FASTER if x.is_cuda else SMALLEST)


def is_plain(module: nn.Module, expected: type) -> bool:
    """Whether calling the module runs exactly expected.forward: that type, no hooks, no forward on the instance, not
    compiled on its own.

    Wrappers (PEFT, quantization) change the type. FSDP, DeepSpeed and offloading register hooks. accelerate and hub
    kernels replace forward on the instance.
    """
    return (
        original_class(type(module)) is expected
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not _global_forward_hooks
        and not _global_forward_pre_hooks
        and not _global_backward_hooks
        and not _global_backward_pre_hooks
    )


def is_plain_dropout(dropout: Any) -> bool:
    """Whether calling it is functional.dropout with its p, in training."""
    return is_plain(dropout, nn.Dropout) and not dropout.inplace


def is_followed() -> bool:
    """Whether a compiler, torch.jit.trace or a transform of torch.func follows the call."""
    return torch.compiler.is_compiling() or is_jit_tracing() or is_transformed()


def is_plain_linear(dense: Any) -> bool:
    """Whether dense is a plain nn.Linear of an ordinary weight: none that torchao has quantized, no DTensor."""
    return is_plain(dense, nn.Linear) and not hasattr(type(dense.weight), "__tensor_flatten__")


def multiplies(dense: Any, x: Tensor) -> bool:
    """Whether dense(x) is the product of a plain linear layer, in x's dtype or in autocast's, which kernels have."""
    if not is_plain_linear(dense) or is_distributed(x):
        return False
    weight = dense.weight
    has_dtype = weight.dtype in KERNEL_DTYPES and (weight.dtype == x.dtype or is_autocasting(x))
    return has_dtype and weight.device == x.device and weight.shape[1:] == x.shape[-1:]


def is_factor(value: Any) -> bool:
    """Whether a matrix product multiplies by the Python number as an operator does: not by 0, Inf or NaN, which BLAS
    libraries leave out, nor by what float32 cannot hold."""
    return type(value) in (float, int) and 2.0**-126 < abs(value) < 2.0**127


_LARGEST_EXPONENT = 16
"""What a factor of 2^e or 2^-e scales stays far from the ends of bfloat16 and float32."""


def scales_exactly(factor: Any, dense: nn.Linear, x: Any) -> bool:
    """Whether dense(x) * factor has the same bits if the factor is part of the product, or scales x: a power of two
    changes exponents alone. Not in float16: its smallest numbers are too close."""
    if not is_factor(factor) or not (type(x) is Tensor or isinstance(x, FakeTensor)):
        return False
    fraction, exponent = math.frexp(factor)
    is_power = abs(fraction) == 0.5 and abs(exponent - 1) <= _LARGEST_EXPONENT
    return is_power and torch.float16 not in (x.dtype, dense.weight.dtype, autocast_dtype(x))


_TRANSPOSED = "torch.addmm(self.bias, X.view(-1, X.size(-1)), self.weight).view(X.size()[:-1] + (self.N,))"


_transposed: dict[Any, bool] = {}
"""forward -> whether it is that of a transposed layer. Not functools.cache, which Dynamo ignores: it would trace the
reading of the source."""


def is_transposed(cls: Any) -> bool:
    """Whether the class's forward is that of a linear layer with the weight (n_inputs, n_outputs), and a bias."""
    if cls.__call__ is not nn.Module.__call__:
        return False
    found = _transposed.get(cls.forward)
    if found is None:
        found = _transposed[cls.forward] = _is_transposed(cls.forward)
    return found


def _is_transposed(forward: Any) -> bool:
    tree = parse(forward)
    if isinstance(tree, Unsuitable):
        return False
    names, used = [each.arg for each in tree.args.args], forward.__globals__
    try:
        found = first_match((_TRANSPOSED,), Inliner(used, {}).run(tree.body))
    except Unreadable:
        return False
    return found is not None and names == ["self", ast.unparse(found[1]["X"])] and used.get("torch") is torch


Configuration = tuple[tuple[str, Any], ...]
_OWN = frozenset(vars(nn.Module()))
_COMPARABLE = (int, float, str, type(None), torch.dtype, type, FunctionType, BuiltinFunctionType)


def configuration(module: nn.Module) -> Configuration | None:
    """(name, value) of each attribute that instances of the class may differ in, besides parameters, buffers and
    children. None if there is a value that says nothing by itself."""
    attributes = ((name, value) for name, value in vars(module).items() if name not in _OWN)
    found = tuple((name, _comparable(module, value)) for name, value in attributes)
    return found if all(map(_is_comparable, found)) else None


@cache
def names_read(cls: Any) -> frozenset[str]:
    """All names in the class's forward, and in the methods and properties that it names."""
    found: set[str] = set()
    left = ["forward"]
    while left:
        function = getattr_static(cls, left.pop(), None)
        if isinstance(function, property):
            function = function.fget
        function = unwrap(function) if callable(function) else None
        if isinstance(function, FunctionType) and function.__module__.partition(".")[0] != "torch":
            names = own_names(function) - found
            found |= names
            left += names
    return frozenset(found)


def attributes_read(module: nn.Module) -> Configuration:
    """(name, value) of those attributes that the class's methods read and that say something by themselves."""
    names = names_read(original_class(type(module)))
    found = ((name, _comparable(module, value)) for name, value in vars(module).items() if name in names - _OWN)
    return tuple(filter(_is_comparable, found))


def has_configuration(module: nn.Module, expected: Configuration) -> bool:
    """Whether the attributes still have these values."""
    attributes = module.__dict__
    for name, value in expected:
        actual = attributes.get(name)
        if actual is not value and _comparable(module, actual) != value:
            return False
    return True


def _comparable(module: nn.Module, value: Any) -> Any:
    """Methods by their function, partial functions by their parts."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return value.__func__
    if isinstance(value, partial):
        return value.func, value.args, tuple(sorted(value.keywords.items()))
    return value


def _is_comparable(value: Any) -> bool:
    return all(map(_is_comparable, value)) if isinstance(value, tuple) else isinstance(value, _COMPARABLE)


Multiply = Callable[[Any, Tensor, Tensor, None], Tensor]
"""(dense, x, weight, None) -> functional.linear(x, weight)."""


def linear_parts(dense: Any, x: Tensor, under_autocast: Multiply | None = None) -> tuple[Tensor, Tensor | None]:
    """(product, bias) with dense(x) = product + bias. A dense that is no plain linear layer is called: bias is None.

    The bias is cast to the product's dtype, as under autocast, so that the sum has the dtype of dense(x).
    under_autocast: the product of an nn.Linear there.
    """
    cls = original_class(type(dense))
    is_known = (cls is nn.Linear or is_transposed(cls)) and is_plain(dense, cls)
    if not is_known or hasattr(type(dense.weight), "__tensor_flatten__") or x.is_nested:
        return dense(x), None
    if cls is not nn.Linear:
        product = x @ dense.weight
    elif under_autocast is not None and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        product = under_autocast(dense, x, dense.weight, None)
    else:
        product = functional.linear(x, dense.weight)
    bias = dense.bias
    if bias is not None and bias.dtype != product.dtype:
        bias = bias.to(product.dtype)
    return product, bias


class Branch(NamedTuple):
    """One side of a sum, before its bias and its dropout."""

    x: Tensor
    bias: Tensor | None
    p: float


def dropped(dropout: Any, x: Tensor, bias: Tensor | None = None) -> Branch:
    """x + bias with the module's dropout still to be done; done already where it is not a plain nn.Dropout."""
    if is_plain_dropout(dropout):
        return Branch(x, bias, float(dropout.p) if dropout.training else 0.0)
    return Branch(dropout(x if bias is None else x + bias), None, 0.0)


def dropped_linear(dropout: Any, dense: Any, x: Tensor, under_autocast: Multiply | None = None) -> Branch:
    """dense(x) with its bias and the dropout still to be done. under_autocast: as in linear_parts."""
    return dropped(dropout, *linear_parts(dense, x, under_autocast))


def undropped(x: Any) -> tuple[Any, Tensor | None]:
    """(x, a bias still to be added) of what a Tail returned, one without dropout."""
    return x[:2] if isinstance(x, Branch) else (x, None)


def is_distributed(x: Tensor) -> bool:
    """Whether x is a DTensor: kernels would see only the local shard."""
    return type(x).__name__ == "DTensor"


def fits(x: Tensor) -> bool:
    """Whether an element-wise operator takes x: anything else is left to torch."""
    return x.dtype in KERNEL_DTYPES and x.dim() > 0 and not x.is_nested and not is_distributed(x)


def is_like(up: Any, gate: Tensor) -> bool:
    """Whether ops.glu takes both: anything else that a product may be of is left to torch."""
    return (
        isinstance(up, Tensor)
        and not up.is_nested
        and up.shape == gate.shape
        and up.dtype == gate.dtype
        and up.device == gate.device
        and not is_distributed(up)
    )


def is_released(x: Tensor) -> bool:
    """Whether the memory of x is freed, as FSDP1 frees that of a layer's weights while the layer does not run."""
    if torch.compiler.is_dynamo_compiling() or x.numel() == 0 or not have_storage(x):
        return False
    return x.untyped_storage().nbytes() == 0


def stream_of(x: Tensor) -> int:
    """The current stream of x's GPU; 0 on a CPU, and of a tensor without memory."""
    return current_stream(x.device.index) if x.is_cuda and have_storage(x) else 0


def has_saved_tensor_hooks() -> bool:
    """Whether something packs what autograd saves: a non-reentrant checkpoint, save_on_cpu."""
    autograd: Any = torch._C._autograd
    if hasattr(autograd, "_top_saved_tensors_default_hooks"):
        return autograd._top_saved_tensors_default_hooks(True) is not None
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    try:
        autograd._saved_tensors_hooks_disable("")  # torch 2.6 says it by refusing
        return False
    except RuntimeError:
        return True
    finally:
        autograd._saved_tensors_hooks_enable()
