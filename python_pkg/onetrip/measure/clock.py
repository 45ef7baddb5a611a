"""Wall time on a device, order statistics of samples, and the CPU time that other processes took meanwhile."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_CPUS_WORTH_A_WARNING = 0.25  # an idle desktop's own services stay below it
_IDLE_FIELDS = (3, 4)  # idle and iowait, of the first line of /proc/stat (proc(5))
_COUNTED_FIELDS = 8  # user to steal; guest time, which follows, is part of user


def now(device: torch.device) -> float:
    """Seconds of perf_counter, read when all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile of some samples."""

    median: float
    p20: float
    p80: float

    def to_dict(self) -> dict[str, float]:
        return dict(vars(self))


def spread(values: Sequence[float]) -> Spread:
    """values: at least one."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return Spread(statistics.median(values), fifths[0], fifths[3])


class BusyCpus:
    """Counts the CPUs that other processes kept busy during a with block.

    others: their mean number, 0.0 to the number of CPUs; None where the system has no /proc/stat. The machine's busy
    time minus that of this process and of its children that have ended. The counters advance every 10 ms: use blocks
    of a second and more.
    """

    others: float | None = None

    def __enter__(self) -> BusyCpus:
        self._start = _cpu_seconds()
        return self

    def __exit__(self, *exception: object) -> None:
        end = _cpu_seconds()
        if self._start is None or end is None:
            return
        wall, machine, own = (after - before for after, before in zip(end, self._start, strict=True))
        self.others = max(0.0, machine - own) / wall if wall > 0.0 else 0.0


def load_warning(others: float | None) -> str:
    """One sentence for a table of times where other processes were busy (BusyCpus.others); else ""."""
    if others is None or others < _CPUS_WORTH_A_WARNING:
        return ""
    return (
        f"Load: other processes kept {others:.1f} of {os.cpu_count()} CPUs busy during the timed steps; "
        "these times are too long and vary more."
    )


def _cpu_seconds() -> tuple[float, float, float] | None:
    """(Wall clock, busy time of all CPUs, CPU time of this process and its ended children), in seconds."""
    try:
        with open("/proc/stat") as file:
            ticks = [int(field) for field in file.readline().split()[1 : 1 + _COUNTED_FIELDS]]
    except OSError:
        return None
    busy = sum(ticks) - sum(ticks[field] for field in _IDLE_FIELDS)
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), own
