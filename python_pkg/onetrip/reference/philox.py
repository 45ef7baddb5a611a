"""Philox4x32-10 (Salmon et al. 2011) and the dropout mask made of it, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_KEY_STEP_A, _KEY_STEP_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF

Rng = tuple[int, int] | Tensor
"""(seed, offset) as two ints, or as an int64 tensor of shape (2,)."""


def dropout_threshold(p: float) -> int:
    """round(p * 2^32): an element is kept iff its 32 random bits are at least this."""
    return round(p * 4294967296.0)


def dropout_scale(p: float) -> float:
    """What kept elements are multiplied by: 1 / (1 - p), and 0 where p = 1 keeps none."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def philox(rng: Rng, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each block.

    rng: key and first half of the counter. group: int64, any shape, the second half of the counter (element index //
    4).
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


def keep_mask(
    shape: tuple[int, ...], p: float, rng: Rng, device: torch.device | str = "cpu", first_element: int = 0
) -> Tensor:
    """Bool tensor: True where dropout keeps the element.

    Element e counts in the contiguous logical order, from first_element, and takes word e % 4 of block e // 4.
    """
    count = 1
    for size in shape:
        count *= size
    first_group = first_element // 4
    n_groups = (first_element + count + 3) // 4 - first_group
    group = torch.arange(first_group, first_group + n_groups, dtype=torch.int64, device=device)
    bits = torch.stack(philox(rng, group), dim=-1).flatten()
    skip = first_element - 4 * first_group
    return (bits[skip : skip + count] >= dropout_threshold(p)).view(shape)
