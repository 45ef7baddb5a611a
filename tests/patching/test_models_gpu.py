"""Patched models on a CUDA device, by each backend: what they compute there, and a training step as users write it."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from onetrip import patch_model
from onetrip.optim import AdamW8bit
from onetrip.patching import calls, half_results
from patching_cases import WIDTH, Case, Stack
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
from transformers.activations import NewGELUActivation  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.promise("I1, I7, D8")]

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {**SIZES, "vocab_size": 67, "pad_token_id": 0}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 67}
T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 67, "pad_token_id": 0}
LLAMA = {**TEXT, "num_key_value_heads": 2}
MIXTURE = {**LLAMA, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "bert": Case("BertForMaskedLM", TEXT),
    "gpt2": Case("GPT2LMHeadModel", GPT2),
    "llama": Case("LlamaForCausalLM", LLAMA),
    "qwen3_moe": Case("Qwen3MoeForCausalLM", MIXTURE),
    "t5": Case("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
}
OWN_SOFTMAX = {
    "deberta_v2": Case("DebertaV2ForMaskedLM", TEXT | {"relative_attention": True}),
    "mpnet": Case("MPNetForMaskedLM", TEXT),
}
"""Models that compute it in a forward of theirs."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """On the GPU, with eager attention."""
    if request.param == "qwen3_moe":
        needs_histograms()
    return MODELS[request.param].eager().cuda()


def needs_histograms() -> None:
    """transformers counts the rows of each expert by one of integers, which the fake GPU does not have."""
    try:
        torch.histc(torch.zeros(1, dtype=torch.int32, device="cuda"), bins=1)
    except NotImplementedError as error:
        pytest.skip(str(error))


def batch() -> dict[str, Tensor]:
    """Two rows of tokens, the second padded."""
    ids = torch.randint(3, 67, (2, 24), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    torch.cuda.manual_seed(3)
    model(**batch()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        label = partial("{}: {}".format, name)
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5, msg=label)


@pytest.mark.parametrize("is_large", [False, True])
def test_gradients_are_those_of_the_unpatched_model(
    backend: str, model: nn.Module, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors have links, shared gradients and fused activations of one operator."""
    monkeypatch.setattr(calls, "SMALLEST", 0 if is_large else 1 << 18)
    model.eval()
    expected = gradients(copy.deepcopy(model))
    report = patch_model(model)
    for _ in range(1 + is_large):  # the first call finds out who reads what
        assert_close(gradients(model), expected)
    assert report.calls() and not any(fallbacks for _, fallbacks in report.calls().values())


@pytest.mark.parametrize("name", OWN_SOFTMAX)
def test_under_autocast_a_softmax_of_half_scores_is_fused(backend: str, name: str) -> None:
    """Autocast makes it float32 on a GPU, dropout too, and casts both to half precision for the product."""
    model = OWN_SOFTMAX[name].eager().cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = gradients(copy.deepcopy(model))
        report = patch_model(model, patterns=["attention_softmax"])
        actual = gradients(model)
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        error, size = (actual[key] - gradient).norm(), gradient.norm()
        assert error <= 0.03 * size + 1e-5, f"{key}: {error}, {size}"
    assert set(report.calls().values()) == {(1, 0)}


def test_a_norm_on_another_stream_than_its_sum_computes() -> None:
    """Autograd would let neither wait for the other."""
    stack = Stack(n_layers=1).cuda()
    patch_model(stack)
    other = torch.cuda.Stream()

    def made_by(stream: torch.cuda.Stream) -> str:
        state = stack.states(torch.randn(2, 5, WIDTH, device="cuda"))[-1]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return type(stack.final(state).grad_fn).__name__

    made_by(torch.cuda.current_stream())
    assert "_DeferredNorm" in made_by(torch.cuda.current_stream())
    assert "_DeferredNorm" not in made_by(other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_under_autocast_norms_round_what_products_alone_read(
    backend: str, model: nn.Module, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same loss as of norms that return float32; Triton orders the sum of a row by the dtypes of all tensors."""
    patch_model(model.eval())
    losses, returned = [], []
    for known in (half_results._known, {}):
        monkeypatch.setattr(half_results, "_known", known)
        with torch.autocast("cuda", dtype=dtype):
            losses.append(model(**batch()).loss)
            x = torch.randn(2, 64, device="cuda")
            norms = [
                child
                for child in model.modules()
                if isinstance(child, nn.LayerNorm) or hasattr(child, "variance_epsilon")
            ]
            returned.append({norm(x).dtype for norm in norms if norm.weight.shape == x.shape[1:]})
    torch.testing.assert_close(*losses, rtol=1e-3 if backend == "triton" else 0.0, atol=0.0)
    is_pre_norm = not isinstance(model, transformers.BertForMaskedLM)
    assert returned == [{torch.float32, *[dtype] * is_pre_norm}, {torch.float32}]


class Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(16, 64), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), NewGELUActivation()], ids=lambda act: type(act).__name__)
@pytest.mark.parametrize("is_large", [False, True])
def test_an_activation_of_one_operator_is_fused_where_the_pass_of_the_bias_counts(
    act: nn.Module, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SMALLEST", 0 if is_large else 1 << 18)
    model, x = Mlp(act).cuda(), torch.randn(2, 5, 16, device="cuda")
    expected = model(x)
    report = patch_model(model)
    torch.testing.assert_close(model(x), expected)
    assert report.calls() == {"": (int(is_large or isinstance(act, NewGELUActivation)), 0)}


def test_checkpointing_repeats_the_dropout_masks(backend: str, model: nn.Module) -> None:
    patch_model(model.train())
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_training_loop_learns(backend: str, model: nn.Module, dtype: torch.dtype) -> None:
    """Autocast, loss scaling, clipping, 8-bit states; one step of an infinite loss is skipped, and nothing changes."""
    patch_model(model.train())
    optimizer = AdamW8bit(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**7, enabled=dtype is torch.float16)
    losses = []

    def step(factor: float = 1.0) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = model(**batch()).loss
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())

    for _ in range(8):
        step()
    assert losses[-1] < 0.9 * losses[0], losses
    if scaler.is_enabled():
        before = copy.deepcopy(model.state_dict())
        step(float("inf"))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
