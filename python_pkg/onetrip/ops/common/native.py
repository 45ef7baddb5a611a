"""What launches of every family share: row strides, dtype codes, the stream, errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .backends import native

DTYPE_CODE = {None: 0, torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum DType in csrc/launch.h
DTYPE_OF_DIGIT = (None, torch.float32, torch.float16, torch.bfloat16)
"""Of the digits in base 4 of half an operands_code."""
Launcher = Callable[..., int]


@cache
def _reader(name: str) -> Launcher | None:
    """The native library's reader of operands of this name."""
    library = native()
    return None if library is None else getattr(library, name)(Tensor, torch.nn.Parameter)


def operands_code(operands: tuple[Tensor | None, ...]) -> int:
    """A code (row_norm_native.decode) of the dtypes of x, and of a residual and vectors if there are more, where all
    are tensors or parameters of KERNEL_DTYPES, on one device, of fitting shapes: they would pass every check of ops.

    Else -1, and before torch 2.10, whose tensors the native library cannot read: the checks must be made.
    """
    reader = _reader("operands_reader")
    return -1 if reader is None else reader(operands)


def rotary_code(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> int:
    """The same of the operands of rotary_embedding that are not empty: 2 * the dtypes of q and of cos as digits in base
    4, + 1 where kernels can read them as they are."""
    reader = _reader("rotary_reader")
    return -1 if reader is None else reader(q, k, cos, sin)


def readable_labels(ignore_index: int, labels: Tensor, *operands: Tensor | None) -> int:
    """How many labels are not ignored, where these and logits, or hidden, weight and bias, would pass every check of
    ops/cross_entropy.py, are on the CPU, and kernels can read them as they are. Else -1, as operands_code."""
    reader = _reader("labels_reader")
    return -1 if reader is None else reader(ignore_index, labels, *operands)


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor with its values in memory: torch's lazily negated tensors, and its zeros without memory (from
    forward-mode and undefined gradients), are copied."""
    if tensor._is_zerotensor():
        return tensor.clone()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def rows(tensor: Tensor, n_cols: int) -> tuple[Tensor, int]:
    """The tensor as rows with last stride 1 (copied only where no single row stride fits), and the row stride in
    elements."""
    tensor = in_memory(tensor)
    if tensor.is_contiguous():
        return tensor, n_cols
    tensor = tensor.reshape(-1, n_cols)
    if n_cols > 1 and tensor.stride(1) != 1:
        tensor = tensor.contiguous()
    return tensor, tensor.stride(0)


def matrix(tensor: Tensor | None, n_cols: int) -> Tensor | None:
    """The tensor as [n_rows, n_cols] with last stride 1, for backends that read torch's strides."""
    return None if tensor is None else rows(tensor, n_cols)[0].view(-1, n_cols)


def vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else in_memory(tensor).contiguous()


def empty(like: Tensor, is_shaped: bool, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor. is_shaped: `like` is contiguous and of this shape; empty_like then gives the
    same in half the time."""
    if is_shaped and like.dtype is dtype:
        return torch.empty_like(like)
    return torch.empty(shape, dtype=dtype, device=like.device)


def where(tensor: Tensor) -> tuple[int, int]:
    """(device index, stream) of a launch; index -1 means the CPU."""
    if tensor.is_cuda:
        index = tensor.get_device()
        return index, torch._C._cuda_getCurrentRawStream(index)
    return -1, 0


_OF_EARLIER_KERNELS = frozenset({214, 220, 226, 700, 702, 710, *range(714, 720)})
"""CUDA errors of kernels as they run. The next call of the runtime returns them, whatever it is."""
_OF_CAPTURES = frozenset(range(900, 909))


def cuda_error(function: str, device: torch.device, code: int, text: str) -> str:
    """What a user can do about a CUDA error of a launch. text: the runtime's own."""
    error = f"CUDA error {code}: {text}"
    if code in _OF_EARLIER_KERNELS:
        return (
            f"{function}: a kernel that ran before on {device} failed, perhaps another library's ({error}); "
            "CUDA_LAUNCH_BLOCKING=1 shows which"
        )
    if code in _OF_CAPTURES:
        return (
            f"{function}: the call cannot be captured in a CUDA graph ({error}); a first call loads its kernels: "
            "make the same call once before the capture, its backward too"
        )
    return f"{function}: {error}"


def raise_error(function: str, tensor: Tensor, code: int) -> None:
    if tensor.is_cuda:
        text = native().cuda_error_string(code)  # type: ignore[union-attr]
        raise RuntimeError(cuda_error(function, tensor.device, code, text))
    if code == errno.ENOTSUP:  # row_norm only
        raise TypeError(
            f"{function}: z_dtype must be float32, without center_z also what x and residual have in common"
        )
    raise MemoryError(f"{function}: {os.strerror(code)}")
