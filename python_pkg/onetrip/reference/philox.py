"""Philox4x32 with 7 rounds (Salmon et al. 2011) and the dropout mask made of it, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_KEY_STEP_A, _KEY_STEP_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7  # the fewest that pass BigCrush
_LOW = 0xFFFFFFFF

Rng = tuple[int, int] | Tensor
"""(seed, offset) as two ints, or as an int64 tensor of shape (2,)."""


def signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return word - 2**64 if word >= 2**63 else word


def dropout_threshold(p: float) -> int:
    """round(65536 * p), but 1 to 65535 for 0 < p < 1: an element is kept iff its 16 random bits are at least this."""
    return min(max(round(65536.0 * p), 1), 65535) if 0.0 < p < 1.0 else round(65536.0 * p)


def dropout_scale(p: float) -> float:
    """What kept elements are multiplied by: one over the share of them that the threshold keeps; 0 where it keeps none.

    So the expectation is exact, for the probability that was rounded to 1/65536.
    """
    threshold = dropout_threshold(p)
    return 65536.0 / (65536.0 - threshold) if threshold < 65536 else 0.0


def philox(rng: Rng, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each block.

    rng: key and first half of the counter. group: int64, any shape, the second half of the counter (element index //
    8).
    Returns four int64 tensors shaped like group, each in [0, 2^32).
    """
    seed, offset = rng.to(group.device).unbind() if isinstance(rng, Tensor) else rng
    # int64 products wrap modulo 2^64, and a shift followed by a mask reads the right bits of a wrapped product.
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    c0, c1 = torch.zeros_like(group) + (offset & _LOW), torch.zeros_like(group) + ((offset >> 32) & _LOW)
    c2, c3 = group & _LOW, (group >> 32) & _LOW
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0, c1, c2, c3 = ((b >> 32) & _LOW) ^ c1 ^ k0, b & _LOW, ((a >> 32) & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _KEY_STEP_A) & _LOW, (k1 + _KEY_STEP_B) & _LOW
    return c0, c1, c2, c3


def random_bits(count: int, rng: Rng, device: torch.device | str, first_element: int = 0) -> Tensor:
    """[count] int64: the 16 random bits of each element from first_element on.

    Element e takes word e % 8 // 2 of block e // 8: the lower 16 bits where e is even, the upper 16 where it is odd.
    """
    first_group = first_element // 8
    n_groups = (first_element + count + 7) // 8 - first_group
    group = torch.arange(first_group, first_group + n_groups, dtype=torch.int64, device=device)
    halves = [half for word in philox(rng, group) for half in (word & 0xFFFF, word >> 16)]
    skip = first_element - 8 * first_group
    return torch.stack(halves, dim=-1).flatten()[skip : skip + count]


def keep_mask(
    shape: tuple[int, ...], p: float, rng: Rng, device: torch.device | str = "cpu", first_element: int = 0
) -> Tensor:
    """Bool tensor: True where dropout keeps the element. Elements count in the contiguous order, from first_element."""
    count = math.prod(shape)
    return (random_bits(count, rng, device, first_element) >= dropout_threshold(p)).view(shape)


def dropout(values: Tensor, p: float, rng: Rng | None) -> Tensor:
    """rng None: what is dropped is 0 already."""
    if p == 0.0:
        return values
    scaled = values * dropout_scale(p)
    return scaled if rng is None else torch.where(keep_mask(tuple(values.shape), p, rng, values.device), scaled, 0.0)
