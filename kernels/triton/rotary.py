"""Rotary position embedding in Triton: `rotate` as every backend has it. The launcher and its one kernel.

y = x * cos + rotate(x) * sin for the heads of q and of k (Su et al. 2021, RoFormer), rotate(x) = cat(-x2, x1) of the
halves x1, x2 of the first n_rotated columns, or of their neighbours where interleaved; the other columns are copied.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..reference.rotary import OperandTuple, RotaryPlan, empty_adjacent
from .launch import LAUNCHES, Launch, cdiv, kernel, next_power_of_2, on_device_of
from .tiles import MAX_REGISTERS, with_divisor

_TILE_PAIRS = 512
"""Pairs of columns in a tile of a head, for 4 warps of 32 lanes: 4 a lane, beside as many of cos and of sin. 1024 take
up to 206 registers on sm_120."""
_HEADS_PER_PROGRAM = 4
"""Heads that share one tile of cos and sin: its bytes are then a quarter of a head's, also where no cache keeps
them."""


@triton.jit
def _rounded(value, like_ptr, ROUNDS: tl.constexpr):
    """value, rounded to the dtype that like_ptr points to where products are."""
    if ROUNDS:
        value = value.to(like_ptr.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _load_pairs(
    rows,
    there,
    N_ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """The first and the second column of each pair, [BLOCK_POSITIONS, BLOCK_PAIRS] float32. rows: where each position's
    columns start; there: which positions exist; both [BLOCK_POSITIONS, 1]."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        tile = tl.load(rows + cols, mask=there & (cols < N_ROTATED), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(tile, (BLOCK_POSITIONS, BLOCK_PAIRS, 2)))
    else:
        cols = tl.arange(0, BLOCK_PAIRS)[None, :]
        inside = there & (cols < N_ROTATED // 2)
        first = tl.load(rows + cols, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(rows + N_ROTATED // 2 + cols, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    rows,
    first,
    second,
    there,
    N_ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """As _load_pairs, rounded to what rows point to."""
    first, second = first.to(rows.dtype.element_ty), second.to(rows.dtype.element_ty)
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        tile = tl.reshape(tl.join(first, second), (BLOCK_POSITIONS, 2 * BLOCK_PAIRS))
        tl.store(rows + cols, tile, mask=there & (cols < N_ROTATED))
    else:
        cols = tl.arange(0, BLOCK_PAIRS)[None, :]
        inside = there & (cols < N_ROTATED // 2)
        tl.store(rows + cols, first, mask=inside)
        tl.store(rows + N_ROTATED // 2 + cols, second, mask=inside)


@triton.jit
def _rotate_head(
    x_rows,
    y_rows,
    there,
    first_cos,
    second_cos,
    first_sin,
    second_sin,
    N_ROTATED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_PASSED: tl.constexpr,
):
    """One head's block of positions; first_cos ... second_sin: what the columns of each pair are multiplied with."""
    a, b = _load_pairs(x_rows, there, N_ROTATED, INTERLEAVED, BLOCK_POSITIONS, BLOCK_PAIRS)
    first = _rounded(a * first_cos, x_rows, ROUNDS) + _rounded(b * first_sin, x_rows, ROUNDS)
    second = _rounded(b * second_cos, x_rows, ROUNDS) + _rounded(a * second_sin, x_rows, ROUNDS)
    _store_pairs(y_rows, first, second, there, N_ROTATED, INTERLEAVED, BLOCK_POSITIONS, BLOCK_PAIRS)
    if BLOCK_PASSED > 0:
        passed = N_ROTATED + tl.arange(0, BLOCK_PASSED)[None, :]
        inside = there & (passed < HEAD_DIM)
        tl.store(y_rows + passed, tl.load(x_rows + passed, mask=inside), mask=inside)


_STRIDES = [f"{name}_{of}_stride" for name in ("q", "k", "q_out", "k_out") for of in ("batch", "head", "position")]
_TABLE_STRIDES = [f"{name}_{of}_stride" for name in ("cos", "sin") for of in ("batch", "position")]
"""The kernel's arguments of these names, in the order in which the launch has their values."""


@kernel
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_batch_stride: tl.int64,
    q_head_stride: tl.int64,
    q_position_stride: tl.int64,
    k_batch_stride: tl.int64,
    k_head_stride: tl.int64,
    k_position_stride: tl.int64,
    q_out_batch_stride: tl.int64,
    q_out_head_stride: tl.int64,
    q_out_position_stride: tl.int64,
    k_out_batch_stride: tl.int64,
    k_out_head_stride: tl.int64,
    k_out_position_stride: tl.int64,
    cos_batch_stride: tl.int64,
    cos_position_stride: tl.int64,
    sin_batch_stride: tl.int64,
    sin_position_stride: tl.int64,
    n_q_heads: tl.int32,
    n_heads: tl.int32,
    n_positions: tl.int32,
    n_position_blocks: tl.int32,
    N_ROTATED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    ROUNDS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_PASSED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """q_out, k_out = x * cos + rotate(x) * sin; INVERSE: x * cos + rotate^T(x * sin), the gradients.

    q, k: [n_batch, heads, n_positions, HEAD_DIM] of one dtype, q_out, k_out: the same of one dtype; cos, sin:
    [n_batch, n_positions, N_ROTATED]; every last stride is 1, ALIGN divides the others. n_heads: of q and k together;
    head numbers are q's and then k's. Grid: (blocks of positions * n_batch, groups of HEADS heads). A program takes
    one block of positions of HEADS heads and reads cos and sin once. Arithmetic is float32; ROUNDS: each product is
    rounded to the dtype of q. Moves HEAD_DIM * (read x + write y) a row, and 2 * N_ROTATED / HEADS of cos and sin.
    Addresses are int64: batch * stride passes 2^31.
    """
    block = tl.program_id(0)
    batch = (block // n_position_blocks).to(tl.int64)
    positions = (block % n_position_blocks).to(tl.int64) * BLOCK_POSITIONS + tl.arange(0, BLOCK_POSITIONS)[:, None]
    there = positions < n_positions
    cos_rows = cos_ptr + with_divisor(batch * cos_batch_stride + positions * cos_position_stride, ALIGN)
    sin_rows = sin_ptr + with_divisor(batch * sin_batch_stride + positions * sin_position_stride, ALIGN)
    first_cos, second_cos = _load_pairs(cos_rows, there, N_ROTATED, INTERLEAVED, BLOCK_POSITIONS, BLOCK_PAIRS)
    first_sin, second_sin = _load_pairs(sin_rows, there, N_ROTATED, INTERLEAVED, BLOCK_POSITIONS, BLOCK_PAIRS)
    if INVERSE:
        first_sin, second_sin = second_sin, -first_sin
    else:
        first_sin = -first_sin
    for i in range(HEADS):
        head = (tl.program_id(1) * HEADS + i).to(tl.int64)
        if head < n_q_heads:
            x = batch * q_batch_stride + head * q_head_stride + positions * q_position_stride
            y = batch * q_out_batch_stride + head * q_out_head_stride + positions * q_out_position_stride
            _rotate_head(
                q_ptr + with_divisor(x, ALIGN),
                q_out_ptr + with_divisor(y, ALIGN),
                there,
                first_cos,
                second_cos,
                first_sin,
                second_sin,
                N_ROTATED,
                HEAD_DIM,
                INTERLEAVED,
                ROUNDS,
                BLOCK_POSITIONS,
                BLOCK_PAIRS,
                BLOCK_PASSED,
            )
        elif head < n_heads:
            head -= n_q_heads
            x = batch * k_batch_stride + head * k_head_stride + positions * k_position_stride
            y = batch * k_out_batch_stride + head * k_out_head_stride + positions * k_out_position_stride
            _rotate_head(
                k_ptr + with_divisor(x, ALIGN),
                k_out_ptr + with_divisor(y, ALIGN),
                there,
                first_cos,
                second_cos,
                first_sin,
                second_sin,
                N_ROTATED,
                HEAD_DIM,
                INTERLEAVED,
                ROUNDS,
                BLOCK_POSITIONS,
                BLOCK_PAIRS,
                BLOCK_PASSED,
            )


def _tile(n_rotated: int, head_dim: int, n_positions: int) -> tuple[int, int, int]:
    """Pairs of columns of a tile, columns that are passed on, positions."""
    pairs = next_power_of_2(n_rotated // 2)
    passed = next_power_of_2(head_dim - n_rotated) if head_dim > n_rotated else 0
    most = min(_TILE_PAIRS // pairs, 2 * _TILE_PAIRS // max(1, passed))
    return pairs, passed, max(1, min(most, next_power_of_2(n_positions)))


def rotate(operands: OperandTuple, plan: RotaryPlan) -> tuple[Tensor | None, Tensor | None]:
    """reference.rotary.rotate for tensors of last stride 1. Results are laid out as torch.empty_like does it."""
    q, k, cos, sin = operands
    q_out = None if q is None else empty_adjacent(q, plan.dtype)
    k_out = None if k is None else empty_adjacent(k, plan.dtype)
    some = k if q is None else q
    if some is None:
        return q_out, k_out
    n_q_heads = 0 if q is None else q.shape[1]
    n_heads = n_q_heads + (0 if k is None else k.shape[1])
    if some.shape[0] * n_heads * some.shape[2] == 0:
        return q_out, k_out
    # A tensor that is not there has no heads: the other one stands in its place, and is not used there.
    queries, keys = (k, k_out) if q is None else (q, q_out), (q, q_out) if k is None else (k, k_out)
    tensors = queries[0], keys[0], cos, sin, queries[1], keys[1]
    strides = tuple([tensor.stride() for tensor in tensors])
    rounds = some.dtype == cos.dtype == (plan.dtype or cos.dtype) != torch.float32
    with on_device_of(cos):
        _launch_of(plan, rounds, some.shape, (cos.shape, sin.shape), n_q_heads, n_heads, strides)(*tensors)
    return q_out, k_out


@functools.lru_cache(maxsize=LAUNCHES)
def _launch_of(
    plan: RotaryPlan,
    rounds: bool,
    shape: torch.Size,
    tables: tuple[torch.Size, torch.Size],
    n_q_heads: int,
    n_heads: int,
    strides: tuple[tuple[int, ...], ...],
) -> Launch:
    """shape: of q or k. tables: those of cos and sin. strides: of the kernel's tensors."""
    batch, _, n_positions, head_dim = shape
    n_rotated = tables[0][-1]
    pairs, passed, block_positions = _tile(n_rotated, head_dim, n_positions)
    n_position_blocks = cdiv(n_positions, block_positions)
    q, k, cos, sin, q_out, k_out = strides
    values = [*q[:3], *k[:3], *q_out[:3], *k_out[:3]]
    values += [*_table_strides(tables[0], cos), *_table_strides(tables[1], sin)]
    return Launch(
        _rotary_kernel,
        (n_position_blocks * batch, cdiv(n_heads, _HEADS_PER_PROGRAM)),
        **dict(zip([*_STRIDES, *_TABLE_STRIDES], values, strict=True)),
        n_q_heads=n_q_heads,
        n_heads=n_heads,
        n_positions=n_positions,
        n_position_blocks=n_position_blocks,
        N_ROTATED=n_rotated,
        HEAD_DIM=head_dim,
        INTERLEAVED=plan.interleaved,
        INVERSE=plan.inverse,
        ROUNDS=rounds,
        HEADS=_HEADS_PER_PROGRAM,
        BLOCK_POSITIONS=block_positions,
        BLOCK_PAIRS=pairs,
        BLOCK_PASSED=passed,
        ALIGN=math.gcd(16, *values),
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,  # a fused multiply-add would round once where torch rounds twice
    )


def _table_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, int]:
    """(batch, position); 0 where all sequences share the table."""
    batch = 0 if len(shape) == 2 or shape[0] == 1 else strides[0]
    return batch, strides[-2]
