"""The softmax family: time forward, backward and both, beside eager PyTorch, torch.compile and a plain copy."""

from __future__ import annotations

import torch
from onetrip.benchmarks.measure.cases import Case
from onetrip.benchmarks.measure.providers import providers
from onetrip.benchmarks.measure.side_by_side import race
from onetrip.benchmarks.suites.softmax import cases as cases
from pytest_benchmark.fixture import BenchmarkFixture


def test_softmax(
    case: Case, device: torch.device, quick: bool, against: tuple[str, ...], benchmark: BenchmarkFixture
) -> None:
    race(case, providers(case, device, quick, against), device, quick, benchmark)
