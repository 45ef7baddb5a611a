"""`pytest benchmarks/` checks the quick cases, one round of each, under pytest-benchmark; -k selects some by their ids.

With --benchmark-enable it measures the whole grid. It records nothing: that is what `onetrip bench` is for.
"""

from __future__ import annotations

import pytest
import torch
from onetrip.benchmarks.measure.cases import Named, Session, Skip
from onetrip.benchmarks.measure.results import own_failures
from onetrip.benchmarks.runner import Options, module, runnable, select
from pytest_benchmark.fixture import BenchmarkFixture

CPU = torch.device("cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    options = Options.parse(quick=not metafunc.config.option.benchmark_enable)
    selected, _ = runnable(select(options), CPU, options)
    cases = [(suite, case) for suite, members in selected.items() for case in members]
    metafunc.parametrize(("suite", "case"), cases, ids=[case.id for _, case in cases])


def test_case(suite: str, case: Named, benchmark: BenchmarkFixture) -> None:
    session = Session(CPU, quick=benchmark.disabled, rounds=lambda function, n: benchmark.pedantic(function, rounds=n))
    try:
        record = module(suite).measure(case, session)
    except Skip as reason:
        pytest.skip(str(reason))
    assert not own_failures(record)
