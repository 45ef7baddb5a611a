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
_GROWTH = 8


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

    A peak is linear in the batch size over wide stretches, and never falls: two known sizes tell where to look (not far
    beyond what is known: where the optimizer's step holds the peak, small sizes all have the same). The answer and the
    size above it have both been asked. Every other time the middle is tried: a line from below a kink can creep.
    """
    low, high = 0, None
    peaks: dict[int, int] = {}

    def fits(batch: int) -> bool:
        nonlocal low, high
        peaks[batch] = peak_of(batch)
        if peaks[batch] <= memory:
            low = max(low, batch)
        else:
            high = batch if high is None else min(high, batch)
        return peaks[batch] <= memory

    if not fits(1):
        return 0, None
    fits(2)
    by_middle = True
    while (high is None or high - low > 1) and low < _LARGEST_BATCH:
        known = sorted(peaks)
        a, b = (low, high) if high is not None else (known[-2], known[-1])
        slope = (peaks[b] - peaks[a]) / (b - a)
        estimate = int(a + (memory - peaks[a]) / slope) if slope > 0 else _LARGEST_BATCH
        most = min(_GROWTH * low, _LARGEST_BATCH) if high is None else high - 1
        if high is not None and (by_middle := not by_middle):
            estimate = (low + high) // 2
        guess = max(low + 1, min(estimate, most))
        if fits(guess) and guess == estimate and guess + 1 != high and guess < _LARGEST_BATCH:
            fits(guess + 1)
    return low, peaks[low]
