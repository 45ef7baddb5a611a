"""Tiles of matrices: their sizes, and what Triton is told of alignment. Shared by the families of kernels.

Matrices are [n_rows, n_cols] with last stride 1: inputs with any row stride, in elements, outputs contiguous. A
program takes tiles of BLOCK_ROWS x BLOCK_COLS in registers: whole rows while a row fits. None as a tensor argument
removes its loads and stores from the compiled kernel. ALIGN divides n_cols and every row stride, and matrices start at
multiples of 16 bytes where it is not 1: Triton then emits 16-byte accesses. Row numbers are int64: row * stride passes
2^31 on long batches. Random numbers: see philox.py; PHILOX_COLS = 0 compiles dropout out.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

import triton
import triton.language as tl

from .launch import next_power_of_2

MAX_REGISTERS = 64
"""A lane: 1024 lanes then stay on a multiprocessor, half of what sm_80 to sm_100 can hold."""


class Tile(NamedTuple):
    """A tile of a matrix and the warps that hold it in their registers."""

    rows: int
    cols: int
    num_warps: int


class TileRule(NamedTuple):
    """Which tile a kernel takes for a width. See tile()."""

    elements: int
    """Short rows are gathered into tiles of so many."""
    elements_per_lane: int
    max_cols: int
    """Wider rows do not stay in registers."""
    wide_cols: int
    """The tile that such rows are walked with."""


def tile(rule: TileRule, n_cols: int, whole_rows: bool = True) -> Tile:
    """The tile for rows of n_cols. whole_rows: it is to hold whole rows, and does up to max_cols of the rule."""
    cols = max(next_power_of_2(n_cols), 8)
    if cols > (rule.max_cols if whole_rows else rule.wide_cols):
        cols = rule.wide_cols
    rows = max(1, rule.elements // cols)
    return Tile(rows, cols, min(32, max(4, rows * cols // (32 * rule.elements_per_lane))))


def common_divisor(n_cols: int) -> int:
    """A kernel's ALIGN: what divides the width, and with aligned() every row stride, up to the 16 that matter."""
    return math.gcd(16, n_cols)


def tile_arguments(block: Tile, n_cols: int) -> dict[str, int]:
    """What a kernel over tiles of rows of n_cols is launched with."""
    return {
        "ALIGN": common_divisor(n_cols),
        "BLOCK_ROWS": block.rows,
        "BLOCK_COLS": block.cols,
        "num_warps": block.num_warps,
        "maxnreg": MAX_REGISTERS,
    }


def row_stride(matrix: Tensor | None) -> int:
    return 0 if matrix is None else matrix.stride(0)


@triton.jit
def with_divisor(size, ALIGN: tl.constexpr):
    """The same number, with its divisor for Triton to see: tl.multiple_of has no effect on an argument of a kernel."""
    return size // ALIGN * ALIGN


_Maybe = TypeVar("_Maybe", Tensor, Tensor | None)


def aligned(matrix: _Maybe, divisor: int) -> _Maybe:
    """The matrix, or an aligned copy of it where Triton could not read `divisor` elements at once.

    divisor: common_divisor of its width. A tile's layout, and with it the order of a row's sum, then depends on the
    width and the dtypes only: the same values give the same bits wherever they lie. Few tensors are misaligned, and a
    copy of those costs everybody else nothing. Matrices of odd width are never copied.
    """
    if matrix is None or divisor == 1:
        return matrix
    if matrix.data_ptr() % 16 == 0 and (matrix.shape[0] == 1 or matrix.stride(0) % divisor == 0):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def aligned_vector(vector: _Maybe) -> _Maybe:
    """As aligned: whatever its width, a vector by itself lends its layout to the tile it is applied to."""
    return vector if vector is None or vector.data_ptr() % 16 == 0 else vector.clone()
