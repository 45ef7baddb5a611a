"""Bytes: what autograd keeps for the backward pass, and the peak of what a call allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .cases import Case


def saved_bytes(function: Callable[[], object], excluded: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages that autograd saves while function runs, less those of the excluded tensors."""
    skip = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    storages: dict[int, torch.UntypedStorage] = {}  # holding them keeps an address from being given out twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    del result
    return sum(storage.nbytes() for storage in storages.values())


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The most that was allocated at one time while function ran, above what was there before.

    CPU: from the allocations that torch's profiler records, so that it counts bytes asked for, not pages.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = allocated = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    import psutil

    return psutil.virtual_memory().available


def needed_bytes(case: Case) -> int:
    """The least that a race over a case holds at one time: three sets of inputs and incoming gradients, the two tensors
    of the copy, and the truth in float64: inputs, gradients of inputs and outputs, and what stands between."""
    elements = case.n_rows * case.n_cols
    matrices = len(case.operator.matrices)
    given = elements * ((3 * (matrices + 1) + 2) * case.dtype.itemsize + (2 * matrices + 1) * 8)
    return given + case.operator.between(case.n_rows, case.n_cols) * 8


def shortage(case: Case, device: torch.device) -> str:
    """By how much a case does not fit into what is free; empty where it does."""
    needed, free = needed_bytes(case), _free_bytes(device)
    if needed <= free:
        return ""
    gib = [value / (1 << 30) for value in (needed, free, needed - free)]
    return f"needs at least {gib[0]:.1f} GiB, {gib[1]:.1f} GiB are free ({gib[2]:.1f} GiB too much)"
