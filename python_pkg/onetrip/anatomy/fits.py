"""Whether a training step fits a memory, by how much, and with which batch size it still does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .models import UsageError

CARDS = {
    "P100-16GB": 16,
    "V100-16GB": 16,
    "V100-32GB": 32,
    "T4": 16,
    "A10": 24,
    "A10G": 24,
    "A30": 24,
    "A40": 48,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "H100-80GB": 80,
    "H100-NVL": 94,
    "H200": 141,
    "RTX-2080-Ti": 11,
    "RTX-3060": 12,
    "RTX-3080": 10,
    "RTX-3090": 24,
    "RTX-4070": 12,
    "RTX-4080": 16,
    "RTX-4090": 24,
    "RTX-5080": 16,
    "RTX-5090": 32,
    "RTX-A6000": 48,
    "RTX-6000-Ada": 48,
}
"""Memory of NVIDIA's cards in GB, as published in their data sheets. See card_bytes for what of it a step can have."""

_ECC_IN_MEMORY = {"T4", "A10", "A10G", "A40", "L4", "L40", "L40S"}
"""Cards of GDDR6 with ECC on as they come. The bits of ECC take 6.25% (CUDA C++ Best Practices Guide, "Device Memory").
HBM has room of its own for them, and workstation cards come with ECC off."""
_DRIVER_AND_CONTEXT = 1 << 30
"""Of those cards: 0.4 to 0.6 GiB that the driver keeps back (torch's total of a T4 is 14.56 GiB of 15, of an L40 44.40
of 45), the rest for a CUDA context."""

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


def card_bytes(name: str) -> int:
    """What a step can have of the card's memory.

    The nominal size in 10^9 bytes: cards count in 2^30, 7% more, which is about what the driver and a CUDA context
    take. Less where ECC takes a part of the memory itself.
    """
    if name in _ECC_IN_MEMORY:
        return CARDS[name] * _UNITS["GIB"] * 15 // 16 - _DRIVER_AND_CONTEXT
    return CARDS[name] * _UNITS["GB"]


def memory_size(text: str) -> int:
    """Bytes of '16GB' (10^9), '24GiB' (2^30) or of a card by its name. Raises UsageError for anything else."""
    by_name = {name.lower(): name for name in CARDS}
    if card := by_name.get(text.lower().replace(" ", "-")):
        return card_bytes(card)
    size = _SIZE.fullmatch(text.strip())
    if size is None or size[2].upper() not in _UNITS or float(size[1]) == 0.0:
        raise UsageError(f"{text} is neither a size (16GB, 24GiB) nor one of the cards {', '.join(CARDS)}")
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
