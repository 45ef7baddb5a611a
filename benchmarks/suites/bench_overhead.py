"""What one eager call costs before any arithmetic: the wall time of every operator's forward on a tensor of 1 x 8.

On CUDA it is the time in which the host has enqueued the call; the device runs behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pytest
import torch
from onetrip.benchmarks.measure.cases import DTYPE_NAMES, Case, Operator, Outputs, Provider
from onetrip.benchmarks.measure.checks import Check, Truth, make_inputs
from onetrip.benchmarks.measure.providers import EAGER, own_provider, providers
from onetrip.benchmarks.measure.timing import summarise, timed_rounds
from onetrip.benchmarks.suites import row_norm, softmax
from pytest_benchmark.fixture import BenchmarkFixture

N_ROWS, N_COLS = 1, 8
ROUNDS, QUICK_ROUNDS = 301, 15
"""A second: of a fifth of one, a hiccup of the machine would be the median."""
CALLS = {"cpu": 200, "cuda": 50}
"""A sample is their mean, so that the clock itself costs nothing; on CUDA few enough for the queue of launches to hold
them all (1024 on today's drivers), or the host would wait for the device."""
OPERATORS = (*row_norm.SINGLE, *row_norm.FUSED, softmax.SOFTMAX, *softmax.ATTENTION_SOFTMAX.values())


@dataclass(frozen=True)
class OverheadCase:
    operator: Operator
    requires_grad: bool
    dtype: torch.dtype = torch.float32

    @property
    def id(self) -> str:
        dtype = "" if self.dtype == torch.float32 else f"-{DTYPE_NAMES[self.dtype]}"
        return f"overhead-{self.operator.name}-{'grad' if self.requires_grad else 'no_grad'}{dtype}"


def cases(quick: bool = False) -> list[OverheadCase]:
    return [OverheadCase(operator, grad) for operator in OPERATORS for grad in (False, True)]


def _racing(case: OverheadCase, device: torch.device, against: tuple[str, ...]) -> list[Provider]:
    """By default eager and onetrip without a scope: picking the backend is part of what a call costs."""
    own = own_provider(device)
    if not against:
        return [EAGER, Provider(own.name, own.bind)]
    small = Case(case.operator, N_ROWS, N_COLS, case.dtype, full=False)
    return [Provider(p.name, p.bind) if p.name == own.name else p for p in providers(small, device, against=against)]


def _microseconds_a_call(
    function: Callable[..., object], inputs: dict[str, torch.Tensor], device: torch.device
) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    calls = CALLS[device.type]
    start = time.perf_counter()
    for _ in range(calls):
        function(**inputs)
    return (time.perf_counter() - start) / calls * 1e6


def test_overhead(
    case: OverheadCase, device: torch.device, quick: bool, against: tuple[str, ...], benchmark: BenchmarkFixture
) -> None:
    inputs = make_inputs(case.operator, N_ROWS, N_COLS, case.dtype, device, seed=0)
    truth = Truth(case.operator, inputs)
    torch._dynamo.reset()
    racing = _racing(case, device, against)
    unavailable = {provider.name: provider.unavailable(device) for provider in racing}
    functions: dict[str, tuple[Provider, Callable[..., Outputs]]] = {}
    checks: dict[str, Check] = {}
    for provider in racing:
        if not unavailable[provider.name]:
            with provider.scope():
                try:
                    function = provider.bind(case.operator)
                except Exception as error:  # a provider that raises is reported, and the others are measured
                    checks[provider.name] = Check(False, f"{type(error).__name__}: {error}".splitlines()[0])
                    continue
                functions[provider.name] = provider, function
                checks[provider.name] = truth.check(function)
    tensors = {name: tensor.detach() for name, tensor in inputs.tensors.items()}
    for name, tensor in tensors.items():
        tensor.requires_grad_(case.requires_grad and inputs.tensors[name].requires_grad)
    samples: dict[str, list[float]] = {name: [] for name, check in checks.items() if check.passed}

    def one_round() -> None:
        for name, values in samples.items():
            provider, function = functions[name]
            with provider.scope():
                values.append(_microseconds_a_call(function, tensors, device))

    one_round()
    for values in samples.values():
        values.clear()
    timed_rounds(benchmark, one_round, QUICK_ROUNDS if quick else ROUNDS)
    benchmark.extra_info["record"] = {
        "case": case.id,
        "operator": case.operator.name,
        "dtype": DTYPE_NAMES[case.dtype],
        "n_rows": N_ROWS,
        "n_cols": N_COLS,
        "requires_grad": case.requires_grad,
        "providers": [
            {"name": name, "check": asdict(check)}
            | ({"forward": summarise(samples[name], "us")} if check.passed else {})
            for name, check in checks.items()
        ],
        "unavailable": {name: reason for name, reason in unavailable.items() if reason},
    }
    failed = {name: check.detail for name, check in checks.items() if not check.passed and name.startswith("onetrip")}
    if failed:
        pytest.fail(f"no number for what fails its check: {failed}")
