"""Eager attention as older transformers write it: up to 5.0 a forward asks the interface only if the implementation is
not "eager", and up to 5.1 a function adds a slice of its mask."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import onetrip
import pytest
import torch
from onetrip.patching import patch_model
from onetrip.patching.attention.eager import EagerFunction, read_eager_function
from onetrip.patching.attention.interface import attention_functions
from onetrip.patching.forward import Forward, read_forward
from onetrip.patching.report import PatchReport, Unsuitable
from outcomes import Outcome, assert_agree, assert_compiles, assert_equal, outcome, patched_pair
from torch import Tensor, nn

modeling_utils = pytest.importorskip("transformers.modeling_utils")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

PATTERN = "attention_softmax"
BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8


def repeat_kv(x: Tensor, n: int) -> Tensor:
    return x.repeat_interleave(n, dim=1)


def llama(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """With a slice of the mask."""
    key_states = repeat_kv(key, module.num_key_value_groups)
    value_states = repeat_kv(value, module.num_key_value_groups)

    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
    if attention_mask is not None:
        causal_mask = attention_mask[:, :, :, : key_states.shape[-2]]
        attn_weights = attn_weights + causal_mask

    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


def modernbert_decoder(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """With a slice of the mask, whatever it is."""
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    causal_mask = attention_mask[:, :, :, : key.shape[-2]]
    attn_weights = attn_weights + causal_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


def whisper(module, query, key, value, attention_mask, scaling=None, dropout=0.0, head_mask=None, **kwargs):
    """Masks of other dimensions are ignored. With a mask of heads."""
    if scaling is None:
        scaling = query.size(-1) ** -0.5

    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None and attention_mask.ndim == 4:
        attn_weights = attn_weights + attention_mask[:, :, :, : key.shape[-2]]

    attn_weights = nn.functional.softmax(attn_weights, dim=-1)
    if head_mask is not None:
        attn_weights = attn_weights * head_mask.view(1, -1, 1, 1)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


def vit(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Its mask is one of heads."""
    attn_weights = torch.matmul(query, key.transpose(-1, -2)) * scaling
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    if attention_mask is not None:
        attn_weights = attn_weights * attention_mask
    attn_output = torch.matmul(attn_weights, value)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


def clip(module, query, key, value, attention_mask, scaling, dropout=0.0, output_attentions=True, **kwargs):
    """Returns weights on request."""
    attn_weights = torch.matmul(query, key.transpose(-1, -2)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value)
    attn_output = attn_output.transpose(1, 2).contiguous()
    if not output_attentions:
        attn_weights = None
    return attn_output, attn_weights


def two_head_masks(module, query, key, value, attention_mask, scaling, dropout=0.0, head_mask=None, **kwargs):
    attn_weights = torch.matmul(query, key.transpose(-1, -2)) * scaling
    attn_weights = nn.functional.softmax(attn_weights, dim=-1)
    if attention_mask is not None:
        attn_weights = attn_weights * attention_mask
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    if head_mask is not None:
        attn_weights = attn_weights * head_mask
    return torch.matmul(attn_weights, value).transpose(1, 2), attn_weights


def sliced_for_values(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    attn_weights = torch.matmul(query, key.transpose(-1, -2)) * scaling
    attn_weights = attn_weights + attention_mask[:, :, :, : value.shape[-2]]
    attn_weights = nn.functional.softmax(attn_weights, dim=-1)
    return torch.matmul(attn_weights, value).transpose(1, 2), attn_weights


def other_weights(module, query, key, value, attention_mask, scaling, dropout=0.0, output_attentions=True, **kwargs):
    attn_weights = torch.matmul(query, key.transpose(-1, -2)) * scaling
    probabilities = nn.functional.softmax(attn_weights, dim=-1)
    if not output_attentions:
        attn_weights = None
    return torch.matmul(probabilities, value).transpose(1, 2), attn_weights


eager_attention_forward = llama
"""What the forwards below name: each test sets it."""


class Attention(nn.Module):
    """Transformers 4.50 to 5.0."""

    num_key_value_groups = 2
    is_causal = False

    def __init__(self, implementation: str = "eager", dropout: float = 0.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=implementation)
        self.scaling, self.dropout = 0.5, dropout
        n_columns = HEADS * WIDTH
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(n_columns, n) for n in (n_columns, n_columns // 2, n_columns // 2)
        )

    def forward(self, x, attention_mask=None, **kwargs):
        shape = (*x.shape[:-1], -1, WIDTH)
        query = self.q_proj(x).view(shape).transpose(1, 2)
        key = self.k_proj(x).view(shape).transpose(1, 2)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        attention_interface: Callable = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0 if not self.training else self.dropout,
            scaling=self.scaling,
            **kwargs,
        )
        return output.reshape(*x.shape[:-1], -1), weights


class WarningAttention(Attention):
    """Transformers 4.48: SDPA returns no weights."""

    def forward(self, x, attention_mask=None, **kwargs):
        shape = (*x.shape[:-1], -1, WIDTH)
        query = self.q_proj(x).view(shape).transpose(1, 2)
        key = self.k_proj(x).view(shape).transpose(1, 2)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        attention_interface: Callable = eager_attention_forward
        if self.config._attn_implementation != "eager":
            if self.config._attn_implementation == "sdpa" and kwargs.get("output_attentions", False):
                print("falling back to eager attention")
            else:
                attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, weights = attention_interface(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return output.reshape(*x.shape[:-1], -1), weights


class ChosenByArgument(Attention):
    """GPT-NeoX of transformers 4.49."""

    def forward(self, x, attention_mask=None, attention_type="eager"):
        shape = (*x.shape[:-1], -1, WIDTH)
        query = self.q_proj(x).view(shape).transpose(1, 2)
        key = self.k_proj(x).view(shape).transpose(1, 2)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        attention_interface: Callable = eager_attention_forward
        attention_interface = (
            ALL_ATTENTION_FUNCTIONS[attention_type] if attention_type != "eager" else attention_interface
        )
        output, weights = attention_interface(self, query, key, value, attention_mask, scaling=self.scaling)
        return output.reshape(*x.shape[:-1], -1), weights


FORMS = [Attention, WarningAttention]
FUNCTIONS = [llama, modernbert_decoder, whisper, vit, clip]


def use(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    monkeypatch.setattr(sys.modules[__name__], "eager_attention_forward", function)
    n_groups = 2 if "repeat_kv" in function.__code__.co_names else 1
    monkeypatch.setattr(Attention, "num_key_value_groups", n_groups)


def made(cls: Any = Attention, *args: Any) -> Any:
    torch.manual_seed(0)
    module = cls(*args)
    if Attention.num_key_value_groups == 1:
        module.k_proj, module.v_proj = nn.Linear(32, 32), nn.Linear(32, 32)
    return module


def inputs() -> Tensor:
    return torch.randn(BATCH, LENGTH, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))


def added(n_columns: int = LENGTH) -> Tensor:
    """Hides the last key of one sequence, and what is behind the keys."""
    mask = torch.zeros(BATCH, 1, LENGTH, n_columns)
    mask[0, ..., LENGTH - 1 :] = torch.finfo(torch.float32).min
    return mask


def compared(module: nn.Module, **options: Any) -> PatchReport:
    """The report of a module that computes the same after patching."""
    module, original, report = patched_pair(module, patterns=[PATTERN])
    assert_agree(outcome(module, inputs(), **options), outcome(original, inputs(), **options))
    return report


def calls(report: PatchReport) -> set[tuple[int, int]]:
    return set(report.calls().values())


@pytest.mark.parametrize("cls", FORMS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_eager_function_is_fused(monkeypatch: pytest.MonkeyPatch, cls: Any, function: Any, training: bool) -> None:
    use(monkeypatch, function)
    mask = None if function is vit else added()
    report = compared(made(cls).train(training), attention_mask=mask)
    assert not report.skipped and calls(report) == {(1, 0)}


@pytest.mark.parametrize("function", [llama, whisper, vit, clip], ids=lambda function: function.__name__)
def test_without_a_mask(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    use(monkeypatch, function)
    assert calls(compared(made())) == {(1, 0)}


@pytest.mark.parametrize("function", [llama, modernbert_decoder, whisper], ids=lambda function: function.__name__)
def test_a_static_cache_s_mask_is_longer_than_the_keys(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    use(monkeypatch, function)
    assert calls(compared(made(), attention_mask=added(2 * LENGTH))) == {(1, 0)}


def test_a_mask_that_the_function_ignores_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, whisper)
    assert calls(compared(made(), attention_mask=added()[:, 0])) == {(1, 0)}


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (whisper, {"head_mask": torch.tensor([1.0, 0.0, 0.5, 1.0])}),
        (vit, {"attention_mask": torch.tensor([1.0, 0.0, 0.5, 1.0]).view(1, -1, 1, 1)}),
    ],
    ids=["whisper", "vit"],
)
def test_the_original_runs_with_a_mask_of_heads(
    monkeypatch: pytest.MonkeyPatch, function: Any, options: dict[str, Any]
) -> None:
    use(monkeypatch, function)
    module, original, report = patched_pair(made(), patterns=[PATTERN])
    assert_equal(outcome(module, inputs(), **options), outcome(original, inputs(), **options))
    assert calls(report) == {(0, 1)}


def test_weights_are_returned_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, clip)
    module, original, _ = patched_pair(made(), patterns=[PATTERN])
    torch.testing.assert_close(module(inputs())[1], original(inputs())[1])
    assert module(inputs(), output_attentions=False)[1] is None


@pytest.mark.parametrize(
    "function", [two_head_masks, sliced_for_values, other_weights], ids=lambda function: function.__name__
)
def test_other_functions_are_left(function: Any) -> None:
    found = read_eager_function(function)
    assert isinstance(found, Unsuitable) and "none of the known attention functions" in found.detail


@pytest.mark.parametrize("cls", FORMS)
def test_sdpa_is_found_where_it_is_asked_for(cls: Any) -> None:
    module, original, report = patched_pair(made(cls, "sdpa"), patterns=[PATTERN], attention=True)
    mask = added() == 0
    assert_agree(outcome(module, inputs(), attention_mask=mask), outcome(original, inputs(), attention_mask=mask))
    assert calls(report) == {(1, 0)}  # no fallback by the eager function, which is not called


def test_eager_attention_in_place_of_sdpa_is_the_forward_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    module, original, report = patched_pair(made(WarningAttention, "sdpa"), patterns=[PATTERN], attention=True)
    found, expected = (outcome(each, inputs(), output_attentions=True) for each in (module, original))
    assert_equal(found, expected)
    assert calls(report) == {(0, 0)} and "falling back" in capsys.readouterr().out


def test_another_implementation_later_is_obeyed() -> None:
    module, original, report = patched_pair(made(), patterns=[PATTERN])
    for each in (module, original):
        each.config._attn_implementation = "sdpa"
    assert_equal(outcome(module, inputs()), outcome(original, inputs()))
    assert calls(report) == {(0, 0)}


def test_a_choice_by_an_argument_is_left() -> None:
    report = patch_model(made(ChosenByArgument), patterns=[PATTERN])
    assert not report.patched
    assert [each.detail for each in report.skipped] == ["its attention function depends on more than the module"]


GUARD = 'if self.config._attn_implementation != "eager":'
CALLED = "output, weights = attention_interface("


@pytest.mark.parametrize(
    ("old", "new", "is_found"),
    [
        (GUARD, GUARD, True),
        (GUARD, "if x.shape[1] != 100:", False),
        (GUARD, f"attention_interface = eager_attention_forward\n        {GUARD}", False),
        (CALLED, f"attention_interface = eager_attention_forward\n        {CALLED}", False),
        (
            CALLED,
            f"attention_interface = eager_attention_forward\n        {GUARD}\n            x = x\n        {CALLED}",
            False,
        ),
        ("= eager_attention_forward", "= self.own_attention", False),
        (CALLED, f"x = x if attention_interface is eager_attention_forward else x\n        {CALLED}", False),
    ],
    ids=["eager", "another guard", "twice", "afterwards", "no question", "another function", "compared"],
)
def test_a_name_is_an_attention_function_s_where_eager_alone_does_not_ask(old: str, new: str, is_found: bool) -> None:
    """Elsewhere a function that is not transformers' may be called, which need not read views."""
    source = textwrap.dedent(inspect.getsource(Attention.forward))
    read = read_forward(Attention.forward, source.replace(textwrap.dedent(old), new.replace("\n    ", "\n")))
    assert isinstance(read, Forward) and old in source
    assert attention_functions(read) == ({"attention_interface"} if is_found else set())


def test_autocast_gives_eager_s_dtypes() -> None:
    module, original, report = patched_pair(made(), patterns=[PATTERN])
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (outcome(each, inputs(), attention_mask=added()) for each in (module, original))
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        torch.testing.assert_close(tensor, expected[name], rtol=0.1, atol=0.1)
    assert calls(report) == {(1, 0)}


@pytest.mark.parametrize("function", [llama, whisper], ids=lambda function: function.__name__)
def test_compiles_without_a_graph_break(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    use(monkeypatch, function)

    def compute(module: nn.Module, x: Tensor) -> Outcome:
        return outcome(module, x, attention_mask=added(2 * LENGTH))

    assert_compiles(made(), inputs(), compute=compute, patterns=[PATTERN])


@pytest.mark.skipif(not hasattr(modeling_utils, "AttentionInterface"), reason="needs a registry")
@pytest.mark.parametrize("cls", FORMS)
def test_registered_by_name(cls: Any) -> None:
    pytest.importorskip("transformers.masking_utils")
    onetrip.register_attention()
    found, expected = (
        outcome(made(cls, name), inputs(), attention_mask=added(2 * LENGTH)) for name in ("onetrip", "eager")
    )
    assert_agree(found, expected)
    report = patch_model(made(cls, "onetrip"), patterns=[PATTERN])
    assert [each.reason for each in report.skipped] == ["kernelized_already"]


def test_registration_names_the_version_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(ImportError, match=r"needs transformers 4\.53 or newer"):
        onetrip.register_attention()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_all_parameters_are_the_original_s(function: Any) -> None:
    found = read_eager_function(function)
    assert isinstance(found, EagerFunction)
    assert inspect.signature(found.compile()) == inspect.signature(function)
