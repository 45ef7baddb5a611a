"""Where kernels can run: every (device, backend), and why one cannot be tested here."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from onetrip.ops.common.backends import unavailable_reason


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
