"""Factors of an output layer's result, moved to what it reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import PATTERNS, patch_model, unpatch_model
from onetrip.patching.linear import scaled_logits
from outcomes import assert_equal, assert_obeys, outcome, parameter_gradients
from pairwise import pairwise
from patching_cases import WIDTH, randomised, twice, written
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCABULARY = 96


class Scaling(nn.Module):
    """Parts of the forwards below."""

    def __init__(self, scale: Any = 0.0625, bias: bool = False, width: int = VOCABULARY) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, width, bias=bias)
        self.scale = scale


COHERE = "logits = self.head(self.body(x).tanh()); logits = logits * self.scale; return logits"
Multiplied = written(Scaling, COHERE, globals())
GRANITE = "h = self.body(x); logits = self.head(h[:, 1:]); logits = logits / self.scale; return logits + h.sum()"
Divided = written(Scaling, GRANITE, globals())
Inline = written(Scaling, "logits = self.head(self.body(x)) * self.scale; return logits", globals())


Constant = written(Scaling, "logits = self.head(self.body(x)) / 4; return logits", globals(), decorators=[twice])
Returned = written(Scaling, "logits = self.head(self.body(x)); return torch.tanh(logits * self.scale)", globals())
FOUND = {"multiplied": Multiplied, "divided": Divided, "inline": Inline, "constant": Constant, "returned": Returned}


LEFT = {
    "read before": "raw = self.head(self.body(x)); logits = raw * self.scale; return logits + raw",
    "another statement between": """
        logits = self.head(self.body(x))
        logits = logits + 1.0
        logits = logits * self.scale
        return logits""",
    "by a tensor of the forward": "factor = x.mean(); logits = self.head(self.body(x)) * factor; return logits",
    "read by a function": """
        logits = self.head(self.body(x))
        later = lambda: logits
        scaled = logits * self.scale
        return scaled + later()""",
    "read by a comprehension": """
        logits = self.head(self.body(x))
        return sum([logits * self.scale for _ in range(2)])""",
    "in a loop": """
        total = 0.0
        logits = self.head(self.body(x))
        for _ in range(2):
            scaled = logits * self.scale
            total = total + scaled
        return total""",
}


def patch(model: nn.Module) -> Any:
    return patch_model(model, patterns=("scaled_logits",))


def passes(model: nn.Module, x: Tensor) -> int:
    """Elements of the factor's multiplications, there and back."""
    found = traffic(lambda: outcome(model, x)).operators.values()
    return sum(each.bytes for each in found if each.name in ("aten::mul", "aten::div"))


@pairwise(kind=FOUND, scale=[0.0625, 8, -0.5, 2.0**-16], dtype=[torch.float32, torch.bfloat16])
def test_the_same_bits_with_a_smaller_pass(kind: Any, scale: float, dtype: torch.dtype, x: Tensor) -> None:
    model, x = randomised(kind(scale)).to(dtype), x.to(dtype)
    expected, before = outcome(model, x), passes(model, x)
    report = patch(model)
    assert [site.pattern for site in report.patched] == ["scaled_logits"]
    assert_equal(outcome(model, x), expected)
    assert report.calls() == {"": (1, 0)}
    assert passes(model, x) < before
    unpatch_model(model)
    assert type(model) is kind


@pytest.mark.parametrize("kind", FOUND.values(), ids=FOUND)
def test_under_autocast(kind: Any, x: Tensor) -> None:
    model = randomised(kind())
    with torch.autocast("cpu", torch.bfloat16):
        expected = outcome(model, x)
        report = patch(model)
        assert_equal(outcome(model, x), expected)
    assert report.calls() == {"": (1, 0)}


def test_float16_is_scaled_after_the_product() -> None:
    """Before it h, and after it the gradient of h, leave the range that the logits and their gradient are in."""
    h = torch.full((2, WIDTH), 1e4)
    unpatched, patched = Inline(8.0).half(), Inline(8.0).half()
    for each in (unpatched, patched):
        each.body = nn.Identity()
        nn.init.constant_(each.head.weight, 1e-4)
    report = patch(patched)
    assert_equal(outcome(patched, h.half()), outcome(unpatched, h.half()))
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(patched.float()(h), unpatched.float()(h))
    assert report.calls() == {"": (0, 0)}


def test_a_factor_of_one_costs_nothing(x: Tensor) -> None:
    model = randomised(Inline(1.0))
    expected = outcome(model, x)
    patch(model)
    assert_equal(outcome(model, x), expected)
    assert passes(model, x) == 0


@pytest.mark.parametrize("scale", [0.3, 3, True, torch.tensor(0.5), 2.0**17, 2.0**-17], ids=str)
@pytest.mark.parametrize("kind", [Multiplied, Divided], ids=["multiplied", "divided"])
def test_other_factors_scale_the_logits(kind: Any, scale: Any, x: Tensor) -> None:
    model = randomised(kind(scale))
    expected = outcome(model, x)
    report = patch(model)
    assert_equal(outcome(model, x), expected)
    assert report.calls() == {"": (0, 0)}


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_factors_without_an_inverse(scale: float, x: Tensor) -> None:
    report = patch(model := Multiplied(scale))
    model(x)
    assert report.calls() == {"": (0, 0)}


def test_a_factor_that_is_trained(x: Tensor) -> None:
    model = randomised(Multiplied(nn.Parameter(torch.tensor(0.5))))
    model.scale.data.fill_(0.5)
    expected = outcome(model, x)
    patch(model)
    assert_equal(outcome(model, x), expected)


@pytest.mark.parametrize("name", LEFT)
def test_forwards_that_are_left(name: str) -> None:
    assert not patch(written(Scaling, LEFT[name], globals())()).patched


@pytest.mark.parametrize("options", [{"bias": True}, {"width": WIDTH}], ids=str)
def test_layers_that_are_left(options: Any) -> None:
    assert not patch(Multiplied(**options)).patched


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda model: model.head.register_forward_hook(lambda _, given, y: 3.0 * y),
    "a bias": lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(VOCABULARY))),
    "another layer": lambda model: setattr(model, "head", nn.Sequential(model.head)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_patching_scale_the_logits(name: str, x: Tensor) -> None:
    report = assert_obeys(CHANGES[name], randomised(Multiplied()), x, patterns=("scaled_logits",))
    assert report.calls() == {"": (0, 0)}


class Added(Tensor):
    """Tensors whose product is none."""

    def __mul__(self, other: Any) -> Tensor:
        return self + other


def test_tensors_of_a_user_s_class(x: Tensor) -> None:
    model = randomised(Inline())
    model.body = nn.Identity()
    expected = model(x.as_subclass(Added))
    report = patch(model)
    assert torch.equal(model(x.as_subclass(Added)), expected)
    assert report.calls() == {"": (0, 0)}


def test_excluded() -> None:
    assert not patch_model(Multiplied(), patterns=("scaled_logits",), exclude=("head",)).patched


def test_compiled_with_factors_that_change(x: Tensor) -> None:
    model = randomised(Multiplied())
    unpatched = copy.deepcopy(model)
    patch(model)
    n_graphs = []
    for each in (model, unpatched):
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(each, backend=counter, fullgraph=True)
        for scale in (0.5, 0.25, 0.125, 0.3):
            each.scale = scale
            torch.testing.assert_close(compiled(x), unpatched.head(unpatched.body(x).tanh()) * scale)
        n_graphs.append(counter.frame_count)
    assert n_graphs[0] == n_graphs[1]


def test_verification_calls_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_logits, "scaled_logits", lambda module, head, x, scale, factor: head(x))
    report = patch(Multiplied())
    assert [site.reason for site in report.skipped] == ["verify_failed"]


TINY = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {"cohere": {"logit_scale": 0.0625}, "granite": {"logits_scaling": 8.0}}


@pytest.mark.parametrize("patterns", [PATTERNS, ("linear_cross_entropy",)], ids=["default", "loss"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers(kind: str, patterns: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**TINY, **HEADS, **MODELS[kind])).train()
    ids = torch.randint(3, 128, (2, 9))

    def run() -> Any:
        model.zero_grad()
        outputs = model(input_ids=ids, labels=ids)
        outputs.loss.backward()
        return outputs.loss.detach(), outputs.logits[:1].detach(), parameter_gradients(model)

    patch_model(model, patterns=[each for each in patterns if each != "scaled_logits"])
    loss, logits, gradients = run()
    unpatch_model(model)
    report = patch_model(model, patterns=(*patterns, "scaled_logits"))
    assert "scaled_logits_" in report.diff("")
    found = run()
    assert torch.equal(found[0], loss) and torch.equal(found[1], logits)
    assert_equal(found[2], gradients)
