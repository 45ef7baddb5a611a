"""Random bits and dropout masks from Philox4x32 with 7 rounds, tile by tile: the bits of csrc/common/philox.h."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import triton
import triton.language as tl

from ..reference.philox import dropout_scale, dropout_threshold, signed

_ROUNDS = tl.constexpr(7)


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
        n_rounds=_ROUNDS,
    )


@triton.jit
def _halves(word0, word1):
    """Two words for each place -> [..., 2, 2] uint32: of each word the lower half, shifted up, and the word itself."""
    return tl.join(tl.join(word0 << 16, word1 << 16), tl.join(word0, word1))


@triton.jit
def random_tile(
    seed,
    offset,
    rows,
    first_col,
    n_cols,
    PHILOX_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """[BLOCK_ROWS, BLOCK_COLS] uint32: the 16 random bits of each element of a matrix, above 16 bits of no meaning.

    rows: [BLOCK_ROWS, 1] int64. first_col: of the tile, a multiple of BLOCK_COLS.
    PHILOX_COLS: 8 where n_cols is a multiple of 8, so that a row is made of whole groups and one call serves eight
    elements; 4 where it is one of 4: a call for each half of a group. Else 1: each element computes its group.
    """
    if PHILOX_COLS == 1:
        cols = first_col + tl.arange(0, BLOCK_COLS)[None, :]
        element = rows * n_cols + cols
        word0, word1, word2, word3 = _philox(seed, offset, element >> 3)
        word01 = tl.where((element & 2) == 0, word0, word1)
        word23 = tl.where((element & 2) == 0, word2, word3)
        word = tl.where((element & 4) == 0, word01, word23)
        return tl.where((element & 1) == 0, word << 16, word)
    else:
        # join makes a new last axis, in a lane's own registers: the outermost of what a group holds comes first.
        cols = first_col // PHILOX_COLS + tl.arange(0, BLOCK_COLS // PHILOX_COLS)[None, :]
        piece = rows * (n_cols // PHILOX_COLS) + cols
        if PHILOX_COLS == 8:
            word0, word1, word2, word3 = _philox(seed, offset, piece)
            halves = _halves(tl.join(word0, word2), tl.join(word1, word3))
        else:
            tl.static_assert(PHILOX_COLS == 4)
            word0, word1, word2, word3 = _philox(seed, offset, piece >> 1)
            first = (piece & 1) == 0
            halves = _halves(tl.where(first, word0, word2), tl.where(first, word1, word3))
        return tl.reshape(halves, (BLOCK_ROWS, BLOCK_COLS))


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
    """[BLOCK_ROWS, BLOCK_COLS] bool: which elements dropout keeps. As random_tile. drop_limit: dropout_arguments."""
    # No bit below an element's own can decide, as drop_limit's are ones.
    random = random_tile(seed, offset, rows, first_col, n_cols, PHILOX_COLS, BLOCK_ROWS, BLOCK_COLS)
    return random > drop_limit.to(tl.uint32)


def philox_cols(n_cols: int) -> int:
    """random_tile's PHILOX_COLS for rows of n_cols."""
    return 8 if n_cols % 8 == 0 else 4 if n_cols % 4 == 0 else 1


def rng_arguments(rng: tuple[int, int] | Tensor | None, draws: bool) -> tuple[Tensor | None, int, int]:
    """The kernels' arguments rng_ptr, seed and offset. rng: (seed, offset), or an int64 tensor of the two; any where
    nothing is drawn."""
    if not draws:
        return None, 0, 0
    assert rng is not None
    if isinstance(rng, Tensor):
        return rng, 0, 0
    seed, offset = rng
    return None, signed(seed), signed(offset)


def dropout_arguments(dropout_p: float, n_cols: int) -> dict[str, Any]:
    """The kernels' arguments drop_limit, keep_scale and PHILOX_COLS. An element is kept iff its 16 bits, above any 16
    others, exceed drop_limit."""
    threshold = dropout_threshold(dropout_p)
    if threshold == 0:
        return {"drop_limit": 0, "keep_scale": 1.0, "PHILOX_COLS": 0}
    return {
        "drop_limit": (threshold << 16) - 1,
        "keep_scale": dropout_scale(dropout_p),
        "PHILOX_COLS": philox_cols(n_cols),
    }
