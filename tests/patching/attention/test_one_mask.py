"""SDPA with one added mask for all layers in place of a bool one in each."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from onetrip.measure import saved_bytes
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.attention import one_mask
from outcomes import assert_agree, assert_equal, loss_outcome
from patching_cases import COMMON, DECODER, GPT2, NO_DROPOUT, T5, padded_text, tiny_model, token_ids
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", "5.0")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

PATTERN = ("attention_mask",)
N_LAYERS = 2


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    assert not one_mask._known


def bert(**options: Any) -> Any:
    return tiny_model("BertForMaskedLM", "BertConfig", COMMON | NO_DROPOUT | {"attn_implementation": "sdpa"} | options)


def llama() -> Any:
    return tiny_model("LlamaForCausalLM", "LlamaConfig", DECODER | {"attn_implementation": "sdpa"})


def gpt2() -> Any:
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "sdpa"}
    return tiny_model("GPT2LMHeadModel", "GPT2Config", GPT2 | options)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The added masks that are made."""
    found: list[Tensor] = []
    original = one_mask._Added
    monkeypatch.setattr(one_mask, "_Added", lambda *a: (found.append(a[2]), original(*a))[1])
    return found


@pytest.mark.parametrize("build", [bert, llama, gpt2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_mask_is_made_and_kept_for_all_layers(
    build: Any, dtype: torch.dtype, made: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onetrip.patching.attention.interface.multiplies_bfloat16_in_vectors", lambda: False)
    model, inputs = build().to(dtype).train(), padded_text("left")

    def saved() -> int:
        return saved_bytes(lambda: model(**inputs), excluded=list(model.parameters()))

    expected, before = loss_outcome(model, inputs), saved()
    report = patch_model(model, patterns=PATTERN)
    assert [site.pattern for site in report.patched] == [*PATTERN] * N_LAYERS
    assert not report.skipped  # attention_softmax is not asked for
    made.clear()
    assert_equal(loss_outcome(model, inputs), expected)
    assert len(made) == 1 and made[0].dtype == dtype
    assert before - saved() == (N_LAYERS - 1) * made[0].nbytes
    made.clear()
    unpatch_model(model)
    assert_equal(loss_outcome(model, inputs), expected)


def test_by_default_beside_what_else_is_fused() -> None:
    model, inputs = llama().train(), padded_text()
    expected = loss_outcome(model, inputs)
    report = patch_model(model)
    attention = [site for site in report.patched if site.name.endswith("self_attn")]
    assert [site.pattern for site in attention] == ["rotary"] * N_LAYERS
    assert all("attention_mask" in site.detail for site in attention)
    assert "attention_mask" not in str(patch_model(llama(), patterns=["rotary"]).patched)
    assert_agree(loss_outcome(model, inputs), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoints_and_autocast(use_reentrant: bool, autocast: bool) -> None:
    model, inputs = llama().train(), padded_text()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        expected = loss_outcome(model, inputs)
        patch_model(model, patterns=PATTERN)
        assert_equal(loss_outcome(model, inputs), expected)


def four_dimensional() -> Tensor:
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    mask[1, ..., 8:] = False
    return mask


def test_a_mask_of_the_users_own_may_change_between_calls_and_layers() -> None:
    """Values, the dtype that SDPA runs in, and inference mode, whose tensors autograd cannot save."""
    ids, model, original = token_ids(2, 12), bert().eval(), bert().eval()
    masks = {id(model): four_dimensional(), id(original): four_dimensional()}
    patch_model(model, patterns=PATTERN)

    def edit(of: nn.Module) -> None:
        mask = masks[id(of)]
        mask[..., 0] = ~mask[..., 0]

    def assert_same() -> None:
        of = loss_outcome if torch.is_grad_enabled() else lambda each, inputs: {"loss": each(**inputs).loss}
        inputs = ({"input_ids": ids, "attention_mask": masks[id(each)], "labels": ids} for each in (model, original))
        assert_equal(*map(of, (model, original), inputs))

    with torch.inference_mode():
        assert_same()
    assert_same()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same()
    for each in (model, original):
        edit(each)
    assert_same()
    for each in (model, original):
        each.bert.encoder.layer[0].register_forward_hook(lambda *_, each=each: edit(each))
    for _ in range(2):
        assert_same()
    masks = {key: four_dimensional() for key in masks}
    with torch.inference_mode():
        masks = {key: four_dimensional() for key in masks}
        assert_same()
        assert_same()


def test_one_query_and_other_masks_are_left_to_sdpa(made: list[Tensor]) -> None:
    """A step of generation, a mask that is added already, a position bias."""
    model = llama().eval()
    inputs = {key: value for key, value in padded_text("left").items() if key != "labels"}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    patch_model(model, patterns=PATTERN)
    made.clear()
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert len(made) <= 1  # of the prompt
    model = bert()
    patch_model(model, patterns=PATTERN)
    made.clear()
    model(token_ids(2, 12), attention_mask=torch.zeros(2, 1, 12, 12))
    t5 = tiny_model("T5ForConditionalGeneration", "T5Config", T5 | {"attn_implementation": "sdpa"})
    assert not patch_model(t5, patterns=PATTERN).patched and not made


def test_compiled_and_transformed_calls_see_the_bool_mask(made: list[Tensor]) -> None:
    model, inputs = bert().train(), padded_text()
    patch_model(model, patterns=PATTERN)
    made.clear()
    expected = loss_outcome(bert().train(), inputs)
    assert_agree(loss_outcome(torch.compile(model, backend="aot_eager"), inputs), expected)
    ids, masks = token_ids(2, 12), torch.stack([four_dimensional(), four_dimensional().flip(1)])

    def logits(mask: Tensor) -> Tensor:
        logits: Tensor = model(ids, attention_mask=mask).logits
        return logits

    torch.testing.assert_close(torch.vmap(logits)(masks)[1], logits(masks[1]))
    assert len(made) == 1


def test_a_site_that_gives_another_result_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_mask, "_added", lambda mask, query: torch.zeros(mask.shape, dtype=query.dtype))
    report = patch_model(bert(), patterns=PATTERN)
    assert not report.patched and {site.reason for site in report.skipped} == {"verify_failed"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.LlamaConfig(attn_implementation="sdpa")

    def forward(self, x, mask):  # type: ignore[no-untyped-def]
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return function(self, x, x, x, mask, dropout=0.0)[0]


@pytest.mark.gpu
def test_a_captured_graph_reads_what_the_mask_is() -> None:
    module, x, mask = Attention(), torch.randn(2, 3, 12, 8, device="cuda"), four_dimensional().cuda()
    assert patch_model(module, patterns=PATTERN).patched
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module(x, mask)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = module(x, mask)
    mask[..., 0] = False
    graph.replay()
    torch.testing.assert_close(y, module(x, mask))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    model = bert().cuda().to(dtype).train()
    inputs = {key: value.cuda() for key, value in padded_text().items()}
    expected = loss_outcome(model, inputs)
    patch_model(model, patterns=PATTERN)
    assert_agree(loss_outcome(model, inputs), expected, relative=1e-2 if dtype == torch.bfloat16 else 1e-5)
