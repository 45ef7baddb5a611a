"""The kernels of softmax's backward pass; softmax_kernels.py has their conventions, softmax.py launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import kernel
from .softmax_kernels import loaded_cols, visible_cols, where_visible
from .tiles import with_divisor


@triton.jit
def _load_gradient(
    dy_ptr,
    p_ptr,
    dropout_scale,
    dy_row_stride,
    p_row_stride,
    rows,
    cols,
    inside,
    visible,
    HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Tiles of P and of P * dP, dP = dropout_backward(dy); 0 where not inside. P * dP is 0 where causality hides.

    visible: of visible_cols, shaped like rows or a scalar.
    """
    if CAUSAL:
        inside = inside & (cols < loaded_cols(visible, ALIGN))
    gradient = tl.load(dy_ptr + rows * dy_row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    probability = tl.load(p_ptr + rows * p_row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        dropped = probability.to(tl.int32, bitcast=True) < 0
        gradient = tl.where(dropped, 0.0, gradient * dropout_scale)
        probability = tl.abs(probability)
    return probability, where_visible(probability * gradient, cols, visible, CAUSAL)


@triton.jit
def _wide_row_dot(
    dy_ptr,
    p_ptr,
    dropout_scale,
    dy_row_stride,
    p_row_stride,
    row,
    n_cols,
    visible,
    HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """[1, 1]: the sum of P * dP over a row wider than a tile."""
    totals = tl.zeros([1, BLOCK_COLS], tl.float32)
    for first_col in range(0, visible, BLOCK_COLS):
        cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
        _, product = _load_gradient(
            dy_ptr, p_ptr, dropout_scale, dy_row_stride, p_row_stride, row, cols, cols < n_cols, visible,
            HAS_DROPOUT, CAUSAL, ALIGN,
        )  # fmt: skip
        totals += product
    return tl.sum(totals, axis=1, keep_dims=True)


@kernel
def _softmax_bwd_kernel(
    dy_ptr,
    p_ptr,
    dscores_ptr,
    scale: tl.float32,
    dropout_scale: tl.float32,
    n_rows: tl.int64,
    n_cols: tl.int32,
    n_queries: tl.int32,
    dy_row_stride: tl.int64,
    p_row_stride: tl.int64,
    HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    INDEX: tl.constexpr,
    ROW_IN_TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """dscores = scale * g,  g = P * dP - P * sum(P * dP),  dP = dropout_backward(dy)

    dy, p, dscores: [n_rows, n_cols]; with dropout the sign of p says what was dropped. A program takes BLOCK_ROWS rows:
    in registers where ROW_IN_TILE, everything read once; a wider row takes two trips.
    Moves a row: n_cols * (read dy, p + write dscores) bytes, dy and p twice unless ROW_IN_TILE. Columns that causality
    hides are not read.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    dy_row_stride = with_divisor(dy_row_stride, ALIGN)
    p_row_stride = with_divisor(p_row_stride, ALIGN)
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    if ROW_IN_TILE:
        row = first_row + tl.arange(0, BLOCK_ROWS)
        visible = visible_cols(row, n_cols, n_queries, CAUSAL, INDEX)
        if CAUSAL:
            visible = visible[:, None]
        rows = row[:, None]
        cols = tl.arange(0, BLOCK_COLS)[None, :]
        inside = (rows < n_rows) & (cols < n_cols)
        probability, product = _load_gradient(
            dy_ptr, p_ptr, dropout_scale, dy_row_stride, p_row_stride, rows, cols, inside, visible,
            HAS_DROPOUT, CAUSAL, ALIGN,
        )  # fmt: skip
        g = product - probability * tl.sum(product, axis=1, keep_dims=True)
        g = where_visible(g, cols, visible, CAUSAL)
        tl.store(dscores_ptr + rows * n_cols + cols, (g * scale).to(dscores_ptr.dtype.element_ty), mask=inside)
    else:
        tl.static_assert(BLOCK_ROWS == 1)
        row = first_row
        visible = visible_cols(row, n_cols, n_queries, CAUSAL, INDEX)
        dot = _wide_row_dot(
            dy_ptr, p_ptr, dropout_scale, dy_row_stride, p_row_stride, row, n_cols, visible,
            HAS_DROPOUT, CAUSAL, ALIGN, BLOCK_COLS,
        )  # fmt: skip
        for first_col in range(0, n_cols, BLOCK_COLS):
            cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
            inside = cols < n_cols
            probability, product = _load_gradient(
                dy_ptr, p_ptr, dropout_scale, dy_row_stride, p_row_stride, row, cols, inside, visible,
                HAS_DROPOUT, CAUSAL, ALIGN,
            )  # fmt: skip
            g = where_visible(product - probability * dot, cols, visible, CAUSAL)
            tl.store(dscores_ptr + row * n_cols + cols, (g * scale).to(dscores_ptr.dtype.element_ty), mask=inside)


@kernel
def _row_dots_kernel(
    dy_ptr,
    p_ptr,
    row_dots_ptr,
    dropout_scale: tl.float32,
    n_rows: tl.int64,
    n_cols: tl.int32,
    n_queries: tl.int32,
    dy_row_stride: tl.int64,
    p_row_stride: tl.int64,
    HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    INDEX: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """row_dots = sum(P * dP) of each row: what _softmax_bwd_mask_kernel must know of rows too wide for its tile.

    row_dots: [n_rows] float32. A program takes one row. Moves n_cols * (read dy, p) a row.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    dy_row_stride = with_divisor(dy_row_stride, ALIGN)
    p_row_stride = with_divisor(p_row_stride, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    visible = visible_cols(row, n_cols, n_queries, CAUSAL, INDEX)
    dot = _wide_row_dot(
        dy_ptr, p_ptr, dropout_scale, dy_row_stride, p_row_stride, row, n_cols, visible,
        HAS_DROPOUT, CAUSAL, ALIGN, BLOCK_COLS,
    )  # fmt: skip
    tl.store(row_dots_ptr + row + tl.zeros([1, 1], tl.int32), dot)


@triton.jit
def _place(index, inner, inner_stride, outer_stride, SPLIT: tl.constexpr, INDEX: tl.constexpr):
    """int64: where `index` stands that counts in two dimensions, the fast one of size inner; in one unless SPLIT."""
    if SPLIT:
        index, inner = index.to(INDEX), inner.to(INDEX)
        return (index // inner).to(tl.int64) * outer_stride + (index % inner).to(tl.int64) * inner_stride
    else:
        return index * inner_stride


@kernel
def _softmax_bwd_mask_kernel(
    # operands: two of [n_rows, n_cols], [n_rows] or None
    dy_ptr,
    p_ptr,
    row_dots_ptr,
    # outputs: [n_rows, n_cols] or None; partials as below
    dscores_ptr,
    partials_ptr,
    scale: tl.float32,
    dropout_scale: tl.float32,
    # sizes, and where rows stand: _place
    n_mask_rows: tl.int64,
    n_shared: tl.int64,
    n_cols: tl.int32,
    n_queries: tl.int32,
    mask_inner: tl.int64,
    mask_inner_stride: tl.int64,
    mask_outer_stride: tl.int64,
    shared_inner: tl.int64,
    shared_inner_stride: tl.int64,
    shared_outer_stride: tl.int64,
    shared_per_program: tl.int64,
    # strides in elements
    dy_row_stride: tl.int64,
    p_row_stride: tl.int64,
    # chosen when compiled: `if` blocks on these, and on pointers that are None, disappear
    HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK_SPLIT: tl.constexpr,
    SHARED_SPLIT: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    INDEX: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """As _softmax_bwd_kernel, and dmask = sum of g over the rows that share a row of the mask.

    The rows of the scores are the pairs of n_mask_rows rows of the mask and the n_shared rows that share each: see
    _place for where each of the two stands, the sum of both is the row.
    A tile holds BLOCK_ROWS / SHARED_ROWS rows of the mask, times SHARED_ROWS rows that share each. Program (i, j, k)
    walks shared_per_program of the latter for the i-th tile of mask rows and the k-th of columns and adds up g in its
    registers: partials, [programs on axis 1 * SHARED_ROWS, n_mask_rows, n_cols] float32. The partition is the host's:
    sums do not depend on the GPU. dy, p, dscores: [n_rows, n_cols]. row_dots: [n_rows] float32 of _row_dots_kernel;
    None where a tile holds whole rows.
    Moves a row: n_cols * (read dy, p + write dscores) bytes; partials: 4 * n_cols a row of them.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    dy_row_stride = with_divisor(dy_row_stride, ALIGN)
    p_row_stride = with_divisor(p_row_stride, ALIGN)
    cols = tl.program_id(2) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    in_tile = tl.arange(0, BLOCK_ROWS)
    mask_row = tl.program_id(0).to(tl.int64) * (BLOCK_ROWS // SHARED_ROWS) + in_tile // SHARED_ROWS
    slot = in_tile % SHARED_ROWS
    chunk = tl.program_id(1).to(tl.int64)
    mask_part = _place(mask_row, mask_inner, mask_inner_stride, mask_outer_stride, MASK_SPLIT, INDEX)
    dmask = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for step in range(0, shared_per_program, SHARED_ROWS):
        shared = chunk * shared_per_program + step + slot
        row = mask_part + _place(shared, shared_inner, shared_inner_stride, shared_outer_stride, SHARED_SPLIT, INDEX)
        exists = (mask_row < n_mask_rows) & (shared < n_shared)
        rows = row[:, None]
        inside = exists[:, None] & (cols < n_cols)
        visible = visible_cols(row, n_cols, n_queries, CAUSAL, INDEX)
        if CAUSAL:
            visible = visible[:, None]
        probability, product = _load_gradient(
            dy_ptr, p_ptr, dropout_scale, dy_row_stride, p_row_stride, rows, cols, inside, visible,
            HAS_DROPOUT, CAUSAL, ALIGN,
        )  # fmt: skip
        if row_dots_ptr is not None:
            dot = tl.load(row_dots_ptr + row, mask=exists, other=0.0)[:, None]
        else:
            dot = tl.sum(product, axis=1, keep_dims=True)
        g = where_visible(product - probability * dot, cols, visible, CAUSAL)
        dmask += g
        if dscores_ptr is not None:
            tl.store(dscores_ptr + rows * n_cols + cols, (g * scale).to(dscores_ptr.dtype.element_ty), mask=inside)
    partial_row = (chunk * SHARED_ROWS + slot) * n_mask_rows + mask_row
    inside = (mask_row < n_mask_rows)[:, None] & (cols < n_cols)
    tl.store(partials_ptr + partial_row[:, None] * n_cols + cols, dmask, mask=inside)
