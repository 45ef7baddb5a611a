"""From tensors to the native launcher of the rotation, on the CPU; eager calls, also of Triton's kernel."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..reference.rotary import RotaryPlan, empty_adjacent
from .common.backends import formulas, native
from .common.native import DTYPE_CODE, DTYPE_OF_DIGIT, EagerCall, Launcher, raise_error


@lru_cache(maxsize=64)
def _launcher(plan: RotaryPlan, dtype: torch.dtype, table_dtype: torch.dtype) -> Launcher:
    dtypes = (DTYPE_CODE[each] for each in (dtype, plan.dtype or dtype, table_dtype))
    return native().rotary(*dtypes, plan.interleaved, plan.inverse)


@lru_cache(maxsize=64)
def eager_call(plan: RotaryPlan, code: int, backend: str) -> EagerCall | None:
    """The call for operands of this code (read.rotary), on the CPU or by Triton; None where kernels cannot read them as
    they are. As forward of a Function it saves cos and sin."""
    dtype, table_dtype = DTYPE_OF_DIGIT[code // 2 // 4 % 4], DTYPE_OF_DIGIT[code // 2 % 4]
    if code < 0 or code % 2 == 0 or backend not in ("cpu", "triton") or dtype is None or table_dtype is None:
        return None
    kernel = None
    if backend == "triton":
        kernel = formulas("triton", "rotary").rotate, plan, plan.of_gradients(dtype)
    of_gradients = code + 2 * 4 * (DTYPE_CODE[plan.dtype or dtype] - DTYPE_CODE[dtype])
    launcher = _launcher(plan, dtype, table_dtype)
    return native().rotary_eager(launcher, code, of_gradients, kernel)


def rotate(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, plan: RotaryPlan
) -> tuple[Tensor | None, Tensor | None]:
    """reference.rotary.rotate by the native library; the last strides are 1. Results have the layout of q and of k."""
    q_out = None if q is None else empty_adjacent(q, plan.dtype)
    k_out = None if k is None else empty_adjacent(k, plan.dtype)
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
