"""Attention of transformers' models, fused: what each model's own eager path computes, outputs and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import onetrip
import pytest
import torch
from onetrip import measure, ops
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.attention import verify
from onetrip.patching.attention.eager import EagerFunction, read_eager_function
from onetrip.patching.report import Unsuitable
from outcomes import Outcome, assert_compiles, assert_equal, loss_outcome, parameter_gradients, patch_and_compare
from patching_cases import (
    COMMON,
    DECODER,
    GPT2,
    HEADS,
    NO_DROPOUT,
    T5,
    VIT,
    WHISPER,
    Case,
    causal,
    image,
    padded_text,
    speech,
    token_ids,
)
from tolerances import assert_like_torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "AttentionMaskInterface"), reason="before 4.53 masks were every model's own"
)

PATTERN = "attention_softmax"


def left() -> dict[str, Tensor]:
    return padded_text("left")


CASES = {
    "bert": Case("BertForMaskedLM", COMMON),
    "gpt2": Case("GPT2LMHeadModel", GPT2, left),
    "t5": Case("T5ForConditionalGeneration", T5, n_attentions=6),
    "llama": Case("LlamaForCausalLM", DECODER, left),
    # Adds its mask without a test for None.
    "modernbert-decoder": Case("ModernBertDecoderForCausalLM", COMMON | {"cls_token_id": 1, "sep_token_id": 2}, left),
    "gemma2": Case("Gemma2ForCausalLM", DECODER | {"attn_logit_softcapping": 0.05}, left),
    "gpt_oss": Case(
        "GptOssForCausalLM",
        DECODER | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
        | {"experts_implementation": "eager"},
        left,
    ),
    "whisper": Case("WhisperForConditionalGeneration", WHISPER, speech, n_attentions=6),
    "vit": Case("ViTForImageClassification", VIT, image),
}  # fmt: skip
GENERATING = ("gpt2", "t5", "llama", "gemma2", "gpt_oss", "whisper")


@pytest.fixture(autouse=True)
def _float64_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of float64 models with float32's lowest number: their own is -inf to eager functions that compute the
    softmax in float32, and a row of nothing else NaN."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

    def mask(*args: Any, dtype: torch.dtype, **options: Any) -> Tensor:
        made = eager_mask(*args, dtype=torch.float32 if dtype == torch.float64 else dtype, **options)
        return made if made is None else made.to(dtype)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "eager", mask)


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def attention_sites(report: Any) -> list[str]:
    return [site.name for site in report.patched if site.pattern == PATTERN]


def outcome(model: nn.Module, inputs: dict[str, Tensor]) -> Outcome:
    dtype = next(model.parameters()).dtype
    return loss_outcome(model, {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()})


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
    ids=["fp32", "bf16", "fp16"],
)
def test_outputs_and_gradients_are_the_eager_path_s(case: Case, dtype: torch.dtype) -> None:
    model = case.eager(dtype)
    exact = outcome(copy.deepcopy(model).double(), case.inputs())
    eager = outcome(model, case.inputs())
    report = patch_model(model, patterns=[PATTERN])
    assert len(attention_sites(report)) == case.n_attentions and not report.skipped
    ours = outcome(model, case.inputs())
    assert set(report.calls().values()) == {(1, 0)}
    assert ours.keys() == eager.keys()
    for name, tensor in ours.items():
        if name != "loss" and exact[name].any():  # which some models compute in float32
            # A key's bias shifts all scores of a row alike: its gradient is 0, and what is seen of it is rounding.
            weight = name.removesuffix("bias") + "weight" if name.endswith(("key.bias", "k_proj.bias")) else name
            assert_like_torch(tensor, eager[name], exact[name], terms=64, summands=exact[weight].abs().max().item())


@pytest.mark.parametrize("name", GENERATING)
def test_generation_with_a_cache_gives_the_same_tokens(name: str) -> None:
    case = CASES[name]
    model, inputs = case.eager(), case.inputs()
    given = {key: value for key, value in inputs.items() if key not in ("labels", "decoder_input_ids")}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(**given, **options)
    report = patch_model(model, patterns=[PATTERN])
    assert torch.equal(model.generate(**given, **options), expected)
    assert all(fused > 0 and fallen_back == 0 for fused, fallen_back in report.calls().values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_at_most_half_of_the_bytes_that_eager_saves(name: str, dtype: torch.dtype) -> None:
    n = 64
    p = {"attention_probs_dropout_prob": 0.1} if name == "bert" else {"attention_dropout": 0.1}
    model = CASES[name].eager(dtype, **p).train()
    inputs = {"input_ids": token_ids(2, n)}
    size = 2 * HEADS * n * n

    def kept() -> int:
        """For backward, in tensors of that size, parameters apart."""
        return measure.saved_bytes(lambda: model(**inputs), model.parameters(), smallest=size)

    eager = kept()
    patch_model(model, patterns=[PATTERN])
    ours = kept()
    assert ours == 2 * size * dtype.itemsize  # the probabilities of two layers and nothing else
    assert 0 < ours <= eager / 2


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "gpt_oss"])
def test_output_attentions_are_eager_s_and_can_be_differentiated(name: str) -> None:
    case = CASES[name]
    model = case.eager()
    inputs = {key: value for key, value in case.inputs().items() if key != "labels"}
    if name == "t5":
        inputs["decoder_input_ids"] = token_ids(seed=1)

    def weights() -> Outcome:
        output = model(**inputs, output_attentions=True)
        found = [w for key in ("attentions", "decoder_attentions", "cross_attentions") for w in output.get(key) or ()]
        assert len(found) >= 2
        model.zero_grad()
        sum((w * w).sum() for w in found).backward()
        return {str(i): w.detach() for i, w in enumerate(found)} | parameter_gradients(model)

    patch_and_compare(model, weights, patterns=[PATTERN])


def test_sdpa_without_dropout_is_left_alone_unless_asked_for() -> None:
    model = CASES["bert"].eager(attn_implementation="sdpa", **NO_DROPOUT)
    inputs = padded_text()
    expected = outcome(model, inputs)
    report = patch_model(model)
    assert not attention_sites(report)
    assert [site.reason for site in report.skipped] == ["sdpa_in_use"] * 2
    assert all("attention=True" in site.detail for site in report.skipped)
    unpatch_model(model)
    assert not attention_sites(patch_model(model, patterns=[PATTERN]))
    report = patch_model(model, patterns=[PATTERN], attention=True)
    assert len(attention_sites(report)) == 2 and model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(outcome(model, inputs), expected)
    assert set(report.calls().values()) == {(1, 0)}


def test_sdpa_is_replaced_in_calls_with_dropout_on_a_cpu() -> None:
    """There SDPA has no fused kernel. Without dropout (evaluation) it is called as before."""
    model = CASES["bert"].eager(attn_implementation="sdpa")
    inputs = padded_text()
    expected = outcome(model, inputs)
    report = patch_model(model, patterns=[PATTERN])
    assert len(attention_sites(report)) == 2 and not report.skipped
    assert_equal(outcome(model, inputs), expected)
    assert set(report.calls().values()) == {(0, 0)}
    outcome(model.train(), inputs)
    assert set(report.calls().values()) == {(1, 0)}


def test_one_switch_patches_everything_or_leaves_attention_alone() -> None:
    """Patterns by name used to be what replaced SDPA, and patched attention only."""
    patterns = {
        site.pattern for site in patch_model(CASES["bert"].eager(attn_implementation="sdpa"), attention=True).patched
    }
    norms = {"layer_norm", "add_norm", "dropout_add_norm"}
    assert patterns == norms | {PATTERN, "bias_activation", "cross_entropy", "dropout"}
    for implementation in ("eager", "sdpa"):
        report = patch_model(CASES["bert"].eager(attn_implementation=implementation), attention=False)
        expected = patterns - {PATTERN} | {"shared_input"}  # what else there is in the attention
        assert {site.pattern for site in report.patched} == expected and not report.skipped


def test_asked_for_in_place_of_causal_sdpa_without_a_mask() -> None:
    model, inputs = CASES["llama"].eager(attn_implementation="sdpa"), causal()

    def run() -> Outcome:
        return outcome(model, inputs) | {"ids": model.generate(token_ids(), max_new_tokens=6, do_sample=False)}

    report = patch_and_compare(model, run, patterns=[PATTERN], attention=True)
    assert all(fused > 1 and fallen_back == 0 for fused, fallen_back in report.calls().values())


def test_other_implementations_are_named() -> None:
    model = CASES["llama"].eager()
    model.config._attn_implementation = "flex_attention"
    assert {site.reason for site in patch_model(model, patterns=[PATTERN]).skipped} == {"other_attention_in_use"}


def test_config_and_other_models_of_it_stay_as_they_were() -> None:
    model = CASES["gpt2"].eager()
    other = type(model)(model.config).eval()
    before, config = outcome(other, left()), copy.deepcopy(model.config.to_dict())
    patch_model(model)
    assert model.config.to_dict() == config and model.config._attn_implementation == "eager"
    model.config.output_attentions = True  # which transformers allows to eager alone
    model.config.output_attentions = False
    assert_equal(outcome(other, left()), before)
    classes = [type(module) for module in other.modules()]
    assert [type(module) for module in unpatch_model(model).modules()] == classes


def test_a_branch_on_the_name_eager_is_still_taken() -> None:
    """GPT-2's upcast attention asks for the implementation by name, and calls no function of the interface."""
    model = CASES["gpt2"].eager(reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
    report = patch_and_compare(model, lambda: outcome(model, left()), relative=0.0, patterns=[PATTERN])
    assert set(report.calls().values()) == {(0, 0)}


def test_what_changes_the_implementation_later_is_obeyed() -> None:
    model = CASES["bert"].eager()
    report = patch_model(model, patterns=[PATTERN])
    model.set_attn_implementation("sdpa")
    expected = outcome(CASES["bert"].eager(attn_implementation="sdpa"), padded_text())
    assert_equal(outcome(model, padded_text()), expected)
    assert set(report.calls().values()) == {(0, 1)}


def test_excluded_sites_stay_eager() -> None:
    model = CASES["bert"].eager()
    report = patch_model(model, patterns=[PATTERN], exclude=["bert.encoder.layer.0"])
    assert attention_sites(report) == ["bert.encoder.layer.1.attention.self"]
    assert [site.reason for site in report.skipped] == ["excluded"]


@pytest.mark.parametrize("name", ["bert", "t5", "llama", "gemma2"])
def test_autocast_gives_eager_s_dtypes(name: str) -> None:
    case = CASES[name]
    model = case.eager()
    inputs = case.inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected = outcome(model, inputs)
        patch_model(model, patterns=[PATTERN])
        actual = outcome(model, inputs)
    for key, tensor in actual.items():
        assert tensor.dtype == expected[key].dtype
        torch.testing.assert_close(tensor, expected[key], rtol=0.1, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "t5", "llama", "gemma2"])
def test_compiles_without_a_graph_break(name: str) -> None:
    """Without a cache: transformers 5.17 makes T5's of a copy of the config, and dynamo traces no copy.deepcopy."""
    inputs = CASES[name].inputs() | {"use_cache": False}
    assert_compiles(CASES[name].eager(), inputs, compute=loss_outcome, patterns=[PATTERN])


def test_registered_by_name_with_eager_s_masks() -> None:
    onetrip.register_attention()
    for name in ("bert", "llama", "t5"):
        case = CASES[name]
        expected = outcome(case.eager(), case.inputs())
        model = case.eager(attn_implementation="onetrip")
        torch.testing.assert_close(outcome(model, case.inputs()), expected)
        assert {site.reason for site in patch_model(model, patterns=[PATTERN]).skipped} == {"kernelized_already"}


def test_by_name_refuses_what_no_eager_function_takes() -> None:
    onetrip.register_attention()
    module = CASES["llama"].eager(attn_implementation="onetrip").model.layers[0].self_attn
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="indices"):
        transformers.AttentionInterface()["onetrip"](module, x, x, x, None, scaling=1.0, indices=x)
    with pytest.raises(ValueError, match="no eager attention function"):
        transformers.AttentionInterface()["onetrip"](nn.Linear(2, 2), x, x, x, None)


def squared_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """An eager function that no pattern fits: its weights are squared."""
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    attn_weights = nn.functional.softmax(attn_weights, dim=-1) ** 2
    return torch.matmul(attn_weights, value).transpose(1, 2).contiguous(), attn_weights


def test_an_unknown_eager_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bert import modeling_bert

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", squared_attention)
    report = patch_model(CASES["bert"].eager(), patterns=[PATTERN])
    assert not report.patched and {site.reason for site in report.skipped} == {"unknown_forward"}
    assert all("squared_attention" in site.detail for site in report.skipped)


def wrong_attention(*args: Any, **options: Any) -> Any:
    output, weights = ops.attention.attention(*args, **options)
    return output * 1.01, weights


def test_a_fused_function_that_computes_something_else_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "attention", wrong_attention)
    report = patch_model(CASES["bert"].eager(), patterns=[PATTERN])
    assert not report.patched and {site.reason for site in report.skipped} == {"verify_failed"}


@pytest.mark.skipif(not hasattr(transformers, "Inkling2Config"), reason="not in this transformers")
def test_sinks_that_are_an_argument_are_fused() -> None:
    """inkling2's function takes them, and computes another softmax without them."""
    from transformers.models.inkling2 import modeling_inkling2

    found = read_eager_function(modeling_inkling2.eager_attention_forward)
    assert isinstance(found, EagerFunction) and found.takes_sinks

    class Module(nn.Linear):
        num_key_value_groups = 2

    verify.verify_attention(Module(2, 2), found)
    assert {case.get("sinks") for case in verify._cases(found)} == {None, True}


@pytest.mark.parametrize("name", ["granite_swa", "granitemoe_swa"])
def test_an_output_scaled_by_a_gate_is_named(name: str) -> None:
    """They scale the output by sigmoid(logsumexp(scores) - sinks), and return probabilities without sinks."""
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    found = read_eager_function(module.eager_attention_forward)
    assert isinstance(found, Unsuitable) and "its output is not that of probabilities @ value" in found.detail
