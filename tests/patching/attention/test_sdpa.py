"""What stands in for transformers' sdpa function, where attention=True asks for it."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from onetrip.measure import saved_bytes
from onetrip.patching import patch_model
from onetrip.patching.attention.eager import EagerFunction, fused_function
from onetrip.patching.attention.interface import SDPA, sdpa_function
from patching_cases import T5, compiles_transformers, tiny_model
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
ALL_ATTENTION_FUNCTIONS = getattr(transformers, "AttentionInterface", dict)()
pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "AttentionMaskInterface"), reason="before 4.53 masks were every model's own"
)
PATTERN = "attention_softmax"


@pytest.fixture
def encoder() -> nn.Module:
    """T5's, whose attention has a position bias."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if "position_bias" not in inspect.signature(sdpa_attention_forward).parameters:
        pytest.skip("this transformers has no position bias beside sdpa")
    return tiny_model("T5EncoderModel", T5 | {"attn_implementation": "sdpa"}).eval()


def outcome(model: nn.Module, mask: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    hidden = model(torch.arange(3, 35).view(2, 16), attention_mask=mask).last_hidden_state
    (hidden * torch.linspace(-1.0, 1.0, hidden.numel()).view_as(hidden)).sum().backward()
    return {"hidden": hidden.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("n_seen", [0, 5, 16], ids=["fully-padded", "padded", "whole"])
def test_padding_beside_a_position_bias(encoder: nn.Module, n_seen: int) -> None:
    """Its bool mask becomes a finite one: a row that is padded whole is no row of zeros."""
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, n_seen:] = 0
    expected = outcome(encoder, mask)
    report = patch_model(encoder, patterns=[PATTERN], attention=True)
    torch.testing.assert_close(outcome(encoder, mask), expected, rtol=1e-4, atol=2e-5)
    assert set(report.calls().values()) == {(1, 0)}


def test_verification_sees_zeros_in_a_row_that_is_padded_whole(
    encoder: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onetrip.patching.attention.eager.biased_mask", lambda mask, bias: (mask, bias))
    report = patch_model(encoder, patterns=[PATTERN], attention=True)
    assert not report.patched and {site.reason for site in report.skipped} == {"verify_failed"}


def attentions(model: nn.Module) -> list[str]:
    return [site.detail for site in patch_model(model, patterns=[PATTERN]).patched]


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onetrip.patching.attention.interface.multiplies_bfloat16_in_vectors", lambda: True)


@pytest.fixture
def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)


def fused(model: nn.Module, n_tokens: int, batch: int = 4, backward: bool = True, **options: Tensor) -> int:
    """Attention modules that took SDPA's place in a forward and backward of that many tokens."""
    report = patch_model(model)
    before = {name: calls[0] for name, calls in report.calls().items()}
    ids = torch.arange(batch * n_tokens).view(batch, n_tokens) % 99
    loss = model(ids, **options).logits.sum()
    if backward:
        loss.backward()
    names = {site.name for site in report.patched if site.pattern == PATTERN}
    return sum(calls[0] - before[name] for name, calls in report.calls().items() if name in names)


class ByKeyword(nn.Module):
    """Asks the interface as a third of transformers' models do; SDPA's names are a part of what it is called with."""

    is_causal = False

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.config = transformers.LlamaConfig(attn_implementation="sdpa")
        self.dropout = dropout
        self.projection = nn.Linear(32, 32)

    def forward(self, x, mask):
        heads = self.projection(x).view(*x.shape[:2], 4, 8).transpose(1, 2)
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.dropout if self.training else 0.0
        output, _ = function(
            self, query=heads, key=heads, value=heads, attention_mask=mask, dropout=dropout, scaling=0.3
        )
        return output.flatten(2)


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize(
    ("dtype", "dropout"), [(torch.float32, 0.5), (torch.bfloat16, 0.0), (torch.bfloat16, 0.5)], ids=str
)
def test_arguments_by_keyword(dtype: torch.dtype, dropout: float) -> None:
    module = ByKeyword(dropout).to(dtype)
    x = torch.randn(2, 128, 32, dtype=dtype)
    mask = torch.rand(2, 1, 128, 128) > 0.2
    expected = module.eval()(x, mask)
    report = patch_model(module, patterns=[PATTERN])
    torch.testing.assert_close(module(x, mask), expected, rtol=1e-2, atol=2e-3 if dtype == torch.bfloat16 else 1e-5)
    module.train()(x, mask).float().sum().backward()
    assert list(report.calls().values()) == [(1 + (dtype == torch.bfloat16), 0)]


@compiles_transformers
@pytest.mark.usefixtures("bfloat16_products")
def test_training_in_bfloat16_on_a_cpu_takes_the_place_of_sdpa_where_it_is_faster(llama: nn.Module) -> None:
    assert all("bfloat16 on a CPU" in detail for detail in attentions(llama)) and len(attentions(llama)) == 2
    assert fused(llama, n_tokens=128) == 2
    assert fused(llama, n_tokens=16) == 0  # calls cost more than the work
    assert fused(llama, n_tokens=64, batch=1) == 0  # too few scores
    assert fused(llama, n_tokens=640, batch=1) == 0
    mask = torch.ones(4, 128, dtype=torch.int64)
    mask[:, :3] = 0
    assert fused(llama, n_tokens=128, attention_mask=mask) == 2
    with torch.no_grad():
        assert fused(llama, n_tokens=128, backward=False) == 0  # forward alone is no faster
    with torch.backends.mkldnn.flags(enabled=False):
        assert fused(llama, n_tokens=128) == 0
    compiled = torch.compile(llama, backend="eager")
    assert fused(llama, n_tokens=128) == 2
    compiled(torch.zeros(4, 128, dtype=torch.int64)).logits.sum().backward()


@pytest.mark.usefixtures("bfloat16_products")
def test_bfloat16_gives_what_sdpa_gives_and_keeps_no_more(llama: nn.Module) -> None:
    for layer in llama.model.layers:  # trained models have scores that rounding to bfloat16 would harm
        layer.self_attn.q_proj.weight.data *= 1000.0
    ids = torch.arange(4 * 96).view(4, 96) % 99
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0

    def losses(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    def run(model: nn.Module) -> Tensor:
        return model(ids, attention_mask=mask, labels=ids).loss

    exact, expected, kept = losses(copy.deepcopy(llama).float()), losses(llama), saved_bytes(lambda: run(llama))
    patch_model(llama, patterns=[PATTERN])
    actual = losses(llama)
    for ours, theirs, truth in zip(actual, expected, exact, strict=True):
        assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max() + 1e-3 * truth.abs().max()
    assert saved_bytes(lambda: run(llama)) <= kept


def test_sdpa_stays_for_bfloat16_without_vectors_of_it(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onetrip.patching.attention.interface.multiplies_bfloat16_in_vectors", lambda: False)
    report = patch_model(llama, patterns=[PATTERN])
    assert not report.patched and {site.reason for site in report.skipped} == {"sdpa_in_use"}


@pytest.mark.usefixtures("bfloat16_products")
def test_sdpa_stays_for_float32_and_under_torch_func(llama: nn.Module) -> None:
    assert attentions(copy.deepcopy(llama).float()) == []
    patch_model(llama, patterns=[PATTERN])
    ids = torch.zeros(4, 64, dtype=torch.int64)
    hidden = llama.model.embed_tokens(ids).detach()
    report = patch_model(llama, patterns=[PATTERN])
    torch.func.grad(lambda x: llama(inputs_embeds=x).logits.float().sum())(hidden)
    assert set(report.calls().values()) == {(0, 0)}


@pytest.mark.filterwarnings("ignore")  # of the tracer
def test_causal_without_a_mask_is_traced() -> None:
    """Sizes are tensors then, and whether there is more than one query is one, too."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    fused = EagerFunction(sdpa_attention_forward, SDPA, frozenset(), is_sdpa=True).compile()

    def causal(query: Tensor) -> Tensor:
        return fused(nn.Module(), query, query, query, None, is_causal=True, scaling=0.5)[0]

    query = torch.randn(2, 3, 5, 8)
    torch.testing.assert_close(torch.jit.trace(causal, torch.randn(1, 3, 5, 8))(query), causal(query))


def test_an_sdpa_without_a_position_bias_keeps_its_defaults() -> None:
    """That of transformers 4: GPT-2 passes no scaling."""

    def sdpa_attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None):  # type: ignore[no-untyped-def]
        raise AssertionError("not fused")

    query, key, value = torch.randn(3, 2, 4, 5, 8, requires_grad=True)
    fused = fused_function(sdpa_function(sdpa_attention_forward))
    output, _ = fused(nn.Identity(), query, key, value, None)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(output, expected.transpose(1, 2))
