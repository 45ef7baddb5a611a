"""SDPA with one added mask for all layers in place of a bool one in each."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.attention import one_mask
from outcomes import Outcome, assert_agree, assert_equal, compiles_transformers, loss_outcome
from patching_cases import ZOO, padded_text, tiny_model, token_ids
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

transformers = pytest.importorskip("transformers", "5.0")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

PATTERN = ("attention_mask",)
N_LAYERS = 2


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    assert not one_mask._known


def sdpa(name: str, **options: Any) -> Any:
    return tiny_model(ZOO[name].model, ZOO[name].options | {"attn_implementation": "sdpa"} | options)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each added mask that is made."""
    found: list[int] = []

    class Recorded(one_mask._Added):
        def __new__(cls, *fields: Any) -> Any:
            found.append(fields[2]().nbytes)
            return super().__new__(cls, *fields)

    monkeypatch.setattr(one_mask, "_Added", Recorded)
    return found


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_mask_is_made_and_kept_for_all_layers(
    name: str, dtype: torch.dtype, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onetrip.patching.attention.interface.multiplies_bfloat16_in_vectors", lambda: False)
    model, inputs = sdpa(name).to(dtype).train(), padded_text("left")

    def n_kept() -> int:
        """Of added masks, by the graph."""
        loss, kept = model(**inputs).loss, set()
        nodes = [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            nodes += [other for other, _ in node.next_functions if other is not None]
            if node.name().startswith("ScaledDotProduct"):
                kept.add(node._saved_attn_mask.data_ptr())
        return len(kept)

    expected = loss_outcome(model, inputs)
    assert n_kept() == N_LAYERS
    report = patch_model(model, patterns=PATTERN)
    assert [site.pattern for site in report.patched] == [*PATTERN] * N_LAYERS
    assert not report.skipped  # attention_softmax is not asked for
    made.clear()
    assert_equal(loss_outcome(model, inputs), expected)
    assert len(made) == 1
    assert n_kept() == 1
    made.clear()
    unpatch_model(model)
    assert_equal(loss_outcome(model, inputs), expected)


def test_by_default_beside_what_else_is_fused() -> None:
    model, inputs = sdpa("llama").train(), padded_text()
    expected = loss_outcome(model, inputs)
    report = patch_model(model)
    attention = [site for site in report.patched if site.name.endswith("self_attn")]
    assert [site.pattern for site in attention] == ["rotary"] * N_LAYERS
    assert all("attention_mask" in site.detail for site in attention)
    assert "attention_mask" not in str(patch_model(sdpa("llama"), patterns=["rotary"]).patched)
    assert "attention_mask" not in str(patch_model(sdpa("llama"), attention=False).patched)
    assert_agree(loss_outcome(model, inputs), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoints_and_autocast(use_reentrant: bool, autocast: bool, made: list[int]) -> None:
    """Hooks on saved tensors keep no mask that could be shared."""
    model, inputs = sdpa("llama").train(), padded_text()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        expected = loss_outcome(model, inputs)
        patch_model(model, patterns=PATTERN)
        made.clear()
        assert_equal(loss_outcome(model, inputs), expected)
    assert len(made) == N_LAYERS * use_reentrant


def four_dimensional() -> Tensor:
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    mask[1, ..., 8:] = False
    return mask


class Own:
    """A model, and a mask that its user keeps."""

    def __init__(self, is_patched: bool) -> None:
        self.model, self.values = sdpa("bert").eval(), np.ones((2, 1, 12, 12), dtype=bool)
        self.mask = torch.from_numpy(self.values)
        if is_patched:
            assert patch_model(self.model, patterns=PATTERN).patched
        self.edit()

    def edit(self, *_: Any) -> None:
        self.mask[1, ..., 8:] ^= True

    def outcome(self) -> Outcome:
        inputs = {"input_ids": token_ids(2, 12), "attention_mask": self.mask, "labels": token_ids(2, 12)}
        if torch.is_grad_enabled():
            return loss_outcome(self.model, inputs)
        return {"loss": self.model(**inputs).loss}


def test_a_mask_of_the_users_own_may_change_between_calls_and_layers() -> None:
    """Its values, also by writes that autograd does not count; the dtype that SDPA runs in; inference mode."""
    both = Own(is_patched=True), Own(is_patched=False)

    def assert_same() -> None:
        assert_equal(*(each.outcome() for each in both))
        assert not any(known.rows() is not None for known in one_mask._known.values())  # memory of a step

    with torch.inference_mode():
        assert_same()
    for dtype in (torch.bfloat16, torch.float16, None):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            assert_same()
    for each in both:
        each.edit()
    assert_same()
    for each in both:
        each.values[:, :, :, 2] = False
    assert_same()
    handles = [each.model.bert.encoder.layer[0].register_forward_hook(each.edit) for each in both]
    for _ in range(2):
        assert_same()
    for handle in handles:
        handle.remove()
    for each in both:
        each.model.double()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same()
    with torch.inference_mode():
        for each in both:
            each.mask = each.mask.clone()
    assert_same()


def test_one_query_and_other_masks_are_left_to_sdpa(made: list[int]) -> None:
    """A step of generation, a mask that is added already, a position bias; a mask that no graph would keep."""
    model = sdpa("llama").eval()
    inputs = {key: value for key, value in padded_text("left").items() if key != "labels"}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    patch_model(model, patterns=PATTERN)
    made.clear()
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert not made
    model = sdpa("bert")
    patch_model(model, patterns=PATTERN)
    made.clear()
    model(token_ids(2, 12), attention_mask=torch.zeros(2, 1, 12, 12))
    model.requires_grad_(False)(token_ids(2, 12), attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool))
    t5 = sdpa("t5")
    assert not patch_model(t5, patterns=PATTERN).patched and not made


@compiles_transformers
def test_compiled_and_transformed_calls_see_the_bool_mask(made: list[int]) -> None:
    model, inputs = sdpa("bert").train(), padded_text()
    patch_model(model, patterns=PATTERN)
    made.clear()
    expected = loss_outcome(sdpa("bert").train(), inputs)
    assert_agree(loss_outcome(torch.compile(model, backend="aot_eager"), inputs), expected)
    assert not made
    ids, masks = token_ids(2, 12), torch.stack([four_dimensional(), four_dimensional().flip(0)])

    def logits(mask: Tensor) -> Tensor:
        logits: Tensor = model(ids, attention_mask=mask).logits
        return logits

    expected = logits(masks[1])
    made.clear()
    torch.testing.assert_close(torch.vmap(logits)(masks)[1], expected)
    mask = masks[0].clone()
    loss = logits(mask).sum()  # keeps an added mask
    made.clear()
    graph = make_fx(logits)(mask)
    assert not made
    torch.testing.assert_close(graph(masks[1]), expected)
    loss.backward()


class Positional(nn.Module):
    """Passes all that transformers' sdpa function takes by position."""

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.LlamaConfig(attn_implementation="sdpa")

    def forward(self, x, mask, scaling=None, bias=None):
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        more = (None, bias) if bias is not None else ()
        return function(self, x, x, x, mask, 0.0, scaling, *more)[0]


@pytest.mark.parametrize("patterns", [PATTERN, ("attention_softmax", *PATTERN)])
def test_arguments_by_position(patterns: tuple[str, ...], made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onetrip.patching.attention.interface.may_be_slower", lambda *_: True)
    x = torch.randn(2, 3, 12, 8, requires_grad=True)
    original, module, mask, bias = Positional(), Positional(), four_dimensional(), torch.randn(2, 3, 12, 12)
    assert patch_model(module, patterns=patterns).patched
    for more, n_made in (((), 1), ((0.5,), 1), ((0.5, bias), 0)):
        made.clear()
        torch.testing.assert_close(module(x, mask, *more), original(x, mask, *more))
        assert len(made) == n_made


@pytest.mark.parametrize("patterns", [("attention_softmax",), ("attention_softmax", *PATTERN)])
def test_where_sdpa_may_be_replaced(patterns: tuple[str, ...], made: list[int]) -> None:
    """In evaluation it stays, and shares a mask if that is asked for. Its calls are none of the fused ones."""
    model = sdpa("bert", attention_probs_dropout_prob=0.5).eval()
    report = patch_model(model, patterns=patterns)
    made.clear()
    loss_outcome(model, padded_text())
    assert len(made) == len(patterns) - 1 and set(report.calls().values()) == {(0, 0)}


def test_a_position_bias_by_position_stays_sdpas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onetrip.patching.attention.interface.may_be_slower", lambda *_: True)
    monkeypatch.setattr("onetrip.patching.attention.interface._trains_slowly", lambda *_: True)
    module, x = Positional(), torch.randn(2, 3, 12, 8)
    report = patch_model(module, patterns=["attention_softmax"])
    module(x, four_dimensional(), 0.5, torch.randn(2, 3, 12, 12))
    assert report.calls() == {"": (0, 0)}
    module(x, four_dimensional(), 0.5)
    assert report.calls() == {"": (1, 0)}


def test_on_the_meta_device() -> None:
    model = sdpa("bert")
    patch_model(model, patterns=PATTERN)
    logits = model.to("meta")(token_ids(2, 12).to("meta"), attention_mask=four_dimensional().to("meta")).logits
    assert logits.is_meta


def test_a_site_that_gives_another_result_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_mask, "shared_mask", lambda mask, query: torch.zeros(mask.shape, dtype=query.dtype))
    for model in (sdpa("bert"), sdpa("bert", attention_probs_dropout_prob=0.5)):
        report = patch_model(model, patterns=[*PATTERN, "attention_softmax"])
        assert not report.patched and "verify_failed" in {site.reason for site in report.skipped}


@pytest.mark.gpu
def test_a_captured_graph_reads_what_the_mask_is() -> None:
    module, mask = Positional(), four_dimensional().cuda()
    x = torch.randn(2, 3, 12, 8, device="cuda", requires_grad=True)
    assert patch_model(module, patterns=PATTERN).patched
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kept = module(x, mask)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = module(x, mask)
    mask[..., 0] = False
    graph.replay()
    torch.testing.assert_close(y, module(x, mask))
    assert kept.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("n_tokens", [16, 13])  # a row of 13 elements is none of 16 bytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_on_a_gpu(name: str, dtype: torch.dtype, n_tokens: int, made: list[int]) -> None:
    """Padding on the left leaves the decoder's first queries without a key."""
    model = sdpa(name).cuda().to(dtype).train()
    ids = token_ids(2, n_tokens).cuda()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    expected = loss_outcome(model, inputs)
    patch_model(model, patterns=PATTERN)
    assert_agree(loss_outcome(model, inputs), expected, relative=1e-2 if dtype == torch.bfloat16 else 1e-5)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        made.clear()
        assert_agree(loss_outcome(model, inputs), expected, relative=1e-2 if dtype == torch.bfloat16 else 1e-5)
    if torch.version.cuda:  # the simulated GPU's SDPA keeps no mask
        assert len(made) == 1


def test_models_in_float64_keep_their_masks() -> None:
    report = patch_model(sdpa("bert").double(), patterns=PATTERN)
    assert not report.patched
