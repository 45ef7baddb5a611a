"""The rows of a mixture of experts in Triton: combine, combine_backward and dispatch, as every backend has them.

out[t] = sum_j weights[t, j] * y[places[t, j]]; backward dy[places[t, j]] = weights[t, j] * dout[t] and dweights[t, j] =
sum(dout[t] * y[places[t, j]]); dispatch writes x[t] to row places[t, j] (Shazeer et al. 2017). One kernel gathers, one
scatters. places names every row once: nothing is added in memory, and results do not depend on the order of programs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import triton.language as tl

from .launch import LAUNCHES, Launch, cdiv, kernel, next_power_of_2, on_device_of
from .tiles import MAX_REGISTERS, aligned, common_divisor, row_stride, with_divisor

_TILE_BYTES = 2048
"""Bytes of a tile of rows, for 4 warps of 32 lanes: 16 a lane."""
_WHOLE_ROW_BYTES = 8192
"""Rows of dout up to this length stay in registers while the k rows of y pass: 16 warps at most."""


@kernel
def _combine_kernel(
    y_ptr,
    places_ptr,
    weights_ptr,
    out_ptr,
    y_row_stride: tl.int64,
    n_tokens: tl.int32,
    n_cols: tl.int32,
    K: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """out[t] = sum_j weights[t, j] * y[places[t, j]], weights_ptr None: 1 each. In float32, in the order of j.

    y: [n_tokens * K, n_cols], last stride 1; places: [n_tokens, K] int64; weights: [n_tokens, K]; out: [n_tokens,
    n_cols]; all but y contiguous; ALIGN divides n_cols and y's stride. Grid: (blocks of tokens, tiles of columns).
    Moves K * n_cols * (read y) + n_cols * (write out) + 8 K + K * (read weights) a token. A place out of range gives
    NaN. Rows are int64: row * stride passes 2^31.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    there, inside = tokens < n_tokens, cols < n_cols
    n_rows = n_tokens.to(tl.int64) * K
    total = tl.zeros((BLOCK_TOKENS, BLOCK_COLS), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places_ptr + tokens * K + j, mask=there, other=0)
        is_row = (place >= 0) & (place < n_rows)
        rows = y_ptr + with_divisor(place * y_row_stride, ALIGN)
        values = tl.load(rows + cols, mask=is_row & inside, other=float("nan")).to(tl.float32)
        if weights_ptr is not None:
            values = values * tl.load(weights_ptr + tokens * K + j, mask=there, other=0.0).to(tl.float32)
        total = values if j == 0 else total + values
    out = out_ptr + with_divisor(tokens * n_cols, ALIGN) + cols
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=there & inside)


@kernel
def _scatter_kernel(
    dout_ptr,
    y_ptr,
    places_ptr,
    weights_ptr,
    dy_ptr,
    dweights_ptr,
    dout_row_stride: tl.int64,
    y_row_stride: tl.int64,
    n_tokens: tl.int32,
    n_cols: tl.int32,
    K: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """dy[places[t, j]] = weights[t, j] * dout[t] (weights_ptr None: 1) unless dy_ptr is None; dweights[t, j] =
    sum(dout[t] * y[places[t, j]]) unless dweights_ptr is None. In float32.

    dout: [n_tokens, n_cols]; y, dy: [n_tokens * K, n_cols]; last strides 1; places: [n_tokens, K] int64; weights,
    dweights: [n_tokens, K]; all but dout and y contiguous; ALIGN divides n_cols and the strides. Grid: (blocks of
    tokens,). A program takes the K rows of its tokens one after another. WHOLE_ROWS: a tile holds a row of dout, which
    is then read once; a longer one is read again from the cache for each j. Moves n_cols * (read dout) + K * n_cols *
    (read y + write dy) + 8 K + K * (read weights + write dweights) a token. Rows are int64: row * stride passes 2^31.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    there = tokens < n_tokens
    n_rows = n_tokens.to(tl.int64) * K
    columns = tl.arange(0, BLOCK_COLS)[None, :]
    dout_rows = dout_ptr + with_divisor(tokens * dout_row_stride, ALIGN)
    if WHOLE_ROWS:
        dout = tl.load(dout_rows + columns, mask=there & (columns < n_cols), other=0.0).to(tl.float32)
    for j in range(K):  # unrolled it spills
        place = tl.load(places_ptr + tokens * K + j, mask=there, other=-1)
        is_row = (place >= 0) & (place < n_rows)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + tokens * K + j, mask=there, other=0.0).to(tl.float32)
        if dweights_ptr is not None:
            products = tl.zeros((BLOCK_TOKENS, BLOCK_COLS), tl.float32)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + columns
            inside = is_row & (cols < n_cols)
            if not WHOLE_ROWS:
                dout = tl.load(dout_rows + cols, mask=there & (cols < n_cols), other=0.0).to(tl.float32)
            if dweights_ptr is not None:
                y_rows = y_ptr + with_divisor(place * y_row_stride, ALIGN)
                products += dout * tl.load(y_rows + cols, mask=inside, other=0.0).to(tl.float32)
            if dy_ptr is not None:
                dy_rows = dy_ptr + with_divisor(place * n_cols, ALIGN)
                dy = dout if weights_ptr is None else dout * weight
                tl.store(dy_rows + cols, dy.to(dy_ptr.dtype.element_ty), mask=inside)
        if dweights_ptr is not None:
            dweight = tl.where(is_row, tl.sum(products, axis=1, keep_dims=True), float("nan"))
            tl.store(dweights_ptr + tokens * K + j, dweight.to(dweights_ptr.dtype.element_ty), mask=there)


def _tile(n_cols: int, element_size: int, largest: int) -> tuple[int, int, int]:
    """(tokens, columns, warps) of a tile: a whole row where that has no more than `largest` bytes."""
    cols = max(8, next_power_of_2(n_cols))
    if cols * element_size > largest:
        cols = _TILE_BYTES // element_size
    tokens = max(1, _TILE_BYTES // (cols * element_size))
    return tokens, cols, max(4, tokens * cols * element_size // (_TILE_BYTES // 4))


def combine(y: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """reference.moe.combine for y of last stride 1, places and weights contiguous, neither empty."""
    n_tokens, k = places.shape
    n_cols = y.shape[1]
    y = aligned(y, common_divisor(n_cols))
    out = torch.empty((n_tokens, n_cols), dtype=dtype, device=y.device)
    with on_device_of(y):
        _combine_launch(k, out.shape, y.stride(0), y.itemsize)(y, places, weights, out)
    return out


@functools.lru_cache(maxsize=LAUNCHES)
def _combine_launch(k: int, shape: torch.Size, y_row_stride: int, bytes_of_value: int) -> Launch:
    n_tokens, n_cols = shape
    tokens, cols, num_warps = _tile(n_cols, bytes_of_value, _TILE_BYTES)
    return Launch(
        _combine_kernel,
        (cdiv(n_tokens, tokens), cdiv(n_cols, cols)),
        y_row_stride=y_row_stride,
        n_tokens=n_tokens,
        n_cols=n_cols,
        K=k,
        BLOCK_TOKENS=tokens,
        BLOCK_COLS=cols,
        ALIGN=common_divisor(n_cols),
        num_warps=num_warps,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,  # product and sum rounded apart: the reference's bits
    )


def combine_backward(
    dout: Tensor, y: Tensor, places: Tensor, weights: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """reference.moe.combine_backward for dout and y of last stride 1, places and weights contiguous, none empty."""
    wants_y, wants_weights = wants
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device) if wants_y else None
    dweights = torch.empty_like(weights) if wants_weights else None
    _scatter(dout, y if wants_weights else None, places, weights if wants_y else None, dy, dweights)
    return dy, dweights


def dispatch(x: Tensor, places: Tensor) -> Tensor:
    """reference.moe.dispatch for x of last stride 1, places contiguous, neither empty."""
    rows = torch.empty((places.numel(), x.shape[1]), dtype=x.dtype, device=x.device)
    _scatter(x, None, places, None, rows, None)
    return rows


def _scatter(
    dout: Tensor,
    y: Tensor | None,
    places: Tensor,
    weights: Tensor | None,
    dy: Tensor | None,
    dweights: Tensor | None,
) -> None:
    align = common_divisor(dout.shape[1])
    dout, y = aligned(dout, align), aligned(y, align)
    strides = dout.stride(0), row_stride(y)
    with on_device_of(dout):
        launch = _scatter_launch(places.shape[1], dout.shape, strides, dout.itemsize)
        launch(dout, y, places, weights, dy, dweights)


@functools.lru_cache(maxsize=LAUNCHES)
def _scatter_launch(k: int, shape: torch.Size, strides: tuple[int, int], bytes_of_value: int) -> Launch:
    """strides: of the rows of dout and y."""
    n_tokens, n_cols = shape
    tokens, cols, num_warps = _tile(n_cols, bytes_of_value, _WHOLE_ROW_BYTES)
    return Launch(
        _scatter_kernel,
        (cdiv(n_tokens, tokens),),
        dout_row_stride=strides[0],
        y_row_stride=strides[1],
        n_tokens=n_tokens,
        n_cols=n_cols,
        K=k,
        WHOLE_ROWS=cols >= n_cols,
        BLOCK_TOKENS=tokens,
        BLOCK_COLS=cols,
        ALIGN=common_divisor(n_cols),
        num_warps=num_warps,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,
    )
