"""Options of the suite under pytest, set by `python -m onetrip.benchmarks`.

`pytest benchmarks/` alone runs every check and one round of everything, and records nothing.
"""

from __future__ import annotations

import pytest
import torch
from onetrip.benchmarks.suite import selects


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("onetrip benchmarks")
    group.addoption("--only", default=None, help="cases to run: a glob over their ids, or a part of them")
    group.addoption("--quick", action="store_true", help="fewer cases, fewer rounds")
    group.addoption("--bench-device", default="cpu", help="cpu or cuda")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        options = metafunc.config.option
        cases = [case for case in metafunc.module.cases(options.quick) if selects(options.only, case.id)]
        metafunc.parametrize("case", cases, ids=[case.id for case in cases])


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> bool:
    return request.config.option.quick


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.option.bench_device)
