"""Low-rank adapters in forwards that do more with their results than PEFT's."""

from __future__ import annotations

import functools

import outcomes
import pytest
import torch
from onetrip.patching import calls, patch_model
from outcomes import assert_agree
from patching_cases import WIDTH, inputs, randomised
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


class Kept(Adapted):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        dropout, down, up = self.dropout, None, None
        down = self.down["one"]
        up = self.up["one"]
        result = self.base(x)
        kept = result
        result = result + up(down(dropout(x))) * scale
        return result + kept


class KeptByNoConversion(Adapted):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        dropout = self.dropout
        down = self.down["one"]
        up = self.up["one"]
        result = self.base(x)
        kept = result.to(x.dtype)
        result = result + up(down(dropout(x))) * scale
        return result + kept


class KeptByAnother(Adapted):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        dropout = self.dropout
        down = self.down["one"]
        up = self.up["one"]
        result = self.base(x)
        if self.is_active:
            result = self.stash(result)
        result = result + up(down(dropout(x))) * scale
        return result + self.kept


class WrittenTo(Adapted):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        dropout = self.dropout
        down = self.down["one"]
        up = self.up["one"]
        result = self.base(x)
        if self.is_active:
            result = nn.functional.relu(result, inplace=True)
        result = result + up(down(dropout(x))) * scale
        return result


class ReadElsewhere(Adapted):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        dropout = self.dropout
        down = self.down["one"]
        up = self.up["one"]
        result = self.base(x)
        output = up(down(dropout(x))) * scale
        result = result + output
        return result * output


class Deleted(Adapted):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        dropout = self.dropout
        down = self.down["one"]
        up = self.up["one"]
        result = self.base(x)
        output = up(down(dropout(x))) * scale
        result = result + output
        del output
        return result


class Looped(Adapted):
    """The next turn reads another x."""

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        result = self.base(x)
        dropout = self.dropout
        for name in ("one", "one"):
            down = self.down[name]
            up = self.up[name]
            x = 0.1 * x
            result = result + up(down(dropout(x))) * scale
            x = result
        return result


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


class ReadAfterTheCast(Adapted):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        dropout = self.dropout
        down = self.down["one"]
        up = self.up["one"]
        result = self.base(x)
        x = self.convert(x, down.weight.dtype)
        if self.is_active:
            result = result + up(down(dropout(x))) * scale
        return result + x


class OfALocalName(Adapted):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        dropout = self.dropout
        down = self.down["one"]
        up = self.up["one"]
        result = self.base(x)
        h = 0.5 * x
        result = result + up(down(dropout(h))) * scale
        return result


LEFT = {ReadElsewhere, Deleted, OfALocalName}
"""A name would be missing."""
FORWARDS = (
    Kept,
    KeptByNoConversion,
    KeptByAnother,
    WrittenTo,
    ReadElsewhere,
    Deleted,
    Looped,
    OfALocalName,
    Passing,
    ReadAfterTheCast,
)


@pytest.mark.parametrize("make", FORWARDS, ids=lambda make: make.__name__)
def test_forwards_that_do_more_with_their_results(make: type[Adapted]) -> None:
    model, (x,) = randomised(make()), inputs()

    def run(autocast: bool) -> outcomes.Outcome:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return outcome(model, x.bfloat16() if autocast else x)

    expected = run(False), run(True)
    report = patch_model(model, patterns=["lora"])
    assert [site.pattern for site in report.patched] == ["lora"] * (make not in LEFT)
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
