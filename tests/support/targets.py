"""Where kernels can run: every (device, backend), and why one cannot be tested here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from onetrip.ops.common.backends import unavailable_reason
from torch import Tensor


class Target(NamedTuple):
    """Where an operator runs, and by which backend."""

    device: str
    backend: str


TARGETS = [
    pytest.param(Target("cpu", "reference"), id="cpu/reference"),
    pytest.param(Target("cpu", "cpu"), id="cpu/cpu"),
    pytest.param(Target("cuda", "cuda"), id="cuda/cuda", marks=pytest.mark.gpu),
    pytest.param(Target("cuda", "triton"), id="cuda/triton", marks=pytest.mark.gpu),
]


def needs(target: Target) -> None:
    """Skips the test, with the reason, where the target cannot run."""
    if target.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    reason = unavailable_reason(target.backend, target.device)
    if reason:
        pytest.skip(f"{target.backend} on {target.device}: {reason}")


def needs_memory(gigabytes: int) -> None:
    """Skips the test where the GPU has less free memory."""
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of free device memory, {free} are free")


def assert_masks_are_new_and_follow_the_seed(step: Callable[[], tuple[Tensor, ...]]) -> None:
    """step: gives tensors that are zero where an element was dropped, and nowhere else."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    def replays(seed: int) -> list[Tensor]:
        torch.cuda.manual_seed(seed)
        found = []
        for _ in range(3):
            graph.replay()
            kept, *others = (tensor != 0.0 for tensor in outputs)
            assert all(torch.equal(kept, other) for other in others)  # forward and backward of one replay share it
            found.append(kept)
        return found

    first, again, other = replays(1), replays(1), replays(2)
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
