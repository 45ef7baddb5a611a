"""The bytes of one training step, by class of tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

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

    @property
    def saved_activations(self) -> int:
        return self.saved.total

    @property
    def temporaries(self) -> int:
        """peak less all the rest; 0 where at the peak less than all of that was there."""
        return max(0, self.peak - sum(getattr(self, name) for name in CLASSES if name != "temporaries"))

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CLASSES} | asdict(self)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Tensors in optimizer.state; 0 before the first step of most optimizers."""
    return tensor_bytes(t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


@contextmanager
def at_most_more(n_bytes: int | None) -> Iterator[None]:
    """An allocation fails, and torch says of how much, where this process would take more than so many bytes more.

    Else Linux grants it, and ends the process when it is written to. None, and another system: as without. Stacks of
    threads count, and OpenMP ends a process that cannot have them: torch's are started before.
    """
    torch.zeros(1 << 20).sum()
    try:
        import resource

        with open("/proc/self/status") as file:
            held = next(1024 * int(line.split()[1]) for line in file if line.startswith("VmData:"))
    except (ImportError, OSError, StopIteration):
        n_bytes = None
    if n_bytes is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    known = [limit for limit in (held + n_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def format_bytes(n: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"
