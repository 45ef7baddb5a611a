"""Dropout masks from Philox4x32-10, tile by tile: bit for bit those of csrc/common/philox.h."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rng(rng_ptr, seed, offset):
    """(seed, offset) as uint64 scalars: from rng_ptr, [2] int64, or the values given where it is None."""
    if rng_ptr is not None:
        seed = tl.load(rng_ptr)
        offset = tl.load(rng_ptr + 1)
    return seed.to(tl.uint64), offset.to(tl.uint64)


@triton.jit
def _philox(seed, offset, group):
    """Four uint32 words for each entry of group (int64, any shape): key = seed, counter = {offset, group}."""
    return tl.philox_impl(
        offset.to(tl.uint32),
        (offset >> 32).to(tl.uint32),
        group.to(tl.uint32),
        (group >> 32).to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )


@triton.jit
def _interleave_keep(seed, offset, group, drop_limit):
    """[rows, n] groups -> [rows, n, 4] bool: is the word above drop_limit?"""
    word0, word1, word2, word3 = _philox(seed, offset, group)
    # join makes a new last axis: (0, 2) and (1, 3) joined are [.., i, j] = word 2 * i + j, in a lane's own registers.
    even = tl.join(word0 > drop_limit, word2 > drop_limit)
    odd = tl.join(word1 > drop_limit, word3 > drop_limit)
    return tl.join(even, odd)


@triton.jit
def keep_tile(
    seed,
    offset,
    rows,
    first_col,
    n_cols,
    drop_limit,
    PHILOX_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """[BLOCK_ROWS, BLOCK_COLS] bool: which elements dropout keeps, those whose 32 random bits are above drop_limit.

    rows: [BLOCK_ROWS, 1] int64. first_col: of the tile, a multiple of BLOCK_COLS. drop_limit: round(p * 2^32) - 1.
    PHILOX_COLS: 4 where n_cols is a multiple of 4, so that a row is made of whole groups and one call serves four
    elements; else 1, and each element computes its group and takes one word of it.
    """
    drop_limit = drop_limit.to(tl.uint32)
    if PHILOX_COLS == 1:
        cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
        element = rows * n_cols + cols
        word0, word1, word2, word3 = _philox(seed, offset, element >> 2)
        lane = element & 3
        word = tl.where(lane < 2, tl.where(lane == 0, word0, word1), tl.where(lane == 2, word2, word3))
        return word > drop_limit
    else:
        group_cols = first_col // 4 + tl.arange(0, BLOCK_COLS // 4)[None, :]
        group = rows * (n_cols // 4) + group_cols
        return tl.reshape(_interleave_keep(seed, offset, group, drop_limit), (BLOCK_ROWS, BLOCK_COLS))


def philox_cols(n_cols: int) -> int:
    """keep_tile's PHILOX_COLS for rows of n_cols."""
    return 4 if n_cols % 4 == 0 else 1
