"""Attention by sequence length: forward, backward, both, memory, beside eager, torch.compile and SDPA's backends."""

from __future__ import annotations

import pytest
import torch
from onetrip.benchmarks.measure.cases import Case
from onetrip.benchmarks.measure.providers import providers
from onetrip.benchmarks.measure.side_by_side import race
from onetrip.benchmarks.suites.attention import cases as cases
from onetrip.benchmarks.suites.attention import unavailable as unavailable
from pytest_benchmark.fixture import BenchmarkFixture


def test_attention(
    case: Case,
    device: torch.device,
    quick: bool,
    against: tuple[str, ...],
    benchmark: BenchmarkFixture,
    request: pytest.FixtureRequest,
) -> None:
    if not request.config.option.bench_dtype and (reason := unavailable(case, device)):
        pytest.skip(reason)
    race(case, providers(case, device, quick, against), device, quick, benchmark)
