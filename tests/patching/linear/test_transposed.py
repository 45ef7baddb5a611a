"""Linear layers whose weight is (n_inputs, n_outputs), as GPT-2's: their bias is left to the sum or activation."""

from __future__ import annotations

import copy
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import calls, patch_model
from outcomes import Outcome, assert_agree, outcome, patch_and_compare
from patching_cases import WIDTH, randomised, written
from torch import Tensor, nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")
Conv1D = transformers.pytorch_utils.Conv1D


class Mlp(nn.Module):
    """As GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.dropout = Conv1D(2 * WIDTH, WIDTH), Conv1D(WIDTH, 2 * WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.c_fc(x))
        x = self.c_proj(x)
        x = self.dropout(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


@pytest.fixture
def model() -> Any:
    return randomised(Block()).train()


def biases_summed(model: nn.Module, x: Tensor) -> int:
    """How many gradients take a pass of their own."""
    found = traffic(lambda: outcome(model, x)).operators.get(("backward", "aten::sum"))
    return 0 if found is None else found.calls


def test_no_pass_for_the_gradient_of_the_bias(model: Any, x: Tensor) -> None:
    expected, before = outcome(model, x), biases_summed(model, x)
    report = patch_model(model)
    assert report.calls().keys() == {"", "norm", "mlp"}
    assert_agree(outcome(model, x), expected)
    assert all(counts == (1, 0) for counts in report.calls().values())
    assert (before, biases_summed(model, x)) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(model: Any, dtype: torch.dtype, x: Tensor) -> None:
    def found() -> Outcome:
        with torch.autocast("cpu", dtype):
            return outcome(model, x)

    patch_and_compare(model, found, relative=2e-2)


def test_hooks_see_the_whole_result(model: Any, x: Tensor) -> None:
    seen: list[Tensor] = []
    expected = copy.deepcopy(model.mlp.c_fc)(model.norm(x))
    patch_model(model)
    model.mlp.c_fc.register_forward_hook(lambda _, given, y: seen.append(y))
    model.mlp.c_proj.register_forward_hook(lambda _, given, y: seen.append(y))
    model(x)
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], expected)


SHIFTED = """
    size_out = (*x.size()[:-1], self.nf)
    x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight + 1.0)
    return x.view(size_out)"""
TWICE_THE_BIAS = SHIFTED.replace("self.weight + 1.0", "self.weight, beta=2.0")
BY_LINEAR = "return functional.linear(x, self.weight.t(), self.bias)"


class Inherited(Conv1D):
    """Adds nothing."""


class OwnCall(Conv1D):
    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = 2.0 * super().__call__(x)
        return result


OTHERS = [OwnCall, *(written(Conv1D, body, globals()) for body in (SHIFTED, TWICE_THE_BIAS, BY_LINEAR))]


@pytest.mark.parametrize("cls", OTHERS, ids=["own call", "shifted", "twice the bias", "by linear"])
def test_other_forwards_are_called(cls: Any, x: Tensor) -> None:
    model = Block()
    model.mlp.c_fc, model.mlp.c_proj = cls(2 * WIDTH, WIDTH), cls(WIDTH, 2 * WIDTH)
    expected = outcome(randomised(model), x)
    patch_model(model)
    assert not calls.is_transposed(cls)
    assert_agree(outcome(model, x), expected)


def test_another_torch_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = textwrap.dedent(inspect.getsource(Conv1D))
    (tmp_path / "other_torch.py").write_text(f"from torch import nn\nclass torch: addmm = None\n{source}")
    monkeypatch.syspath_prepend(tmp_path)
    assert not calls.is_transposed(importlib.import_module("other_torch").Conv1D)


def test_a_subclass_that_adds_nothing_is_one() -> None:
    assert calls.is_transposed(Inherited) and not calls.is_transposed(nn.Linear) and not calls.is_transposed(nn.GELU)


def test_a_layer_exchanged_later_is_called(model: Any, x: Tensor) -> None:
    patch_model(model)
    layer = model.mlp.c_fc
    model.mlp.c_fc = nn.Linear(WIDTH, 2 * WIDTH)
    model.mlp.c_fc.weight, model.mlp.c_fc.bias = nn.Parameter(layer.weight.detach().t()), layer.bias
    by_linear = outcome(model, x)
    model.mlp.c_fc = layer
    by_conv = outcome(model, x)
    weight = by_linear.pop("mlp.c_fc.weight"), by_conv.pop("mlp.c_fc.weight")
    assert_agree(by_linear, by_conv)
    assert_agree([weight[0].t()], [weight[1]])


def test_a_class_whose_forward_is_replaced_is_called(model: Any, monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    patch_model(model)
    monkeypatch.setattr(Conv1D, "forward", lambda self, x: x @ self.weight)
    assert not calls.is_transposed(Conv1D)
    y, bias = calls.linear_parts(model.mlp.c_fc, x)
    assert bias is None and torch.equal(y, x @ model.mlp.c_fc.weight)
