"""glu in Triton: `forward` and `backward` as every backend has them.

The formulas stand in glu_kernels.py; here are the tile and the launches.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..reference.glu import KERNEL_ACTIVATIONS, GluPlan, Gradients, OperandTuple, halves, reads_result
from ..reference.philox import Rng, dropout_scale
from . import glu_kernels as kernels
from .launch import LAUNCHES, Launch, cdiv, on_device_of
from .philox import dropout_arguments, rng_arguments
from .sum_partials import rows_per_program, sum_partials
from .tiles import Tile, aligned, aligned_vector, common_divisor, tile_arguments

_COLS, _NARROW_COLS = 1024, 128
"""Columns of a tile; of rows of up to 512 columns, which would leave lanes of the other one empty."""


def _tile(n_cols: int, bytes_of_value: int, vectors: int) -> Tile:
    """vectors: of 16 bytes that a lane takes of each operand. Two share what a lane computes of its place."""
    cols = _NARROW_COLS if n_cols <= 512 else _COLS
    return Tile(rows=1024 * vectors // cols, cols=cols, num_warps=2 * bytes_of_value)


def _gate_and_up(operands: OperandTuple, plan: GluPlan) -> tuple[Tensor, Tensor | None]:
    """Interleaved columns stay one matrix."""
    gate, up, _ = operands
    return (gate, up) if plan.gate_first is None or plan.interleaved else halves(gate, plan)


def forward(operands: OperandTuple, plan: GluPlan, rng: Rng | None = None) -> Tensor:
    """reference.glu.forward for matrices of last stride 1, or contiguous tensors of any rank, of float32, float16 or
    bfloat16, not empty; y is contiguous."""
    gate, up = _gate_and_up(operands, plan)
    y = gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2)) if plan.interleaved else _empty(gate)
    divisor = common_divisor(y.shape[-1])
    with on_device_of(gate):
        gate, up, bias = aligned(gate, divisor), aligned(up, divisor), aligned_vector(operands[2])
        draws = rng is not None
        launch = _forward_launch(plan, draws, y.shape, y.itemsize, _row_stride(gate), _row_stride(up))
        launch(gate, up, bias, y, *rng_arguments(rng, draws))
    return y


@lru_cache(maxsize=LAUNCHES)
def _forward_launch(
    plan: GluPlan, draws: bool, shape: torch.Size, bytes_of_value: int, gate_row_stride: int, up_row_stride: int
) -> Launch:
    n_cols = shape[-1]
    n_rows = shape.numel() // n_cols
    block = _tile(n_cols, bytes_of_value, vectors=2)
    n_col_tiles = cdiv(n_cols, block.cols)
    return Launch(
        kernels._glu_fwd_kernel,
        (cdiv(n_rows, block.rows) * n_col_tiles,),
        n_rows=n_rows,
        n_cols=n_cols,
        n_col_tiles=n_col_tiles,
        gate_row_stride=gate_row_stride,
        up_row_stride=up_row_stride,
        **_common(plan, draws, n_cols, block),
    )


def _common(plan: GluPlan, draws: bool, n_cols: int, block: Tile) -> dict[str, Any]:
    """Arguments of both kernels. Where nothing is drawn, the gradient is 0 already where elements were dropped."""
    limit = math.inf if plan.limit is None else plan.limit
    return {
        **dropout_arguments(plan.dropout_p if draws else 0.0, n_cols),
        "keep_scale": dropout_scale(plan.dropout_p),
        "limit": limit,
        "alpha": plan.sigmoid_alpha,
        "up_offset": plan.up_offset,
        "ACTIVATION": KERNEL_ACTIVATIONS.index(plan.activation),
        "CLAMPED": plan.has_numbers,
        "INTERLEAVED": plan.interleaved,
        "HAS_DROPOUT": plan.dropout_p != 0.0,
        **tile_arguments(block, n_cols),
    }


def _row_stride(tensor: Tensor | None) -> int:
    """A tensor that is no matrix is contiguous, or is half of the columns of a contiguous one."""
    if tensor is None or tensor.dim() == 2:
        return 0 if tensor is None else tensor.stride(0)
    n_cols = tensor.shape[-1]
    return n_cols if tensor.is_contiguous() else 2 * n_cols


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def backward(
    dy: Tensor, operands: OperandTuple, plan: GluPlan, wants: tuple[bool, bool, bool], rng: Rng | None = None
) -> Gradients:
    """reference.glu.backward for tensors as forward takes them; gradients are contiguous, that of both halves is
    one."""
    gate, up = _gate_and_up(operands, plan)
    wants_gate, wants_up, wants_bias = wants
    n_cols = dy.shape[-1]
    whole = dgate = _empty(operands[0]) if wants_gate else None
    dup = _empty(up) if wants_up and up is not None else None
    if plan.gate_first is not None and not plan.interleaved and whole is not None:
        dgate, dup = halves(whole, plan)
    bias = operands[2]
    dbias = torch.empty_like(bias) if wants_bias and bias is not None else None
    divisor = common_divisor(n_cols)
    with on_device_of(dy):
        dy, gate, up = aligned(dy, divisor), aligned(gate, divisor), aligned(up, divisor)
        strides = tuple([_row_stride(tensor) for tensor in (dy, gate, up, dgate, dup)])
        draws = rng is not None
        n_parts, launch = _backward_launch(plan, draws, dy.shape, dy.itemsize, strides, up is None, dbias is None)
        partials = None if dbias is None else dy.new_empty((1, n_parts, n_cols), dtype=torch.float32)
        added = None if reads_result(plan, operands) else aligned_vector(bias)
        launch(dy, gate, up, added, dgate, dup, partials, *rng_arguments(rng, draws))
        if partials is not None and dbias is not None:
            sum_partials(partials, [dbias])
    return Gradients(whole, None if plan.gate_first is not None else dup, dbias)


@lru_cache(maxsize=LAUNCHES)
def _backward_launch(
    plan: GluPlan,
    draws: bool,
    shape: torch.Size,
    bytes_of_value: int,
    strides: tuple[int, ...],
    has_one_operand: bool,
    has_no_sums: bool,
) -> tuple[int, Launch]:
    """Into how many parts the rows are shared out, and the launch. strides: of the rows of dy, gate, up and their
    gradients."""
    n_cols = shape[-1]
    n_rows = shape.numel() // n_cols
    # More would spill: 16-bit values and a mask, two vectors of two gradients or in rows of several tiles.
    vectors = 2 if has_one_operand and not plan.interleaved and n_cols > 512 else 1
    block = _tile(n_cols, 4 if draws else bytes_of_value, vectors)
    n_col_tiles = cdiv(n_cols, block.cols)
    rows = block.rows if has_no_sums else rows_per_program(n_rows, block, n_col_tiles)
    n_parts = cdiv(n_rows, rows)
    launch = Launch(
        kernels._glu_bwd_kernel,
        (n_parts * n_col_tiles,),
        n_rows=n_rows,
        n_cols=n_cols,
        n_col_tiles=n_col_tiles,
        rows_per_program=rows,
        **{f"{name}_row_stride": stride for name, stride in zip(_ROWS, strides, strict=True)},
        **_common(plan, draws, n_cols, block),
    )
    return n_parts, launch


_ROWS = ("dy", "gate", "up", "dgate", "dup")
