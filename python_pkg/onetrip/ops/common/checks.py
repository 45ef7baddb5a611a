"""Argument checks. Every message reads "<function>: <argument> must ..., got ..."."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from .backends import KERNEL_DTYPES

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})

SMALLEST_NORMAL, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max

_OF_TORCH = {
    "dim": "rows are the last dimension; transpose the input for another one",
    "normalized_shape": "rows are the last dimension; call {function}(x, weight)",
    "dtype": "cast scores first",
    "p": "its name here is dropout_p",
    "training": "pass dropout_p=0.0 outside training",
    "inplace": "arguments are never modified",
}
"""Arguments of torch.nn.functional that the operators do not take, and what to write instead."""


def raise_unknown(function: str, arguments: Mapping[str, object]) -> NoReturn:
    """arguments: keyword arguments that the function does not have."""
    name = next(iter(arguments))
    if name in _OF_TORCH:
        raise TypeError(f"{function}: {name} must not be given: {_OF_TORCH[name].format(function=function)}")
    raise TypeError(f"{function}: unknown argument {name!r}")


def check_tensor(function: str, argument: str, tensor: object) -> None:
    if isinstance(tensor, Tensor):
        return
    is_shape = isinstance(tensor, int) or (isinstance(tensor, (tuple, list)) and all(type(n) is int for n in tensor))
    hint = "; rows are the last dimension, leave out dim and normalized_shape" if is_shape else ""
    if isinstance(tensor, torch.fx.Proxy):
        hint = " of torch.fx.symbolic_trace; record with torch.export, torch.compile or torch.jit.trace"
    raise TypeError(f"{function}: {argument} must be a Tensor, got {type(tensor).__name__}{hint}")


def check_rows(function: str, argument: str, tensor: Tensor) -> None:
    """A strided floating-point tensor of rank 1 and up."""
    check_dense(function, argument, tensor, DTYPES, "float32, float16, bfloat16 or float64")
    if tensor.dim() == 0:
        raise ValueError(f"{function}: {argument} must have at least one dimension, got a 0-dimensional tensor")


def check_out_dtype(function: str, out_dtype: object) -> None:
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in KERNEL_DTYPES:
        raise TypeError(f"{function}: out_dtype must be float32, float16 or bfloat16, got {out_dtype!r}")


def check_dense(function: str, argument: str, tensor: Tensor, dtypes: Collection[torch.dtype], names: str) -> None:
    """A strided tensor of one of these dtypes. names: of them."""
    check_tensor(function, argument, tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{function}: {argument} must be {names}, got {str(tensor.dtype)[6:]}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else tensor.layout
        raise TypeError(f"{function}: {argument} must be a dense (strided) tensor, got {kind}")


def check_bool(function: str, argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {argument} must be a bool, got {value!r}")


def check_int64(function: str, argument: str, tensor: Tensor) -> None:
    check_dense(function, argument, tensor, (torch.int64,), "int64")


def check_device(function: str, argument: str, tensor: Tensor, x: Tensor, name: str = "x") -> None:
    """name: of x, in messages."""
    if tensor.device != x.device:
        raise ValueError(f"{function}: {argument} must be on the device of {name}, {x.device}, got {tensor.device}")


def check_like(function: str, argument: str, tensor: Tensor, x: Tensor, name: str = "x") -> None:
    """A tensor that goes with x element by element: same shape, same device."""
    check_rows(function, argument, tensor)
    if tensor.shape != x.shape:
        raise ValueError(
            f"{function}: {argument} must have the shape of {name}, {tuple(x.shape)}, got {tuple(tensor.shape)}"
        )
    check_device(function, argument, tensor, x, name)


def check_parameter(function: str, argument: str, tensor: Tensor, x: Tensor) -> None:
    """A vector that goes with the columns of x: shape (n_cols,), same device."""
    check_rows(function, argument, tensor)
    if tensor.shape != x.shape[-1:]:
        raise ValueError(f"{function}: {argument} must have shape ({x.shape[-1]},), got {tuple(tensor.shape)}")
    check_device(function, argument, tensor, x)


def check_probability(function: str, argument: str, p: float) -> None:
    """A number in [0, 1]; NaN is not."""
    check_number(function, argument, p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{function}: {argument} must be in [0, 1], got {p}")


def check_eps(function: str, eps: float) -> None:
    """A number >= 0; NaN is not."""
    check_number(function, "eps", eps)
    if not eps >= 0.0:
        raise ValueError(f"{function}: eps must be >= 0, got {eps}")


def check_finite(function: str, argument: str, value: float) -> None:
    """Kernels compute in float32."""
    check_number(function, argument, value)
    if not abs(value) <= LARGEST:
        raise ValueError(f"{function}: {argument} must be finite in float32, got {value}")


def check_divisor(function: str, argument: str, value: float) -> None:
    check_number(function, argument, value)
    if not SMALLEST_NORMAL <= value <= LARGEST:
        raise ValueError(f"{function}: {argument} must be > 0, normal and finite in float32, got {value}")


def check_number(function: str, argument: str, value: object) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{function}: {argument} must be a number, got {type(value).__name__}")
    if isinstance(value, int) and abs(value) > 2**53:
        raise ValueError(f"{function}: {argument} must be a number that float64 holds, got an integer past 2^53")
