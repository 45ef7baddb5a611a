from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


def forget_launches() -> None:
    """Of every family: what was launched with other sizes of tiles must not be found again."""
    for name, module in list(sys.modules.items()):
        if name.startswith("onetrip.kernels."):
            for function in list(vars(module).values()):
                if hasattr(function, "cache_clear") and function.__module__ == name:
                    function.cache_clear()


@pytest.fixture(autouse=True)
def launches_made_anew() -> Iterator[None]:
    """Tests change the sizes of tiles, and put others in the place of kernels."""
    forget_launches()
    yield
    forget_launches()


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """torch.empty fills with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # references may use any operator
    yield
    torch.use_deterministic_algorithms(False)
