"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from onetrip import use_backend
from targets import TARGETS, Target, needs
from triton_runner import EMULATED

if EMULATED:
    from simulators import run_triton_on_the_emulator

    run_triton_on_the_emulator()


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Every (device, backend) that can run here; the backend is in use during the test."""
    needs(request.param)
    with use_backend(request.param.backend):
        yield request.param


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kernel backend of the card, in use during the test."""
    needs(Target("cuda", request.param))
    with use_backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def cuda() -> str:
    """The CUDA device, for tests that only it can run."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    return "cuda"
