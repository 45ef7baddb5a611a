"""Whether a training step fits a memory, by how much, and with which batch size it still does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
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

    A peak never falls, and is linear in the batch size over wide stretches: between a size that fits and one that does
    not, a line through both tells where to look. Every other time the middle is tried: a line from below a kink can
    creep. The answer and the size above it have both been asked.
    """
    peaks: dict[int, int] = {}

    def fits(batch: int) -> bool:
        peaks[batch] = peak_of(batch)
        return peaks[batch] <= memory

    low, high = 0, 1
    while low < _LARGEST_BATCH and fits(high):
        low, high = high, min(8 * high, _LARGEST_BATCH)
    by_middle = False
    while high - low > 1:
        on_line = low + (memory - peaks[low]) * (high - low) // (peaks[high] - peaks[low])
        guess = (low + high) // 2 if by_middle else max(on_line, low + 1)
        by_middle = not by_middle
        low, high = (guess, high) if fits(guess) else (low, guess)
    return low, peaks.get(low)
