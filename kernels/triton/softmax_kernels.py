"""The kernels of softmax's forward pass, and what those of backward (softmax_backward_kernels.py) share with them;
softmax.py beside this file chooses tiles and launches them.

P = softmax(scale * scores + mask) over the last dimension, y = dropout(P). Softmax: Bridle 1990; as attention weights,
with mask and dropout, Vaswani et al. 2017, section 3.2. Sum beside a running maximum: Milakov & Gimelshein 2018. All
arithmetic is float32, rounded once where it is stored. A row whose largest value is -Inf gives zeros.

Conventions: see tiles.py.

The mask is read in place. Row r of the scores, counted in the mask's dimensions, reads the mask's row that starts at
the sum of index * stride: see _mask_starts. MASK_COLS is the stride between its columns: 0, 1, or ANY_STRIDE for
mask_col_stride. MASK_ALIGN divides its strides and n_cols, and is at most ALIGN and 16 bytes of scores: the mask never
makes Triton choose another layout than the scores alone, so sums have the same bits whatever the mask's alignment.
(Before Triton 3.7 ANY_STRIDE alone does: the last bits may then differ from those of a copy of the mask.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import exp
from .launch import kernel
from .philox import keep_tile, load_rng
from .tiles import with_divisor

ANY_STRIDE = tl.constexpr(2)
_MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def _mask_starts(
    rows,
    mask_size0,
    mask_size1,
    mask_size2,
    mask_stride0,
    mask_stride1,
    mask_stride2,
    mask_outer_stride,
    MASK_DIMS: tl.constexpr,
    MASK_ALIGN: tl.constexpr,
    INDEX: tl.constexpr,
):
    """int64, shaped like rows: where the mask's row of each row starts, a multiple of MASK_ALIGN.

    A row counts in MASK_DIMS dimensions, the fastest of size mask_size0 and stride mask_stride0, the slowest of stride
    mask_outer_stride. INDEX: uint32 where row numbers fit, whose division takes a fifth of the instructions of int64's.
    """
    outer = rows.to(INDEX)
    start = outer.to(tl.int64) * 0
    if MASK_DIMS > 1:
        size = mask_size0.to(INDEX)
        start += (outer % size).to(tl.int64) * mask_stride0
        outer = outer // size
    if MASK_DIMS > 2:
        size = mask_size1.to(INDEX)
        start += (outer % size).to(tl.int64) * mask_stride1
        outer = outer // size
    if MASK_DIMS > 3:
        size = mask_size2.to(INDEX)
        start += (outer % size).to(tl.int64) * mask_stride2
        outer = outer // size
    start += outer.to(tl.int64) * mask_outer_stride
    return with_divisor(start, MASK_ALIGN)


@triton.jit
def visible_cols(rows, n_cols, n_queries, CAUSAL: tl.constexpr, INDEX: tl.constexpr):
    """How many columns of each row are visible: row r is query r % n_queries. Zero or less: none."""
    if CAUSAL:
        query = (rows.to(INDEX) % n_queries.to(INDEX)).to(tl.int32)
        return n_cols - n_queries + query + 1
    else:
        return n_cols


@triton.jit
def _inside(rows, cols, n_rows, n_cols):
    """Which elements of a tile there are. n_rows: None where rows is a scalar, one that exists. (Interpreters make
    integers of a scalar condition that is combined with a tile's; that of Triton 3.9 then rejects them as a mask.)"""
    if n_rows is None:
        return cols < n_cols
    else:
        return (rows < n_rows) & (cols < n_cols)


@triton.jit
def loaded_cols(visible, ALIGN: tl.constexpr):
    """How many columns of a causal row are loaded: rounded up, so that a lane's are loaded together or not at all."""
    return (visible + (ALIGN - 1)) // ALIGN * ALIGN


@triton.jit
def where_visible(tile, cols, visible, CAUSAL: tl.constexpr):
    """The tile, 0 where causality hides, in a row of NaN too."""
    if CAUSAL:
        tile = tl.where(cols < visible, tile, 0.0)
    return tile


@triton.jit
def _load_values(
    scores_ptr,
    mask_ptr,
    mask_start,
    mask_col_stride,
    scale,
    visible,
    scores_row_stride,
    rows,
    first_col,
    n_rows,
    n_cols,
    CAUSAL: tl.constexpr,
    MASK_COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """[rows, BLOCK_COLS] of scale * scores + mask; -Inf where the mask, or causality, hides, and past the last column.

    mask_start, visible: of _mask_starts and visible_cols, shaped like rows or scalars. n_rows: see _inside.
    """
    cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
    if CAUSAL:
        inside = _inside(rows, cols, n_rows, loaded_cols(visible, ALIGN))
    else:
        inside = _inside(rows, cols, n_rows, n_cols)
    scores = tl.load(scores_ptr + rows * scores_row_stride + cols, mask=inside, other=0.0)
    if mask_ptr is not None:
        if MASK_COLS == 0:
            if n_rows is None:
                mask = tl.load(mask_ptr + mask_start)
            else:
                mask = tl.load(mask_ptr + mask_start, mask=rows < n_rows, other=0)
        elif MASK_COLS == 1:
            mask = tl.load(mask_ptr + mask_start + cols, mask=inside, other=0)
        else:
            mask = tl.load(mask_ptr + mask_start + cols * mask_col_stride, mask=inside, other=0)
    values = scores.to(tl.float32) * scale
    seen = cols < visible
    if mask_ptr is not None:
        if mask_ptr.dtype.element_ty.is_floating():
            values += mask.to(tl.float32)
        else:
            seen = seen & (mask != 0)
    return tl.where(seen, values, _MINUS_INF)


@triton.jit
def _subtrahend(largest):
    """What is subtracted from a row: its largest value, and 0 where that is -Inf, so that exp gives 0 and not NaN."""
    return tl.where(largest == _MINUS_INF, 0.0, largest)


@triton.jit
def _inverse(total):
    """1 / the sum of a row's exponentials. It is at least 1, or NaN, or 0 where every value is -Inf: then 0."""
    return 1.0 / tl.where(total == 0.0, float("inf"), total)


@triton.jit
def _store_probabilities(
    probability,
    y_ptr,
    p_ptr,
    seed,
    offset,
    drop_limit,
    keep_scale,
    rows,
    first_col,
    n_rows,
    n_cols,
    PHILOX_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Stores a tile of y; of p too where it is wanted, its sign bit set where dropout drops. n_rows: see _inside."""
    cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
    inside = _inside(rows, cols, n_rows, n_cols)
    at = rows * n_cols + cols
    y = probability
    if PHILOX_COLS > 0:
        keep = keep_tile(seed, offset, rows, first_col, n_cols, drop_limit, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS)
        y = tl.where(keep, probability * keep_scale, 0.0)
        probability = tl.where(keep, probability, probability * -1.0)  # 0 - 0 would lose the sign of zero
    if p_ptr is not None:
        tl.store(p_ptr + at, probability.to(p_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _softmax_fwd_kernel(
    # operands: [n_rows, n_cols], and a mask of any shape or None
    scores_ptr,
    mask_ptr,
    # outputs: [n_rows, n_cols]; p None: not stored
    y_ptr,
    p_ptr,
    # random numbers: philox.rng_arguments and dropout_arguments
    rng_ptr,
    seed: tl.int64,
    offset: tl.int64,
    drop_limit: tl.int64,
    keep_scale: tl.float32,
    scale: tl.float32,
    # sizes, and strides in elements
    n_rows: tl.int64,
    n_cols: tl.int32,
    n_queries: tl.int32,
    scores_row_stride: tl.int64,
    # how the mask is read: _mask_starts
    mask_size0: tl.int64,
    mask_size1: tl.int64,
    mask_size2: tl.int64,
    mask_stride0: tl.int64,
    mask_stride1: tl.int64,
    mask_stride2: tl.int64,
    mask_outer_stride: tl.int64,
    mask_col_stride: tl.int64,
    # chosen when compiled: `if` blocks on these, and on pointers that are None, disappear
    CAUSAL: tl.constexpr,
    MASK_DIMS: tl.constexpr,
    MASK_COLS: tl.constexpr,
    MASK_ALIGN: tl.constexpr,
    INDEX: tl.constexpr,
    ROW_IN_TILE: tl.constexpr,
    PHILOX_COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """P = exp(v - max(v)) / sum(exp(v - max(v))), v = scale * scores + mask;  y = dropout(P);  p = P signed by dropout

    scores, y, p: [n_rows, n_cols]. mask: see above. rng: [2] int64. A program takes BLOCK_ROWS rows: in registers where
    ROW_IN_TILE, everything read once. A wider row takes two trips: the first for the largest value and the sum, the
    second computes the values again.
    Moves a row: n_cols * (read scores + write y, p) bytes, scores twice unless ROW_IN_TILE, and what mask rows the
    caches do not hold. Columns that causality hides are not read.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    scores_row_stride = with_divisor(scores_row_stride, ALIGN)
    seed, offset = load_rng(rng_ptr, seed, offset)
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS

    if ROW_IN_TILE:
        # Per row numbers start as vectors: as columns of a tile, each lane of a row would load and divide for itself.
        row = first_row + tl.arange(0, BLOCK_ROWS)
        mask_start = _mask_starts(
            row, mask_size0, mask_size1, mask_size2, mask_stride0, mask_stride1, mask_stride2, mask_outer_stride,
            MASK_DIMS, MASK_ALIGN, INDEX,
        )[:, None]  # fmt: skip
        visible = visible_cols(row, n_cols, n_queries, CAUSAL, INDEX)
        if CAUSAL:
            visible = visible[:, None]
        rows = row[:, None]
        values = _load_values(
            scores_ptr, mask_ptr, mask_start, mask_col_stride, scale, visible, scores_row_stride,
            rows, 0, n_rows, n_cols, CAUSAL, MASK_COLS, ALIGN, BLOCK_COLS,
        )  # fmt: skip
        exponentials = exp(values - _subtrahend(tl.max(values, axis=1, keep_dims=True)))
        total = tl.sum(exponentials, axis=1, keep_dims=True)
        _store_probabilities(
            where_visible(exponentials * _inverse(total), tl.arange(0, BLOCK_COLS)[None, :], visible, CAUSAL),
            y_ptr, p_ptr, seed, offset, drop_limit, keep_scale,
            rows, 0, n_rows, n_cols, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
    else:
        tl.static_assert(BLOCK_ROWS == 1)
        row = first_row
        mask_start = _mask_starts(
            row, mask_size0, mask_size1, mask_size2, mask_stride0, mask_stride1, mask_stride2, mask_outer_stride,
            MASK_DIMS, MASK_ALIGN, INDEX,
        )  # fmt: skip
        visible = visible_cols(row, n_cols, n_queries, CAUSAL, INDEX)
        largest = tl.full([1, 1], _MINUS_INF, tl.float32)
        totals = tl.zeros([1, BLOCK_COLS], tl.float32)
        for first_col in range(0, visible, BLOCK_COLS):
            values = _load_values(
                scores_ptr, mask_ptr, mask_start, mask_col_stride, scale, visible, scores_row_stride,
                row, first_col, None, n_cols, CAUSAL, MASK_COLS, ALIGN, BLOCK_COLS,
            )  # fmt: skip
            before = largest
            largest = tl.maximum(largest, tl.max(values, axis=1, keep_dims=True))
            subtrahend = _subtrahend(largest)
            totals = totals * exp(before - subtrahend) + exp(values - subtrahend)
        total = tl.sum(totals, axis=1, keep_dims=True)
        inverse = _inverse(total)
        subtrahend = _subtrahend(largest)
        for first_col in range(0, visible, BLOCK_COLS):
            values = _load_values(
                scores_ptr, mask_ptr, mask_start, mask_col_stride, scale, visible, scores_row_stride,
                row, first_col, None, n_cols, CAUSAL, MASK_COLS, ALIGN, BLOCK_COLS,
            )  # fmt: skip
            cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
            _store_probabilities(
                where_visible(exp(values - subtrahend) * inverse, cols, visible, CAUSAL),
                y_ptr, p_ptr, seed, offset, drop_limit, keep_scale,
                row, first_col, None, n_cols, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
        if CAUSAL:
            hidden = tl.zeros([1, BLOCK_COLS], tl.float32)
            first_hidden = (tl.maximum(visible, 0) + (BLOCK_COLS - 1)) // BLOCK_COLS * BLOCK_COLS
            for first_col in range(first_hidden, n_cols, BLOCK_COLS):
                _store_probabilities(
                    hidden, y_ptr, p_ptr, seed, offset, drop_limit, keep_scale,
                    row, first_col, None, n_cols, 0, BLOCK_ROWS, BLOCK_COLS,  # dropout would change no zero
                )  # fmt: skip
