"""Keys and values that a cache keeps without copies."""

from __future__ import annotations

import copy
import inspect
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import patch_model
from onetrip.patching.attention.cached import read_updates
from onetrip.patching.forward import Forward, read_forward
from outcomes import assert_agree, assert_compiles, compiles_transformers, loss_outcome
from patching_cases import WIDTH, ZOO, tiny_model, token_ids, written
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")
if not hasattr(cache_utils, "DynamicLayer"):
    pytest.skip("needs caches of layers", allow_module_level=True)

ALL_ATTENTION_FUNCTIONS = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
ONLY = ("key_value_cache",)
DECODERS = ("gpt2", "llama")  # of two layers; a packed projection, and rotated keys with fewer heads


def pair(name: str) -> tuple[Any, Any, Any]:
    """(unpatched, patched, report)."""
    original = tiny_model(*ZOO[name][:2]).train()
    model = copy.deepcopy(original)
    return original, model, patch_model(model, patterns=ONLY)


def n_joined(model: nn.Module, inputs: dict[str, Any]) -> int:
    joins = traffic(lambda: loss_outcome(model, inputs)).operators.get(("forward", "aten::cat"))
    return 0 if joins is None else joins.calls


def kept(cache: Any) -> list[Tensor]:
    return [each for layer in cache.layers for each in (layer.keys, layer.values)]


@pytest.mark.parametrize("name", DECODERS)
def test_a_training_step_joins_nothing(name: str) -> None:
    original, model, report = pair(name)
    inputs = ZOO[name].inputs()
    assert_agree(loss_outcome(model, inputs), loss_outcome(original, inputs))
    assert set(report.calls().values()) == {(1, 0)}
    assert n_joined(original, inputs) - n_joined(model, inputs) == 2 * 2


def test_a_cache_without_layers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers 4.48: it keeps the keys and values of the first call as they are."""
    read = read_forward(inspect.unwrap(transformers.models.gpt2.modeling_gpt2.GPT2Attention.forward))
    assert isinstance(read, Forward) and read_updates(read)
    monkeypatch.delattr(cache_utils, "DynamicLayer")
    assert not read_updates(read)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("training", [True, False], ids=["gradients", "no gradients"])
def test_the_cache_has_what_it_had_and_goes_on(name: str, training: bool) -> None:
    original, model, report = pair(name)
    found = []
    with torch.set_grad_enabled(training):
        for each in (original, model):
            output = each(input_ids=token_ids())
            first = [tensor.clone() for tensor in kept(output.past_key_values)]
            more = each(input_ids=token_ids(2, 3, seed=2), past_key_values=output.past_key_values)
            found.append([*first, more.logits, *kept(more.past_key_values)])
    assert_agree(*found)
    assert set(report.calls().values()) == {(int(training), 0)}  # none where there is something to join


def test_keys_and_values_are_the_projections() -> None:
    """GPT-2's are slices of one tensor, which is kept for backward in any case."""
    _, model, _ = pair("gpt2")
    key, value = kept(model(input_ids=token_ids()).past_key_values)[:2]
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() and not key.is_contiguous()


def test_an_encoder_and_a_decoder() -> None:
    original, model, _ = pair("bart")
    found = []
    for each in (original, model):
        output = each(input_ids=token_ids(), decoder_input_ids=token_ids(2, 5, seed=1))
        cache = output.past_key_values
        loss = output.logits.square().sum()
        gradients = torch.autograd.grad(loss, list(each.parameters()), allow_unused=True, materialize_grads=True)
        found.append([*kept(cache.self_attention_cache), *kept(cache.cross_attention_cache), *gradients])
    assert_agree(*found)


CACHES = {
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=16),
    "sliding windows": lambda config: transformers.DynamicCache(config=config),
    "a class of one's own": lambda config: type("Own", (transformers.DynamicCache,), {})(config=config),
}


@pytest.mark.parametrize("name", CACHES)
def test_other_caches_are_updated_as_ever(name: str) -> None:
    options = ZOO["llama"].options
    if name == "sliding windows":
        options = options | {"sliding_window": 4}
    model = "MistralForCausalLM" if name == "sliding windows" else "LlamaForCausalLM"
    original = tiny_model(model, options).train()
    patched = copy.deepcopy(original)
    report = patch_model(patched, patterns=ONLY)
    found = []
    for each in (original, patched):
        cache = CACHES[name](each.config)
        output = each(input_ids=token_ids(), past_key_values=cache)
        found.append([output.logits, *kept(cache)])
    assert_agree(*found)
    assert report.patched and set(report.calls().values()) == {(0, 0)}


def test_an_update_of_ones_own_is_called() -> None:
    _, model, report = pair("llama")
    cache, seen = transformers.DynamicCache(), []

    def update(self: Any, key: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(key.shape)
        return transformers.DynamicCache.update(self, key, *args, **options)

    cache.update = types.MethodType(update, cache)
    model(input_ids=token_ids(), past_key_values=cache)
    assert len(seen) == 2 and set(report.calls().values()) == {(0, 0)}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.config, self.is_causal = SimpleNamespace(_attn_implementation="sdpa"), False


FORWARD = """
    shape = (*x.shape[:-1], -1, 4)
    query, key, value = (each(x).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
    key, value = cache.update(key, value, 0)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
    y, _ = function(self, query, key, value, None, scaling=1.0)
    y = self.out(y.reshape(x.shape))
    return y"""
OTHERS = {
    "none": ("", ""),
    "returned": ("y = self.out(", "return key, value; y = self.out("),
    "viewed": ("function = ", "key = key.view(key.shape); function = "),
    "given to another function": ("function = ", "key = torch.relu(key); function = "),
    "written to": ("y = self.out(", "x *= 2.0; y = self.out("),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_reads_keys_has_copies(name: str) -> None:
    assert OTHERS[name][0] in FORWARD
    model = written(Attention, FORWARD.replace(*OTHERS[name], 1), globals(), "x, cache")()
    assert bool(patch_model(model, patterns=ONLY).patched) == (name == "none")


def test_eager_attention_reads_copies() -> None:
    _, model, report = pair("llama")
    model.set_attn_implementation("eager")
    model(input_ids=token_ids())
    assert set(report.calls().values()) == {(0, 0)}


def test_attention_false_leaves_the_cache_alone() -> None:
    model = tiny_model(*ZOO["gpt2"][:2])
    assert not [site for site in patch_model(model, attention=False).patched if site.pattern == ONLY[0]]


@compiles_transformers
def test_compiles_without_a_break() -> None:
    assert_compiles(pair("llama")[0], ZOO["llama"].inputs(), compute=loss_outcome, patterns=ONLY)
