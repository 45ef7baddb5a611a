"""What is tested here is the same on every backend; the kernels have tests of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from onetrip import use_backend


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with use_backend("reference"):
        yield
