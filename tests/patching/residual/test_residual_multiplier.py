"""Numbers that multiply residual branches, as the alpha of the matrix products before them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from onetrip.measure import saved_bytes
from onetrip.measure.traffic import traffic
from onetrip.patching import calls, patch_model
from onetrip.patching.residual import layer_scale
from outcomes import (
    assert_agree,
    assert_compiles,
    assert_equal,
    assert_obeys,
    loss_outcome,
    outcome,
    parameter_gradients,
    penalty_gradients,
)
from patching_cases import WIDTH, checkpointed, randomised, tiny_model, written
from torch import Tensor, nn

ONLY = ("layer_scale",)
X = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(3))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> tuple[Tensor, None]:
        h = self.up(h).tanh()
        h = self.o_proj(h)
        return h, None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        down = self.down(self.up(h).tanh() + 1.0)
        return down


class Layer(nn.Module):
    """As Granite's."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.multiplier: Any = 0.22

    def forward(self, h: Tensor) -> Tensor:
        residual = h
        h = self.norm_1(h)
        h, _ = self.attention(h)
        h = residual + h * self.multiplier
        residual = h
        h = self.norm_2(h)
        h = self.mlp(h)
        h = residual + h * self.multiplier
        return h


class Returned(Layer):
    """As NeoMME's: the sum is returned, and the number comes first."""

    def forward(self, h: Tensor) -> Tensor:
        y, _ = self.attention(self.norm_1(h))
        h = self.multiplier * y + h
        z = self.mlp(self.norm_2(h))
        return h + self.multiplier * z


class Constants(Layer):
    """As Parakeet's; a dropout between."""

    def forward(self, h: Tensor) -> Tensor:
        residual = h
        h, _ = self.attention(self.norm_1(h))
        h = self.dropout(h)
        h = residual + 0.5 * h
        residual = h
        h = self.mlp(self.norm_2(h))
        return residual + h * 2


LAYERS: list[type[Layer]] = [Layer, Returned, Constants]


def pair(cls: type[Layer], **options: Any) -> tuple[Layer, Layer, Any]:
    """(unpatched, patched, report)."""
    original = randomised(cls()).train()
    model = copy.deepcopy(original)
    return original, model, patch_model(model, **options)


@pytest.mark.parametrize("options", [{"patterns": ONLY}, {}], ids=["alone", "beside others"])
@pytest.mark.parametrize("cls", LAYERS)
def test_outputs_and_gradients(cls: type[Layer], options: Any) -> None:
    original, model, report = pair(cls, **options)
    for training in (True, False):
        for each in (original, model):
            each.train(training)
        assert_agree(outcome(model, X), outcome(original, X))
        with torch.no_grad():
            assert_agree([model(X)], [original(X)])
    if options:
        assert report.calls() == {"": (8, 0)}


@pytest.mark.parametrize("cls", LAYERS)
def test_the_sum_after_it_is_fused_with_its_norm(cls: type[Layer]) -> None:
    _, _, report = pair(cls)
    _, _, without = pair(cls, patterns=("add_norm",))
    (site,), (expected,) = ([each for each in found.patched if each.name == ""] for found in (report, without))
    assert site.pattern == expected.pattern == "add_norm"
    assert site.detail == f"{expected.detail}, and layer_scale" and "2 add_norm" in expected.detail


@pytest.mark.parametrize("cls", LAYERS)
def test_nothing_is_multiplied(cls: type[Layer]) -> None:
    def products(each: nn.Module) -> int:
        operators = traffic(lambda: outcome(each, X)).operators.values()
        return sum(each.written for each in operators if each.name == "aten::mul")

    original, model, _ = pair(cls, patterns=ONLY)
    assert products(original) == 2 * 2 * X.nbytes  # forward and backward
    assert products(model) == 2 * model.attention.o_proj.bias.nbytes


@pytest.mark.parametrize("frozen", ["", "mlp.down", "mlp"])
@pytest.mark.parametrize("autocast", [True, False])
def test_no_more_is_saved(frozen: str, autocast: bool) -> None:
    original, model, _ = pair(Layer, patterns=ONLY)
    for each in (original, model):
        if frozen:
            each.get_submodule(frozen).requires_grad_(False)

    def saved(each: nn.Module) -> int:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return saved_bytes(lambda: each(X))

    assert saved(model) == saved(original)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("multiplier", [0.22, 1e-5])
def test_half_precision(dtype: torch.dtype, autocast: bool, multiplier: float) -> None:
    """On average the unpatched layer's error. A small number does not vanish: no weight is multiplied."""
    original, model, report = pair(Layer, patterns=ONLY)
    for each in (original, model):
        each.multiplier = multiplier
        each.to(torch.float32 if autocast else dtype)
    exact = outcome(copy.deepcopy(original).double(), X.double())
    with torch.autocast("cpu", dtype, enabled=autocast):
        x = X if autocast else X.to(dtype)
        theirs, ours = outcome(original, x), outcome(model, x)
    ratios = {name: float((ours[name] - y).norm() / (theirs[name] - y).norm()) for name, y in exact.items()}
    assert sum(ratios.values()) <= 1.25 * len(ratios), ratios
    assert {name: y.dtype for name, y in ours.items()} == {name: y.dtype for name, y in theirs.items()}
    assert report.calls() == {"": (2, 0)}


def test_backward_outside_of_autocast() -> None:
    original, model, report = pair(Layer, patterns=ONLY)
    for each in (original, model):
        each.attention.up = nn.Identity()  # o_proj reads float32
        with torch.autocast("cpu", torch.bfloat16):
            y = each(X)
        y.sum().backward()
    assert_agree(parameter_gradients(model), parameter_gradients(original), 0.05)
    assert report.calls() == {"": (2, 0)}


class Tripled(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return 3.0 * super().forward(h)


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "a hook on the linear layer": lambda layer: layer.mlp.down.register_forward_hook(lambda _, __, y: 2.0 * y),
    "a hook on the child": lambda layer: layer.mlp.register_forward_hook(lambda _, __, y: 2.0 * y),
    "another linear layer": lambda layer: setattr(layer.mlp, "down", nn.Sequential(layer.mlp.down, nn.Tanh())),
    "another child": lambda layer: setattr(layer, "mlp", nn.Sequential(layer.mlp, nn.Tanh())),
    "a subclass of the linear layer": lambda layer: setattr(layer.mlp, "down", Tripled(2 * WIDTH, WIDTH)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_after_patching_is_called(name: str) -> None:
    report = assert_obeys(CHANGES[name], randomised(Layer()).train(), X, patterns=ONLY)
    assert report.calls() == {"": (1, 1)}


FACTORS: dict[str, tuple[Any, int]] = {
    "another number": (3, 2),
    "zero": (0.0, 0),
    "a NumPy number": (numpy.float64(0.5), 0),
    "a tensor": (torch.tensor(0.5, requires_grad=True), 0),
    "a bool": (True, 0),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_that_was_replaced(name: str) -> None:
    factor, n_fused = FACTORS[name]
    change: Callable[[Any], Any] = lambda layer: setattr(layer, "multiplier", factor)  # noqa: E731
    report = assert_obeys(change, randomised(Layer()).train(), X, patterns=ONLY)
    assert report.calls() == {"": (n_fused, 2 - n_fused)}


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf"), 1e39])
def test_numbers_that_products_leave_out(factor: float) -> None:
    """A BLAS library hides Inf and NaN in the weight behind a factor of 0 or NaN."""
    for weight in (0.5, float("inf")):
        original = randomised(Layer()).train()
        original.multiplier = factor
        original.mlp.down.weight.data.fill_(weight)
        model = copy.deepcopy(original)
        patch_model(model, patterns=ONLY)
        torch.testing.assert_close(model(X), original(X), equal_nan=True)


def test_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("multiplied", "folded"):
        with monkeypatch.context() as patch:
            patch.setattr(layer_scale, name, lambda x, weight, bias, factor: torch.zeros(*x.shape[:-1], len(weight)))
            model = Layer()
            if name == "folded":
                model.multiplier = nn.Parameter(torch.ones(WIDTH))
            assert "verify_failed" in [site.reason for site in patch_model(model, patterns=ONLY).skipped]


def test_gradients_under_vmap() -> None:
    """Its addmm reads what beta = 0 leaves out: memory that may hold anything."""
    _, model, _ = pair(Layer, patterns=ONLY)
    x = X[:1, :3].clone().requires_grad_()
    y = model(x)
    for n in (1, y.numel()):
        [torch.full((n,), float("nan")) for _ in range(200)]
    vectors = torch.eye(y.numel()).view(-1, *y.shape)
    found = torch.func.vmap(lambda each: torch.autograd.grad(y, x, each, retain_graph=True)[0])(vectors)
    torch.testing.assert_close(
        found, torch.stack([torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in vectors])
    )


def test_a_dropout_stays_between() -> None:
    _, model, _ = pair(Constants, patterns=ONLY)
    model.dropout.p = 1.0
    residual = X + 2 * model.mlp(model.norm_2(X))
    torch.testing.assert_close(model(X), residual)


def test_small_tensors_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SMALLEST", 2 * X.numel() + 1)
    original, model, report = pair(Layer, patterns=ONLY)
    assert_equal(outcome(model, X), outcome(original, X))
    assert report.calls() == {"": (0, 2)}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed(use_reentrant: bool) -> None:
    original, model, _ = pair(Layer)
    expected, found = (outcome(checkpointed(each, use_reentrant), X) for each in (original, model))
    assert_agree(found, expected)


def test_the_gradient_has_a_gradient() -> None:
    original, model, _ = pair(Layer, patterns=ONLY)
    assert_agree(penalty_gradients(model, X), penalty_gradients(original, X))


def test_compilers_and_transforms_see_the_product() -> None:
    original, model, report = pair(Layer, patterns=ONLY)
    expected = original(X)
    torch.testing.assert_close(torch.jit.trace(model, X, check_trace=False)(X), expected)
    torch.testing.assert_close(torch.func.vmap(model)(X), expected)
    assert report.calls()[""][0] == 0
    assert_compiles(randomised(Layer()).train(), X)


class Written(nn.Module):
    """Writes to what the layer returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.mul_(2.0)


def test_the_result_may_be_written_to() -> None:
    layer = written(Layer, "y = self.mlp(h); return y * self.multiplier", globals(), "h")()
    original = Written(randomised(layer).train())
    model = copy.deepcopy(original)
    report = patch_model(model, patterns=ONLY)
    assert_agree(outcome(model, X), outcome(original, X))
    assert report.calls() == {"layer": (1, 0)}


OTHERS = {
    "something else reads what is to be multiplied": "y = self.mlp(h); return h + y * self.multiplier + y",
    "what the linear layer reads is written to": """
        x = h.sin()
        y = self.mlp(x)
        x.zero_()
        return h + y * self.multiplier""",
    "a function called between": "y = self.mlp(h); h = self.norm_1(h); return h + y * self.multiplier",
    "a function called first": "y = self.mlp(h); return self.norm_1(h) + y * self.multiplier",
    "an attribute set between": "y = self.mlp(h); self.mlp.down.bias = None; return h + y * self.multiplier",
    "a factor of another kind": "y = self.mlp(h); return h + y * self.training",
    "a division": "y = self.mlp(h); return h + y / self.multiplier",
    "the result of no linear layer": "y = self.norm_1(h); return h + y * self.multiplier",
    "in a loop": """
        for _ in range(2):
            y = self.mlp(h)
            y = y * self.multiplier
            h = h + y
        return h""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_no_sites(name: str) -> None:
    assert not patch_model(written(Layer, OTHERS[name], globals(), "h")(), patterns=ONLY).patched


def test_excluded_layers_are_no_sites() -> None:
    assert not patch_model(Layer(), patterns=ONLY, exclude=["attention", "mlp.down"]).patched


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
MORE = {"num_key_value_heads": 2, "residual_multiplier": 0.22, "pad_token_id": 0, "max_position_embeddings": 64}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Granite": ({}, 2),
    "GraniteMoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 1),
    "GraniteSWA": ({}, 2),
}
"""Class -> (sizes, products fused of one layer)."""


@pytest.mark.parametrize("patterns", [ONLY, None], ids=["alone", "beside others"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, patterns: Any) -> None:
    sizes, n_products = MODELS[name]
    original = tiny_model(f"{name}ForCausalLM", {**SIZES, **MORE, **sizes}).train()
    model = copy.deepcopy(original)
    report = patch_model(model, **({} if patterns is None else {"patterns": patterns}))
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "labels": ids}
    assert_agree(loss_outcome(model, given), loss_outcome(original, given), 1e-4)
    layers = [site for site in report.patched if site.module_class.endswith("DecoderLayer")]
    assert len(layers) == 2 and all("layer_scale" in f"{site.pattern} {site.detail}" for site in layers)
    if patterns is not None:
        assert [report.calls()[site.name] for site in layers] == 2 * [(n_products, 0)]
