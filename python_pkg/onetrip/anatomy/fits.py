"""Whether a training step fits a memory, by how much, and with which batch size it still does."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from .models import UsageError

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", re.IGNORECASE)
_LARGEST_BATCH = 1 << 20


@dataclass(frozen=True)
class Fit:
    """A column of the comparison in a memory of this many bytes."""

    memory: int
    peak: int
    largest_batch: int
    """With which the predicted peak still fits; 0 where not even one does."""
    peak_at_largest: int | None

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory

    @property
    def margin(self) -> int:
        """What is left; what is missing, where negative."""
        return self.memory - self.peak

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits, "margin": self.margin}


def memory_size(text: str) -> int:
    """Bytes of '16GB' (10^9) or '24GiB' (2^30). Raises UsageError for anything else."""
    size = _SIZE.fullmatch(text.strip())
    if size is None or size[2].upper() not in _UNITS or float(size[1]) == 0.0:
        raise UsageError(f"--fits must be a size as 16GB or 24GiB, got {text} (--gpu takes the name of a GPU)")
    return int(float(size[1]) * _UNITS[size[2].upper()])


def largest_batch(peak_of: Callable[[int], int], memory: int) -> tuple[int, int | None]:
    """(The largest batch size whose peak is at most memory, that peak), (0, None) where there is none.

    A peak never falls with the batch size. The answer and the size above it have both been asked.
    """
    peak_of = cache(peak_of)
    low, high = 0, 1
    while high < _LARGEST_BATCH and peak_of(high) <= memory:
        low, high = high, min(8 * high, _LARGEST_BATCH)
    found = low + bisect_right(range(low + 1, high + 1), memory, key=peak_of)
    return found, peak_of(found) if found else None
