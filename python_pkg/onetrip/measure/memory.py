"""Bytes of tensors, the peak of what a call allocates, and the memory that is free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


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

    def tensors(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return [tensor for each in values for tensor in tensors(each)]

    return storage_bytes(tensors(dict(optimizer.state)))


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

    CUDA: what the driver has left and what torch's allocator holds unused. CPU: MemAvailable of Linux; elsewhere what
    psutil says, if it is installed.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


@contextmanager
def at_most_more(n_bytes: int | None) -> Iterator[None]:
    """Inside the with block an allocation on the CPU raises where this process would take more than n_bytes more.

    Without a limit Linux grants the allocation and kills the process when it writes to it. None, and systems other
    than Linux: no limit. Thread stacks count, and OpenMP aborts a process that cannot have them: torch's threads are
    started first.
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
