"""Attention by sequence length: forward, backward, both, memory, beside eager, torch.compile and SDPA's backends."""

from __future__ import annotations

import pytest
import torch
from onetrip.benchmarks.attention import cases as cases
from onetrip.benchmarks.attention import unavailable as unavailable
from onetrip.benchmarks.providers import providers
from onetrip.benchmarks.race import race
from onetrip.benchmarks.suite import Case
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
