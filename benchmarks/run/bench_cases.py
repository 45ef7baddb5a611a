"""The one test of the suite: a case is measured under pytest-benchmark, and fails where a check of ours failed."""

from __future__ import annotations

from functools import partial

import pytest
from onetrip.benchmarks.measure.cases import Named, Session, Skip
from onetrip.benchmarks.measure.results import own_failures
from onetrip.benchmarks.measure.timing import timed_rounds
from onetrip.benchmarks.run.selection import module
from pytest_benchmark.fixture import BenchmarkFixture


def test_case(suite: str, case: Named, session: Session, benchmark: BenchmarkFixture) -> None:
    try:
        record = module(suite).measure(case, session._replace(rounds=partial(timed_rounds, benchmark)))
    except Skip as reason:
        pytest.skip(str(reason))
    benchmark.extra_info["record"] = record | benchmark.extra_info.get("load", {})
    if failures := own_failures(record):
        pytest.fail(f"no number for what fails its check: {failures}")
