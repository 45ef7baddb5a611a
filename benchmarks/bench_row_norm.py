"""The row_norm family: time forward, backward and both, beside eager PyTorch, torch.compile and a plain copy."""

from __future__ import annotations

import pytest
import torch
from onetrip.benchmarks.race import Race
from onetrip.benchmarks.row_norm import cases as cases
from onetrip.benchmarks.row_norm import providers
from onetrip.benchmarks.suite import Case
from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS, QUICK_ROUNDS = 31, 9


def test_row_norm(case: Case, device: torch.device, quick: bool, benchmark: BenchmarkFixture) -> None:
    race = Race(case, providers(case, device, quick), device)
    race.warm_up()
    benchmark.pedantic(race.round, rounds=QUICK_ROUNDS if quick else ROUNDS)
    benchmark.extra_info["record"] = race.record()
    own = {name: reason for name, reason in race.failures.items() if name.startswith("onetrip")}
    if own:
        pytest.fail(f"no number for what fails its check: {own}")
