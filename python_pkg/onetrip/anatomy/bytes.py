"""The bytes of one training step, by class of tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..measure.traffic import Traffic
from .saved import SavedActivations

CLASSES = ("weights", "buffers", "gradients", "optimizer_states", "batch", "saved_activations", "temporaries")
"""What StepBytes.peak is made of."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one training step, once the optimizer has its states."""

    weights: int
    buffers: int
    gradients: int
    optimizer_states: int
    batch: int
    saved: SavedActivations
    """What the graph keeps for backward."""
    peak: int
    """The most at once, all included."""
    at_peak: dict[str, int] = field(default_factory=dict)
    """What the peak consists of, as MemTracker tells it apart; empty where it was measured."""
    traffic: Traffic | None = None
    """What the operators of the step read and write; None where it was measured."""

    @property
    def saved_activations(self) -> int:
        return self.saved.total

    @property
    def temporaries(self) -> int:
        """peak less all the rest; 0 where at the peak less than all of that was there."""
        return max(0, self.peak - sum(getattr(self, name) for name in CLASSES if name != "temporaries"))

    def to_dict(self) -> dict[str, Any]:
        traffic = None if self.traffic is None else self.traffic.to_dict()
        described = asdict(replace(self, traffic=None)) | {"traffic": traffic}
        return {name: getattr(self, name) for name in CLASSES} | described


def format_bytes(n: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"
