"""`pytest benchmarks/` checks the quick cases and runs one round of each; pytest's -k selects some by their ids.

With --benchmark-enable it measures the whole grid. It records nothing: that is what `onetrip bench` is for.
"""

from __future__ import annotations

import pytest
import torch
from onetrip.benchmarks.measure.cases import Session
from onetrip.benchmarks.run.runner import CasesPlugin
from onetrip.benchmarks.run.selection import Options, runnable, select


def pytest_configure(config: pytest.Config) -> None:
    device, quick = torch.device("cpu"), not config.option.benchmark_enable
    options = Options.parse(quick=quick)
    selected, _ = runnable(select(options), device, options)
    config.pluginmanager.register(CasesPlugin(selected, Session(device, quick)))
