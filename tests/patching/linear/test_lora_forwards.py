"""Low-rank adapters in forwards that do more with their results than PEFT's."""

from __future__ import annotations

import functools

import outcomes
import pytest
import torch
from onetrip.patching import calls, patch_model
from outcomes import assert_agree
from patching_cases import WIDTH, inputs, randomised, written
from torch import Tensor, nn

outcome = functools.partial(outcomes.outcome, is_leaf=False)


class Adapted(nn.Module):
    """A linear layer and one adapter in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.ModuleDict({"one": nn.Linear(WIDTH, 4, bias=False)})
        self.up = nn.ModuleDict({"one": nn.Linear(4, WIDTH, bias=False)})
        self.dropout, self.is_active, self.kept = nn.Identity(), True, torch.empty(0)

    def stash(self, result: Tensor) -> Tensor:
        self.kept = result
        return result

    def convert(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)


LAYERS = 'dropout = self.dropout; down = self.down["one"]; up = self.up["one"]; result = self.base(x)'
ADD = "result = result + up(down(dropout(x))) * scale"
FUSED = {
    "read after the cast": f"""
        {LAYERS}
        x = self.convert(x, down.weight.dtype)
        if self.is_active:
            {ADD}
        return result + x""",
    # Something may hold a result, or its memory.
    "kept (PEFT 0.15)": f"{LAYERS}; kept = result; {ADD}; return result + kept",
    "kept by no conversion": f"{LAYERS}; kept = result.to(x.dtype); {ADD}; return result + kept",
    "kept by another": f"{LAYERS}; result = self.stash(result); {ADD}; return result + self.kept",
    "written to": f"{LAYERS}; result = nn.functional.relu(result, inplace=True); {ADD}; return result",
}
OUTPUT = "output = up(down(dropout(x))) * scale; result = result + output"
LEFT = {
    # A name would be missing.
    "read elsewhere": f"{LAYERS}; {OUTPUT}; return result * output",
    "deleted": f"{LAYERS}; {OUTPUT}; del output; return result",
    "of a local name": f"{LAYERS}; h = 0.5 * x; result = result + up(down(dropout(h))) * scale; return result",
}


class Passing(Adapted):
    """Arguments of every kind."""

    def forward(self, x: Tensor, *more: Tensor, scale: float = 2.0, **named: Tensor) -> Tensor:
        """With a docstring."""
        dropout = self.dropout
        down = self.down["one"]
        up = self.up["one"]
        result = self.base(x, *more, **named)
        result = result + up(down(dropout(x))) * scale
        return result


@pytest.mark.parametrize("name", ["every argument", *FUSED, *LEFT])
def test_forwards_that_do_more_with_their_results(name: str) -> None:
    bodies = FUSED | LEFT
    make = written(Adapted, bodies[name], globals(), "x, scale=2.0") if name in bodies else Passing
    model, (x,) = randomised(make()), inputs()

    def run(autocast: bool) -> outcomes.Outcome:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return outcome(model, x.bfloat16() if autocast else x)

    expected = run(False), run(True)
    report = patch_model(model, patterns=["lora"])
    assert [site.pattern for site in report.patched] == ["lora"] * (name not in LEFT)
    assert_agree(run(False), expected[0])
    assert_agree(run(True), expected[1], 3e-2)
    assert all(fused and not fallbacks for fused, fallbacks in report.calls().values())


def test_small_inputs_run_the_original_with_all_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x,) = randomised(Passing()), inputs()
    expected = model(x, scale=3.0)
    report = patch_model(model)
    torch.testing.assert_close(model(x, scale=3.0), expected)
    monkeypatch.setattr(calls, "SMALLEST", x.numel() + 1)
    assert torch.equal(model(x, scale=3.0), expected)
    assert report.calls() == {"": (1, 0)}  # without gradients the sum alone


def test_forwards_without_containers_of_layers_are_left() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"one": nn.Tanh()})
            self.dense = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, name: str = "one", scale: float = 2.0) -> Tensor:
            layer = self.layers[name]
            x = self.dense(x)
            x = x + layer(x) * scale
            return x

    assert not patch_model(Scaled()).patched
