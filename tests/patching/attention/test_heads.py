"""Copies that attention functions do not need."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import patch_model
from outcomes import assert_agree, loss_outcome
from patching_cases import WHISPER, WIDTH, speech, tiny_model, written
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
modeling_utils = pytest.importorskip("transformers.modeling_utils")
if not hasattr(getattr(modeling_utils, "ALL_ATTENTION_FUNCTIONS", None), "get_interface"):
    pytest.skip("needs transformers 5", allow_module_level=True)
ALL_ATTENTION_FUNCTIONS = modeling_utils.ALL_ATTENTION_FUNCTIONS

ONLY = ("attention_heads",)


def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value, None


class Parts(nn.Module):
    def __init__(self, implementation: str = "sdpa") -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.same = nn.Identity()
        self.config, self.is_causal = SimpleNamespace(_attn_implementation=implementation), False


FORWARD = """
    shape = (*x.shape[:-1], -1, 4)
    q = (self.q(x) * 0.5).view(shape).transpose(1, 2).contiguous()
    k = self.k(x).view(shape).transpose(1, 2).contiguous()
    v = self.v(x).view(shape).transpose(1, 2).contiguous()
    function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    y, _ = function(self, q, k, v, None, scaling=1.0)
    y = y.reshape(x.shape)
    return self.out(y)"""
Attention = written(Parts, FORWARD, globals(), "x, store=None")
"""As Whisper's."""
LINE = "v = self.v(x).view(shape).transpose(1, 2).contiguous()"
RESHAPED = "y = y.reshape(x.shape)"
OTHERS = {
    "returned": [("return self.out(y)", "return self.out(y), q, k, v")],
    "written to": [(LINE, f"{LINE}; q.mul_(2.0)")],
    "of the input": [("self.q(x) * 0.5", "x"), ("self.k(x)", "x"), ("self.v(x)", "x")],
    "of no linear layer": [(f"self.{name}(x)", "self.same(x)") for name in "qkv"],
    "result written to": [(RESHAPED, f"y *= 2.0; {RESHAPED}")],
    "view of the result written to": [(RESHAPED, f"{RESHAPED}; y *= 2.0")],
    "result returned": [(RESHAPED, "return y")],
    "another function": [("y, _ = ", "if x.shape[1] < 100: function = eager; y, _ = ")],
    "no cache": [
        (LINE, f"{LINE}; seen, kept = store.update(k, v); store.update(q, q)"),
        ("q, k, v, None", "q, seen, kept, None"),
    ],
    "own update": [(LINE, f"{LINE}; self.update(q, k, v)")],
    "other dimensions": [("transpose(1, 2)", "transpose(2, 3)")],
}
"""Changes of FORWARD, by what they make of q, k and v, or of the result."""


@pytest.fixture
def whisper() -> Any:
    return tiny_model("WhisperForConditionalGeneration", WHISPER).train()


def copies(model: nn.Module) -> int:
    return traffic(lambda: loss_outcome(model, speech())).operators["forward", "aten::clone"].calls


def test_whisper_copies_no_heads(whisper: Any) -> None:
    """Six attentions: q, k and v."""
    expected, before = loss_outcome(whisper, speech()), copies(whisper)
    report = patch_model(whisper, patterns=ONLY)
    assert len(report.patched) == 6
    assert_agree(loss_outcome(whisper, speech()), expected)
    assert set(report.calls().values()) == {(3, 0)}
    assert before - copies(whisper) >= 6 * 3


def test_without_gradients_whisper_does_what_it_did(whisper: Any) -> None:
    whisper.eval()
    features = {"input_features": speech()["input_features"]}
    expected = whisper.generate(**features, max_new_tokens=4)
    report = patch_model(whisper, patterns=ONLY)
    assert torch.equal(whisper.generate(**features, max_new_tokens=4), expected)
    assert set(report.calls().values()) == {(0, 0)}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_beside_everything_else(whisper: Any, use_reentrant: bool) -> None:
    expected = loss_outcome(whisper, speech())
    whisper.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    patch_model(whisper)
    for _ in range(2):
        assert_agree(loss_outcome(whisper, speech()), expected)


def test_an_attention_of_ones_own(x: Tensor) -> None:
    model = Attention()
    expected = model(x)
    report = patch_model(model, patterns=ONLY)
    torch.testing.assert_close(model(x), expected)
    assert report.calls() == {"": (3, 0)}


@pytest.mark.parametrize("name", OTHERS)
def test_what_others_may_read_is_copied(name: str) -> None:
    body = FORWARD
    for old, other in OTHERS[name]:
        assert old in body
        body = body.replace(old, other)
    assert not patch_model(written(Parts, body, globals(), "x, store=None")(), patterns=ONLY).patched


@pytest.mark.parametrize("name", ["own", "sdpa"])
@pytest.mark.parametrize("decorate", [lambda own: own, functools.wraps(ALL_ATTENTION_FUNCTIONS["sdpa"])])
def test_other_functions_are_given_copies(x: Tensor, decorate: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a user's may need rows one after another."""
    model, strides = Attention(), []

    @decorate
    def own(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        strides.extend(each.is_contiguous() for each in (query, key, value))
        return eager(module, query, key, value, mask, **options)

    patch_model(model, patterns=ONLY)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, own)
    model.config._attn_implementation = name
    model(x)
    assert not patch_model(Attention(name), patterns=ONLY).patched
    assert strides == [True] * 3
    monkeypatch.undo()
    assert not patch_model(Attention("eager"), patterns=ONLY).patched
    report = patch_model(Attention(), attention=False)
    assert "attention_heads" not in {site.pattern for site in report.patched}
