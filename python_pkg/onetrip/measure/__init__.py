"""Measuring what a call takes: bytes saved for backward, peak bytes, free memory, wall time and its noise.

anatomy, methods, the benchmarks and the tests measure with these functions; what operators move is in traffic.py.
Nothing here knows onetrip's operators.
"""

from __future__ import annotations

import resource
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

SLOWED = 1.1
"""Slowdown by other processes: above it a time is doubtful."""


class Saved:
    """One saved tensor. The graph holds this object, so that a weak reference shows when the graph lets go of it."""

    __slots__ = ("__weakref__", "label", "order", "tensor")

    def __init__(self, tensor: Tensor, label: Any, order: int) -> None:
        self.tensor, self.label, self.order = tensor, label, order


def saved_tensors(function: Callable[[], Any], label: Callable[[], Any] | None = None) -> tuple[Any, list[Saved]]:
    """(What function returns, the tensors that its graph holds when it has returned, in the order of saving).

    A tensor appears as often as it was saved. label: called whenever a tensor is saved, for Saved.label.
    """
    held: weakref.WeakSet[Saved] = weakref.WeakSet()
    order = 0

    def pack(tensor: Tensor) -> Saved:
        nonlocal order
        # Detached: a node's own output comes with its grad_fn, a cycle through C++ that would never be freed.
        saved = Saved(tensor.detach(), None if label is None else label(), order)
        order += 1
        held.add(saved)
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        result = function()
    return result, sorted(held, key=lambda saved: saved.order)


def saved_bytes(function: Callable[[], object], excluded: Iterable[Tensor] = (), smallest: int = 0) -> int:
    """Bytes of the storages that the graph of what function returns keeps for backward.

    Each storage counts once and whole, also where a view of it was saved. excluded: tensors whose storages do not
    count, as a rule parameters, buffers and inputs. smallest: tensors of fewer elements do not count.
    """
    result, saved = saved_tensors(function)
    skip = {tensor.untyped_storage()._cdata for tensor in excluded}
    storages = {
        storage._cdata: storage.nbytes()
        for storage in (each.tensor.untyped_storage() for each in saved if each.tensor.numel() >= smallest)
    }
    del result
    return sum(n_bytes for address, n_bytes in storages.items() if address not in skip)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements, each tensor by itself."""
    return sum(t.numel() * t.element_size() for t in tensors)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors; of a tensor subclass those of its inner tensors."""
    plain: list[Tensor] = []
    for tensor in tensors:
        inner = getattr(tensor, "__tensor_flatten__", None)
        plain += [getattr(tensor, name) for name in inner()[0]] if inner is not None else [tensor]
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in plain)}
    return sum(storages.values())


def optimizer_state_bytes(optimizer: Any) -> int:
    """Bytes of the tensors in optimizer.state; 0 before the first step of most optimizers."""
    return storage_bytes(leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most memory that `run` had allocated at once, above what was allocated when it began.

    CUDA: torch's allocator statistics. CPU: every allocation and release of torch's CPU allocator, as the profiler
    records them. That figure is exact and repeatable; the resident set of the process is not (malloc keeps freed
    pages). Not seen: the scratch memory that a library takes from malloc itself, and the release of what was allocated
    before.
    """
    if device.type == "cuda":
        return cuda_peak_bytes(run, device)[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    return peak_of_trace(trace)


def cuda_peak_bytes(run: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """(peak_bytes, what the caching allocator had reserved beyond the peak)."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # earlier calls leave their blocks reserved
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return peak - before, torch.cuda.max_memory_reserved(device) - peak


def peak_of_trace(trace: profile) -> int:
    """Peak bytes of CPU memory in a trace taken with profile_memory=True; see peak_bytes."""
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    memory: list[Any] = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(memory, key=lambda e: e.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def free_bytes(device: torch.device) -> int | None:
    """Memory that this process can still allocate; None where the system does not tell.

    CUDA: what the driver has left and what torch's allocator holds unused. CPU: MemAvailable of Linux.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return _bytes_of("/proc/meminfo", "MemAvailable:")


def _bytes_of(path: str, field: str) -> int | None:
    """Bytes of a field of one of Linux' files; None where there is none."""
    with suppress(OSError), open(path) as file:
        return next((1024 * int(line.split()[1]) for line in file if line.startswith(field)), None)
    return None


@contextmanager
def at_most_more(n_bytes: int | None) -> Iterator[None]:
    """Inside the with block an allocation on the CPU raises where this process would take more than n_bytes more.

    Without a limit Linux grants the allocation and kills the process when it writes to it. None: no limit. Thread
    stacks count, and OpenMP aborts a process that cannot have them: torch's threads are started first.
    """
    torch.zeros(1 << 20, device="cpu").sum()
    held = _bytes_of("/proc/self/status", "VmData:")
    if n_bytes is None or held is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    known = [limit for limit in (held + n_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


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


class Slowdown:
    """How much slower a with block was because a thread of it waited for a CPU that others held.

    factor: 1.0 on a quiet machine; None where the system does not tell. Of the threads that ran at least half as long
    as the busiest one, that which waited longest for its work: the others wait for it.
    """

    factor: float | None = None

    def __enter__(self) -> Slowdown:
        self._before = _scheduled()
        return self

    def __exit__(self, *exception: object) -> None:
        spent = [
            (ran - self._before.get(thread, (0, 0))[0], waited - self._before.get(thread, (0, 0))[1])
            for thread, (ran, waited) in _scheduled().items()
        ]
        longest = max((ran for ran, _ in spent), default=0)
        busy = [waited / ran for ran, waited in spent if ran > 0 and 2 * ran >= longest]
        self.factor = 1.0 + max(busy) if busy else None


def _scheduled() -> dict[str, tuple[int, int]]:
    """Thread of this process -> nanoseconds that it ran, and that it waited for a CPU. Empty where the kernel does not
    tell (Documentation/scheduler/sched-stats.rst)."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # a thread that has ended
            ran, waited, _ = path.read_text().split()
            found[path.parent.name] = int(ran), int(waited)
    return found
