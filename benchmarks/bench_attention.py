"""Attention by sequence length: forward, backward, both, memory, beside eager, torch.compile and SDPA's backends."""

from __future__ import annotations

import torch
from onetrip.benchmarks.attention import cases as cases
from onetrip.benchmarks.providers import providers
from onetrip.benchmarks.race import race
from onetrip.benchmarks.suite import Case
from pytest_benchmark.fixture import BenchmarkFixture


def test_attention(
    case: Case, device: torch.device, quick: bool, against: tuple[str, ...], benchmark: BenchmarkFixture
) -> None:
    race(case, providers(case, device, quick, against), device, quick, benchmark)
