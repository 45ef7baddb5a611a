"""torch.jit.trace: its graph holds the operators themselves, not the memory that a kernel filled behind its back."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from onetrip import nn, patch_model
from operator_cases import assert_same, each_operator, results_and_gradients

pytestmark = pytest.mark.promise("jit")


@pytest.fixture(autouse=True)
def _without_warnings_of_the_tracer() -> Any:
    """Shapes that are checked in Python, dropout that its own check of the graph finds to differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@each_operator()
def test_a_traced_graph_gives_the_bits_of_eager_calls(target, operator, grad):
    """On other sizes, too, and with gradients that nobody wanted when it was traced."""
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(operator.call, tuple(operator.leaves(target, 3)))
    leaves = operator.leaves(target, 5)
    expected = results_and_gradients(operator.call, leaves)
    assert_same(results_and_gradients(traced, leaves), expected, operator.compare)


@pytest.mark.parametrize(
    "module", [nn.BiasDropoutResidualNorm(8, p=0.5), nn.BiasDropoutResidual(8, p=0.5), nn.Softmax(p=0.5)]
)
def test_each_run_of_a_traced_graph_draws_its_dropout_anew(target, module):
    module = module.to(target.device)
    tensors = [torch.randn(2, 4, 8, device=target.device) for _ in range(2)]
    traced = torch.jit.trace(module, tuple(tensors), check_trace=False)
    torch.manual_seed(3)
    first, second = traced(*tensors), traced(*tensors)
    torch.manual_seed(3)
    assert torch.equal(traced(*tensors), first) and not torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
def test_a_patched_module_is_traced_saved_and_loaded_elsewhere(tmp_path: Path, requires_grad: bool):
    """In a process that does no more than import onetrip."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), nn.Softmax())
    module.requires_grad_(requires_grad)
    patch_model(module)
    x = torch.randn(5, 8)
    torch.jit.trace(module, torch.randn(3, 8)).save(tmp_path / "traced.pt")
    torch.save((x, module(x).detach()), tmp_path / "outcome.pt")
    code = (
        "import onetrip, torch; x, y = torch.load('outcome.pt'); loaded = torch.jit.load('traced.pt')(x); "
        f"assert torch.equal(loaded, y) and loaded.requires_grad == {requires_grad}"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True)
