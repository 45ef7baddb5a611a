from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def launches_made_anew() -> Iterator[None]:
    """Tests change the sizes of tiles; what an earlier one launched with must not be found again."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("onetrip.kernels."):
            for function in list(vars(module).values()):
                if hasattr(function, "cache_clear"):
                    function.cache_clear()
