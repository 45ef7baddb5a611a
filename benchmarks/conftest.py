"""Options of the suite under pytest: those of `onetrip bench`, which passes them on.

`pytest benchmarks/` alone checks everything on the quick cases and runs one round of each; it records nothing.
`pytest benchmarks/ --benchmark-enable` measures the whole grid.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onetrip.benchmarks.measure.results import UsageError
from onetrip.benchmarks.run.options import Options
from onetrip.benchmarks.run.selection import cases_of

_REPEATABLE = {
    "--op": "a suite or an operator",
    "--dtype": "fp32, fp16 or bf16",
    "--shape": "ROWSxCOLS",
    "--pass": "forward, backward or both",
    "--against": "a provider",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("onetrip benchmarks")
    group.addoption(
        "--only", default=None, help="cases to run: a glob over ids, or a part of them; with commas, several"
    )
    group.addoption("--quick", action="store_true", help="fewer cases, fewer rounds")
    group.addoption("--bench-device", default="cpu", help="cpu or cuda")
    for name, words in _REPEATABLE.items():
        group.addoption(name, action="append", default=[], dest=f"bench_{name[2:]}", help=f"{words}; may be repeated")


def _options(config: pytest.Config) -> Options:
    given = config.option
    try:
        return Options.parse(
            given.only,
            given.quick or (given.benchmark_disable and not given.benchmark_enable),
            given.bench_op,
            given.bench_dtype,
            given.bench_shape,
            given.bench_pass,
            given.bench_against,
        )
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        try:
            cases = cases_of(Path(metafunc.module.__file__).stem.removeprefix("bench_"), _options(metafunc.config))
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        metafunc.parametrize("case", cases, ids=[case.id for case in cases])


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> bool:
    return _options(request.config).quick


@pytest.fixture
def against(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return _options(request.config).against


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.option.bench_device)
