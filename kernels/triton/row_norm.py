"""The row_norm family in Triton: `forward` and `backward` as every backend has them.

The formulas stand in row_norm_kernels.py; here are the sizes of tiles, the partition of the rows, and the launches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

import triton.language as tl

from ..reference.row_norm import (
    BackwardOperands,
    Dtypes,
    Gradients,
    Operands,
    Outputs,
    RowNormPlan,
    gradients_of,
    outputs_of,
)
from . import row_norm_kernels as kernels
from .launch import LAUNCHES, Launch, cdiv, on_device_of
from .philox import dropout_arguments, rng_arguments
from .sum_partials import rows_per_program, sum_partials
from .tiles import (
    TileRule,
    aligned,
    aligned_vector,
    common_divisor,
    row_stride,
    tile,
    tile_arguments,
)

_NONE, _LAYER = kernels.NORM_NONE.value, kernels.NORM_LAYER.value
_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# The one table of tile sizes; tests/kernels/test_triton_budgets.py compiles what it leads to and holds it to this:
# MAX_REGISTERS a lane, and nothing spills but what its table SPILLED says.
# Forward has 16 values a lane: 64 (32) bytes of each float32 (bfloat16) input in flight, in accesses of 16 bytes.
# Backward keeps two values and one sum for each column of its tile. With two or three sums that fits for 4 columns a
# lane, of a 16-bit dtype in accesses of 8 bytes. 8 columns, for 16 bytes, spill 16 to 40 bytes a lane with two sums,
# 80 to 112 with three and dropout (sm_75 to sm_120, width 1024 or 8192); those need 96 registers: under a third of
# sm_90's lanes. Reading dy, z and weight again after a row's means, from the L1 cache, saves the two sums' spills,
# not the three's, and takes as many accesses as 8 bytes do. Only rows of more than 4096 columns have 8 a lane, because
# 1024 lanes are all there are: their spills are L1 traffic, where splitting the row would read dy and z again.
FORWARD = TileRule(elements=2048, elements_per_lane=16, max_cols=16384, wide_cols=8192)
BACKWARD = TileRule(elements=1024, elements_per_lane=4, max_cols=8192, wide_cols=2048)
BACKWARD_ONE_SUM = TileRule(elements=1024, elements_per_lane=8, max_cols=8192, wide_cols=2048)
ROW_MEANS = TileRule(elements=4096, elements_per_lane=8, max_cols=0, wide_cols=4096)

# The compiler fuses no products and sums (enable_fp_fusion=False): where two products are added it may fuse the one or
# the other, and does not choose alike when the seed comes by value and by address. What is to be fused is a tl.fma.


def forward(operands: Operands, rng: tuple[int, int] | Tensor | None, plan: RowNormPlan) -> Outputs:
    """reference.row_norm.forward for matrices of last stride 1 and contiguous vectors, float32, float16 or bfloat16;
    none is empty.

    rng: (seed, offset), or an int64 tensor of the two on x's device.
    """
    x, residual, bias, weight, norm_bias = operands
    outputs = outputs_of(plan, x, x.new_empty)
    divisor = common_divisor(x.shape[1])
    with on_device_of(x):
        x, residual = aligned(x, divisor), aligned(residual, divisor)
        vectors = aligned_vector(bias), aligned_vector(weight), aligned_vector(norm_bias)
        launch = _forward_launch(plan, x.shape, row_stride(x), row_stride(residual))
        launch(x, residual, *vectors, *outputs, *rng_arguments(rng, plan.dropout_p > 0.0))
    return outputs


@lru_cache(maxsize=LAUNCHES)
def _forward_launch(plan: RowNormPlan, shape: torch.Size, x_row_stride: int, residual_row_stride: int) -> Launch:
    n_rows, n_cols = shape
    normed = plan.norm != _NONE
    block = tile(FORWARD, n_cols, whole_rows=normed)
    return Launch(
        kernels._row_norm_fwd_kernel,
        (cdiv(n_rows, block.rows), 1 if normed else cdiv(n_cols, block.cols)),
        **dropout_arguments(plan.dropout_p, n_cols),
        eps=float(plan.eps),
        weight_offset=float(plan.weight_offset),
        n_rows=n_rows,
        n_cols=n_cols,
        x_row_stride=x_row_stride,
        residual_row_stride=residual_row_stride,
        NORM=plan.norm,
        CENTER_Z=normed and plan.store_z and plan.center_z,
        Z_DTYPE=_TL_DTYPES[plan.z_dtype],
        N_DTYPE=_TL_DTYPES[plan.n_dtype],
        ROW_IN_TILE=block.cols >= n_cols,
        **tile_arguments(block, n_cols),
        enable_fp_fusion=False,
    )


def backward(
    operands: BackwardOperands, rng: tuple[int, int] | Tensor | None, plan: RowNormPlan, wanted: Dtypes
) -> Gradients:
    """reference.row_norm.backward for the same tensors.

    The sums over rows are float32, in an order that depends only on the sizes, the dtypes and, of RMSNorm, on whether
    the bias's gradient is wanted: repeatable, and the same on every GPU and wherever the tensors lie.
    """
    dy, dz, z, mean, rstd, weight = operands
    like = operands.given
    n_rows, n_cols = like.shape
    if dy is None:
        wanted = wanted._replace(weight=None, norm_bias=None)
    gradients = gradients_of(wanted, like, like.new_empty)
    dx, dresidual, *sums = gradients
    dbias = sums[0]
    summed = [gradient for gradient in sums if gradient is not None]
    if dx is None and dresidual is None and not summed:
        return gradients

    needs_row = dy is not None and (dx is not None or dresidual is not None or dbias is not None)
    # In which order a tile's rows and columns are summed is up to its warps. LayerNorm has those for all of its sums,
    # whichever are wanted; RMSNorm has one sum, or the bias's as well.
    one_sum = dy is None or (plan.norm != _LAYER and dbias is None)
    divisor = common_divisor(n_cols)
    with on_device_of(like):
        dy, dz, z = aligned(dy, divisor), aligned(dz, divisor), aligned(z, divisor)
        strides = row_stride(dy), row_stride(dz), row_stride(z)
        launches = _backward_launches(plan, like.shape, strides, dy is not None, one_sum, needs_row)
        workspace = None
        if summed:
            workspace = like.new_empty((len(summed), launches.n_programs, n_cols), dtype=torch.float32)
        partials = iter(workspace if workspace is not None else ())
        partials_of = [None if gradient is None else next(partials) for gradient in sums]
        weight = aligned_vector(weight)
        row_means = None
        if launches.row_means is not None:
            row_means = like.new_empty((2, n_rows), dtype=torch.float32)
            launches.row_means(dy, z, mean, rstd, weight, row_means)
        written = row_means, dx, dresidual, *partials_of
        launches.gradients(dy, dz, z, mean, rstd, weight, *written, *rng_arguments(rng, plan.dropout_p > 0.0))
        if workspace is not None:
            sum_partials(workspace, summed)
    return gradients


class _BackwardLaunches(NamedTuple):
    n_programs: int
    """That share out the rows."""
    row_means: Launch | None
    """For rows wider than a tile."""
    gradients: Launch


@lru_cache(maxsize=LAUNCHES)
def _backward_launches(
    plan: RowNormPlan, shape: torch.Size, strides: tuple[int, int, int], normed: bool, one_sum: bool, needs_row: bool
) -> _BackwardLaunches:
    """strides: of the rows of dy, dz and z."""
    n_rows, n_cols = shape
    block = tile(BACKWARD_ONE_SUM if one_sum else BACKWARD, n_cols, whole_rows=normed)
    n_col_tiles = cdiv(n_cols, block.cols)
    rows = rows_per_program(n_rows, block, n_col_tiles)
    common = {
        "weight_offset": float(plan.weight_offset),
        "n_rows": n_rows,
        "n_cols": n_cols,
        "dy_row_stride": strides[0],
        "z_row_stride": strides[2],
        "enable_fp_fusion": False,
    }
    row_means = None
    if needs_row and n_col_tiles > 1:
        wide = tile(ROW_MEANS, n_cols)
        row_means = Launch(
            kernels._row_means_kernel,
            (n_rows,),
            ALIGN=common_divisor(n_cols),
            BLOCK_COLS=wide.cols,
            num_warps=wide.num_warps,
            **common,
        )
    gradients = Launch(
        kernels._row_norm_bwd_kernel,
        (cdiv(n_rows, rows), n_col_tiles),
        **dropout_arguments(plan.dropout_p, n_cols),
        rows_per_program=rows,
        dz_row_stride=strides[1],
        NORM=plan.norm if normed else _NONE,
        **tile_arguments(block, n_cols),
        **common,
    )
    return _BackwardLaunches(cdiv(n_rows, rows), row_means, gradients)
