"""Sums over rows: which program sums over which rows, and its partial sums added, in an order that the sizes alone
decide."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

import triton.language as tl

from .launch import LAUNCHES, Launch, cdiv, kernel
from .tiles import Tile, common_divisor, with_divisor

_TILE = Tile(rows=64, cols=32, num_warps=8)
# Sums have the same bits on every GPU. Up to 512 programs, 4 for each of an H100's 132 multiprocessors; then more rows
# a program, up to 16, because its partial sums cost 4 bytes a column, written and read once; then more programs, up to
# 1024; then more rows. An H100 reached 50% of a copy's speed with 182 programs, 71% with 368 (glu, bfloat16).
_FEW_PROGRAMS, _ENOUGH_ROWS, _MANY_PROGRAMS = 512, 16, 1024


def rows_per_program(n_rows: int, block: Tile, n_col_tiles: int) -> int:
    """How many rows a program of backward sums over: a multiple of block.rows."""
    rows = min(max(n_rows // _FEW_PROGRAMS, 1), _ENOUGH_ROWS)
    rows = max(rows, cdiv(n_rows * n_col_tiles, _MANY_PROGRAMS))
    return cdiv(rows, block.rows) * block.rows


def sum_partials(partials: Tensor, outputs: Sequence[Tensor]) -> None:
    """outputs[k] = sum over rows of partials[k]. At most three outputs. Launches on the current device.

    partials: [outputs, n_partials, n_cols] float32. outputs: [n_cols], any dtype, each. Less than 2^31 columns.
    """
    _, n_partials, n_cols = partials.shape
    _launch_of(len(outputs), n_partials, n_cols)(partials, *[*outputs, None, None][:3])


@lru_cache(maxsize=LAUNCHES)
def _launch_of(n_outputs: int, n_partials: int, n_cols: int) -> Launch:
    return Launch(
        _sum_partials_kernel,
        (cdiv(n_cols, _TILE.cols), n_outputs),
        n_partials=n_partials,
        n_cols=n_cols,
        ALIGN=common_divisor(n_cols),
        BLOCK_ROWS=_TILE.rows,
        BLOCK_COLS=_TILE.cols,
        num_warps=_TILE.num_warps,
    )


@kernel
def _sum_partials_kernel(
    partials_ptr,
    out0_ptr,
    out1_ptr,
    out2_ptr,
    n_partials: tl.int32,
    n_cols: tl.int32,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """out_k = sum over rows of partials[k], k = 0, 1, 2; an output is None where there are fewer.

    partials: [outputs, n_partials, n_cols] float32. out_k: [n_cols], any dtype. Program (j, k) takes BLOCK_COLS columns
    of partials[k], in an order that depends on the sizes alone. Moves 4 * n_partials * n_cols bytes an output, most of
    them still in the L2 cache.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    output = tl.program_id(1)
    first = partials_ptr + output.to(tl.int64) * n_partials * n_cols
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for step in range(0, n_partials, BLOCK_ROWS):
        rows = step + tl.arange(0, BLOCK_ROWS)[:, None]
        inside = (rows < n_partials) & (cols < n_cols)
        total += tl.load(first + rows.to(tl.int64) * n_cols + cols, mask=inside, other=0.0)
    total = tl.sum(total, axis=0, keep_dims=True)
    if output == 0:
        tl.store(out0_ptr + cols, total.to(out0_ptr.dtype.element_ty), mask=cols < n_cols)
    if out1_ptr is not None:  # noqa: SIM102 (the outer one is decided when the kernel is compiled)
        if output == 1:
            tl.store(out1_ptr + cols, total.to(out1_ptr.dtype.element_ty), mask=cols < n_cols)
    if out2_ptr is not None:  # noqa: SIM102
        if output == 2:
            tl.store(out2_ptr + cols, total.to(out2_ptr.dtype.element_ty), mask=cols < n_cols)
