"""Where kernels can run: every (device, backend), and why one cannot be tested here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from onetrip import use_backend
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
TARGETS_WITHOUT_CUDA_KERNELS = [target for target in TARGETS if target.id != "cuda/cuda"]
"""Where families can run that the cuda backend has no kernels of."""


def target_fixture(targets: list[Any]) -> Any:
    """A fixture: each of the targets that can run here; its backend is in use during the test."""

    @pytest.fixture(params=targets)
    def target(request: pytest.FixtureRequest) -> Iterator[Target]:
        needs(request.param)
        with use_backend(request.param.backend):
            yield request.param

    return target


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


@contextmanager
def without_synchronising() -> Iterator[None]:
    """What waits for the GPU inside the with block raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def after_a_slow_producer(source: Tensor, use: Callable[[Tensor], Any]) -> Any:
    """use(a tensor that gets the values of source only after a while), all on a stream of its own; done on return."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pending = torch.zeros_like(source)
        torch.cuda._sleep(100_000_000)
        pending.copy_(source)
        result = use(pending)
    torch.cuda.current_stream().wait_stream(stream)
    return result


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
