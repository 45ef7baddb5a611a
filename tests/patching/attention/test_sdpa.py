"""What stands in for transformers' sdpa function, where attention=True asks for it."""

from __future__ import annotations

import inspect

import pytest
import torch
from onetrip.patching import patch_model
from onetrip.patching.attention.eager import EagerFunction
from onetrip.patching.attention.interface import SDPA
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
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
    config = transformers.T5Config(vocab_size=99, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4)
    return transformers.T5EncoderModel._from_config(config, attn_implementation="sdpa").eval()


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
    merged = "biased_mask_(attention_mask, bias_)"
    assert merged in SDPA
    monkeypatch.setattr("onetrip.patching.attention.interface.SDPA", SDPA.replace(merged, "attention_mask, bias_"))
    report = patch_model(encoder, patterns=[PATTERN], attention=True)
    assert not report.patched and {site.reason for site in report.skipped} == {"verify_failed"}


@pytest.mark.filterwarnings("ignore")  # of the tracer
def test_causal_without_a_mask_is_traced() -> None:
    """Sizes are tensors then, and whether there is more than one query is one, too."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    fused = EagerFunction(sdpa_attention_forward, SDPA, True, False, False, False).compile()

    def causal(query: Tensor) -> Tensor:
        return fused(nn.Module(), query, query, query, None, is_causal=True, scaling=0.5)[0]

    query = torch.randn(2, 3, 5, 8)
    torch.testing.assert_close(torch.jit.trace(causal, torch.randn(1, 3, 5, 8))(query), causal(query))
