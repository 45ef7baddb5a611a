"""Clocks that time one call on cold caches, and the order statistics that are reported."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from onetrip.environment import last_level_cache_bytes
from onetrip.measure import Slowdown, spread

T = TypeVar("T")

_CUDA_FLUSH_BYTES = 256 << 20  # five times the L2 of an H200, twice that of a B200
_CUDA_FLUSHES = 12  # about 1 ms on an H100, more than the host takes for most calls
_WARM_UP_CALLS = 3


class Clock:
    """perf_counter. Evicts by reading (not writing: dirty lines would be written back inside the timed region) a buffer
    of twice the last-level cache."""

    def __init__(self) -> None:
        self._flush = torch.ones(2 * last_level_cache_bytes() // 4)

    def evict(self) -> None:
        """Make sure that nothing the next call reads lies in a cache."""
        self._flush.sum()

    def time(self, function: Callable[[], T]) -> tuple[float, T]:
        """Milliseconds of one call, and what it returned."""
        start = time.perf_counter()
        result = function()
        return (time.perf_counter() - start) * 1e3, result

    def captured(self, function: Callable[[], object]) -> Callable[[], object] | None:
        """A replay of the kernels that function launches, without its host code; None on a CPU. Raises where a capture
        is impossible."""
        return None


class CudaClock(Clock):
    """CUDA events. Evicts by writing 256 MB a dozen times, which keeps an H100 busy for about 1 ms: the host enqueues a
    call meanwhile, and what it takes longer than that is in the time. (The suite overhead measures the host.)"""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(_CUDA_FLUSH_BYTES, dtype=torch.int8, device=device)
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def evict(self) -> None:
        for _ in range(_CUDA_FLUSHES):
            self._flush.zero_()

    def time(self, function: Callable[[], T]) -> tuple[float, T]:
        self._start.record()
        result = function()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end), result

    def captured(self, function: Callable[[], object]) -> Callable[[], object] | None:
        """As a CUDA graph: warmed up on a side stream, as a capture needs it, then captured there.

        The outputs live in the graph's own memory and are given up at once: the replay is for its time alone.
        """
        side = torch.cuda.Stream(self._flush.device)
        side.wait_stream(torch.cuda.current_stream(self._flush.device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_CALLS):
                function()
        torch.cuda.current_stream(self._flush.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                function()
        except Exception:
            # The capture never told the generator that it ended: a clone of its state is not in one.
            generator = torch.cuda.default_generators[self._flush.device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        return graph.replay


def rotated(items: list[T], rounds: int) -> list[T]:
    """The items, each round beginning with another one."""
    first = rounds % max(len(items), 1)
    return items[first:] + items[:first]


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else Clock()


class Rounds:
    """rounds(function, n) calls function n times, without garbage collection. cpu_slowdown: as Slowdown.factor."""

    cpu_slowdown: float | None = None

    def __call__(self, function: Callable[[], T], rounds: int) -> T:
        collects = gc.isenabled()
        gc.disable()
        try:
            with Slowdown() as slowdown:
                for _ in range(rounds):
                    result = function()
        finally:
            if collects:
                gc.enable()
        self.cpu_slowdown = slowdown.factor
        return result


def summarise(samples: list[float], unit: str) -> dict[str, float | int]:
    """Median and 20th and 80th percentile, under keys that carry the unit."""
    figures = spread(samples).to_dict()
    return {**{f"{name}_{unit}": value for name, value in figures.items()}, "samples": len(samples)}


def at_speed(samples: list[float], n_bytes: float, copy_gb_per_s: float | None = None) -> dict[str, float | int]:
    """summarise() of milliseconds, the GB/s of so many bytes a call, and their share of a copy's."""
    figures = summarise(samples, "ms")
    figures["gb_per_s"] = n_bytes / figures["median_ms"] / 1e6
    if copy_gb_per_s is not None:
        figures["share_of_copy"] = figures["gb_per_s"] / copy_gb_per_s
    return figures
