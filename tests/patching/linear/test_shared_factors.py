"""Factors of what linear layers of a shared input return: part of their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.measure import saved_bytes
from onetrip.measure.traffic import traffic
from onetrip.patching import PatchReport, calls, patch_model, unpatch_model
from onetrip.patching.linear import shared_input
from outcomes import (
    assert_agree,
    assert_compiles,
    assert_equal,
    assert_obeys,
    loss_outcome,
    outcome,
    patched_pair,
    penalty_gradients,
)
from pairwise import pairwise
from patching_cases import WIDTH, inputs, randomised, written
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq


class Attention(nn.Module):
    """Parts of the forwards below."""

    def __init__(self, scaling: Any = 0.125, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=each) for each in (bias, False, True))
        self.scaling = scaling

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v

    def halves(self, x: Tensor, n: int = 2) -> Tensor:
        return x.view(*x.shape[:-1], n, -1).transpose(-2, -3)


def attention(body: str) -> Any:
    return written(Attention, body, globals(), "x, y=None")


OPT = "q = self.q(x) * self.scaling; k = self.k(x); v = self.v(x); return self.attend(q, k, v)"
Inline = attention(OPT)
Cross = attention("y = x if y is None else y; " + OPT.replace("k(x)", "k(y)").replace("v(x)", "v(y)"))
FOUND = {
    "inline": Inline,
    "viewed": attention("q = (self.q(x) * self.scaling).view(-1, x.shape[-1]); return q * self.k(x).view_as(q)"),
    "given": attention("q = self.halves(self.q(x) * self.scaling, 4); return q + self.halves(self.k(x), 4)"),
    "next statement": attention("q = self.q(x); q = q * self.scaling; return self.attend(q, self.k(x), self.v(x))"),
    "returned": attention("k = self.k(x); return torch.tanh(k + self.q(x) * self.scaling)"),
    "constant": attention("q = self.q(x) * 0.125; return self.attend(q, self.k(x), self.v(x))"),
}
LEFT = {
    "read before": "q = self.q(x); scaled = q * self.scaling; return self.attend(q, self.k(x), scaled)",
    "another statement between": "q = self.q(x); k = self.k(x); q = q * self.scaling; return self.attend(q, k, q)",
    "by a tensor of the forward": "s = x.mean(); q = self.q(x) * s; return self.attend(q, self.k(x), self.v(x))",
    "divided": "q = self.q(x) / self.scaling; return self.attend(q, self.k(x), self.v(x))",
    "read by a function": """
        q = self.q(x)
        scaled = [q * self.scaling for _ in range(2)]
        return self.attend(scaled[0], self.k(x), scaled[1])""",
    "of a layer alone": "return self.q(x) * self.scaling + self.k(y)",
}


def takes_a_factor(report: PatchReport) -> bool:
    return any("shared_.scaled(" in report.diff(site.name) for site in report.patched)


def scaled_bytes(model: nn.Module, x: Tensor) -> int:
    """Of multiplications, there and back."""
    found = traffic(lambda: outcome(model, x)).operators.values()
    return sum(each.bytes for each in found if each.name == "aten::mul")


def apart(compute: Callable[[], Any]) -> Any:
    """What it computes with each factor in a pass of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "scales_exactly", lambda *given: False)
        return compute()


@pairwise(kind=FOUND, bias=[True, False], dtype=[torch.float32, torch.bfloat16])
def test_the_same_bits_without_a_pass_over_the_result(kind: Any, bias: bool, dtype: torch.dtype, x: Tensor) -> None:
    model, x = randomised(kind(bias=bias)).to(dtype), x.to(dtype)
    expected = outcome(model, x)
    report = patch_model(model)
    assert takes_a_factor(report)
    ours = outcome(model, x)
    assert torch.equal(ours["y"], expected["y"])
    assert_equal(ours, apart(lambda: outcome(model, x)))
    assert_agree(ours, expected, 1e-5 if dtype == torch.float32 else 3e-2)
    passes = 4 * x.nbytes  # the result and its gradient, each read and written
    assert apart(lambda: scaled_bytes(model, x)) - scaled_bytes(model, x) > passes - 8 * WIDTH * x.itemsize
    unpatch_model(model)
    assert type(model) is kind


@pairwise(scaling=[0.125, 8, -0.5, 2.0**-16, 1.0, 1], dtype=[torch.float32, torch.bfloat16])
def test_a_layer_alone_has_the_bits_of_the_unpatched_model(scaling: float, dtype: torch.dtype) -> None:
    """Its gradients are not added to others."""
    model, given = randomised(Cross(scaling)).to(dtype), [each.to(dtype) for each in inputs(2)]
    expected = outcome(model, *given)
    report = patch_model(model)
    ours = outcome(model, *given)
    for name in ("y", "input 0", "q.weight", "q.bias"):
        assert torch.equal(ours[name], expected[name]), name
    assert report.calls() == {"": (3, 0)}


def test_the_layer_is_called_once(x: Tensor) -> None:
    report = patch_model(model := FOUND["next statement"]())
    outcome(model, x)
    assert report.calls() == {"": (3, 0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype: torch.dtype, x: Tensor) -> None:
    model, x = randomised(Inline()), x.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        expected = outcome(model, x)
        patch_model(model)
        ours = outcome(model, x)
        assert_equal(ours, apart(lambda: outcome(model, x)))
    assert torch.equal(ours["y"], expected["y"])
    assert_agree(ours, expected, 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, x: Tensor) -> None:
    """Gradients of float32 weights are float32 in their products."""
    monkeypatch.setattr(calls, "_GPU_IS_FASTER", 1)
    model, x = randomised(Inline()).cuda(), x.to("cuda", dtype)
    patch_model(model)
    leaf = x.clone().requires_grad_()

    def gradients() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            y = model(leaf)
        return [y, *torch.autograd.grad(y.float().sin().sum(), [leaf, *model.parameters()])]

    assert_agree(gradients(), apart(gradients), 1e-2)


def test_saves_what_it_saved(x: Tensor) -> None:
    model, unpatched, _ = patched_pair(randomised(Inline()))
    leaf = x.clone().requires_grad_()
    assert saved_bytes(lambda: model(leaf)) <= saved_bytes(lambda: unpatched(leaf))
    assert saved_bytes(lambda: model(leaf)) == apart(lambda: saved_bytes(lambda: model(leaf)))


@pytest.mark.parametrize("scaling", [0.3, 3, True, torch.tensor(0.5), 2.0**17, 2.0**-17, 0.0, float("inf")], ids=str)
def test_other_factors_scale_the_result(scaling: Any, x: Tensor) -> None:
    model = randomised(Inline(scaling))
    expected = outcome(model, x)
    patch_model(model)
    ours = outcome(model, x)
    assert torch.equal(ours["y"].nan_to_num(), expected["y"].nan_to_num())
    assert scaled_bytes(model, x) == apart(lambda: scaled_bytes(model, x))


def test_inputs_that_are_not_contiguous_have_the_same_bits() -> None:
    """Of those, torch adds the bias after the product is rounded; a checkpoint may run without gradients first."""
    model = randomised(Inline()).bfloat16()
    patch_model(model)
    x = torch.randn(7, 3, WIDTH).bfloat16().transpose(0, 1).requires_grad_()
    y = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), y)


def test_a_factor_that_is_trained(x: Tensor) -> None:
    model = randomised(Inline(nn.Parameter(torch.tensor(0.5))))
    expected = outcome(model, x)
    patch_model(model)
    ours = outcome(model, x)
    assert "scaling" in ours
    assert_agree(ours, expected)


def test_float16_is_scaled_after_the_product(x: Tensor) -> None:
    model = Inline()
    patch_model(model)
    with torch.autocast("cpu", torch.float16):
        assert scaled_bytes(model, x) == apart(lambda: scaled_bytes(model, x))
    model, x = model.half(), x.half()
    assert scaled_bytes(model, x) == apart(lambda: scaled_bytes(model, x))


@pytest.mark.parametrize("name", LEFT)
def test_forwards_whose_factor_is_left(name: str) -> None:
    assert not takes_a_factor(patch_model(attention(LEFT[name])(), patterns=("shared_input",)))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hooked": lambda model: model.q.register_forward_hook(lambda module, args, y: y + 1.0),
    "subclassed": lambda model: setattr(model, "q", Doubled(WIDTH, WIDTH)),
    "wrapped": lambda model: setattr(model, "q", nn.Sequential(model.q, nn.Tanh())),
    "frozen": lambda model: [each.requires_grad_(False) for each in (model.q.weight, model.v.bias)],
    "another factor": lambda model: setattr(model, "scaling", 0.7),
    "without gradients": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_patching(name: str, x: Tensor) -> None:
    assert_obeys(CHANGES[name], randomised(Inline()), x)


def test_without_gradients_the_same_bits(x: Tensor) -> None:
    model, unpatched, _ = patched_pair(randomised(Inline()))
    with torch.no_grad():
        assert torch.equal(model(x), unpatched(x))


def test_a_result_that_is_written_to(x: Tensor) -> None:
    model = randomised(
        attention("q = (self.q(x) * self.scaling).add_(1.0); return self.attend(q, self.k(x), self.v(x))")()
    )
    expected = outcome(model, x)
    assert takes_a_factor(patch_model(model))
    assert_agree(outcome(model, x), expected)


def test_second_derivatives(x: Tensor) -> None:
    model = randomised(Inline()).double()
    expected = penalty_gradients(model, x.double())
    patch_model(model.float())
    assert_agree(penalty_gradients(model, x), expected, relative=1e-4)


@pytest.mark.parametrize("kind", ["inline", "next statement"])
def test_compiles_without_a_break(kind: str, x: Tensor) -> None:
    assert_compiles(randomised(FOUND[kind]()), x)


def test_verification_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = shared_input.linear
    monkeypatch.setattr(shared_input, "linear", lambda *given, scale: linear(*given))
    report = patch_model(Inline())
    assert [site.reason for site in report.skipped] == ["verify_failed"]


SIZES = {"d_model": 128, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 64}
ENCODER = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
OPTIONS = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_layers": 1, "attention_heads": 2}
"""Of 64 columns."""
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "opt": (AutoModelForCausalLM, OPTIONS | HEADS | SPECIAL | {"vocab_size": 64}),
    "xglm": (AutoModelForCausalLM, SIZES | OPTIONS | HEADS | SPECIAL),
    "trocr": (AutoModelForCausalLM, SIZES | SPECIAL),
    "led": (AutoModelForSeq2SeqLM, SIZES | ENCODER | SPECIAL | {"attention_window": 4}),
    # Its attention weights are computed in methods.
    "pegasus_x": (AutoModelForSeq2SeqLM, SIZES | ENCODER | SPECIAL | {"block_size": 4, "num_global_tokens": 2}),
    "whisper": (AutoModelForSpeechSeq2Seq, SIZES | ENCODER | SPECIAL | {"num_mel_bins": 8, "max_source_positions": 10}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    make, options = MODELS[name]
    torch.manual_seed(0)
    model = make.from_config(CONFIG_MAPPING[name](**options)).eval()
    ids = torch.randint(3, 64, (2, 9))
    given = {"input_features": torch.randn(2, 8, 20)} if name == "whisper" else {"input_ids": ids}
    expected = loss_outcome(model, given | {"labels": ids})
    report = patch_model(model)
    assert takes_a_factor(report)
    ours = loss_outcome(model, given | {"labels": ids})
    assert_agree(ours, expected, 1e-4)
    assert_equal(ours, apart(lambda: loss_outcome(model, given | {"labels": ids})))
