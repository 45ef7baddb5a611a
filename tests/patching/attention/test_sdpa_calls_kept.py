"""What stays as it is in forwards that call torch's SDPA: layouts, rules, errors, the rest of the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip.patching import patch_model
from onetrip.patching.attention import sdpa_calls
from outcomes import assert_agree, outcome, patched_pair
from patching_cases import written
from softmax_cases import N_HEADS, WIDTH, Block, Dropped, calling, keep, x_of
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as attend

PATTERN = "attention_softmax"


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onetrip.patching.attention.interface.multiplies_bfloat16_in_vectors", lambda: True)


class Both(nn.Module):
    """As nanoGPT and timm: SDPA, or the same step by step."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.qkv, self.dropout, self.is_fused = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(p), True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, N_HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.is_fused:
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p if self.training else 0.0)
        else:
            weights = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = functional.softmax(weights, dim=-1)
            weights = self.dropout(weights)
            y = weights @ v
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_beside_attention_step_by_step(p: float) -> None:
    model, original, report = patched_pair(Both(p), patterns=[PATTERN])
    assert [site.pattern for site in report.patched] == [PATTERN]
    assert [site.reason for site in report.skipped] == ([] if p else ["sdpa_in_use"])
    for each in (model, original):
        each.eval()
    for is_fused in (True, False):
        model.is_fused = original.is_fused = is_fused
        assert_agree(outcome(model, x_of()), outcome(original, x_of()))
    n_before = report.calls()[""][0]
    model.train().is_fused = True
    model(x_of())
    assert report.calls()[""][0] - n_before == (p > 0)


LAYOUTS = {
    "by tokens": "",
    "by heads": "q = q.contiguous()",
    "by heads, a part": "q = torch.cat((q, q), 1)[:, :4]",
    "by width": "q = q.transpose(2, 3).contiguous().transpose(2, 3)",
    "tokens first": "q = q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)",
    "a part of each token": "q = torch.cat((q, q), 3)[..., :8]",
    "wider values": "v = torch.cat((v, v), 3)",
}


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("before", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("p", "dtype"), [(0.1, torch.float32), (0.1, torch.bfloat16), (0.0, torch.bfloat16)], ids=str)
def test_the_result_has_sdpas_layout(before: str, p: float, dtype: torch.dtype) -> None:
    """With scores of several cuts, too: views of it are possible as of SDPA's."""
    block = written(Block, f"""
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        {before}
        return attend(q, k, v, None, self.p if self.training else 0.0)
    """, {"attend": attend, "torch": torch}, "x")(p).to(dtype)  # fmt: skip
    model, original, report = patched_pair(block)
    for n_tokens in (64, 1024):
        x = torch.randn(4, n_tokens, WIDTH).to(dtype)
        assert model(x).stride() == original(x).stride()
    assert p == 0.0 or report.calls() == {"": (2, 0)}


@pytest.mark.parametrize("frozen", ["q", "k", "v"])
def test_a_mask_is_shared_beside_a_frozen_layer(frozen: str) -> None:
    model, _, report = patched_pair(Block(), patterns=["attention_mask"])
    model.get_submodule(frozen).requires_grad_(False)
    model(x_of(), keep())
    assert report.calls() == {"": (1, 0)}


def test_a_mask_in_autocasts_dtype_is_added() -> None:
    """Beside float32 queries, as a rotation in float32 leaves them."""
    model, _, report = patched_pair(
        calling("attend(q, k, v, mask.to(torch.bfloat16), self.p)", "q, k, v = q.float(), k.float(), v.float()")(0.5)
    )
    with torch.autocast("cpu", torch.bfloat16):
        model(x_of(), model.added)
    assert report.calls() == {"": (1, 0)}


def test_float16_stays_sdpas() -> None:
    """The fused products are slower than those of SDPA."""
    model, _, report = patched_pair(Block(0.5).half())
    model(x_of(torch.float16))
    assert report.calls() == {"": (0, 0)}


@pytest.mark.usefixtures("bfloat16_products")
def test_a_mask_of_inference_mode_is_sdpas() -> None:
    model, original, _ = patched_pair(Block().bfloat16())
    with torch.inference_mode():
        mask = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril()
    x = torch.randn(4, 128, WIDTH).bfloat16()
    for each in (model, original):
        each(x, mask).sum().backward()


def test_an_added_mask_is_not_a_bias_for_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule sees the mask. What else SDPA is given reaches it where a shared mask takes the place of a bool one."""
    seen: list[Any] = []

    def rule(*given: Any) -> bool:
        seen.append(given[3])
        return False

    monkeypatch.setattr(sdpa_calls, "is_slower", rule)
    call = "attend(q, k[:, :2], v[:, :2], attn_mask=mask, dropout_p=self.p, enable_gqa=True)"
    model, original, _ = patched_pair(calling(call)(0.5))
    for mask in (keep(), model.added):
        found = []
        for each in (model, original):
            torch.manual_seed(0)
            found.append(each(x_of(), mask))
        assert torch.equal(*found)
        assert seen.pop() is mask


class Twice(Dropped):
    """Norms that the forward and the one that it overrides call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.out(x))


class ByName(Twice):
    """super() with the names of class and instance; a method of the class by its name."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.norm(y + self.out(ByName.halved(y)))

    @staticmethod
    def halved(x: Tensor) -> Tensor:
        return 0.5 * x


def test_what_an_overridden_forward_calls_stays_fused() -> None:
    model, original, report = patched_pair(ByName())
    assert_agree(outcome(model, x_of()), outcome(original, x_of()))
    assert report.calls() == {"": (1, 0), "norm": (1, 0)}


def test_patching_runs_no_code_of_the_model() -> None:
    """Of what is given as dropout."""
    block = calling("attend(q, k, v, dropout_p=self.next().p)")
    n_calls: list[int] = []
    block.next = lambda self: n_calls.append(1) or self
    patch_model(block(0.5))
    assert not n_calls
