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


LAUNCHES = 1024
"""How many Launches a family keeps."""


class Launch:
    """What sizes, strides and dtypes decide of a kernel's launch: its grid, its options and its last arguments.

    Making one takes longer than a launch: families keep theirs, for each shape, by functools.lru_cache.
    """

    __slots__ = ("compiled", "grid", "last", "named")

    def __init__(self, grid: tuple[int, ...], **named: Any) -> None:
        self.grid, self.named = grid, named
        self.last: tuple[Any, ...] = ()
        """The last arguments in the kernel's order."""
        self.compiled: dict[tuple[Any, ...], Any] = {}
        """Device, dtypes and alignments of the first arguments -> the compiled kernel."""


def launch(kernel: Any, plan: Launch, *first: Tensor | int | None) -> None:
    """kernel[plan.grid](*first, **plan.named), on the current device, in a third of the host time.

    Triton binds and classifies all arguments of every launch to find what it compiled for them. Only what our kernels
    are compiled for is looked at here: options, constants, which come last, and of pointers the dtype, and whether the
    address is a multiple of 16. Numbers are not: integers are in the kernel's do_not_specialize, others are Python
    floats. What Triton looks at besides, like hooks and debugging options that change between two launches, has no
    effect after the first.
    """
    if not (_TAKES_CONSTANTS and isinstance(kernel, triton.JITFunction)):  # interpreted
        kernel[plan.grid](*first, **plan.named)
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    values, kinds = [], [device]
    for value in first:
        if isinstance(value, Tensor):
            kinds.append(value.dtype)
            value = value.data_ptr()
            kinds.append(value % 16 == 0)
        elif value is None:
            kinds.append(None)
        values.append(value)
    compiled = plan.compiled.get(key := tuple(kinds))
    if compiled is None:
        found = _what_is_compiled(kernel, plan, len(first)), key
        compiled = _compiled.get(found)
        if compiled is None:
            _compiled[found] = kernel[plan.grid](*first, **plan.named)
            return
        plan.compiled[key] = compiled
    grid_x, grid_y, grid_z = (*plan.grid, 1, 1)[:3]
    stream = driver.get_current_stream(device)
    run, function = compiled.run, compiled.function
    run(grid_x, grid_y, grid_z, stream, function, compiled.packed_metadata, None, None, None, *values, *plan.last)


def _what_is_compiled(kernel: Any, plan: Launch, n_first: int) -> tuple[Any, ...]:
    """The kernel, its options and constants."""
    n_constants = len(kernel.constexprs)
    plan.last = tuple([plan.named[name] for name in kernel.arg_names[n_first:]])
    options = (plan.named.get(name) for name in ("num_warps", "maxnreg", "enable_fp_fusion"))
    return (kernel.fn, *options, plan.last[-n_constants:])


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
