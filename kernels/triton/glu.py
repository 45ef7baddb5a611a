"""glu in Triton: `forward` and `backward` as every backend has them.

The formulas stand in glu_kernels.py; here are the tile and the launches.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..reference.glu import ACTIVATIONS, GluPlan, Gradients, OperandTuple, halves, reads_result
from ..reference.philox import Rng, dropout_scale
from . import glu_kernels as kernels
from .launch import cdiv, launch, on_device_of
from .philox import dropout_arguments
from .sum_partials import rows_per_program, sum_partials
from .tiles import MAX_REGISTERS, Tile, aligned, aligned_vector, common_divisor

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
    bfloat16; y is contiguous."""
    gate, up = _gate_and_up(operands, plan)
    y = gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2)) if plan.interleaved else _empty(gate)
    n_elements = y.numel()
    if n_elements == 0:
        return y
    n_cols = y.shape[-1]
    n_rows = n_elements // n_cols
    divisor = common_divisor(n_cols)
    block = _tile(n_cols, gate.itemsize, vectors=2)
    n_col_tiles = cdiv(n_cols, block.cols)
    with on_device_of(gate):
        gate, up = aligned(gate, divisor), aligned(up, divisor)
        launch(
            kernels._glu_fwd_kernel,
            (cdiv(n_rows, block.rows) * n_col_tiles,),
            gate,
            up,
            aligned_vector(operands[2]),
            y,
            n_rows=n_rows,
            n_cols=n_cols,
            n_col_tiles=n_col_tiles,
            gate_row_stride=_row_stride(gate),
            up_row_stride=_row_stride(up),
            **_dropout_arguments(rng, plan, n_cols),
            **_numbers(plan),
            ACTIVATION=ACTIVATIONS.index(plan.activation),
            ALIGN=divisor,
            BLOCK_ROWS=block.rows,
            BLOCK_COLS=block.cols,
            num_warps=block.num_warps,
            maxnreg=MAX_REGISTERS,
        )
    return y


def _row_stride(tensor: Tensor | None) -> int:
    """A tensor that is no matrix is contiguous, or is half of the columns of a contiguous one."""
    if tensor is None or tensor.dim() == 2:
        return 0 if tensor is None else tensor.stride(0)
    n_cols = tensor.shape[-1]
    return n_cols if tensor.is_contiguous() else 2 * n_cols


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _dropout_arguments(rng: Rng | None, plan: GluPlan, n_cols: int) -> dict[str, Any]:
    """Without rng the scale alone: what is dropped is 0 already."""
    arguments = dropout_arguments(rng, 0.0 if rng is None else plan.dropout_p, n_cols)
    return {**arguments, "keep_scale": dropout_scale(plan.dropout_p), "HAS_DROPOUT": plan.dropout_p != 0.0}


def _numbers(plan: GluPlan) -> dict[str, Any]:
    limit = math.inf if plan.limit is None else plan.limit
    numbers = {"limit": limit, "alpha": plan.alpha, "up_offset": plan.up_offset}
    return {**numbers, "CLAMPED": plan.has_numbers, "INTERLEAVED": plan.interleaved}


def backward(
    dy: Tensor, operands: OperandTuple, plan: GluPlan, wants: tuple[bool, bool, bool], rng: Rng | None = None
) -> Gradients:
    """reference.glu.backward for tensors as forward takes them; gradients are contiguous, that of both halves is
    one."""
    gate, up = _gate_and_up(operands, plan)
    wants_gate, wants_up, wants_bias = wants
    n_cols = dy.shape[-1]
    n_rows = dy.numel() // n_cols
    whole = dgate = _empty(operands[0]) if wants_gate else None
    dup = _empty(up) if wants_up and up is not None else None
    if plan.gate_first is not None and not plan.interleaved and whole is not None:
        dgate, dup = halves(whole, plan)
    bias = operands[2]
    dbias = torch.empty_like(bias) if wants_bias and bias is not None else None
    divisor = common_divisor(n_cols)
    # More would spill: 16-bit values and a mask, two vectors of two gradients or in rows of several tiles.
    vectors = 2 if up is None and not plan.interleaved and n_cols > 512 else 1
    block = _tile(n_cols, gate.itemsize if rng is None else 4, vectors)
    n_col_tiles = cdiv(n_cols, block.cols)
    rows = block.rows if dbias is None else rows_per_program(n_rows, block, n_col_tiles)
    n_parts = cdiv(n_rows, rows)
    partials = None if dbias is None else dy.new_empty((1, n_parts, n_cols), dtype=torch.float32)
    with on_device_of(dy):
        dy, gate, up = aligned(dy, divisor), aligned(gate, divisor), aligned(up, divisor)
        launch(
            kernels._glu_bwd_kernel,
            (n_parts * n_col_tiles,),
            dy,
            gate,
            up,
            None if reads_result(plan, operands) else aligned_vector(bias),
            dgate,
            dup,
            partials,
            n_rows=n_rows,
            n_cols=n_cols,
            n_col_tiles=n_col_tiles,
            rows_per_program=rows,
            dy_row_stride=_row_stride(dy),
            gate_row_stride=_row_stride(gate),
            up_row_stride=_row_stride(up),
            dgate_row_stride=_row_stride(dgate),
            dup_row_stride=_row_stride(dup),
            **_dropout_arguments(rng, plan, n_cols),
            **_numbers(plan),
            ACTIVATION=ACTIVATIONS.index(plan.activation),
            ALIGN=divisor,
            BLOCK_ROWS=block.rows,
            BLOCK_COLS=block.cols,
            num_warps=block.num_warps,
            maxnreg=MAX_REGISTERS,
        )
        if partials is not None and dbias is not None:
            sum_partials(partials, [dbias])
    return Gradients(whole, None if plan.gate_first is not None else dup, dbias)
