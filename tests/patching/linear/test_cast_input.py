"""Casts before linear layers, which autocast takes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import PATTERNS, patch_model, unpatch_model
from outcomes import assert_equal, outcome, parameter_gradients
from patching_cases import WIDTH, build, randomised, token_ids, written
from torch import Tensor, nn
from torch.nn import functional


class Casting(nn.Module):
    """See the subclasses: h = self.wi(x) is cast to the dtype of wo's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.seen: list[Any] = []


class Conditional(Casting):
    """As T5's."""

    def forward(self, h: Tensor) -> Tensor:
        h = functional.gelu(self.wi(h))
        if isinstance(self.wo.weight, Tensor) and h.dtype != self.wo.weight.dtype:
            h = h.to(self.wo.weight.dtype)
        h = self.wo(h)
        return h


PLAIN = "h = self.wi(x); cast = h.to(self.wo.weight.dtype); return self.wo(cast) + x"
INLINE = "return self.wo(self.wi(x).to(self.wo.weight.dtype)).float() + x"
FOUND = {
    "conditional": Conditional,
    "plain": written(Casting, PLAIN, globals()),
    "inline": written(Casting, INLINE, globals()),
}
CAST = "h = self.wi(x).to(self.wo.weight.dtype)"
LEFT = {
    "read twice": f"{CAST}; return self.wo(h) + h",
    "read later": f"{CAST}; y = self.wo(h); return y * h.sum()",
    "of another layer": "h = self.wi(x).to(self.other.weight.dtype); return self.wo(h)",
    "cast or something else": """
        h = self.wi(x)
        if flag:
            h = h.to(self.wo.weight.dtype)
        else:
            h = 2 * h
        return self.wo(h)""",
    "more in the branch": """
        h = self.wi(x)
        if h.dtype != self.wo.weight.dtype:
            h = h.to(self.wo.weight.dtype)
            self.seen.append(h.dtype)
        return self.wo(h)""",
    "with another argument": "return self.wo(self.wi(x).to(self.wo.weight.dtype, copy=True))",
    "without autocast": f"{CAST}; with torch.autocast('cpu', enabled=False): y = self.wo(h); return y",
    # With the cast, which is another tensor.
    "written to": "h = self.wi(x); cast = h.to(self.wo.weight.dtype); y = self.wo(cast); h.mul_(2.0); return y + h",
    "written to in the call": "h = self.wi(x); return self.wo(h.to(self.wo.weight.dtype)) + h.add_(100.0)",
    "in a loop": "h = self.wi(x); cast = h.to(self.wo.weight.dtype); for _ in range(2): y = self.wo(cast); return y",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FOUND.values(), ids=FOUND)
def test_the_same_bits_without_the_cast(kind: Any, dtype: torch.dtype, x: Tensor) -> None:
    model = randomised(kind())
    with torch.autocast("cpu", dtype):
        expected = outcome(model, x)
        before = traffic(lambda: outcome(model, x)).by_operator()["aten::_to_copy"]
        report = patch_model(model, patterns=("cast_input",))
        assert [site.pattern for site in report.patched] == ["cast_input"]
        assert_equal(outcome(model, x), expected)
        after = traffic(lambda: outcome(model, x)).by_operator()["aten::_to_copy"]
    assert report.calls() == {"": (2, 0)}
    # To float32 and back, and their backward: less one of 6 bytes an element where the first is a no-op else.
    assert before - after == 4 * 6 * x.numel()
    unpatch_model(model)
    assert type(model) is kind


@pytest.mark.parametrize("kind", FOUND.values(), ids=FOUND)
def test_without_autocast_nothing_changes(kind: Any, x: Tensor) -> None:
    """Also of a layer that is kept in float32 in a model of half precision."""
    model = randomised(kind())
    mixed = copy.deepcopy(model)
    if kind is Conditional:
        mixed.wi.to(torch.bfloat16)
    expected = outcome(model, x), outcome(mixed, x.to(mixed.wi.weight.dtype))
    for each, wanted in zip((model, mixed), expected, strict=True):
        report = patch_model(each, patterns=("cast_input",))
        assert_equal(outcome(each, x.to(each.wi.weight.dtype)), wanted)
        assert report.calls() == {"": (0, 0)}


@pytest.mark.parametrize("name", LEFT)
def test_what_others_may_read_is_cast(name: str) -> None:
    model = written(Casting, LEFT[name], globals(), "x, flag=False")()
    assert not patch_model(model, patterns=("cast_input",)).patched


def change_layer(model: Any) -> None:
    wo = model.wo
    model.wo = nn.Sequential(wo)
    model.wo.weight = wo.weight


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda model: model.wo.register_forward_pre_hook(lambda *_: None),
    "another layer": change_layer,
    "another dtype": lambda model: model.wo.to(torch.float16),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_patching_bring_the_cast_back(name: str, x: Tensor) -> None:
    model = randomised(Conditional())
    report = patch_model(model, patterns=("cast_input",))
    CHANGES[name](model)
    seen: list[torch.dtype] = []
    model.wo.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert seen == [model.wo.weight.dtype] and report.calls() == {"": (0, 0)}


def test_a_layer_that_is_excluded_or_none_is_left() -> None:
    assert not patch_model(Conditional(), patterns=("cast_input",), exclude=("wo",)).patched
    model = Conditional()
    model.wo = nn.Bilinear(1, 1, 1)
    assert not patch_model(model, patterns=("cast_input",)).patched


@pytest.mark.parametrize("is_gated", [False, True], ids=["relu", "gated-gelu"])
def test_t5(is_gated: bool) -> None:
    """Beside the other patterns, in a parent that joins the dropout; generation, too."""
    model = build("t5", feed_forward_proj="gated-gelu" if is_gated else "relu")
    ids = token_ids(2, 9)
    apart = copy.deepcopy(model)
    patch_model(apart, patterns=set(PATTERNS) - {"cast_input"})
    report = patch_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        for each in (apart, model):
            each.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
        assert torch.equal(apart(input_ids=ids, labels=ids).logits, model(input_ids=ids, labels=ids).logits)
        assert torch.equal(apart.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))
    assert_equal(parameter_gradients(model), parameter_gradients(apart))
    details = {site.name: f"{site.pattern}, {site.detail}" for site in report.patched}
    assert all("cast_input" in each for name, each in details.items() if name.endswith("DenseReluDense"))


def test_compiled(x: Tensor) -> None:
    model = randomised(Conditional())
    patch_model(model, patterns=("cast_input",))
    with torch.autocast("cpu", torch.bfloat16):
        expected = outcome(model, x)
        assert_equal(outcome(torch.compile(model, fullgraph=True, backend="aot_eager"), x), expected)
