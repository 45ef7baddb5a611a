"""What launches of every family share: row strides, dtype codes, the stream, errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...reference.philox import Rng
from .backends import native

DTYPE_CODE = {None: 0, torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum DType in csrc/launch.h
DTYPE_OF_DIGIT = (None, torch.float32, torch.float16, torch.bfloat16)
"""The dtype that each digit of half a code of _Read stands for; None: no tensor."""
Launcher = Callable[..., int]
EagerCall = Callable[[tuple[Tensor | None, ...], Rng | None], Any]
"""Computes the result from rng and operands that kernels can read as they are."""


class _Read:
    """The native library's readers of operands, each made at its first use. Each gives a number where all operands
    would pass every check of ops.

    Else it gives -1, and before torch 2.10, whose tensors the native library cannot read: the checks must be made.
    """

    operands: Callable[[tuple[Tensor | None, ...]], int]
    """A code (row_norm_native.decode) of the dtypes of x, and of a residual and vectors if there are more, where all
    are tensors or parameters of KERNEL_DTYPES, on one device, of fitting shapes."""

    scores: Callable[[Tensor, Tensor | None, bool], int]
    """The same of scores, mask and causal: 2 * the dtypes of scores and mask as digits in base 8 (4: bool), + 1 where
    kernels can read them as they are."""

    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], int]
    """The same of q, k, cos and sin that are not empty: 2 * the dtypes of q and of cos as digits in base 4, + 1 where
    kernels can read them as they are."""

    labels: Callable[..., int]
    """How many labels are not ignored: of ignore_index, labels, and logits or hidden, weight and bias, where they are
    on the CPU and kernels can read them as they are."""

    def __getattr__(self, name: str) -> Any:
        library = native()
        reader = None
        if library is not None:
            used = torch.is_grad_enabled, torch.empty_like, current_stream, raise_error, DTYPE_OF_DIGIT[1:]
            library.use_torch(*_TYPES, *used)
            reader = getattr(library, f"{name}_reader")(*_TYPES)
        self.__dict__[name] = reader or _unread
        return self.__dict__[name]


_TYPES = (Tensor, torch.nn.Parameter)
read = _Read()


def _unread(*_: object) -> int:
    return -1


def eager_forward(name: str, otherwise: Callable[..., Any]) -> Any:
    """The forward of an autograd.Function whose last argument begins with rng and an EagerCall, or None: then it is
    otherwise."""
    return staticmethod(otherwise if native() is None else _made_by_native(f"{name}_eager_forward")(otherwise))


def eager_backward(name: str, otherwise: Callable[..., Any]) -> Any:
    """The backward of that Function. otherwise(ctx, saved, gradients) handles gradients and saved tensors that kernels
    cannot read as they are; saved: ctx.saved_tensors, or None where they were not asked for yet."""
    if native() is None:
        return staticmethod(lambda ctx, *gradients: otherwise(ctx, None, gradients))
    made = _made_by_native(f"{name}_eager_backward")(otherwise)
    return staticmethod(lambda ctx, *gradients: made(ctx, *gradients))  # compiled autograd takes Python functions alone


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """The C++ apply of a Function: skips Function.apply's Python wrapper, which looks for functorch transforms (3 of
    8 us). Callers have looked for them: tracing.is_transformed."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _made_by_native(name: str) -> Any:
    made = getattr(native(), name, None)
    if made is None:
        raise ImportError("onetrip: the native library was built from older sources: install onetrip again")
    return made


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


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix by torch's own operators; also of no columns, where reshape(-1, 0) finds no number of
    rows."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def reshaped(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A new tensor in another shape, and no view of it: autograd forbids to write to a view that a Function returns."""
    result: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return result


Maybe = TypeVar("Maybe", Tensor, Tensor | None)


def matrix(tensor: Maybe) -> Maybe:
    """The tensor as [n_rows, n_cols] with last stride 1, for backends that read torch's strides."""
    if tensor is None:
        return tensor
    found = rows(tensor, tensor.shape[-1])[0]
    return found if found.dim() == 2 else found.view(-1, tensor.shape[-1])


def vector(tensor: Maybe) -> Maybe:
    return None if tensor is None else in_memory(tensor).contiguous()


def made_like(operands: Iterable[Tensor | None], wants: Iterable[bool], make: Callable[..., Tensor]) -> Iterator[Any]:
    """A contiguous tensor like each operand that is wanted, None for the others. make: torch.empty_like, or anything
    that is called like it."""
    for tensor, wanted in zip(operands, wants, strict=True):
        yield make(tensor, memory_format=torch.contiguous_format) if wanted and tensor is not None else None


def current_stream(index: int) -> int:
    """The address of a GPU's current stream."""
    return torch._C._cuda_getCurrentRawStream(index)


def where(tensor: Tensor) -> tuple[int, int]:
    """(device index, stream) of a launch; index -1 means the CPU."""
    if tensor.is_cuda:
        index = tensor.get_device()
        return index, current_stream(index)
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
        text = native().cuda_error_string(code)
        raise RuntimeError(cuda_error(function, tensor.device, code, text))
    if code == errno.ENOTSUP:  # row_norm only
        raise TypeError(
            f"{function}: z_dtype must be float32, without center_z also what x and residual have in common"
        )
    raise MemoryError(f"{function}: {os.strerror(code)}")
