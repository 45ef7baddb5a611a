"""The kernels of glu: element-wise over tiles of a matrix. glu.py launches them.

Matrices are [n_rows, n_cols], read and written by their row strides, last stride 1: halves of a packed tensor are
matrices of twice the stride. INTERLEAVED: gate and dgate are [n_rows, 2 * n_cols], up and dup in their odd columns, and
up_ptr and dup_ptr are None. Values are float32 between load and store. ACTIVATION: an index into reference.glu's
KERNEL_ACTIVATIONS. Where an input or output is None, its part of a kernel is not compiled. Random numbers: see
philox.py; PHILOX_COLS = 0 draws none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import exp, reciprocal
from .launch import kernel
from .philox import keep_tile, load_rng
from .tiles import with_divisor


@triton.jit
def _logistic(x):
    """1 / (1 + e^-x), and 1 / (1 + e^x): what is missing from 1, as exact where it is small."""
    t = exp(-tl.abs(x))
    larger = reciprocal(1.0 + t)
    smaller = t * larger
    return tl.where(x < 0.0, smaller, larger), tl.where(x < 0.0, larger, smaller)


@triton.jit
def _normal_distribution(x, IS_FLOAT32: tl.constexpr):
    """The cumulative normal distribution, exact in both tails, and its density.

    The tail beyond a = |x| is e^(-a^2/2) t p(t), t = 1 / (1 + c a): p is minimax in the relative error over
    0 <= a <= 14.5. In float32 it is the polynomial of csrc/cpu/math.h; for 16 bits four terms less do (4.4e-6).
    """
    a = tl.minimum(tl.abs(x), 14.5)  # of NaN, too, but every result is a multiple of x, or its sum with one
    e = tl.exp2(-0.7213475204 * a * a)  # e^(-a^2 / 2)
    if IS_FLOAT32:
        t = reciprocal(1.0 + 0.25 * a)
        p = t * 0.01689238 - 0.06453708
        p = p * t + 0.055879265
        p = p * t + 0.022611177
        p = p * t + 0.017734483
        p = p * t + 0.083851345
        p = p * t + 0.07301276
        p = p * t + 0.09528787
        p = p * t + 0.09952146
        p = p * t + 0.09974633
    else:
        t = reciprocal(1.0 + 0.308 * a)
        p = t * -0.075134560 + 0.188776418
        p = p * t + 0.0081833153
        p = p * t + 0.136069328
        p = p * t + 0.118992075
        p = p * t + 0.123112842
    tail = e * t * p
    return tl.where(x < 0.0, tail, 1.0 - tail), e * 0.3989422804


@triton.jit
def _at_most(x, limit):
    """min(x, limit); NaN stays."""
    return tl.where(x > limit, limit, x)


@triton.jit
def _factor(up, limit, up_offset, CLAMPED: tl.constexpr):
    """What the activation is multiplied by."""
    return -_at_most(-_at_most(up, limit), limit) + up_offset if CLAMPED else up


@triton.jit
def _load_pairs(row_ptrs, rows_inside, first_col, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Tiles of the even and of the odd columns."""
    cols = 2 * first_col + tl.arange(0, 2 * BLOCK_COLS)[None, :]
    pairs = tl.load(row_ptrs + cols, mask=rows_inside & (cols < 2 * n_cols), other=0.0)
    even, odd = tl.split(tl.reshape(pairs, [BLOCK_ROWS, BLOCK_COLS, 2]))
    return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def _store_pairs(
    row_ptrs, even, odd, rows_inside, first_col, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    cols = 2 * first_col + tl.arange(0, 2 * BLOCK_COLS)[None, :]
    pairs = tl.join(even.to(row_ptrs.dtype.element_ty), odd.to(row_ptrs.dtype.element_ty))
    tl.store(row_ptrs + cols, tl.reshape(pairs, [BLOCK_ROWS, 2 * BLOCK_COLS]), mask=rows_inside & (cols < 2 * n_cols))


@triton.jit
def _activated(x, alpha, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, IS_FLOAT32: tl.constexpr):
    """act(x) and its derivative; what a kernel does not use is not compiled. alpha: of x sigmoid(alpha x), the formula
    of quick_gelu and, where CLAMPED, of silu; or softcap's."""
    if CLAMPED or ACTIVATION == 5:  # quick_gelu
        value, complement = _logistic(alpha * x)
        y = x * value
        slope = value + alpha * (y * complement)  # finite where alpha * x overflows
    elif ACTIVATION == 0:  # silu
        value, complement = _logistic(x)
        y = x * value
        slope = value + y * complement
    elif ACTIVATION == 1:  # gelu
        cumulative, density = _normal_distribution(x, IS_FLOAT32)
        y = x * cumulative
        slope = cumulative + x * density
    elif ACTIVATION == 2:  # gelu_tanh: x times the logistic function of 2 sqrt(2/pi) (x + 0.044715 x^3)
        square = x * x
        square = tl.where(square > 65536.0, 65536.0, square)  # finite: beyond, it is multiplied by 0
        value, complement = _logistic(x * (1.5957691216 + 0.0713548163 * square))
        y = x * value
        slope = value + y * complement * (1.5957691216 + 0.2140644488 * square)
    elif ACTIVATION == 3:  # relu2
        positive = tl.where(x < 0.0, 0.0, x)
        y = positive * positive
        slope = 2.0 * positive
    elif ACTIVATION == 4:  # relu
        y = tl.where(x < 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    else:  # softcap: tanh is Cephes' polynomial below 0.625, (1 - e) / (1 + e) above it
        u = tl.abs(x) * (1.0 / alpha)
        e = exp(-2.0 * u)
        larger = reciprocal(1.0 + e)
        square = u * u
        p = square * -5.70498872745e-3 + 2.06390887954e-2
        p = p * square - 5.37397155531e-2
        p = p * square + 1.33314422036e-1
        p = p * square - 3.33332819422e-1
        tanh = tl.where(u < 0.625, u * (p * square + 1.0), (1.0 - e) * larger)
        y = tl.where(x < 0.0, -alpha, alpha) * tanh
        slope = 4.0 * e * larger * larger  # 1 - tanh^2 would cancel
    return y, slope


@triton.jit
def _dropped(
    values,
    rng_ptr,
    seed,
    offset,
    drop_limit,
    keep_scale,
    rows,
    first_col,
    n_cols,
    HAS_DROPOUT: tl.constexpr,
    PHILOX_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """A tile of values times the dropout's factors; without random numbers what is dropped is 0 already."""
    if HAS_DROPOUT:
        values *= keep_scale
    if PHILOX_COLS > 0:
        seed, offset = load_rng(rng_ptr, seed, offset)
        keep = keep_tile(seed, offset, rows, first_col, n_cols, drop_limit, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS)
        values = tl.where(keep, values, 0.0)
    return values


@kernel
def _glu_fwd_kernel(
    gate_ptr,
    up_ptr,
    bias_ptr,
    y_ptr,
    rng_ptr,
    seed: tl.int64,
    offset: tl.int64,
    n_rows: tl.int64,
    n_cols: tl.int64,
    n_col_tiles: tl.int32,
    gate_row_stride: tl.int64,
    up_row_stride: tl.int64,
    drop_limit: tl.int64,
    keep_scale: tl.float32,
    limit: tl.float32,
    alpha: tl.float32,
    up_offset: tl.float32,
    ACTIVATION: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PHILOX_COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """y = dropout(act(gate) * up),  or dropout(act(gate + bias))

    CLAMPED: y = dropout(g / (1 + e^(-alpha g)) * (clamp(up, -limit, limit) + up_offset)),  g = min(gate, limit)

    gate, up, y: [n_rows, n_cols], y contiguous. bias: [n_cols]. rng: [2] int64. A program takes one tile of BLOCK_ROWS
    x BLOCK_COLS. Moves n_cols * (read gate, up + write y) a row.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    tile = tl.program_id(0)
    rows = (tile // n_col_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    first_col = (tile % n_col_tiles).to(tl.int64) * BLOCK_COLS
    cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    gate_rows = gate_ptr + rows * with_divisor(gate_row_stride, ALIGN)
    if INTERLEAVED:
        x, up = _load_pairs(gate_rows, rows < n_rows, first_col, n_cols, BLOCK_ROWS, BLOCK_COLS)
    else:
        x = tl.load(gate_rows + cols, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    if CLAMPED:
        x = _at_most(x, limit)
    y, _ = _activated(x, alpha, ACTIVATION, CLAMPED, y_ptr.dtype.element_ty == tl.float32)
    if up_ptr is not None:
        up_rows = up_ptr + rows * with_divisor(up_row_stride, ALIGN)
        up = tl.load(up_rows + cols, mask=inside, other=0.0).to(tl.float32)
    if INTERLEAVED or up_ptr is not None:
        y *= _factor(up, limit, up_offset, CLAMPED)
    y = _dropped(
        y, rng_ptr, seed, offset, drop_limit, keep_scale,
        rows, first_col, n_cols, HAS_DROPOUT, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    tl.store(y_ptr + rows * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _glu_bwd_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    bias_ptr,
    dgate_ptr,
    dup_ptr,
    partials_ptr,
    rng_ptr,
    seed: tl.int64,
    offset: tl.int64,
    n_rows: tl.int64,
    n_cols: tl.int64,
    n_col_tiles: tl.int32,
    rows_per_program: tl.int64,
    dy_row_stride: tl.int64,
    gate_row_stride: tl.int64,
    up_row_stride: tl.int64,
    dgate_row_stride: tl.int64,
    dup_row_stride: tl.int64,
    drop_limit: tl.int64,
    keep_scale: tl.float32,
    limit: tl.float32,
    alpha: tl.float32,
    up_offset: tl.float32,
    ACTIVATION: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PHILOX_COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """dup = g * act(gate);  dgate = g * up * act'(gate), or g * act'(gate + bias);  partials = sums of dgate

    CLAMPED: of forward's formula, 0 where gate or up is beyond its bounds.

    g: dropout's gradient of dy. dy, gate, up, dgate, dup: [n_rows, n_cols]. bias: [n_cols]. rng: [2] int64. partials:
    [programs down the rows, n_cols] float32, the sum over each program's rows, for sum_partials. A program takes
    BLOCK_COLS columns of rows_per_program rows, a multiple of BLOCK_ROWS. Moves n_cols * (read dy, gate, up + write
    dgate, dup) a row.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    program = tl.program_id(0)
    part = (program // n_col_tiles).to(tl.int64)
    first_col = (program % n_col_tiles).to(tl.int64) * BLOCK_COLS
    cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for step in range(0, rows_per_program, BLOCK_ROWS):
        rows = part * rows_per_program + step + tl.arange(0, BLOCK_ROWS)[:, None]
        inside = (rows < n_rows) & (cols < n_cols)
        gate_rows = gate_ptr + rows * with_divisor(gate_row_stride, ALIGN)
        if INTERLEAVED:
            x, up = _load_pairs(gate_rows, rows < n_rows, first_col, n_cols, BLOCK_ROWS, BLOCK_COLS)
        else:
            x = tl.load(gate_rows + cols, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + rows * with_divisor(dy_row_stride, ALIGN) + cols, mask=inside, other=0.0).to(tl.float32)
        g = _dropped(
            g, rng_ptr, seed, offset, drop_limit, keep_scale,
            rows, first_col, n_cols, HAS_DROPOUT, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        x_used = _at_most(x, limit) if CLAMPED else x
        value, slope = _activated(x_used, alpha, ACTIVATION, CLAMPED, dy_ptr.dtype.element_ty == tl.float32)
        if up_ptr is not None:
            up_rows = up_ptr + rows * with_divisor(up_row_stride, ALIGN)
            up = tl.load(up_rows + cols, mask=inside, other=0.0).to(tl.float32)
        dup = g * value
        if CLAMPED:
            dup = tl.where(tl.abs(up) <= limit, dup, 0.0)
        if dup_ptr is not None:
            dup_rows = dup_ptr + rows * with_divisor(dup_row_stride, ALIGN)
            tl.store(dup_rows + cols, dup.to(dup_ptr.dtype.element_ty), mask=inside)
        if INTERLEAVED or up_ptr is not None:
            g *= _factor(up, limit, up_offset, CLAMPED)
        if ACTIVATION != 4:
            g *= slope
        if ACTIVATION == 3 or ACTIVATION == 4:  # relu2, relu: 0 even where up or dy is infinite or NaN
            g = tl.where(slope == 0.0, 0.0, g)
        if CLAMPED:
            g = tl.where(x <= limit, g, 0.0)
        if dgate_ptr is not None:
            dgate_rows = dgate_ptr + rows * with_divisor(dgate_row_stride, ALIGN)
            if INTERLEAVED:
                _store_pairs(dgate_rows, g, dup, rows < n_rows, first_col, n_cols, BLOCK_ROWS, BLOCK_COLS)
            else:
                tl.store(dgate_rows + cols, g.to(dgate_ptr.dtype.element_ty), mask=inside)
        if partials_ptr is not None:
            total += tl.where(inside, g, 0.0)
    if partials_ptr is not None:
        sums = tl.sum(total, axis=0, keep_dims=True)
        tl.store(partials_ptr + part * n_cols + cols, sums, mask=cols < n_cols)
