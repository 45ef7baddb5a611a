"""Fixtures of the tests of patching."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from onetrip.patching import calls, links
from patching_cases import WIDTH, Model
from torch import Tensor


@pytest.fixture(autouse=True)
def _small_sums_are_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' tensors are small."""
    monkeypatch.setattr(calls, "SMALLEST", 0)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def no_link_is_left() -> Iterator[None]:
    """Fails the test that leaves a sum waiting for its norm, or a norm's result."""
    yield
    assert not links._recent
    assert all(slot.result is None for slot in links._slots.values())


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch adds the gradients of gathered rows (batched_mm's weights) in any order where threads share them."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
