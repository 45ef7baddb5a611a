"""Activations: gated products and linear layers before an activation, wherever they stand in a forward."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.activations import PATTERNS
from outcomes import assert_agree, assert_compiles, assert_equal, outcome, patch_and_compare
from patching_cases import WIDTH, inputs, randomised, written
from torch import Tensor, nn
from torch.nn import functional


class TanhGelu(nn.Module):
    """As transformers' NewGELUActivation: eight operators."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class ReluSquared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.square(functional.relu(x))


class QuickGelu(nn.Module):
    """As CLIP's: three operators."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Mlp(nn.Module):
    """Parts of the forwards below."""

    act_class: Callable[[], nn.Module] = nn.SiLU

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.packed = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = type(self).act_class()


class Gated(Mlp):
    """As Llama's."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Packed(Mlp):
    """As Phi-3's: halves of one product."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.packed(x)
        gate, up = up.chunk(2, dim=-1)
        return self.down(up * self.act(gate))


class Dense(Mlp):
    """As BERT's."""

    act_class = nn.GELU

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        x = self.act(x)
        return x


def own_gelu(x: Tensor) -> Tensor:
    """As ESM's."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_of_small(x: Tensor) -> Tensor:
    return functional.gelu(x) if x.numel() < 1000 else functional.relu(x)


global_gelu = nn.GELU()


class Chunk(Mlp):
    """As DistilBERT's."""

    act_class = nn.GELU

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.of_chunk(each) for each in x.split(2)])

    def of_chunk(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)))


def mlp(body: str, act: Callable[[], nn.Module] = nn.SiLU, arguments: str = "x") -> Any:
    model = written(Mlp, body, globals(), arguments)()
    model.act = act()
    return model


OF_ITS_FILE = "x = self.gate(x); x = own_gelu(x); return self.down(x)"
FUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "gated (Llama)": (Gated, "gated_mlp", "silu"),
    "swapped": (lambda: mlp("return self.down(self.up(x) * self.act(self.gate(x)))", nn.GELU), "gated_mlp", "gelu"),
    "named (T5)": (
        lambda: mlp("g = self.act(self.gate(x)); up = self.up(x); x = g * up; x = self.down(x); return x", TanhGelu),
        "gated_mlp",
        "gelu_tanh",
    ),
    "packed (Phi-3)": (Packed, "gated_mlp", "silu"),
    "function": (
        lambda: mlp("return self.down(functional.gelu(self.gate(x), approximate='tanh') * self.up(x))"),
        "gated_mlp",
        "gelu_tanh",
    ),
    "dense (BERT)": (Dense, "bias_activation", "gelu"),
    "quick": (lambda: mlp("return self.down(self.act(self.gate(x)))", QuickGelu), "bias_activation", "quick_gelu"),
    "nested": (lambda: mlp("return self.down(self.act(self.gate(x)))", ReluSquared), "bias_activation", "relu2"),
    "after no linear layer (GPT-2)": (
        lambda: mlp("h = self.act(x.tanh()); return self.down(h)", TanhGelu), "bias_activation", "gelu_tanh"
    ),
    "relu (OPT)": (
        lambda: mlp("x = self.up(x); x = self.act(x); return self.down(x)", nn.ReLU), "bias_activation", "relu"
    ),
    "function of relu": (lambda: mlp("return self.down(functional.relu(self.up(x)))"), "bias_activation", "relu"),
    "function of its file (ESM)": (lambda: mlp(OF_ITS_FILE), "bias_activation", "gelu"),
    # Several operators are gain enough.
    "function of its file alone": (lambda: mlp("return self.down(own_gelu(x.tanh()))"), "bias_activation", "gelu"),
    "module of its file (RoBERTa)": (
        lambda: mlp("return self.down(global_gelu(self.gate(x)))"), "bias_activation", "gelu"
    ),
    "chunk (DistilBERT)": (Chunk, "bias_activation", "gelu"),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_activations_are_fused_wherever_they_stand(name: str) -> None:
    make, *site = FUSED[name]
    model, (x,) = randomised(make()), inputs()
    cls, expected = type(model), outcome(model, x)
    report = patch_and_compare(model, lambda: outcome(model, x), patterns=PATTERNS)
    assert [[each.pattern, each.detail] for each in report.patched] == [site]
    assert report.calls() == {"": (len(x.split(2)) if make is Chunk else 1, 0)}
    unpatch_model(model)
    assert type(model) is cls
    assert_equal(outcome(model, x), expected)


FACTOR = 1.0


def silu_of_a_global(x: Tensor) -> Tensor:
    return x * torch.sigmoid(FACTOR * x)


CALLS: list[int] = []


def noted_gelu(x: Tensor) -> Tensor:
    _ = CALLS.append(1)
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class MethodOfOthers(Chunk):
    """What calls the method, and with what, is not known."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x)


OWN = "return self.down(own_gelu(self.gate(x)))"
NOT_PATCHED: dict[str, Callable[[], Any]] = {
    "a parameter of that name": lambda: mlp(OWN, arguments="x, own_gelu=torch.tanh"),
    "a function of that name": lambda: mlp(f"def own_gelu(v): return v.tanh(); {OWN}"),
    "an import of that name": lambda: mlp(f"from torch import tanh as own_gelu; {OWN}"),
    "a module of that name": lambda: mlp(
        "functional = type('Other', (), {'gelu': torch.tanh}); return self.down(functional.gelu(self.gate(x)))"
    ),
    "a global number, which may change": lambda: mlp("return self.down(silu_of_a_global(self.gate(x)))"),
    "a side effect": lambda: mlp("return self.down(noted_gelu(self.gate(x)))"),
    "something else of larger tensors": lambda: mlp("return self.down(gelu_of_small(self.gate(x)))"),
    "a method that others call": MethodOfOthers,
}
OTHERS: dict[str, Callable[[], Any]] = {
    "read twice": lambda: mlp("gate = self.act(self.gate(x)); return gate * self.up(x) + gate"),
    "broadcast": lambda: mlp("return self.act(self.gate(x)) * self.up(x)[..., :1]"),
    "scaled": lambda: mlp("return self.act(self.gate(x)) * 2.0"),
    "tanh": lambda: mlp("return self.act(self.gate(x)) * self.up(x)", nn.Tanh),
}


@pytest.mark.parametrize("name", NOT_PATCHED | OTHERS)
def test_other_forwards_compute_what_they_computed(name: str) -> None:
    model, (x,) = randomised((NOT_PATCHED | OTHERS)[name]()), inputs()
    report = patch_and_compare(model, lambda: outcome(model, x))
    if name in NOT_PATCHED:
        assert report.patched == ()


def test_a_function_exchanged_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x,) = randomised(mlp(OF_ITS_FILE)), inputs()
    report = patch_model(model)
    monkeypatch.setitem(globals(), "own_gelu", torch.tanh)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.down(torch.tanh(model.gate(x))))
    assert report.calls() == {"": (0, 1)}


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.SiLU])
def test_one_operator_alone_is_left_alone(act: Callable[[], nn.Module]) -> None:
    assert patch_model(mlp("return self.down(self.act(x.tanh()))", act), patterns=PATTERNS).patched == ()


def test_an_input_changed_before_the_product_is_read_before() -> None:
    model, (x,) = randomised(mlp("x = x.clone(); gate = self.act(x); x.add_(1.0); return gate * self.up(x)")), inputs()
    with torch.no_grad():
        expected = model(x)
        patch_model(model)
        torch.testing.assert_close(model(x), expected)


class Calls(nn.Module):
    """An activation whose function is an attribute."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class CallsOfDict(Calls):
    def __init__(self, function: Any) -> None:
        super().__init__(None)
        self.functions = {"of": function}

    def forward(self, x: Tensor) -> Tensor:
        return self.functions["of"](x)


@pytest.mark.parametrize("make", [Calls, CallsOfDict])
def test_instances_that_differ_in_an_attribute_differ(make: type[Calls]) -> None:
    model, (x,) = randomised(nn.Sequential(Gated(), Gated(), Gated())), inputs()
    for mlp, function in zip(model, (functional.silu, functional.gelu, torch.tanh), strict=True):
        mlp.act = make(function)
    patch_and_compare(model, lambda: outcome(model, x))


@pytest.mark.parametrize("make", [Gated, Dense])
def test_an_activation_exchanged_later_is_called(make: type[Mlp]) -> None:
    model, (x,) = randomised(make()), inputs()
    model.act = nn.GELU()
    patch_model(model)
    for change in (lambda: setattr(model, "act", nn.GELU("tanh")), lambda: setattr(model.act, "approximate", "none")):
        change()
        with torch.no_grad():
            torch.testing.assert_close(model(x), unpatch_model(copy.deepcopy(model))(x))


@pytest.mark.parametrize("make", [Gated, Dense])
def test_nested_tensors_are_left_to_torch(make: type[Mlp]) -> None:
    model = randomised(make()).eval()
    x = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)])
    with torch.no_grad():
        expected = model(x)
        patch_model(model)
        torch.testing.assert_close(model(x).to_padded_tensor(0.0), expected.to_padded_tensor(0.0))


def test_a_hooked_activation_or_layer_is_called() -> None:
    model, (x,) = randomised(Gated()), inputs()
    expected = outcome(model, x)
    report = patch_model(model, patterns=PATTERNS)
    seen: list[Any] = []
    model.act.register_forward_hook(lambda *arguments: seen.append(arguments))
    assert_agree(outcome(model, x), expected)
    assert len(seen) == 1 and report.calls() == {"": (0, 1)}
    model = randomised(Dense())
    patch_model(model)
    model.gate.register_forward_hook(lambda module, arguments, y: 2.0 * y)
    assert_agree(outcome(model, x), outcome(unpatch_model(copy.deepcopy(model)), x))


def test_patterns_are_chosen_by_name() -> None:
    assert [site.pattern for site in patch_model(Gated(), patterns=["gated_mlp"]).patched] == ["gated_mlp"]
    assert patch_model(Gated(), patterns=["bias_activation"]).patched == ()
    assert patch_model(Dense(), patterns=["gated_mlp"]).patched == ()
    assert patch_model(Gated(), patterns=PATTERNS, exclude=["act"]).patched == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [Gated, Dense])
def test_autocast(make: type[Mlp], dtype: torch.dtype) -> None:
    model, (x,) = randomised(make()), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x.to(dtype))
        report = patch_model(model)
        y = model(x.to(dtype))
    assert report.calls() == {"": (1, 0)} and y.dtype == expected.dtype
    torch.testing.assert_close(y.float(), expected.float(), rtol=2e-2, atol=2e-2 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("make", [Gated, Packed, Dense])
def test_compiles_without_a_break(make: type[Mlp]) -> None:
    assert_compiles(randomised(make()), *inputs())


class Layer(nn.Module):
    """A parallel block: the sum reads the gated product's child."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Gated()
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


def test_a_fused_child_ends_in_its_parent_s_sum() -> None:
    """The rewritten forward of the child is opened again: its last linear layer leaves its bias to the sum."""
    model, (x,) = randomised(nn.Sequential(Layer(), Layer(), nn.LayerNorm(WIDTH))), inputs()
    report = patch_and_compare(model, lambda: outcome(model, x))
    patterns = [site.pattern for site in report.patched]
    assert patterns.count("gated_mlp") == 2 and patterns.count("dropout_add") == 2
    assert all(fused > 0 and back == 0 for name, (fused, back) in report.calls().items() if "mlp" in name)
