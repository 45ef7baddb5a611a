"""From tensors to the native launchers: row strides, dtype codes, the stream. Allocates what they write."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import cache, lru_cache
from typing import cast

import torch
from torch import Tensor

from ..reference.philox import Rng
from ..reference.row_norm import NORM_LAYER, Backward, Forward, GradDtypes, RowNormPlan
from .backends import native

DTYPE_CODE = {None: 0, torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum DType in csrc/launch.h
_DTYPE_OF_DIGIT = (None, torch.float32, torch.float16, torch.bfloat16)
Launcher = Callable[..., int]
Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None, torch.dtype | None, torch.dtype | None]
"""Of x, residual, bias, weight, norm_bias."""


@cache
def _operands_reader() -> Callable[..., int] | None:
    library = native()
    return None if library is None else library.operands_reader(Tensor, torch.nn.Parameter)


@cache
def _decode(code: int) -> tuple[Dtypes, bool]:
    digits = (code // 2 // 4**place % 4 for place in reversed(range(5)))
    return cast(Dtypes, tuple(_DTYPE_OF_DIGIT[digit] for digit in digits)), bool(code % 2)


def operands(
    x: Tensor, residual: Tensor | None, bias: Tensor | None, weight: Tensor | None, norm_bias: Tensor | None
) -> tuple[Dtypes, bool] | None:
    """(dtypes, whether kernels can read all as they are: contiguous, not empty, not lazily negated) where all are
    tensors or parameters of KERNEL_DTYPES, on one device, and of fitting shapes: they would pass every check of ops.

    Else None, and before torch 2.10, whose tensors do not tell it to the native library: the checks are to be made.
    """
    reader = _operands_reader()
    code = -1 if reader is None else reader(x, residual, bias, weight, norm_bias)
    return None if code < 0 else _decode(code)


def dtypes_of(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


@lru_cache(maxsize=4096)
def forward_launcher(
    plan: RowNormPlan,
    x: torch.dtype,
    residual: torch.dtype | None,
    bias: torch.dtype | None,
    weight: torch.dtype | None,
    norm_bias: torch.dtype | None,
) -> Launcher:
    dtypes = (x, residual, bias, weight, norm_bias, plan.z_dtype, plan.n_dtype, plan.y_dtype)
    return native().row_norm_forward(  # type: ignore[union-attr]
        *(DTYPE_CODE[dtype] for dtype in dtypes),
        plan.norm,
        plan.center_z,
        plan.eps,
        plan.weight_offset,
        plan.dropout_p,
    )


@lru_cache(maxsize=4096)
def _backward_launcher(plan: RowNormPlan, grad_dtypes: GradDtypes, weight: torch.dtype | None) -> Launcher:
    x_dtype, residual_dtype, bias_dtype, weight_dtype, norm_bias_dtype = grad_dtypes
    dtypes = (
        x_dtype or plan.z_dtype,
        residual_dtype or plan.z_dtype,
        bias_dtype,
        weight_dtype or weight,
        norm_bias_dtype,
        plan.z_dtype,
        plan.y_dtype,
    )
    return native().row_norm_backward(  # type: ignore[union-attr]
        *(DTYPE_CODE[dtype] for dtype in dtypes), plan.norm, plan.weight_offset, plan.dropout_p
    )


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor, of which memory holds the values themselves: neither torch's lazy negation nor its zeros without
    memory (they come from forward-mode and undefined gradients)."""
    if tensor._is_zerotensor():
        return tensor.clone()
    return tensor.resolve_neg() if tensor.is_neg() else tensor  # to ask costs half


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


def two_dimensional(tensor: Tensor, n_cols: int) -> Tensor:
    """The same as a matrix, for backends that read torch's strides."""
    return rows(tensor, n_cols)[0].view(-1, n_cols)


def vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else in_memory(tensor).contiguous()


def empty(like: Tensor, is_shaped: bool, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor. is_shaped: `like` is contiguous and of this shape; then empty_like, at half
    the price, gives the same."""
    if is_shaped and like.dtype is dtype:
        return torch.empty_like(like)
    return torch.empty(shape, dtype=dtype, device=like.device)


def where(tensor: Tensor) -> tuple[int, int]:
    """(device index, stream) of a launch; index -1 means the CPU."""
    if tensor.is_cuda:
        index = tensor.get_device()
        return index, torch._C._cuda_getCurrentRawStream(index)
    return -1, 0


def raise_error(function: str, tensor: Tensor, code: int) -> None:
    if tensor.is_cuda:
        raise RuntimeError(f"{function}: CUDA error {code}: {native().cuda_error_string(code)}")  # type: ignore[union-attr]
    if code == errno.ENOTSUP:  # of row_norm alone
        raise TypeError(
            f"{function}: z_dtype must be float32, without center_z also what x and residual have in common"
        )
    raise MemoryError(f"{function}: {os.strerror(code)}")


def row_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
    launch: Launcher | None = None,
) -> Forward:
    """reference.row_norm.forward by the native library. x, residual: any rank and strides; y, z: contiguous, shaped
    like x. launch: forward_launcher of the plan and the dtypes, given where all tensors can be read as they are; a
    centred z then is flat and has the rows' rstd behind it (None in its place), see split_stats."""
    shape = x.shape
    n_cols = x_row_stride = residual_row_stride = shape[-1]
    n_rows = x.numel() // n_cols
    is_shaped, has_stats_behind_z = True, launch is not None and plan.center_z and plan.store_z
    if launch is None:
        launch = forward_launcher(plan, *dtypes_of(x, residual, bias, weight, norm_bias))
        given = x
        x, x_row_stride = rows(x, n_cols)
        is_shaped = x is given
        if residual is not None:
            residual, residual_row_stride = rows(residual, n_cols)
        bias, weight, norm_bias = vector(bias), vector(weight), vector(norm_bias)
    # Tensors like x cost half of what others do, and of x's dtype three quarters.
    x_dtype = x.dtype
    like = x_dtype if is_shaped else None
    y = z = mean = rstd = None
    if plan.norm:
        y = torch.empty_like(x) if like is plan.y_dtype else x.new_empty(shape, dtype=plan.y_dtype)
    if has_stats_behind_z:
        n_saved = n_rows * n_cols + n_rows
        z = x.new_empty(n_saved) if x_dtype is torch.float32 else x.new_empty(n_saved, dtype=torch.float32)
    elif plan.store_z:
        z = torch.empty_like(x) if like is plan.z_dtype else x.new_empty(shape, dtype=plan.z_dtype)
    if plan.store_stats and not has_stats_behind_z:
        rstd = x.new_empty(n_rows) if x_dtype is torch.float32 else x.new_empty(n_rows, dtype=torch.float32)
        if plan.norm == NORM_LAYER and not plan.center_z:
            mean = torch.empty_like(rstd)
    device, stream = where(x)
    code = launch(
        device,
        stream,
        n_rows,
        n_cols,
        x,
        x_row_stride,
        residual,
        residual_row_stride,
        bias,
        weight,
        norm_bias,
        y,
        z,
        mean,
        rstd,
        rng,
    )
    if code:
        raise_error("row_norm forward", x, code)
    return y, z, mean, rstd


def split_stats(z: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """(z, rstd) of a flat z of that shape that has the rstd of its rows behind it."""
    n_rows = z.numel() - shape.numel()
    return z[:-n_rows].view(shape), z[-n_rows:]


def row_norm_backward(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
    grad_dtypes: GradDtypes,
) -> Backward:
    """reference.row_norm.backward by the native library. dy, dz, z: any rank and strides; dx, dresidual: contiguous.
    rstd None beside a dy: z has it behind itself."""
    given = dy if dy is not None else dz
    assert given is not None
    shape, device = given.shape, given.device
    n_cols = shape[-1]
    n_rows = given.numel() // n_cols
    dy_row_stride = dz_row_stride = z_row_stride = 0
    if dy is not None:
        assert z is not None
        dy, dy_row_stride = rows(dy, n_cols)
        z, z_row_stride = (vector(z), n_cols) if rstd is None else rows(z, n_cols)
    if dz is not None:
        dz, dz_row_stride = rows(dz, n_cols)
    weight = vector(weight)
    x_dtype, residual_dtype, bias_dtype, weight_dtype, norm_bias_dtype = grad_dtypes
    if dy is None:
        weight_dtype = norm_bias_dtype = None
    dx = None if x_dtype is None else torch.empty(shape, dtype=x_dtype, device=device)
    dresidual = None if residual_dtype is None else torch.empty(shape, dtype=residual_dtype, device=device)
    dbias = None if bias_dtype is None else torch.empty(n_cols, dtype=bias_dtype, device=device)
    dweight = None if weight_dtype is None else torch.empty(n_cols, dtype=weight_dtype, device=device)
    dnorm_bias = None if norm_bias_dtype is None else torch.empty(n_cols, dtype=norm_bias_dtype, device=device)
    index, stream = where(given)
    n_wanted = (dbias is not None) + (dweight is not None) + (dnorm_bias is not None)
    n_floats = native().row_norm_workspace(index, n_rows, n_cols, n_wanted)  # type: ignore[union-attr]
    workspace = torch.empty(n_floats, dtype=torch.float32, device=device) if n_floats else None
    code = _backward_launcher(
        plan,
        (x_dtype, residual_dtype, bias_dtype, weight_dtype, norm_bias_dtype),
        None if weight is None else weight.dtype,
    )(
        index,
        stream,
        n_rows,
        n_cols,
        dy,
        dy_row_stride,
        dz,
        dz_row_stride,
        None if dy is None else z,
        z_row_stride,
        None if dy is None else mean,
        None if dy is None else rstd,
        weight,
        dx,
        dresidual,
        dbias,
        dweight,
        dnorm_bias,
        workspace,
        rng,
    )
    if code:
        raise_error("row_norm backward", given, code)
    return dx, dresidual, dbias, dweight, dnorm_bias
