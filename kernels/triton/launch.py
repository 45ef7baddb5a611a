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


def kernel(function: Any) -> Any:
    """triton.jit of a function that Launch can launch. Triton would compile it anew for a size or stride that is 1 or a
    multiple of 16: ALIGN tells a kernel what it can use of these."""
    integers = [name for name, kind in function.__annotations__.items() if kind in ("tl.int32", "tl.int64")]
    return triton.jit(do_not_specialize=integers)(function)


LAUNCHES = 1024
"""How many a function that makes them for each shape keeps."""


class Launch:
    """A kernel, and what sizes, strides and dtypes decide of its launch: the grid, the options, the last arguments.

    Called with the first arguments it is kernel[grid](*first, **named), on the current device, in less of the host's
    time. Making one takes longer: all families but Adam, whose numbers change with every step, keep theirs for each
    shape, by functools.lru_cache.

    Triton binds and classifies all arguments of every launch to find what it compiled for them. Only what our kernels
    are compiled for is looked at here: options, constants, which come last, and of tensors the dtype, the device, and
    whether the address is a multiple of 16. Numbers are not: kernel() leaves integers unspecialized, others are
    Python floats. What Triton looks at besides, like debugging options that change between two launches, has no effect
    after the first; its launch hooks run at the first only.
    """

    __slots__ = ("_compiled", "_constants", "_last", "grid", "kernel", "named")

    def __init__(self, kernel: Any, grid: tuple[int, ...], **named: Any) -> None:
        named = {"enable_fp_fusion": True, **named}  # triton 3.10's default is another one
        self.kernel, self.grid, self.named = kernel, grid, named
        self._last: tuple[Any, ...] = ()
        self._constants: tuple[Any, ...] | None = None
        """What is compiled: a function with options and constants. None where Triton interprets."""
        self._compiled: dict[tuple[Any, ...], Any] = {}
        """Current device, and dtypes, devices and alignments of the first arguments -> the compiled kernel."""
        if _TAKES_CONSTANTS and isinstance(kernel, triton.JITFunction):
            self._last = tuple([named[name] for name in kernel.arg_names if name in named])
            options = [named.get(name) for name in ("num_warps", "maxnreg", "enable_fp_fusion")]
            self._constants = (kernel.fn, *options, *self._last[-len(kernel.constexprs) :])

    def __call__(self, *first: Tensor | int | None) -> None:
        if self._constants is None:
            self.kernel[self.grid](*first, **self.named)
            return
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        values, kinds = [], [device]
        for value in first:
            if isinstance(value, Tensor):
                kinds += value.dtype, value.get_device(), (value := value.data_ptr()) % 16 == 0
            elif value is None:
                kinds.append(None)
            values.append(value)
        compiled = self._compiled.get(key := tuple(kinds))
        if compiled is None:
            compiled = _compiled.get((self._constants, key))
            if compiled is None:
                _compiled[self._constants, key] = self.kernel[self.grid](*first, **self.named)
                return
            self._compiled[key] = compiled
        grid_x, grid_y, grid_z = (*self.grid, 1, 1)[:3]
        stream = driver.get_current_stream(device)
        run, function = compiled.run, compiled.function
        run(grid_x, grid_y, grid_z, stream, function, compiled.packed_metadata, None, None, None, *values, *self._last)


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
