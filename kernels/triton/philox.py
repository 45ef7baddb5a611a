"""Dropout masks from Philox4x32-10, tile by tile: bit for bit those of csrc/common/philox.h."""

from __future__ import annotations

from typing import Any

from torch import Tensor

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


def dropout_scale(dropout_p: float) -> float:
    """What kept elements are multiplied by; 0 where p = 1 keeps none."""
    return 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0


def dropout_arguments(rng: tuple[int, int] | Tensor | None, dropout_p: float, n_cols: int) -> dict[str, Any]:
    """The kernels' arguments for it. An element is kept iff its 32 bits are above drop_limit: p = 1 keeps none."""
    drop_limit = round(dropout_p * 2.0**32) - 1
    if drop_limit < 0:
        return {"rng_ptr": None, "seed": 0, "offset": 0, "drop_limit": 0, "keep_scale": 1.0, "PHILOX_COLS": 0}
    assert rng is not None
    state, (seed, offset) = (rng, (0, 0)) if isinstance(rng, Tensor) else (None, rng)
    return {
        "rng_ptr": state,
        "seed": _signed(seed),
        "offset": _signed(offset),
        "drop_limit": drop_limit,
        "keep_scale": dropout_scale(dropout_p),
        "PHILOX_COLS": philox_cols(n_cols),
    }


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return (word + 2**63) % 2**64 - 2**63
