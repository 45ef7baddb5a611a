"""From tensors to the native row_norm launchers. Allocates what they write."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..reference.philox import Rng
from ..reference.row_norm import (
    BackwardOperands,
    Dtypes,
    Gradients,
    Operands,
    OperandTuple,
    OutputTuple,
    RowNormPlan,
    gradients_of,
    outputs_of,
)
from .common.backends import HALF, native
from .common.native import DTYPE_CODE, DTYPE_OF_DIGIT, EagerCall, Launcher, raise_error, rows, vector, where


def decode(code: int) -> tuple[Dtypes, bool]:
    """(dtypes, whether kernels can read all operands as they are: contiguous, not empty, not lazily negated)."""
    return Dtypes(*(DTYPE_OF_DIGIT[code // 2 // 4**place % 4] for place in reversed(range(5)))), bool(code % 2)


def dtypes_of(operands: OperandTuple) -> Dtypes:
    return Dtypes(*(None if tensor is None else tensor.dtype for tensor in operands))


def cuda_dtypes(dtypes: Dtypes, z_dtype: torch.dtype) -> Dtypes:
    """The dtypes in which the CUDA kernels take x and the residual: one dtype, or a half x with a float32 residual.

    Any other mix (rare: a half residual with a float32 x, a float32 bias with halves) is cast to z's dtype first.
    """
    if dtypes.x in HALF and dtypes.residual == torch.float32:
        return dtypes
    return dtypes._replace(x=z_dtype, residual=None if dtypes.residual is None else z_dtype)


@lru_cache(maxsize=4096)
def forward_launcher(plan: RowNormPlan, dtypes: Dtypes) -> Launcher:
    return native().row_norm_forward(
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
    return native().row_norm_backward(
        *(DTYPE_CODE[dtype] for dtype in dtypes), plan.norm, plan.weight_offset, plan.dropout_p
    )


def eager_call(plan: RowNormPlan, dtypes: Dtypes, returns_z: bool, defers_norm: bool) -> EagerCall:
    """Gives y, (y, z) where z is returned, or z without a norm. As forward of a Function it saves (z or x, mean, rstd,
    weight), rstd None where it is in one tensor with another one, see split_stats. defers_norm: y has no gradient."""
    launchers = forward_launcher(plan, dtypes), _backward_launcher(plan, dtypes, dtypes.weight)
    return native().row_norm_eager(*launchers, plan.store_z, plan.store_stats, returns_z, defers_norm)


def forward(operands: OperandTuple, rng: Rng | None, plan: RowNormPlan) -> OutputTuple:
    """reference.row_norm.forward by the native library. x, residual: any rank and strides; y, z: contiguous, shaped
    like x."""
    x, residual, bias, weight, norm_bias = operands
    launch = forward_launcher(plan, dtypes_of(operands))
    outputs = outputs_of(plan, x, x.new_empty)
    n_cols = x.shape[-1]
    n_rows, residual_row_stride = x.numel() // n_cols, 0
    x, x_row_stride = rows(x, n_cols)
    if residual is not None:
        residual, residual_row_stride = rows(residual, n_cols)
    operands = Operands(x, residual, vector(bias), vector(weight), vector(norm_bias))
    code = launch(*where(x), n_rows, n_cols, operands, x_row_stride, residual_row_stride, outputs, rng)
    if code:
        raise_error("row_norm forward", x, code)
    return outputs


def split_stats(z: Tensor, mean: Tensor | None, shape: torch.Size) -> tuple[Tensor, Tensor | None, Tensor]:
    """(z, mean, rstd) of a mean that is followed by rstd, or else of a flat z of that shape that is."""
    if mean is not None:
        mean, rstd = mean.chunk(2)
        return z, mean, rstd
    n_rows = z.numel() - shape.numel()
    return z[:-n_rows].view(shape), None, z[-n_rows:]


def backward(operands: BackwardOperands, rng: Rng | None, plan: RowNormPlan, wanted: Dtypes) -> Gradients:
    """reference.row_norm.backward by the native library. dy, dz, z: any rank and strides; dx, dresidual: contiguous.
    rstd None with a dy: it is in one tensor with mean or z (split_stats)."""
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
        z, z_row_stride = (vector(z), n_cols) if rstd is mean is None else rows(z, n_cols)
    if dz is not None:
        dz, dz_row_stride = rows(dz, n_cols)
    weight = vector(weight)
    gradients = gradients_of(wanted, given, given.new_empty)
    device, stream = where(given)
    n_wanted = 3 - wanted[2:].count(None)
    n_floats = native().row_norm_workspace(device, n_rows, n_cols, n_wanted)
    workspace = given.new_empty(n_floats, dtype=torch.float32) if n_floats else None
    launch = _backward_launcher(plan, wanted, None if weight is None else weight.dtype)
    strides = dy_row_stride, dz_row_stride, z_row_stride
    tensors = dy, dz, z, mean, rstd, weight
    code = launch(device, stream, n_rows, n_cols, tensors, *strides, gradients, workspace, rng)
    if code:
        raise_error("row_norm backward", given, code)
    return gradients
