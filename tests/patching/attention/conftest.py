"""Scores and a mask that hides the last column."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.fixture
def scores() -> Tensor:
    return torch.randn(2, 2, 3, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mask() -> Tensor:
    return torch.zeros(2, 1, 1, 5).index_fill(3, torch.tensor([4]), torch.finfo(torch.float32).min)
