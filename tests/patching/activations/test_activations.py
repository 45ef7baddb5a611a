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
from outcomes import assert_agree, assert_equal, outcome
from patching_cases import WIDTH, inputs, randomised
from torch import Tensor, nn
from torch.nn import functional


class TanhGelu(nn.Module):
    """As transformers' NewGELUActivation: eight operators."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class ReluSquared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.square(functional.relu(x))


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


class Swapped(Mlp):
    act_class = nn.GELU

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.act(self.gate(x)))


class Named(Mlp):
    """As T5's, whose activation has eight operators."""

    act_class = TanhGelu

    def forward(self, x: Tensor) -> Tensor:
        hidden_gelu = self.act(self.gate(x))
        hidden_linear = self.up(x)
        x = hidden_gelu * hidden_linear
        x = self.down(x)
        return x


class Packed(Mlp):
    """As Phi-3's: halves of one product."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.packed(x)
        gate, up = up.chunk(2, dim=-1)
        up = up * self.act(gate)
        return self.down(up)


class Function(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.gate(x), approximate="tanh") * self.up(x))


class Dense(Mlp):
    """As BERT's."""

    act_class = nn.GELU

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        x = self.act(x)
        return x


class Nested(Mlp):
    act_class = ReluSquared

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)))


class Relu(Mlp):
    """As OPT's."""

    act_class = nn.ReLU

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x = self.act(x)
        return self.down(x)


class FunctionOfRelu(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)))


class Composite(Mlp):
    """As GPT-2's: what comes before is no linear layer."""

    act_class = TanhGelu

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(x.tanh())
        return self.down(h)


def own_gelu(x: Tensor) -> Tensor:
    """As ESM's."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_of_small(x: Tensor) -> Tensor:
    return functional.gelu(x) if x.numel() < 1000 else functional.relu(x)


global_gelu = nn.GELU()


class FunctionOfItsFile(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        x = own_gelu(x)
        return self.down(x)


class FunctionOfItsFileAlone(Mlp):
    """Several operators are gain enough."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(own_gelu(x.tanh()))


class ModuleOfItsFile(Mlp):
    """As RoBERTa's head."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(global_gelu(self.gate(x)))


class Chunk(Mlp):
    """As DistilBERT's."""

    act_class = nn.GELU

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.of_chunk(each) for each in x.split(2)])

    def of_chunk(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        x = self.act(x)
        return self.down(x)


FUSED: dict[type[Mlp], tuple[str, str]] = {
    Gated: ("gated_mlp", "silu"),
    Swapped: ("gated_mlp", "gelu"),
    Named: ("gated_mlp", "gelu_tanh"),
    Packed: ("gated_mlp", "silu"),
    Function: ("gated_mlp", "gelu_tanh"),
    Dense: ("bias_activation", "gelu"),
    Nested: ("bias_activation", "relu2"),
    Composite: ("bias_activation", "gelu_tanh"),
    Relu: ("bias_activation", "relu"),
    FunctionOfRelu: ("bias_activation", "relu"),
    FunctionOfItsFile: ("bias_activation", "gelu"),
    FunctionOfItsFileAlone: ("bias_activation", "gelu"),
    ModuleOfItsFile: ("bias_activation", "gelu"),
    Chunk: ("bias_activation", "gelu"),
}


@pytest.mark.parametrize("make", FUSED, ids=lambda make: make.__name__)
def test_activations_are_fused_wherever_they_stand(make: type[Mlp]) -> None:
    model, (x,) = randomised(make()), inputs()
    expected = outcome(model, x)
    report = patch_model(model, patterns=PATTERNS)
    assert [(site.pattern, site.detail) for site in report.patched] == [FUSED[make]]
    assert_agree(outcome(model, x), expected)
    assert report.calls() == {"": (len(x.split(2)) if make is Chunk else 1, 0)}
    unpatch_model(model)
    assert type(model) is make
    assert_equal(outcome(model, x), expected)


class ReadTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.act(self.gate(x))
        return gate * self.up(x) + gate


class ChangedBetween(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        gate = self.act(x)
        x.add_(1.0)
        return gate * self.up(x)


class Broadcast(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.gate(x)) * self.up(x)[..., :1]


class Scaled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.gate(x)) * 2.0


class Tanh(Mlp):
    act_class = nn.Tanh

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.gate(x)) * self.up(x)


class Shadowed(Mlp):
    """The name of the function is another one's here."""

    def forward(self, x: Tensor, own_gelu: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
        return self.down(own_gelu(self.gate(x)))


class ShadowedByDef(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        def own_gelu(v: Tensor) -> Tensor:
            return v.tanh()

        return self.down(own_gelu(self.gate(x)))


class ShadowedByImport(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        from torch import tanh as own_gelu

        return self.down(own_gelu(self.gate(x)))


class ShadowedRoot(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        functional = type("Other", (), {"gelu": torch.tanh})
        return self.down(functional.gelu(self.gate(x)))


FACTOR = 1.0


def silu_of_a_global(x: Tensor) -> Tensor:
    return x * torch.sigmoid(FACTOR * x)


class GlobalNumber(Mlp):
    """It may change."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu_of_a_global(self.gate(x)))


CALLS: list[int] = []


def noted_gelu(x: Tensor) -> Tensor:
    _ = CALLS.append(1)
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class SideEffect(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(noted_gelu(self.gate(x)))


class Conditional(Mlp):
    """Of larger tensors the function computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu_of_small(self.gate(x)))


class MethodOfOthers(Mlp):
    """What calls the method, and with what, is not known."""

    act_class = nn.GELU

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x)

    def of_chunk(self, x: Tensor) -> Tensor:
        return self.act(self.gate(x))


NOT_PATCHED = [Shadowed, ShadowedByDef, ShadowedByImport, ShadowedRoot, GlobalNumber, SideEffect, Conditional]
OTHER = [ReadTwice, Broadcast, Scaled, Tanh, *NOT_PATCHED, MethodOfOthers]


@pytest.mark.parametrize("make", OTHER, ids=lambda make: make.__name__)
def test_other_forwards_compute_what_they_computed(make: type[Mlp]) -> None:
    model, (x,) = randomised(make()), inputs()
    expected = outcome(model, x)
    report = patch_model(model)
    assert_agree(outcome(model, x), expected)
    if make in (*NOT_PATCHED, MethodOfOthers):
        assert report.patched == ()


def test_a_function_exchanged_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x,) = randomised(FunctionOfItsFile()), inputs()
    report = patch_model(model)
    monkeypatch.setitem(globals(), "own_gelu", torch.tanh)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.down(torch.tanh(model.gate(x))))
    assert report.calls() == {"": (0, 1)}


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.SiLU])
def test_one_operator_alone_is_left_alone(act: Callable[[], nn.Module]) -> None:
    class Alone(Mlp):
        act_class = act

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(x.tanh()))

    assert patch_model(Alone(), patterns=PATTERNS).patched == ()


def test_an_input_changed_before_the_product_is_read_before() -> None:
    model, (x,) = randomised(ChangedBetween()), inputs()
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
    expected = outcome(model, x)
    patch_model(model)
    assert_agree(outcome(model, x), expected)


@pytest.mark.parametrize("make", [Gated, Dense], ids=lambda make: make.__name__)
def test_an_activation_exchanged_later_is_called(make: type[Mlp]) -> None:
    model, (x,) = randomised(make()), inputs()
    model.act = nn.GELU()
    patch_model(model)
    for change in (lambda: setattr(model, "act", nn.GELU("tanh")), lambda: setattr(model.act, "approximate", "none")):
        change()
        with torch.no_grad():
            torch.testing.assert_close(model(x), unpatch_model(copy.deepcopy(model))(x))


@pytest.mark.parametrize("make", [Gated, Dense], ids=lambda make: make.__name__)
def test_nested_tensors_are_left_to_torch(make: type[Mlp]) -> None:
    model = randomised(make()).eval()
    x = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)])
    with torch.no_grad():
        expected = model(x)
        patch_model(model)
        torch.testing.assert_close(model(x).to_padded_tensor(0.0), expected.to_padded_tensor(0.0))


def test_a_hooked_activation_is_called() -> None:
    model, (x,) = randomised(Gated()), inputs()
    expected = outcome(model, x)
    report = patch_model(model, patterns=PATTERNS)
    seen: list[Any] = []
    model.act.register_forward_hook(lambda *arguments: seen.append(arguments))
    assert_agree(outcome(model, x), expected)
    assert len(seen) == 1 and report.calls() == {"": (0, 1)}


def test_a_hooked_dense_is_called() -> None:
    model, (x,) = randomised(Dense()), inputs()
    expected = outcome(model, x)
    patch_model(model)
    model.gate.register_forward_hook(lambda module, arguments, y: 2.0 * y)
    doubled = copy.deepcopy(unpatch_model(copy.deepcopy(model)))
    assert_agree(outcome(model, x), outcome(doubled, x))
    assert not torch.allclose(outcome(model, x)["y"], expected["y"])


def test_patterns_are_chosen_by_name() -> None:
    assert [site.pattern for site in patch_model(Gated(), patterns=["gated_mlp"]).patched] == ["gated_mlp"]
    assert patch_model(Gated(), patterns=["bias_activation"]).patched == ()
    assert patch_model(Dense(), patterns=["gated_mlp"]).patched == ()
    assert patch_model(Gated(), patterns=PATTERNS, exclude=["act"]).patched == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [Gated, Dense], ids=lambda make: make.__name__)
def test_autocast(make: type[Mlp], dtype: torch.dtype) -> None:
    model, (x,) = randomised(make()), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x.to(dtype))
        report = patch_model(model)
        y = model(x.to(dtype))
    assert report.calls() == {"": (1, 0)} and y.dtype == expected.dtype
    torch.testing.assert_close(y.float(), expected.float(), rtol=2e-2, atol=2e-2 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("make", [Gated, Packed, Dense], ids=lambda make: make.__name__)
def test_compiles_without_a_break(make: type[Mlp]) -> None:
    model, (x,) = randomised(make()), inputs()
    expected = outcome(model, x)
    patch_model(model)
    assert_agree(outcome(torch.compile(model, backend="aot_eager", fullgraph=True), x), expected)


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
    expected = outcome(model, x)
    report = patch_model(model)
    patterns = [site.pattern for site in report.patched]
    assert patterns.count("gated_mlp") == 2 and patterns.count("dropout_add") == 2
    assert_agree(outcome(model, x), expected)
    assert all(fused > 0 and back == 0 for name, (fused, back) in report.calls().items() if "mlp" in name)
