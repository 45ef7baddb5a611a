"""How Triton's kernels are launched."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

import triton

_TAKES_CONSTANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
"""Whether a compiled kernel is called with all arguments of its source."""

_compiled: dict[tuple[Any, ...], Any] = {}
"""What a kernel was compiled for -> the compiled kernel."""


_signatures: dict[Any, tuple[tuple[str, ...], tuple[int, ...], int]] = {}
"""A kernel's function -> the names of its arguments, which of them are pointers, and where constants begin."""


def _signature(kernel: Any) -> tuple[tuple[str, ...], tuple[int, ...], int]:
    found = _signatures.get(kernel.fn)  # a kernel's own hash takes long
    if found is None:
        names = tuple(kernel.arg_names)
        pointers = tuple(i for i, name in enumerate(names) if name.endswith("_ptr"))
        found = _signatures[kernel.fn] = names, pointers, len(names) - len(kernel.constexprs)
    return found


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """kernel[grid](*arguments, **named), on the current device, in half of the host time.

    Triton binds and classifies all arguments of every launch to find what it compiled for them. Only what our kernels
    are compiled for is looked at here: options, constants, which come last, and of pointers the dtype, and whether the
    address is a multiple of 16. Numbers are not: integers are in the kernel's do_not_specialize, others are Python
    floats. What Triton looks at besides, like debugging options that change between two launches, has no effect after
    the first.
    """
    if not (_TAKES_CONSTANTS and isinstance(kernel, triton.JITFunction)):  # interpreted
        kernel[grid](*arguments, **named)
        return
    names, pointers, n_variables = _signature(kernel)
    values = (*arguments, *[named[name] for name in names[len(arguments) :]])
    kinds = [None if (x := values[i]) is None else (x.dtype, x.data_ptr() % 16 == 0) for i in pointers]
    options = named.get("num_warps"), named.get("maxnreg"), named.get("enable_fp_fusion")
    device = triton.runtime.driver.active.get_current_device()
    key = (kernel.fn, device, options, *kinds, values[n_variables:])
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, **named)
    else:
        compiled[(*grid, 1, 1)](*values)


_NO_SWITCH = contextlib.nullcontext()


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NO_SWITCH
    return torch.cuda.device(tensor.device)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (triton.cdiv takes ten times as long.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
