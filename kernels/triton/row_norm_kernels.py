"""The kernels of row_norm; row_norm.py beside this file chooses tiles and launches them.

z = residual + dropout(x + bias);  y = round_to(n_dtype, normalise(z)) * (weight + weight_offset) + norm_bias.
LayerNorm: Ba, Kiros & Hinton 2016. RMSNorm: Zhang & Sennrich 2019. All arithmetic is float32, and what is normalised is
z as rounded to z_dtype.

Conventions: see tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import kernel
from .philox import keep_tile, load_rng
from .tiles import with_divisor

NORM_NONE, NORM_LAYER, NORM_RMS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # as enum Norm in csrc/launch.h


@triton.jit
def _load_per_col(ptr, cols, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """A [n_cols] parameter as float32, once for every row of a tile.

    Loaded at the tile's shape it lands in the tile's own registers, and its repeated reads hit the L1 cache. Loaded as
    one row it would be laid out by itself, and cross shared memory to the others in every iteration.
    """
    ptrs = tl.broadcast_to(ptr + cols, (BLOCK_ROWS, BLOCK_COLS))
    return tl.load(ptrs, mask=tl.broadcast_to(cols < n_cols, (BLOCK_ROWS, BLOCK_COLS)), other=0.0).to(tl.float32)


@triton.jit
def _load_per_row(ptr, first_row, n_rows, BLOCK_ROWS: tl.constexpr):
    """[BLOCK_ROWS, 1] (a scalar for one row) of a [n_rows] float32 vector, 0 past its end.

    Loaded at that shape, Triton would repeat the load for each register of a lane's row.
    """
    if BLOCK_ROWS == 1:
        return tl.load(ptr + first_row, mask=first_row < n_rows, other=0.0)
    else:
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        return tl.load(ptr + rows, mask=rows < n_rows, other=0.0)[:, None]


@triton.jit
def _load_z(
    x_ptr,
    residual_ptr,
    bias_ptr,
    seed,
    offset,
    drop_limit,
    keep_scale,
    x_row_stride,
    residual_row_stride,
    rows,
    first_col,
    n_rows,
    n_cols,
    Z_DTYPE: tl.constexpr,
    PHILOX_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """[BLOCK_ROWS, BLOCK_COLS] of z, rounded to Z_DTYPE and widened to float32; 0 in columns past the last."""
    cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    if PHILOX_COLS > 0:  # first: it waits for no load, and its registers are free when they arrive
        keep = keep_tile(seed, offset, rows, first_col, n_cols, drop_limit, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS)
    # All loads are issued before the arithmetic that waits for the first.
    z = tl.load(x_ptr + rows * x_row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows * residual_row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        z += _load_per_col(bias_ptr, cols, n_cols, BLOCK_ROWS, BLOCK_COLS)
    if PHILOX_COLS > 0:
        z = tl.where(keep, z * keep_scale, 0.0)
    if residual_ptr is not None:
        z += residual
    return z.to(Z_DTYPE).to(tl.float32)


@triton.jit
def _store_z(z, z_ptr, rows, first_col, n_rows, n_cols, Z_DTYPE: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Stores a tile of z as it is normalised; _store_y stores a centred one."""
    cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
    tl.store(z_ptr + rows * n_cols + cols, z.to(Z_DTYPE), mask=(rows < n_rows) & (cols < n_cols))


@triton.jit
def _centred(z, mean, first_col, n_cols, NORM: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """z - mean for LayerNorm, z for RMSNorm; 0 in columns past the last."""
    if NORM == NORM_LAYER:
        cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
        z = tl.where(cols < n_cols, z - mean, 0.0)
    return z


@triton.jit
def _store_y(
    centred,
    rstd,
    weight_ptr,
    norm_bias_ptr,
    weight_offset,
    y_ptr,
    z_ptr,
    rows,
    first_col,
    n_rows,
    n_cols,
    CENTER_Z: tl.constexpr,
    N_DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Stores a tile of y; of z too where z is to be stored centred."""
    cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    if CENTER_Z:
        tl.store(z_ptr + rows * n_cols + cols, centred.to(z_ptr.dtype.element_ty), mask=inside)
    y = (centred * rstd).to(N_DTYPE).to(tl.float32)
    if weight_ptr is not None:
        y *= _load_per_col(weight_ptr, cols, n_cols, BLOCK_ROWS, BLOCK_COLS) + weight_offset
    if norm_bias_ptr is not None:
        y += _load_per_col(norm_bias_ptr, cols, n_cols, BLOCK_ROWS, BLOCK_COLS)
    tl.store(y_ptr + rows * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _row_norm_fwd_kernel(
    # operands: [n_rows, n_cols], [n_rows, n_cols], three of [n_cols]; None: not there
    x_ptr,
    residual_ptr,
    bias_ptr,
    weight_ptr,
    norm_bias_ptr,
    # outputs: [n_rows, n_cols] twice, [n_rows] float32 twice; None: not stored
    y_ptr,
    z_ptr,
    mean_ptr,
    rstd_ptr,
    # random numbers: philox.rng_arguments and dropout_arguments
    rng_ptr,
    seed: tl.int64,
    offset: tl.int64,
    drop_limit: tl.int64,
    keep_scale: tl.float32,
    # the plan's numbers
    eps: tl.float32,
    weight_offset: tl.float32,
    # sizes, and strides in elements
    n_rows: tl.int64,
    n_cols: tl.int32,
    x_row_stride: tl.int64,
    residual_row_stride: tl.int64,
    # chosen when compiled: `if` blocks on these, and on pointers that are None, disappear
    NORM: tl.constexpr,
    CENTER_Z: tl.constexpr,
    Z_DTYPE: tl.constexpr,
    N_DTYPE: tl.constexpr,
    ROW_IN_TILE: tl.constexpr,
    PHILOX_COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """z = residual + dropout(x + bias);  y = to(N_DTYPE, (z - mean) * rstd) * (weight + weight_offset) + norm_bias

    with mean = sum(z) / n_cols (0 for RMSNorm) and rstd = 1 / sqrt(sum((z - mean)^2) / n_cols + eps).

    x, residual, y, z: [n_rows, n_cols]. bias, weight, norm_bias: [n_cols]. mean, rstd: [n_rows] float32. rng: [2]
    int64. A program takes BLOCK_ROWS rows: in registers where ROW_IN_TILE, with a two-pass variance, every input read
    once. Wider rows take two trips: the first merges the moments of each tile (Chan, Golub & LeVeque 1979), the second
    computes z again.
    Without a norm, program (i, j) takes row tile i and column tile j.
    Moves a row: n_cols * (read x, residual + write y, z) + 8 bytes; reads of x and residual twice unless ROW_IN_TILE.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    x_row_stride = with_divisor(x_row_stride, ALIGN)
    residual_row_stride = with_divisor(residual_row_stride, ALIGN)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    seed, offset = load_rng(rng_ptr, seed, offset)

    if ROW_IN_TILE or NORM == NORM_NONE:
        first_col = 0
        if NORM == NORM_NONE:
            first_col = tl.program_id(1) * BLOCK_COLS
        z = _load_z(
            x_ptr, residual_ptr, bias_ptr, seed, offset, drop_limit, keep_scale, x_row_stride, residual_row_stride,
            rows, first_col, n_rows, n_cols, Z_DTYPE, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        if z_ptr is not None and not CENTER_Z:
            _store_z(z, z_ptr, rows, first_col, n_rows, n_cols, Z_DTYPE, BLOCK_COLS)
        if NORM != NORM_NONE:
            count = n_cols.to(tl.float32)
            mean = tl.zeros([BLOCK_ROWS, 1], tl.float32)
            if NORM == NORM_LAYER:
                mean = tl.div_rn(tl.sum(z, axis=1, keep_dims=True), count)
            centred = _centred(z, mean, first_col, n_cols, NORM, BLOCK_COLS)
            variance = tl.div_rn(tl.sum(centred * centred, axis=1, keep_dims=True), count)
            rstd = tl.rsqrt(variance + eps)
            _store_y(
                centred, rstd, weight_ptr, norm_bias_ptr, weight_offset, y_ptr, z_ptr,
                rows, first_col, n_rows, n_cols, CENTER_Z, N_DTYPE, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
    else:
        mean = tl.zeros([BLOCK_ROWS, 1], tl.float32)
        sum_of_squares = tl.zeros([BLOCK_ROWS, 1], tl.float32)
        for first_col in range(0, n_cols, BLOCK_COLS):
            z = _load_z(
                x_ptr, residual_ptr, bias_ptr, seed, offset, drop_limit, keep_scale, x_row_stride, residual_row_stride,
                rows, first_col, n_rows, n_cols, Z_DTYPE, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
            if z_ptr is not None and not CENTER_Z:
                _store_z(z, z_ptr, rows, first_col, n_rows, n_cols, Z_DTYPE, BLOCK_COLS)
            if NORM == NORM_LAYER:
                count = tl.minimum(n_cols - first_col, BLOCK_COLS).to(tl.float32)
                tile_mean = tl.div_rn(tl.sum(z, axis=1, keep_dims=True), count)
                z = _centred(z, tile_mean, first_col, n_cols, NORM, BLOCK_COLS)
                share = count / (first_col + count)
                step = tile_mean - mean
                mean += step * share
                sum_of_squares += step * step * share * first_col
            sum_of_squares += tl.sum(z * z, axis=1, keep_dims=True)
        rstd = tl.rsqrt(tl.div_rn(sum_of_squares, n_cols.to(tl.float32)) + eps)
        for first_col in range(0, n_cols, BLOCK_COLS):
            z = _load_z(
                x_ptr, residual_ptr, bias_ptr, seed, offset, drop_limit, keep_scale, x_row_stride, residual_row_stride,
                rows, first_col, n_rows, n_cols, Z_DTYPE, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
            _store_y(
                _centred(z, mean, first_col, n_cols, NORM, BLOCK_COLS), rstd, weight_ptr, norm_bias_ptr, weight_offset,
                y_ptr, z_ptr, rows, first_col, n_rows, n_cols, CENTER_Z, N_DTYPE, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip

    if NORM != NORM_NONE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=row < n_rows)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd, mask=row < n_rows)


@triton.jit
def _tile_at(first_row, first_col, n_rows, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """[BLOCK_ROWS, 1] rows counted from first_row, [1, BLOCK_COLS] columns, and which of the tile are inside.

    Only first_row, the same for all lanes, takes 64 bits. Backward has no registers to spare: with int64 rows three
    sums spilled 8 bytes a lane at 64 columns and 56 at 256 (sm_100); so none and 24.
    """
    in_tile = tl.arange(0, BLOCK_ROWS)[:, None]
    cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
    n_inside = tl.minimum(n_rows - first_row, BLOCK_ROWS).to(tl.int32)
    return in_tile, cols, (in_tile < n_inside) & (cols < n_cols)


@triton.jit
def _load_dy(
    dy_ptr,
    z_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    weight_offset,
    dy_row_stride,
    z_row_stride,
    first_row,
    first_col,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Tiles of dy, of n = (z - mean) * rstd and of dy * (weight + weight_offset); rstd as _load_per_row gives it.

    In columns past the last dy is 0, and n any number.
    """
    in_tile, cols, inside = _tile_at(first_row, first_col, n_rows, n_cols, BLOCK_ROWS, BLOCK_COLS)
    dy_ptrs = dy_ptr + first_row * dy_row_stride + (in_tile * dy_row_stride + cols)
    z_ptrs = z_ptr + first_row * z_row_stride + (in_tile * z_row_stride + cols)
    dy = tl.load(dy_ptrs, mask=inside, other=0.0).to(tl.float32)
    normalised = tl.load(z_ptrs, mask=inside, other=0.0).to(tl.float32)
    rstd = _load_per_row(rstd_ptr, first_row, n_rows, BLOCK_ROWS)
    if mean_ptr is not None:
        normalised -= _load_per_row(mean_ptr, first_row, n_rows, BLOCK_ROWS)
    normalised *= rstd
    wdy = dy
    if weight_ptr is not None:
        wdy = dy * (_load_per_col(weight_ptr, cols, n_cols, BLOCK_ROWS, BLOCK_COLS) + weight_offset)
    return dy, normalised, wdy, rstd


@kernel
def _row_means_kernel(
    dy_ptr,
    z_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    row_means_ptr,
    weight_offset: tl.float32,
    n_rows: tl.int64,
    n_cols: tl.int32,
    dy_row_stride: tl.int64,
    z_row_stride: tl.int64,
    ALIGN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """row_means = (mean(wdy * n), mean(wdy)) of each row, wdy = dy * (weight + weight_offset), n = (z - mean) * rstd

    What backward must know of a whole row before it can start, for rows too wide for a tile. row_means: [2, n_rows]
    float32. A program takes one row. Moves n_cols * (read dy, z) a row.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    dy_row_stride = with_divisor(dy_row_stride, ALIGN)
    z_row_stride = with_divisor(z_row_stride, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    wdy_n_sum = tl.zeros([1, BLOCK_COLS], tl.float32)
    wdy_sum = tl.zeros([1, BLOCK_COLS], tl.float32)
    for first_col in range(0, n_cols, BLOCK_COLS):
        _, normalised, wdy, _ = _load_dy(
            dy_ptr, z_ptr, mean_ptr, rstd_ptr, weight_ptr, weight_offset, dy_row_stride, z_row_stride,
            row, first_col, n_rows, n_cols, 1, BLOCK_COLS,
        )  # fmt: skip
        wdy_n_sum = tl.fma(wdy, normalised, wdy_n_sum)
        wdy_sum += wdy
    count = n_cols.to(tl.float32)
    tl.store(row_means_ptr + row, tl.div_rn(tl.sum(wdy_n_sum), count))
    tl.store(row_means_ptr + n_rows + row, tl.div_rn(tl.sum(wdy_sum), count))


@kernel
def _row_norm_bwd_kernel(
    # operands: three of [n_rows, n_cols], two of [n_rows], [n_cols], [2, n_rows]; None: not there
    dy_ptr,
    dz_ptr,
    z_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    row_means_ptr,
    # outputs: two of [n_rows, n_cols], three of [programs on axis 0, n_cols] float32; None: not wanted
    dx_ptr,
    dresidual_ptr,
    dbias_partials_ptr,
    dweight_partials_ptr,
    dnorm_bias_partials_ptr,
    # random numbers: philox.rng_arguments and dropout_arguments
    rng_ptr,
    seed: tl.int64,
    offset: tl.int64,
    drop_limit: tl.int64,
    keep_scale: tl.float32,
    # the plan's number
    weight_offset: tl.float32,
    # sizes, and strides in elements
    n_rows: tl.int64,
    n_cols: tl.int32,
    rows_per_program: tl.int32,
    dy_row_stride: tl.int64,
    dz_row_stride: tl.int64,
    z_row_stride: tl.int64,
    # chosen when compiled: `if` blocks on these, and on pointers that are None, disappear
    NORM: tl.constexpr,
    PHILOX_COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """dresidual = g = dz + rstd * (wdy - n * mean(wdy * n) - mean(wdy));  dx = dropout_backward(g)

    with n = (z - mean) * rstd, wdy = dy * (weight + weight_offset), and no mean(wdy) for RMSNorm; and over rows
    dbias = sum(dx), dweight = sum(dy * n), dnorm_bias = sum(dy).

    dy, dz, z, dx, dresidual: [n_rows, n_cols]. mean, rstd: [n_rows] float32. weight: [n_cols]. row_means: [2, n_rows]
    float32 of _row_means_kernel; None where a tile holds whole rows. Partials: [programs on axis 0, n_cols] float32.
    Program (i, j) walks rows_per_program rows of column tile j and keeps the sums over them in registers: the partition
    is the host's, so sums do not depend on the GPU. NORM = none: only dz counts.
    Moves a row: n_cols * (read dy, z, dz + write dx, dresidual) + 8 bytes; partials: 4 * n_cols a program and gradient.
    """
    n_cols = with_divisor(n_cols, ALIGN)
    dy_row_stride = with_divisor(dy_row_stride, ALIGN)
    dz_row_stride = with_divisor(dz_row_stride, ALIGN)
    z_row_stride = with_divisor(z_row_stride, ALIGN)
    program = tl.program_id(0).to(tl.int64)
    first_col = tl.program_id(1) * BLOCK_COLS
    cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
    seed, offset = load_rng(rng_ptr, seed, offset)
    count = n_cols.to(tl.float32)
    if dbias_partials_ptr is not None:
        dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    if dweight_partials_ptr is not None:
        dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    if dnorm_bias_partials_ptr is not None:
        dnorm_bias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)

    for step in range(0, rows_per_program, BLOCK_ROWS):
        first_row = program * rows_per_program + step
        in_tile, cols, inside = _tile_at(first_row, first_col, n_rows, n_cols, BLOCK_ROWS, BLOCK_COLS)
        out = first_row * n_cols
        if dz_ptr is not None:
            dz_ptrs = dz_ptr + first_row * dz_row_stride + (in_tile * dz_row_stride + cols)
            g = tl.load(dz_ptrs, mask=inside, other=0.0).to(tl.float32)
        if NORM != NORM_NONE:
            dy, normalised, wdy, rstd = _load_dy(
                dy_ptr, z_ptr, mean_ptr, rstd_ptr, weight_ptr, weight_offset, dy_row_stride, z_row_stride,
                first_row, first_col, n_rows, n_cols, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
            if dweight_partials_ptr is not None:
                dweight = tl.fma(dy, normalised, dweight)
            if dnorm_bias_partials_ptr is not None:
                dnorm_bias += dy
            if row_means_ptr is not None:
                wdy_n_mean = _load_per_row(row_means_ptr, first_row, n_rows, BLOCK_ROWS)
            else:
                wdy_n_mean = tl.div_rn(tl.sum(wdy * normalised, axis=1, keep_dims=True), count)
            through = tl.fma(normalised, -wdy_n_mean, wdy)
            if NORM == NORM_LAYER:
                if row_means_ptr is not None:
                    wdy_mean = _load_per_row(row_means_ptr + n_rows, first_row, n_rows, BLOCK_ROWS)
                else:
                    wdy_mean = tl.div_rn(tl.sum(wdy, axis=1, keep_dims=True), count)
                through -= wdy_mean
            through *= rstd
            if dz_ptr is not None:
                g += through
            else:
                g = through
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + out + (in_tile * n_cols + cols), g.to(dresidual_ptr.dtype.element_ty), mask=inside)
        if PHILOX_COLS > 0:
            rows = first_row + in_tile
            keep = keep_tile(seed, offset, rows, first_col, n_cols, drop_limit, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS)
            g = tl.where(keep, g * keep_scale, 0.0)
        if dx_ptr is not None:
            tl.store(dx_ptr + out + (in_tile * n_cols + cols), g.to(dx_ptr.dtype.element_ty), mask=inside)
        if dbias_partials_ptr is not None:
            dbias += g

    if dbias_partials_ptr is not None:
        tl.store(
            dbias_partials_ptr + program * n_cols + cols, tl.sum(dbias, axis=0, keep_dims=True), mask=cols < n_cols
        )
    if dweight_partials_ptr is not None:
        tl.store(
            dweight_partials_ptr + program * n_cols + cols, tl.sum(dweight, axis=0, keep_dims=True), mask=cols < n_cols
        )
    if dnorm_bias_partials_ptr is not None:
        tl.store(
            dnorm_bias_partials_ptr + program * n_cols + cols,
            tl.sum(dnorm_bias, axis=0, keep_dims=True),
            mask=cols < n_cols,
        )
