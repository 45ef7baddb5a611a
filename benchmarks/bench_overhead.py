"""What one eager call costs before any arithmetic: the wall time of the forward on a tensor of 1 x 8."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pytest
import torch
from onetrip.benchmarks.checks import Truth, make_inputs
from onetrip.benchmarks.providers import EAGER, own_provider
from onetrip.benchmarks.row_norm import BIAS_DROPOUT_RESIDUAL_LAYER_NORM, LAYER_NORM, RMS_NORM
from onetrip.benchmarks.suite import Operator
from onetrip.benchmarks.timing import summarise
from pytest_benchmark.fixture import BenchmarkFixture

N_ROWS, N_COLS = 1, 8
ROUNDS, QUICK_ROUNDS = 61, 15
CALLS = 200  # a sample is their mean, so that the clock itself costs nothing


@dataclass(frozen=True)
class OverheadCase:
    operator: Operator
    requires_grad: bool

    @property
    def id(self) -> str:
        return f"overhead-{self.operator.name}-{'grad' if self.requires_grad else 'no_grad'}"


def cases(quick: bool = False) -> list[OverheadCase]:
    operators = (LAYER_NORM, RMS_NORM, *BIAS_DROPOUT_RESIDUAL_LAYER_NORM.values())
    return [OverheadCase(operator, grad) for operator in operators for grad in (False, True)]


def _microseconds_a_call(function: Callable[..., object], inputs: dict[str, torch.Tensor]) -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        function(**inputs)
    return (time.perf_counter() - start) / CALLS * 1e6


def test_overhead(case: OverheadCase, device: torch.device, quick: bool, benchmark: BenchmarkFixture) -> None:
    inputs = make_inputs(case.operator, N_ROWS, N_COLS, torch.float32, device, seed=0)
    truth = Truth(case.operator, inputs)
    # Neither enters a scope: the backend is the one that `auto` picks, and picking it is part of the cost.
    functions = {provider.name: provider.bind(case.operator) for provider in (EAGER, own_provider(device))}
    checks = {name: truth.check(function) for name, function in functions.items()}
    tensors = {name: t.detach().requires_grad_(case.requires_grad) for name, t in inputs.tensors.items()}
    samples: dict[str, list[float]] = {name: [] for name, check in checks.items() if check.passed}

    def one_round() -> None:
        for name, values in samples.items():
            values.append(_microseconds_a_call(functions[name], tensors))

    one_round()
    for values in samples.values():
        values.clear()
    benchmark.pedantic(one_round, rounds=QUICK_ROUNDS if quick else ROUNDS)
    benchmark.extra_info["record"] = {
        "case": case.id,
        "operator": case.operator.name,
        "n_rows": N_ROWS,
        "n_cols": N_COLS,
        "requires_grad": case.requires_grad,
        "providers": [
            {"name": name, "check": asdict(check)}
            | ({"forward": summarise(samples[name], "us")} if check.passed else {})
            for name, check in checks.items()
        ],
    }
    failed = {name: check.detail for name, check in checks.items() if not check.passed and name != EAGER.name}
    if failed:
        pytest.fail(f"no number for what fails its check: {failed}")
