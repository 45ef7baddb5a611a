"""Which backend computes: cpu, cuda, triton or reference, chosen automatically or by name.

A backend asked for by name that cannot run raises; it never falls back in silence.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, cast

import torch

BACKENDS = ("cpu", "cuda", "triton", "reference")
"""Every backend, in the order in which `auto` prefers them."""

HALF = frozenset({torch.float16, torch.bfloat16})
KERNEL_DTYPES = HALF | {torch.float32}
"""Dtypes that kernels compute with. Everything else (float64) goes through reference."""

FAMILIES = {
    "cpu": frozenset({"adam", "cross_entropy", "glu", "moe", "rotary", "row_norm", "softmax"}),
    "cuda": frozenset({"adam", "row_norm", "softmax"}),
    "triton": frozenset({"adam", "cross_entropy", "glu", "moe", "rotary", "row_norm", "softmax"}),
}
"""Which operator families each backend has kernels of; reference has every family's formula. The CPU's kernels of moe
are torch's."""

DISPATCHER = "dispatcher"
"""In place of a backend: the softmax of attention calls its torch.library operator, so that dispatch modes see it."""

_process_choice: str | None = None  # None: not asked yet, see _process_wide
_local_choice: ContextVar[str | None] = ContextVar("onetrip_backend", default=None)
_open: dict[int, str] = {}
"""Choices of the blocks of use_backend that have not ended, in all threads, in the order in which they began."""


@functools.cache
def native() -> Any:
    """The compiled library onetrip._native, None where it was not built."""
    try:
        return importlib.import_module("onetrip._native")
    except ImportError:
        return None


@functools.cache
def unavailable_reason(name: str, device_type: str, index: int = 0) -> str:
    """Why the backend cannot run on that device, in plain words; "" where it can."""
    if name == "reference":
        return ""
    if name == "triton":
        return _triton_unavailable_reason(device_type, index)
    if name != device_type:
        return f"the {name} backend runs on {name} tensors only"
    library = native()
    if library is None:
        return "the native library onetrip._native was not built (it needs a C++ compiler at installation)"
    if name == "cpu":
        return ""
    return str(library.cuda_unavailable_reason(index))


def _triton_unavailable_reason(device_type: str, index: int) -> str:
    try:
        kernels = importlib.import_module("onetrip.kernels")
    except ImportError as error:
        return f"the Triton kernels cannot be imported: {error}"
    return str(kernels.unavailable_reason(torch.device(device_type, index)))


@functools.cache
def formulas(backend: str, family: str) -> ModuleType:
    """The module of an operator family for "reference" or "triton": both have the same forward and backward."""
    return importlib.import_module(f"onetrip.{'reference' if backend == 'reference' else 'kernels'}.{family}")


def available_backends(device: torch.device | str = "cpu") -> tuple[str, ...]:
    """Names of the backends that can run on the device, in order of preference.

    device: as torch.device takes it. Raises RuntimeError where torch does not know the device.
    """
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise RuntimeError(f"available_backends: device must be one that torch knows, got {device!r}") from error
    return tuple(name for name in BACKENDS if not unavailable_reason(name, device.type, device.index or 0))


def _checked(function: str, name: str) -> str:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"{function}: name must be one of {('auto', *BACKENDS)}, got {name!r}")
    return name


def set_backend(name: str) -> None:
    """Use this backend in the whole process from now on; "auto" chooses by device. Raises ValueError for unknown
    names."""
    global _process_choice
    _process_choice = _checked("set_backend", name)


def use_gpu_independent_sums(enabled: bool = True) -> None:
    """Whether the CUDA kernels add up the gradients of a norm's weight and biases in one order on every GPU.

    By default the order follows the number of blocks (in wide rows: clusters of blocks) that a GPU runs at once: equal
    inputs give equal bits in every run on one GPU. Enabled, every GPU adds as one with 128 SMs would, which may cost
    40% of backward's speed where it has fewer. For the whole process. The other backends have one order anyway.
    """
    library = native()
    if library is not None:
        library.set_gpu_independent_sums(enabled)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use this backend inside the with block (this thread or task); an eager backward follows its forward; a traced
    or compiled one chooses when it runs. What a backward called in the block computes again on a GPU (a checkpoint)
    uses it too: there the block that was entered last in any thread, also where this one has none."""
    token = _local_choice.set(_checked("use_backend", name))
    _open[id(token)] = name
    try:
        yield
    finally:
        del _open[id(token)]
        _local_choice.reset(token)


def _of_an_open_block(device: torch.device) -> str | None:
    """For what a backward computes again on a GPU: it runs in threads of torch's, to which no context variable goes."""
    is_in_backward = device.type != "cpu" and torch._C._current_graph_task_id() >= 0
    return [None, *_open.values()][-1] if is_in_backward else None


def _process_wide() -> str:
    if _process_choice is None:
        set_backend(_checked("ONETRIP_BACKEND", os.environ.get("ONETRIP_BACKEND") or "auto"))
    return cast(str, _process_choice)


def environment_fault(devices: list[torch.device]) -> str:
    """Why every operator raises, at least on these devices, if ONETRIP_BACKEND is why; else nothing."""
    name = _process_choice or os.environ.get("ONETRIP_BACKEND") or "auto"
    if name == "auto":
        return ""
    if name not in BACKENDS:
        return f"ONETRIP_BACKEND must be one of {('auto', *BACKENDS)}, got {name!r}: every operator raises"
    reasons = [unavailable_reason(name, device.type, device.index or 0) for device in devices]
    return f"ONETRIP_BACKEND={name}: every operator raises, since {reasons[-1]}" if reasons and all(reasons) else ""


def _has(name: str, family: str | None) -> bool:
    return family is None or name == "reference" or family in FAMILIES[name]


@functools.cache
def _automatic(device: torch.device, family: str | None = None) -> str:
    chosen = next(name for name in available_backends(device) if _has(name, family))
    library = native()
    if device.type == "cuda" and chosen != "cuda" and _has("cuda", family) and library and library.cuda_architectures():
        reason = unavailable_reason("cuda", "cuda", device.index or 0)
        warnings.warn(f"onetrip: {device} runs {chosen} in place of the CUDA kernels: {reason}", stacklevel=2)
    return chosen


def choose(function: str, device: torch.device, in_kernel_dtypes: bool, family: str | None = None) -> str:
    """The backend for a call on this device. in_kernel_dtypes: all tensors are of KERNEL_DTYPES. family: one of
    FAMILIES; None where every backend has it.

    Raises RuntimeError where a backend was asked for by name and cannot run or lacks the family, TypeError where it
    lacks a dtype.
    """
    name = _local_choice.get() or (_of_an_open_block(device) if _open else None) or _process_choice or _process_wide()
    if name == "auto":
        return _automatic(device, family) if in_kernel_dtypes else "reference"
    if name != "reference":
        if not _has(name, family):
            raise RuntimeError(
                f"{function}: backend {name!r} was asked for and has no {family} kernels; use auto or reference"
            )
        reason = unavailable_reason(name, device.type, device.index or 0)
        if reason:
            raise RuntimeError(f"{function}: backend {name!r} was asked for and cannot run on {device}: {reason}")
        if not in_kernel_dtypes:
            raise TypeError(
                f"{function}: backend {name!r} was asked for and computes float32, float16, bfloat16 only, outside of "
                "torch.func's transforms"
            )
    return name


def check_composed(function: str, device: torch.device, family: str | None = None) -> None:
    """Raises as choose does where a backend was asked for by name, for a call under a transform of torch.func.

    Compilers do not ask: Dynamo cannot trace choose."""
    if not torch.compiler.is_compiling():
        choose(function, device, False, family)
