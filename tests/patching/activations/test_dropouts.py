"""The pattern dropout: nn.Dropout and functional.dropout without a mask in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip import ops, patch_model, unpatch_model
from onetrip.measure import saved_bytes
from onetrip.ops.common.rng import dropout_scale
from onetrip.patching import dropouts
from patching_cases import written
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import BartConfig, BartModel, BertConfig, BertModel, GPT2Config, GPT2Model, T5Config, T5Model

BART_LAYERS = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
SHAPE = (8, 32, 64)
"""Shape of 16,384 elements: more than the least of a fused call on a CPU."""


class FeedForward(nn.Module):
    def __init__(self, p: float = 0.25, inplace: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(64, 64), nn.Linear(64, 64), nn.Dropout(p, inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x)))


class ReadsItsProbability(nn.Module):
    """As an attention that hands its probability to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.drop.p, self.training)


class CallsTheFunction(nn.Module):
    """Drops in the middle, and what it returns."""

    def __init__(self, p: Any = 0.25) -> None:
        super().__init__()
        self.up, self.down, self.p = nn.Linear(64, 64), nn.Linear(64, 64), p

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.up(x), p=self.p, training=self.training)
        h = torch.cos(functional.dropout(h, self.p, self.training))
        h = self.down(functional.dropout(h, p=self.p))  # in evaluation, too
        return functional.dropout(h, p=self.p, training=self.training)


DROPPED_NAME = """
    h = functional.dropout(self.up(x), p=self.p, training=self.training)
    h = self.down(torch.cos(functional.dropout(h, p=self.p, training=self.training)))
    h = functional.dropout(h, p=self.p, training=self.training)
    return h"""
ReturnsAName = written(CallsTheFunction, DROPPED_NAME, globals())


class WithANorm(CallsTheFunction):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.25), nn.LayerNorm(64)


INNER = "h = functional.dropout(torch.cos(self.up(x)), p=self.p, training=self.training); h = self.down(h)"
BesideASum = written(WithANorm, f"{INNER}; return self.norm(x + self.drop(h))", globals())
BesideATail = written(WithANorm, f"{INNER}; h = self.drop(h); return h", globals())


class AddsWhatItReturns(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def dropouts_of(model: nn.Module, **options: Any) -> list[str]:
    return [site.name for site in patch_model(model, **options).patched if site.pattern == "dropout"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_drops_and_scales_as_the_operator_and_back(dtype: torch.dtype) -> None:
    drop = nn.Sequential(nn.Dropout(0.25))
    report = patch_model(drop)
    x = torch.randn(SHAPE).to(dtype).requires_grad_()
    torch.manual_seed(7)
    y = drop(x)
    torch.manual_seed(7)
    expected = ops.bias_dropout_residual(x.detach(), None, dropout_p=0.25)
    assert torch.equal(y, expected) and report.calls() == {"0": (1, 0)}
    kept = y != 0
    torch.testing.assert_close(y, torch.where(kept, x.detach() * dropout_scale(0.25), torch.zeros_like(x)))
    assert abs(float(kept.float().mean()) - 0.75) < 0.02
    g = torch.randn(SHAPE).to(dtype)
    y.backward(g)
    torch.testing.assert_close(x.grad, torch.where(kept, g * dropout_scale(0.25), torch.zeros_like(g)))


def test_the_function_drops_as_the_operator() -> None:
    model = CallsTheFunction().bfloat16()
    report = patch_model(model)
    x = torch.randn(SHAPE).bfloat16()
    torch.manual_seed(7)
    y = model(x)
    torch.manual_seed(7)
    h = ops.bias_dropout_residual(model.up(x), None, dropout_p=0.25)
    h = torch.cos(ops.bias_dropout_residual(h, None, dropout_p=0.25))
    h = functional.dropout(model.down(functional.dropout(h, 0.25)), 0.25)
    assert torch.equal(y, h) and report.calls()[""] == (2, 0)
    model.eval()
    torch.manual_seed(7)
    y = model(x)
    torch.manual_seed(7)
    assert torch.equal(y, model.down(functional.dropout(torch.cos(model.up(x)), 0.25)))
    assert report.calls()[""] == (2, 0)


@pytest.mark.parametrize("make", [CallsTheFunction, ReturnsAName])
def test_what_a_child_returns_is_drawn_by_its_parents_sum(make: Any) -> None:
    model = AddsWhatItReturns(make())
    report = patch_model(model)
    assert {site.name: site.pattern for site in report.patched} == {"": "dropout_add", "inner": "dropout"}
    model(torch.randn(SHAPE))
    assert report.calls() == {"": (1, 0), "inner": (2, 0)}


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (BesideASum, {"": (2, 0)}),
        (lambda: AddsWhatItReturns(BesideATail()), {"": (1, 0), "inner": (1, 0), "inner.norm": (0, 0)}),
    ],
    ids=["sum", "tail"],
)
def test_beside_a_sum_that_draws_a_childs_dropout(make: Any, calls: Any) -> None:
    model = make()
    report = patch_model(model)
    x = torch.randn(SHAPE, requires_grad=True)
    model(x).sum().backward()
    assert report.calls() == calls
    model.eval()
    y = model(x)
    unpatch_model(model)
    torch.testing.assert_close(model(x), y)


dropout = functional.dropout
"""Some forwards have something else of this name."""
NAMED = "return torch.cos(dropout(x, p=self.p, training=self.training))"
OTHERS = {
    "another function of that name": f"def dropout(x, p, training): return 2 * x; {NAMED}",
    "an argument of that name": """
        other = lambda x, p, training: 3 * x
        return (lambda dropout: torch.cos(dropout(x, p=self.p, training=self.training)))(other)""",
    "another function around": """
        def dropout(x, p, training):
            return 4 * x

        return (lambda h: torch.cos(dropout(h, p=self.p, training=self.training)))(self.up(x))""",
    "starred": "return torch.cos(functional.dropout(self.up(x), *(), training=self.training))",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_left_alone(name: str) -> None:
    found = [dropouts_of(written(CallsTheFunction, body, globals())()) for body in (OTHERS[name], NAMED)]
    assert found == [[], [""]]


def test_a_probability_that_cannot_be_read_yet_is_asked_for_by_calls() -> None:
    class Later(CallsTheFunction):
        @property
        def later(self) -> float:
            raise RuntimeError("not yet")

    body = "return torch.cos(functional.dropout(self.up(x), p=self.later, training=self.training))"
    model = written(Later, body, globals())()
    assert dropouts_of(model) == [""]
    with pytest.raises(RuntimeError, match="not yet"):
        model(torch.ones(SHAPE))


@pytest.mark.parametrize(
    ("base", "call"),
    [(FeedForward, "self.drop(x.mT)"), (CallsTheFunction, "functional.dropout(x.mT, self.p, self.training)")],
    ids=["module", "function"],
)
def test_results_have_the_strides_that_torch_gives_them(base: Any, call: str) -> None:
    model = written(base, f"return {call}.transpose(1, 2).view(-1, 64)", globals())()
    report = patch_model(model)
    assert model(torch.ones(SHAPE)).shape == (256, 64)
    assert [*report.calls().values()] == [(0, 1)]


def test_traced_symbolically() -> None:
    patch_model(model := ReturnsAName())
    assert "dropout" in torch.fx.symbolic_trace(model).code


def test_a_site_has_the_name_of_its_sum() -> None:
    body = """
        h = torch.cos(functional.dropout(self.up(x), p=self.p, training=self.training))
        return x + functional.dropout(self.down(h), p=self.p, training=self.training)"""
    (site,) = patch_model(written(CallsTheFunction, body, globals())()).patched
    assert site.pattern == "dropout_add" and "dropout" in site.detail.split(", ")[-1]


@pytest.mark.parametrize("p", [0.0, 0, torch.tensor(0.25), 1.5, None], ids=str)
def test_other_probabilities_are_torchs(p: Any) -> None:
    def outcome(model: nn.Module) -> Any:
        torch.manual_seed(3)
        try:
            return model(torch.ones(SHAPE)).tolist()
        except (TypeError, ValueError) as error:
            return str(error)

    model = CallsTheFunction()
    report = patch_model(model)
    model.p = p
    patched = outcome(model)
    unpatch_model(model)
    assert outcome(model) == patched and report.calls()[""] == (0, 0)
    assert dropouts_of(model) == ([] if p in (0.0, 0) else [""])


def test_forwards_of_whole_models_are_read_too() -> None:
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in BART_LAYERS.items()}
    model = BartModel(BartConfig(d_model=32, vocab_size=50, max_position_embeddings=600, **sizes))
    assert {"encoder", "decoder"} <= set(dropouts_of(model, patterns=["dropout"]))
    unpatch_model(model)
    assert dropouts_of(model, patterns=["layer_norm"]) == []
    unpatch_model(model)
    report = patch_model(model)
    sites = {site.name: (site.pattern, site.detail) for site in report.patched}
    assert sites["encoder"] == sites["decoder"] == ("add_norm", "and dropout")
    assert model(input_ids=torch.randint(3, 50, (2, 512))).last_hidden_state.isfinite().all()
    assert report.calls()["encoder"] == report.calls()["decoder"] == (2, 0)  # the sum, the dropout


def test_no_mask_is_kept_for_backward() -> None:
    model, x = FeedForward(), torch.randn(SHAPE, requires_grad=True)
    patch_model(model)
    assert saved_bytes(lambda: model.drop(x)) == 0


def test_evaluation_and_small_tensors_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FeedForward()
    report = patch_model(model)
    x = torch.randn(2, 64)
    torch.manual_seed(3)
    y = model(x)
    unpatch_model(model)
    torch.manual_seed(3)
    assert torch.equal(model(x), y) and report.calls()["drop"] == (0, 0)
    patch_model(model)
    model.eval()
    monkeypatch.setattr(dropouts, "_SMALLEST", {"cpu": 0})
    x = torch.randn(SHAPE)
    assert model.drop(x) is x


@pytest.mark.parametrize("x", [torch.ones(SHAPE).double(), torch.ones(SHAPE).long()], ids=["float64", "int64"])
def test_dtypes_that_no_kernel_has_are_torchs(x: Tensor) -> None:
    model = FeedForward(1.0)  # of integers torch drops all or nothing
    report = patch_model(model)
    assert torch.equal(model.drop(x), functional.dropout(x, 1.0)) and report.calls()["drop"] == (0, 1)


def test_what_is_no_plain_dropout_is_left_alone() -> None:
    class Own(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            return input

    model = nn.Sequential(Own(0.5), nn.Dropout(0.0), nn.Dropout(0.5, inplace=True), nn.Dropout1d(0.5))
    assert dropouts_of(model) == []
    assert dropouts_of(FeedForward().double()) == []
    assert dropouts_of(FeedForward(), exclude=["drop"]) == []
    assert dropouts_of(FeedForward(), patterns=["layer_norm"]) == []


def test_a_probability_or_a_flag_that_changes_later_counts() -> None:
    model = FeedForward()
    report = patch_model(model)
    x = torch.ones(SHAPE)
    model.drop.p = 1.0
    assert not model.drop(x).any() and report.calls()["drop"] == (1, 0)
    model.drop.p = 0.0
    assert model.drop(x) is x
    model.drop.p, model.drop.inplace = 0.5, True
    assert model.drop(x) is x and not x.all()


def test_dropouts_that_no_forward_calls_are_no_sites() -> None:
    assert dropouts_of(ReadsItsProbability()) == []
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertModel(BertConfig(**sizes, intermediate_size=32, vocab_size=50), add_pooling_layer=False)
    assert dropouts_of(bert) == ["embeddings.dropout"]  # sums and attention take the others
    gpt2 = GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    assert set(dropouts_of(gpt2)) == {"drop", "h.0.attn.attn_dropout"}  # the second one in a method for float16
    torchs = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1)
    assert dropouts_of(torchs) == ["layers.0.dropout"]  # the sums take those of two methods
    t5 = T5Model(T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=50))
    assert dropouts_of(t5) == dropouts_of(t5) == ["encoder.dropout", "decoder.dropout"]
    unpatch_model(t5)
    assert len(dropouts_of(t5, patterns=["dropout"])) == 4 + 5  # now the layers call theirs


@pytest.mark.parametrize("make", [FeedForward, CallsTheFunction])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_mask(reentrant: bool, make: Any) -> None:
    model = make()
    patch_model(model)
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        x = torch.ones(SHAPE, requires_grad=True)
        torch.manual_seed(5)
        run(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_under_vmap_it_is_torchs() -> None:
    """Which has a mask for each sample."""
    model = nn.Sequential(FeedForward(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5))
    report = patch_model(model)
    x = torch.randn(8, 300, 64)
    y = torch.func.vmap(model, randomness="different")(x)
    assert y.shape == x.shape and not torch.equal(y[0] == 0, y[1] == 0)
    assert report.calls()["0.drop"] == (0, 0)


def test_gradients_of_each_sample_of_a_model_in_training() -> None:
    """As Opacus and influence functions compute them: the sums and the attention raised."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
    model = BertModel(BertConfig(num_hidden_layers=1, attn_implementation="eager", **sizes)).train()
    assert {site.pattern for site in patch_model(model).patched} >= {"attention_softmax", "dropout_add_norm"}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        states = torch.func.functional_call(model, parameters, (ids[None],)).last_hidden_state
        return states.square()[0, 0, 0]

    same = torch.randint(50, (1, 6)).expand(2, -1)
    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")(parameters, same)
    of_dense = found["encoder.layer.0.output.dense.weight"]
    assert of_dense.isfinite().all() and not torch.equal(of_dense[0], of_dense[1])


@pytest.mark.slow
def test_compiled_it_is_inductors() -> None:
    model = FeedForward()
    report = patch_model(model)
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(SHAPE, requires_grad=True))
    y.sum().backward()
    assert report.calls()["drop"] == (0, 0)


def test_a_dropout_that_computes_something_else_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.bias_dropout_residual
    monkeypatch.setattr(ops, "bias_dropout_residual", lambda *args, **options: 1.001 * real(*args, **options))
    for model, name in ((FeedForward(), "drop"), (CallsTheFunction(), "")):
        report = patch_model(model)
        assert [site.reason for site in report.skipped if site.name == name] == ["verify_failed"]
