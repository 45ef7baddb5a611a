"""Dropouts of activations and gated products: one call with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip import ops
from onetrip.measure import saved_bytes
from onetrip.ops.common.rng import draw_rng, dropout_scale
from onetrip.patching import patch_model
from onetrip.patching.activations import PATTERNS
from outcomes import assert_agree, outcome, patched_pair
from patching_cases import WIDTH, inputs, randomised, written
from torch import Tensor, nn
from torch.nn import functional

P = 0.25
CPU = torch.device("cpu")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.plain, self.packed = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH)
        self.relu, self.gelu, self.drop, self.p = nn.ReLU(), nn.GELU(), nn.Dropout(P), P


def mlp(body: str) -> Any:
    return written(Mlp, body, globals())()


AS_T5 = """
    x = self.plain(x)
    x = self.relu(x)
    x = self.drop(x)
    if x.dtype != self.down.weight.dtype:
        x = x.to(self.down.weight.dtype)
    return self.down(x)"""
AS_GATED_T5 = "gate = self.gelu(self.gate(x)); up = self.up(x); h = gate * up; h = self.drop(h); return self.down(h)"
AS_BART = """
    h = self.gelu(self.up(x))
    h = functional.dropout(h, p=self.p, training=self.training)
    return self.down(h)"""
ACTIVATIONS = {
    "T5": AS_T5,
    "Wav2Vec2": "h = self.up(x); h = self.gelu(h); h = self.drop(h); return self.down(h)",
    "BART": AS_BART,
    "nested": "return self.down(self.drop(self.relu(self.up(x))))",
}
PRODUCTS = {
    "gated T5": AS_GATED_T5,
    "of halves (ModernBERT)": """
        h, gate = self.packed(x).chunk(2, dim=-1)
        return self.down(self.drop(self.gelu(h) * gate))""",
}


def pinned(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """torch's dropout with the mask that the fused operator draws."""
    if not training:
        return x
    keep = ops.dropout_keep_mask(tuple(x.shape), p, draw_rng(CPU))
    return torch.where(keep, x * dropout_scale(p), torch.zeros_like(x))


@pytest.mark.parametrize("name", ACTIVATIONS | PRODUCTS)
def test_it_is_one_call_with_the_dropout(name: str, monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    model = randomised(mlp((ACTIVATIONS | PRODUCTS)[name])).train()
    model, original, report = patched_pair(model, patterns=[*PATTERNS, "dropout"])
    assert [site.pattern for site in report.patched if site.name == ""] == [PATTERNS[name not in PRODUCTS]]
    assert "drop" not in report.calls()
    torch.manual_seed(5)
    ours = outcome(model, x)
    assert report.calls()[""] == (1, 0)
    monkeypatch.setattr(functional, "dropout", pinned)
    torch.manual_seed(5)
    assert_agree(ours, outcome(original, x))
    monkeypatch.undo()
    assert_agree(outcome(model.eval(), x), outcome(original.eval(), x))


@pytest.mark.parametrize(
    "body",
    [
        "h = self.relu(self.up(x)); return self.down(self.drop(h) + h)",
        "h = self.relu(self.up(x)); x = self.gate(x); h = self.drop(h); return self.down(h) + x",
    ],
    ids=["read twice", "something between"],
)
def test_other_dropouts_stay_where_they_are(body: str, monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    model, original, report = patched_pair(randomised(mlp(body)).train(), patterns=PATTERNS)
    monkeypatch.setattr(functional, "dropout", pinned)
    results = []
    for each in (model, original):
        torch.manual_seed(5)
        results.append(outcome(each, x))
    assert report.calls()[""] == (1, 0)
    assert_agree(*results)


def test_a_dropout_that_changes_later_is_called() -> None:
    class Zeros(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    for changed in (Zeros(), nn.Dropout(1.0, inplace=True)):
        for name, body in (ACTIVATIONS | PRODUCTS).items():
            if name == "BART":
                continue
            model, (x,) = randomised(mlp(body)).train(), inputs()
            patch_model(model)
            model.drop = changed
            torch.testing.assert_close(model(x), model.down(torch.zeros_like(model.up(x))))
    model, (x,) = randomised(mlp(AS_T5)).train(), inputs()
    patch_model(model)
    calls: list[Any] = []
    model.drop.register_forward_hook(lambda *given: calls.append(given))
    model(x)
    assert len(calls) == 1


def test_under_vmap_the_dropout_is_torchs() -> None:
    for body in (AS_T5, AS_BART):
        model = randomised(mlp(body)).train()
        patch_model(model)
        y = torch.func.vmap(model, randomness="different")(torch.ones(2, 3, 5, WIDTH))
        assert not torch.equal(y[0], y[1])


def test_without_dropout_there_is_nothing_to_gain_for_an_activation_alone() -> None:
    for p, exclude in ((0.0, ()), (P, ("drop",))):
        model = mlp(AS_T5)
        model.drop.p = p
        assert [site.name for site in patch_model(model, patterns=PATTERNS, exclude=exclude).patched] == []


def test_no_mask_and_no_input_is_kept_of_relu() -> None:
    model, (x,) = randomised(mlp(AS_T5)).train(), inputs()
    before = saved_bytes(lambda: model(x))
    patch_model(model)
    assert saved_bytes(lambda: model(x)) == before - 2 * x.nbytes  # torch keeps relu's result, the mask, their product


@pytest.mark.slow
@pytest.mark.parametrize("body", [AS_T5, AS_GATED_T5], ids=["T5", "gated T5"])
def test_compiles_without_a_break(body: str) -> None:
    model, (x,) = randomised(mlp(body)).train(), inputs()
    patch_model(model)
    torch.compiler.reset()
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x.requires_grad_())
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
