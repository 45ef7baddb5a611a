"""From tensors to the native row_norm launchers. Allocates what they write."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..reference.philox import Rng
from ..reference.row_norm import (
    NORM_LAYER,
    BackwardOperands,
    Dtypes,
    Gradients,
    Operands,
    OperandTuple,
    OutputTuple,
    RowNormPlan,
    gradients_of,
)
from .common.backends import native
from .common.native import DTYPE_CODE, DTYPE_OF_DIGIT, Launcher, raise_error, rows, vector, where


def decode(code: int) -> tuple[Dtypes, bool]:
    """(dtypes, whether kernels can read all operands as they are: contiguous, not empty, not lazily negated)."""
    return Dtypes(*(DTYPE_OF_DIGIT[code // 2 // 4**place % 4] for place in reversed(range(5)))), bool(code % 2)


def dtypes_of(operands: OperandTuple) -> Dtypes:
    return Dtypes(*(None if tensor is None else tensor.dtype for tensor in operands))


def cuda_dtypes(dtypes: Dtypes, z_dtype: torch.dtype) -> Dtypes:
    """The dtypes in which the CUDA kernels take x and the residual: one dtype, or a half x with a float32 residual.

    Any other mix (rare: a half residual with a float32 x, a float32 bias with halves) is cast to z's dtype first.
    """
    if dtypes.x in (torch.float16, torch.bfloat16) and dtypes.residual == torch.float32:
        return dtypes
    return dtypes._replace(x=z_dtype, residual=None if dtypes.residual is None else z_dtype)


@lru_cache(maxsize=4096)
def forward_launcher(plan: RowNormPlan, dtypes: Dtypes) -> Launcher:
    return native().row_norm_forward(  # type: ignore[union-attr]
        *(DTYPE_CODE[dtype] for dtype in (*dtypes, plan.z_dtype, plan.n_dtype, plan.y_dtype)),
        plan.norm,
        plan.center_z,
        plan.eps,
        plan.weight_offset,
        plan.dropout_p,
    )


@lru_cache(maxsize=4096)
def _backward_launcher(plan: RowNormPlan, wanted: Dtypes, weight: torch.dtype | None) -> Launcher:
    x, residual = wanted.x or plan.z_dtype, wanted.residual or plan.z_dtype
    dtypes = (x, residual, wanted.bias, wanted.weight or weight, wanted.norm_bias, plan.z_dtype, plan.y_dtype)
    return native().row_norm_backward(  # type: ignore[union-attr]
        *(DTYPE_CODE[dtype] for dtype in dtypes), plan.norm, plan.weight_offset, plan.dropout_p
    )


def forward(operands: OperandTuple, rng: Rng | None, plan: RowNormPlan, launch: Launcher | None = None) -> OutputTuple:
    """reference.row_norm.forward by the native library. x, residual: any rank and strides; y, z: contiguous, shaped
    like x. launch: forward_launcher of the plan and the dtypes, given where all tensors can be read as they are; a
    centred z then is flat and followed by the rows' rstd (None in its place), see split_stats."""
    x, residual, bias, weight, norm_bias = operands
    shape = x.shape
    n_cols = x_row_stride = residual_row_stride = shape[-1]
    n_rows = x.numel() // n_cols
    is_shaped, stats_follow_z = True, launch is not None and plan.center_z and plan.store_z
    if launch is None:
        launch = forward_launcher(plan, dtypes_of(operands))
        given = x
        x, x_row_stride = rows(x, n_cols)
        is_shaped = x is given
        if residual is not None:
            residual, residual_row_stride = rows(residual, n_cols)
        operands = Operands(x, residual, vector(bias), vector(weight), vector(norm_bias))
    # empty_like takes half of empty's time, new_empty of x's dtype three quarters.
    x_dtype = x.dtype
    like = x_dtype if is_shaped else None
    y = z = mean = rstd = None
    if plan.norm:
        y = torch.empty_like(x) if like is plan.y_dtype else x.new_empty(shape, dtype=plan.y_dtype)
    if stats_follow_z:
        n_saved = n_rows * n_cols + n_rows
        z = x.new_empty(n_saved) if x_dtype is torch.float32 else x.new_empty(n_saved, dtype=torch.float32)
    elif plan.store_z:
        z = torch.empty_like(x) if like is plan.z_dtype else x.new_empty(shape, dtype=plan.z_dtype)
    if plan.store_stats and not stats_follow_z:
        rstd = x.new_empty(n_rows) if x_dtype is torch.float32 else x.new_empty(n_rows, dtype=torch.float32)
        if plan.norm == NORM_LAYER and not plan.center_z:
            mean = torch.empty_like(rstd)
    device, stream = where(x) if x.is_cuda else (-1, 0)
    outputs = y, z, mean, rstd
    code = launch(device, stream, n_rows, n_cols, operands, x_row_stride, residual_row_stride, outputs, rng)
    if code:
        raise_error("row_norm forward", x, code)
    return outputs


def split_stats(z: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """(z, rstd) of a flat z of that shape that is followed by the rstd of its rows."""
    n_rows = z.numel() - shape.numel()
    return z[:-n_rows].view(shape), z[-n_rows:]


def backward(operands: BackwardOperands, rng: Rng | None, plan: RowNormPlan, wanted: Dtypes) -> Gradients:
    """reference.row_norm.backward by the native library. dy, dz, z: any rank and strides; dx, dresidual: contiguous.
    rstd None with a dy: it follows z in one tensor."""
    dy, dz, z, mean, rstd, weight = operands
    given = operands.given
    n_cols = given.shape[-1]
    n_rows = given.numel() // n_cols
    dy_row_stride = dz_row_stride = z_row_stride = 0
    if dy is None:
        z = mean = rstd = None
        wanted = wanted._replace(weight=None, norm_bias=None)
    else:
        assert z is not None
        dy, dy_row_stride = rows(dy, n_cols)
        z, z_row_stride = (vector(z), n_cols) if rstd is None else rows(z, n_cols)
    if dz is not None:
        dz, dz_row_stride = rows(dz, n_cols)
    weight = vector(weight)
    gradients = gradients_of(wanted, given, given.new_empty)
    device, stream = where(given)
    n_wanted = 3 - wanted[2:].count(None)
    n_floats = native().row_norm_workspace(device, n_rows, n_cols, n_wanted)  # type: ignore[union-attr]
    workspace = given.new_empty(n_floats, dtype=torch.float32) if n_floats else None
    launch = _backward_launcher(plan, wanted, None if weight is None else weight.dtype)
    strides = dy_row_stride, dz_row_stride, z_row_stride
    tensors = dy, dz, z, mean, rstd, weight
    code = launch(device, stream, n_rows, n_cols, tensors, *strides, gradients, workspace, rng)
    if code:
        raise_error("row_norm backward", given, code)
    return gradients
