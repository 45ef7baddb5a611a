"""What the tests of every family's CUDA kernels run over: the architectures that they are compiled for."""

from __future__ import annotations

import pytest

from tools.sass.cuda_compile import ARCHITECTURES, Kernel, measure, missing_compiler


@pytest.fixture(params=ARCHITECTURES, ids=lambda arch: f"sm_{arch}", scope="module")
def arch(request: pytest.FixtureRequest) -> int:
    reason = missing_compiler(request.param)
    if reason:
        pytest.skip(reason)
    return int(request.param)


@pytest.fixture(scope="module")
def kernels(arch: int, request: pytest.FixtureRequest) -> list[Kernel]:
    """Those of the module's FAMILY."""
    return measure(request.module.FAMILY, arch)
