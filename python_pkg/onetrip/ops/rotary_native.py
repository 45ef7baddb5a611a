"""From tensors to the native launcher of the rotation, on the CPU."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..reference.rotary import RotaryPlan
from .common.backends import native
from .common.native import DTYPE_CODE, DTYPE_OF_DIGIT, Launcher, raise_error


@lru_cache(maxsize=64)
def _launcher(plan: RotaryPlan, dtype: torch.dtype, table_dtype: torch.dtype, of_tensors: bool = False) -> Launcher:
    types = (Tensor, torch.nn.Parameter) if of_tensors else None
    return native().rotary(DTYPE_CODE[dtype], DTYPE_CODE[table_dtype], *plan, types)  # type: ignore[union-attr]


@lru_cache(maxsize=64)
def plain_launcher(code: int, plan: RotaryPlan) -> Launcher | None:
    """For operands of this code (read.rotary) that kernels can read as they are; else None."""
    dtype, table_dtype = DTYPE_OF_DIGIT[code // 2 // 4 % 4], DTYPE_OF_DIGIT[code // 2 % 4]
    if code < 0 or code % 2 == 0 or dtype is None or table_dtype is None:
        return None
    return _launcher(plan, dtype, table_dtype, of_tensors=True)


def rotate_plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, launch: Launcher) -> tuple[Tensor, Tensor]:
    """As rotate; launch: plain_launcher of the operands' code."""
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    code = launch(cos, sin, q, q_out, k, k_out)
    if code:
        raise_error("rotary_embedding", cos, code)
    return q_out, k_out


def rotate(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, plan: RotaryPlan
) -> tuple[Tensor | None, Tensor | None]:
    """reference.rotary.rotate by the native library; the last strides are 1. Results have the layout of q and of k."""
    q_out = None if q is None else torch.empty_like(q)
    k_out = None if k is None else torch.empty_like(k)
    x = k if q is None else q
    if x is None or cos.numel() == 0:
        return q_out, k_out
    launch = _launcher(plan, x.dtype, cos.dtype)
    table = cos, sin, cos.shape, cos.stride(), sin.stride()
    code = launch(*table, *_operand(q, q_out), *_operand(k, k_out))
    if code:
        raise_error("rotary_embedding", cos, code)
    return q_out, k_out


def _operand(x: Tensor | None, y: Tensor | None) -> tuple[object, ...]:
    """x and y as the launcher reads them; one None where nothing is to be done."""
    if x is None or y is None or x.numel() == 0:
        return (None,)
    return x, y, x.shape, x.stride(), y.stride()
