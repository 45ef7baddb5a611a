"""The operator that benchmarks/README.md adds is one."""

import re
import types

import pytest
import torch
from onetrip.benchmarks.measure.checks import Truth, make_inputs
from onetrip.benchmarks.measure.results import PACKAGE


def test_the_operator_of_the_readme_can_be_measured() -> None:
    readme = PACKAGE / "README.md"
    if not readme.is_file():
        pytest.skip("onetrip was installed from a wheel: there is no README beside it")
    suite = types.ModuleType("onetrip.benchmarks.suites.scaled_softmax")
    suite.__package__ = "onetrip.benchmarks.suites"
    exec(re.search(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)[1], vars(suite))
    operator = suite.cases()[0].operator
    truth = Truth(operator, make_inputs(operator, 8, 32, torch.float32, torch.device("cpu"), seed=0))
    for form in (operator.eager, operator.fused):
        assert truth.check(form).passed
    assert callable(suite.measure)
