"""What the tests of every family's native kernels run over: the instruction-set levels of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from onetrip.ops.common.backends import native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A family that has kernels of its own for more levels lists all of its levels in LEVELS."""
    if "level" in metafunc.fixturenames:
        levels = getattr(metafunc.module, "LEVELS", ("baseline", "avx2", "avx512"))
        metafunc.parametrize("level", levels, indirect=True)


@pytest.fixture
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with the kernels of one instruction-set level."""
    library = native()
    assert library is not None
    best = library.cpu_level()
    if not library.set_cpu_level(request.param):
        pytest.skip(f"this machine or build lacks {request.param}")
    assert library.cpu_level() == request.param
    yield request.param
    assert library.set_cpu_level(best)
