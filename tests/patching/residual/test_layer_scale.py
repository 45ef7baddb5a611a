"""LayerScale, computed in the weight of the linear layer before it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.measure import saved_bytes
from onetrip.measure.traffic import traffic
from onetrip.patching import patch_model
from outcomes import assert_agree, assert_compiles, assert_obeys, outcome
from patching_cases import WIDTH, checkpointed, randomised, written
from torch import Tensor, nn
from torch.nn import functional  # noqa: F401 (a forward reads it)

ONLY = ("layer_scale",)
N_ROWS = 2 * WIDTH
"""From which on a weight of WIDTH columns is scaled."""


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.vector


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, h: Tensor) -> tuple[Tensor, None]:
        h = self.up(h).tanh()
        h = self.down(h)
        return h, None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(self.up(h).tanh())


class Layer(nn.Module):
    """As DINOv2's."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()
        self.scale_1, self.scale_2, self.norm = Vector(), Vector(), nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        residual = h
        h, _ = self.attention(self.norm(h))
        h = self.scale_1(h)
        h = h + residual
        residual = h
        h = self.mlp(h)
        h = self.scale_2(h)
        return h + residual


class Parameters(Layer):
    """As BEiT's: a dropout, then a parameter of the layer's own."""

    def __init__(self) -> None:
        super().__init__()
        self.lambda_1, self.lambda_2 = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.dropout = nn.Dropout(0.0)

    def forward(self, h: Tensor) -> Tensor:
        residual = h
        h, _ = self.attention(self.norm(h))
        h = self.dropout(h)
        h = self.lambda_1 * h
        h = h + residual
        residual = h
        h = self.mlp(h)
        h = self.dropout(h)
        h = h * self.lambda_2
        return h + residual


LAYERS: list[type[Layer]] = [Layer, Parameters]


def pair(cls: type[Layer], **options: Any) -> tuple[Layer, Layer, Any]:
    """(unpatched, patched, report)."""
    original = randomised(cls()).train()
    model = copy.deepcopy(original)
    return original, model, patch_model(model, **options)


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(2, N_ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("options", [{"patterns": ONLY}, {}], ids=["alone", "beside others"])
@pytest.mark.parametrize("cls", LAYERS)
def test_outputs_and_gradients(cls: type[Layer], options: Any, rows: Tensor) -> None:
    original, model, report = pair(cls, **options)
    for training in (True, False):
        for each in (original, model):
            each.train(training)
        assert_agree(outcome(model, rows), outcome(original, rows))
    assert any("layer_scale" in f"{site.pattern} {site.detail}" for site in report.patched)
    if options:
        assert report.calls() == {"": (4, 0)}


@pytest.mark.parametrize("cls", LAYERS)
def test_activations_are_not_multiplied_nor_kept(cls: type[Layer], rows: Tensor) -> None:
    original, model, _ = pair(cls, patterns=ONLY)

    def products(each: nn.Module) -> int:
        operators = traffic(lambda: outcome(each, rows)).operators.values()
        return sum(each.written for each in operators if each.name == "aten::mul")

    assert products(original) == 2 * 3 * rows.nbytes  # forward, and both gradients of it
    assert products(model) < 2 * rows.nbytes  # of the weights


@pytest.mark.parametrize("cls", LAYERS)
def test_few_rows_are_multiplied(cls: type[Layer]) -> None:
    original, model, report = pair(cls, patterns=ONLY)
    x = torch.randn(1, N_ROWS - 1, WIDTH)
    for ours, theirs in zip(outcome(model, x).values(), outcome(original, x).values(), strict=True):
        assert torch.equal(ours, theirs)
    assert report.calls() == {"": (0, 2)}


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "a hook on the linear layer": lambda layer: layer.mlp.down.register_forward_hook(lambda *_: None),
    "a hook on the child": lambda layer: layer.mlp.register_forward_hook(lambda _, __, y: 2.0 * y),
    "a hook on the vector's module": lambda layer: layer.scale_2.register_forward_hook(lambda _, __, y: 2.0 * y),
    "another linear layer": lambda layer: setattr(layer.mlp, "down", nn.Sequential(layer.mlp.down, nn.Tanh())),
    "another child": lambda layer: setattr(layer, "mlp", nn.Sequential(layer.mlp, nn.Tanh())),
    "another vector's module": lambda layer: setattr(layer, "scale_2", nn.Sequential(layer.scale_2, nn.Tanh())),
    "a vector of another shape": lambda layer: setattr(layer.scale_2, "vector", nn.Parameter(torch.full((1,), 3.0))),
    "a vector of another dtype": lambda layer: layer.scale_2.to(torch.bfloat16),
    "a bool": lambda layer: (delattr(layer.scale_2, "vector"), setattr(layer.scale_2, "vector", True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_after_patching_is_called(name: str, rows: Tensor) -> None:
    report = assert_obeys(CHANGES[name], randomised(Layer()).train(), rows, patterns=ONLY)
    assert report.calls() == {"": (1, 1)}


def test_a_number_in_the_vector_s_place(rows: Tensor) -> None:
    def change(layer: Any) -> None:
        del layer.scale_2.vector
        layer.scale_2.vector = 3.0

    assert assert_obeys(change, randomised(Layer()).train(), rows, patterns=ONLY).calls() == {"": (2, 0)}


def test_a_dropout_stays_between(rows: Tensor) -> None:
    """By its mask: what is left of the product is that of the layer without dropout, divided by 1 - p."""
    _, model, _ = pair(Parameters, patterns=ONLY)
    assert isinstance(model, Parameters)
    model.dropout.p = 1.0
    torch.testing.assert_close(model(rows), rows)


def test_a_dropout_that_was_replaced_is_called(rows: Tensor) -> None:
    def change(layer: Any) -> None:
        layer.dropout = nn.Sequential(nn.Tanh())

    assert assert_obeys(change, randomised(Parameters()).train(), rows, patterns=ONLY).calls() == {"": (0, 2)}


@pytest.mark.parametrize("frozen", ["mlp.down.weight", "mlp.down.bias", "scale_2.vector"])
def test_frozen_parameters(frozen: str, rows: Tensor) -> None:
    assert_obeys(lambda layer: layer.get_parameter(frozen).requires_grad_(False), randomised(Layer()).train(), rows)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed(use_reentrant: bool, rows: Tensor) -> None:
    original, model, _ = pair(Layer)

    expected, found = (outcome(checkpointed(each, use_reentrant), rows) for each in (original, model))
    assert_agree(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(dtype: torch.dtype, autocast: bool, rows: Tensor) -> None:
    """At most twice the unpatched layer's error. In float16 a weight times a small vector may vanish: multiplied."""
    original, model, report = pair(Layer, patterns=ONLY)
    for each in (original, model):
        with torch.no_grad():
            each.scale_1.vector.mul_(1e-2)
        each.to(torch.float32 if autocast else dtype)
    exact = outcome(copy.deepcopy(original).double(), rows.double())
    with torch.autocast("cpu", dtype, enabled=autocast):
        x = rows if autocast else rows.to(dtype)
        theirs, ours = outcome(original, x), outcome(model, x)
    for name, expected in exact.items():
        error, allowed = (float((found[name] - expected).norm()) for found in (ours, theirs))
        assert error <= 2.0 * allowed, f"{name}: {error:.2e}, unpatched {allowed:.2e}"
    assert report.calls() == {"": (2, 0) if dtype == torch.bfloat16 else (0, 2)}


def test_under_autocast_the_product_has_the_vector_s_dtype(rows: Tensor) -> None:
    """A residual in half precision would else stay so."""
    original, model, _ = pair(Layer, patterns=ONLY)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(rows.bfloat16()).dtype == original(rows.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("frozen", ["attention.down.weight", "scale_1.vector"])
def test_beside_a_frozen_one_the_weight_is_not_multiplied(frozen: str, rows: Tensor) -> None:
    """The gradient of a frozen weight would be computed for that of the vector. For a frozen vector nothing is kept."""
    layer = randomised(Layer()).train()
    layer.get_parameter(frozen).requires_grad_(False)
    original, model, report = pair(lambda: layer, patterns=ONLY)
    assert_agree(outcome(model, rows), outcome(original, rows))
    assert report.calls() == {"": (1, 1)}
    kept = [saved_bytes(lambda each=each: each(rows * 1), each.parameters()) for each in (model, original)]
    assert kept[0] <= kept[1]
    with torch.no_grad():
        model(rows)
    assert report.calls() == {"": (4, 2)}


def test_compiles_without_a_break(rows: Tensor) -> None:
    assert_compiles(randomised(Layer()).train(), rows)


OTHERS = {
    "something else reads what is to be multiplied": "y, _ = self.attention(h); z = self.scale_1(y); return z + y",
    "what the linear layer reads is written to": """
        x = torch.sin(h)
        y = self.mlp(x)
        x.zero_()
        y = self.scale_1(y)
        return y + h""",
    "a dropout whose p may change from call to call": """
        y = self.mlp(h)
        y = functional.dropout(y, p=0.5, training=self.training)
        y = self.scale_1(y)
        return y + h""",
    "in a loop": """
        for _ in range(2):
            y = self.mlp(h)
            h = self.scale_1(y)
        return h""",
}


class Shifted(Vector):
    def forward(self, h: Tensor) -> Tensor:
        return h * self.vector + 1.0


def test_other_layers_are_no_sites() -> None:
    layer = Layer()
    layer.scale_1 = layer.scale_2 = Shifted()
    for each in (layer, *(written(Layer, body, globals(), "h")() for body in OTHERS.values())):
        assert not patch_model(each, patterns=ONLY).patched
    excluded = Layer()
    assert not patch_model(excluded, patterns=ONLY, exclude=["attention", "mlp.down"]).patched
    assert not patch_model(Layer(), patterns=ONLY, exclude=["scale_1", "scale_2"]).patched


@pytest.mark.parametrize("name", ["Dinov2", "Beit"])
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 48, "patch_size": 4}
    more = {"intermediate_size": 32, "layer_scale_init_value": 0.1} if name == "Beit" else {}
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    torch.manual_seed(0)
    original = getattr(transformers, f"{name}ForImageClassification")(config).train()
    model = copy.deepcopy(original)
    report = patch_model(model, patterns=ONLY)
    pixels = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    for each in (original, model):
        each(pixel_values=pixels, labels=torch.tensor([0, 1])).loss.backward()
    ours, theirs = ({n: p.grad for n, p in each.named_parameters() if p.grad is not None} for each in (model, original))
    assert_agree(ours, theirs)
    assert len(report.patched) == 2 and all(fused > 0 for fused, _ in report.calls().values())
