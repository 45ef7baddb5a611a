"""What the tests of every family's native kernels run over: the instruction-set levels of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cpu_cases import cpu_level


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A family that has kernels of its own for more levels lists all of its levels in LEVELS."""
    if "level" in metafunc.fixturenames:
        levels = getattr(metafunc.module, "LEVELS", ("baseline", "avx2", "avx512"))
        metafunc.parametrize("level", levels, indirect=True)


@pytest.fixture
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with the kernels of one instruction-set level."""
    with cpu_level(request.param):
        yield request.param
