"""Softmaxes that no attention interface reaches: models whose forward computes one itself, fused and compared."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.attention import softmax_regions
from onetrip.patching.attention.softmax_regions import read_softmax_regions
from outcomes import assert_agree, assert_compiles, loss_outcome, outcome, patch_and_compare
from patching_cases import COMMON, GPT2, HEADS, HIDDEN, VOCABULARY, Case, padded_text, renames, written
from tolerances import assert_like_torch
from torch import Tensor, nn

PATTERN = "attention_softmax"


LAYERS = {"n_layers": 2, "n_heads": HEADS}
CASES = {
    "deberta": Case("DebertaForMaskedLM", COMMON | {"relative_attention": True}),
    "deberta_v2": Case("DebertaV2ForMaskedLM", COMMON | {"relative_attention": True}),
    "bloom": Case("BloomForCausalLM", COMMON | {"n_layer": 2, "n_head": HEADS}),
    "falcon": Case("FalconForCausalLM", COMMON),
    "falcon-alibi": Case("FalconForCausalLM", COMMON | {"alibi": True}),
    "mpnet": Case("MPNetForMaskedLM", COMMON),
    "roformer": Case("RoFormerForMaskedLM", COMMON | {"embedding_size": HIDDEN}),
    "mpt": Case("MptForCausalLM", LAYERS | {"d_model": HIDDEN, "vocab_size": VOCABULARY}),
    "gpt_neo": Case(
        "GPTNeoForCausalLM",
        COMMON | {"num_layers": 2, "num_heads": HEADS, "max_position_embeddings": 16, "window_size": 4}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "gpt_neox_japanese": Case("GPTNeoXJapaneseForCausalLM", COMMON),
    "openai-gpt": Case("OpenAIGPTLMHeadModel", GPT2),
    "xlm": Case("XLMWithLMHeadModel", LAYERS | {"emb_dim": HIDDEN, "n_words": VOCABULARY}),
}  # fmt: skip


PRECISIONS = {"fp32": (torch.float32, False), "bf16": (torch.bfloat16, False), "autocast": (torch.float32, True)}
RUNS = [
    pytest.param(name, *of, id=f"{name}-{precision}", marks=[pytest.mark.slow] if precision == "bf16" else [])
    for name in CASES
    for precision, of in PRECISIONS.items()
    if (name, precision) != ("deberta", "autocast")  # whose own code raises there
]


@pytest.mark.parametrize(("name", "dtype", "autocast"), RUNS)
def test_outputs_and_gradients_are_the_model_s(name: str, dtype: torch.dtype, autocast: bool) -> None:
    """Under autocast the scores are bfloat16, masks still float32: fused where the statements or products cast what
    comes of them. (falcon's other branch has another reader of the name.)"""
    model = CASES[name].eager(dtype)
    exact = loss_outcome(copy.deepcopy(model).double(), padded_text())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = loss_outcome(model, padded_text())
        report = patch_model(model, patterns=[PATTERN])
        actual = loss_outcome(model, padded_text())
    assert len(report.patched) == 2
    for key, tensor in actual.items():
        if key != "loss" and exact[key].any():  # which some models compute in float32
            assert_like_torch(tensor, expected[key], exact[key], terms=64)
    assert set(report.calls().values()) == {(0, 1) if autocast and name == "falcon" else (1, 0)}


class Attention(nn.Module):
    """Scores in, dropped-out weights out, as models write it."""

    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.size = 8
        self.dropout = nn.Dropout(p)
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, scores, attention_mask=None):
        scores = scores * self.weight
        scores = scores / math.sqrt(self.size)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = nn.functional.softmax(scores, dim=-1)
        weights = self.dropout(weights)
        return weights


def attention(body: str, p: float = 0.25) -> Any:
    return written(Attention, body, globals(), "scores, attention_mask=None")(p)


UNDROPPED = """
    weights = torch.softmax(scores * self.weight + attention_mask, dim=-1)
    dropped = self.dropout(weights)
    return dropped, weights"""
READ_LATER = """
    scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1)
    weights = self.dropout(weights)
    return weights * self.weight, scores"""
NO_REGION = {
    "another dimension": """
        weights = nn.functional.softmax(scores + attention_mask, dim=1)
        return self.dropout(weights)""",
    "in a loop": """
        for _ in range(2):
            weights = nn.functional.softmax(scores + attention_mask, dim=-1)
            scores = self.dropout(weights)
        return scores""",
}


def test_scale_and_mask_go_into_the_call() -> None:
    (region,) = read_softmax_regions(Attention).chosen
    assert region.scale == "1.0 / (math.sqrt(self.size))"
    assert region.masks == ("attention_mask if attention_mask is not None else None",)
    assert len(region.source.splitlines()) == 5


def test_dropout_follows_the_module_and_its_seed(scores: Tensor, mask: Tensor) -> None:
    module = Attention()
    report = patch_model(module, patterns=[PATTERN])
    assert report.calls() == {"": (0, 0)}
    torch.manual_seed(1)
    first = module(scores, mask)
    torch.manual_seed(1)
    assert torch.equal(module(scores, mask), first) and (first == 0).any()
    plain = Attention().eval()
    torch.testing.assert_close(module.eval()(scores, mask), plain(scores, mask))
    torch.testing.assert_close(module(scores), plain(scores))


def test_probabilities_read_before_dropout_are_fused_only_without_it(scores: Tensor, mask: Tensor) -> None:
    module = attention(UNDROPPED)
    report = patch_model(module, patterns=[PATTERN])
    expected = attention(UNDROPPED).eval()(scores, mask)
    torch.testing.assert_close(module.eval()(scores, mask), expected)
    assert report.calls() == {"": (1, 0)}
    dropped, weights = module.train()(scores, mask)
    torch.testing.assert_close(weights, expected[1])
    assert (dropped == 0).sum() > (weights == 0).sum()
    assert report.calls() == {"": (1, 1)}


def test_scores_that_are_read_later_keep_their_mask(scores: Tensor, mask: Tensor) -> None:
    module = attention(READ_LATER, 0.0)
    assert [region.masks for region in read_softmax_regions(type(module)).chosen] == [()]
    assert patch_model(module, patterns=[PATTERN]).patched
    torch.testing.assert_close(module(scores, mask), attention(READ_LATER, 0.0)(scores, mask))


class Weighing(Attention):
    """As Bark, OpenAI GPT: forward calls a method."""

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        return self.weigh(scores * self.weight, mask)

    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        weights = nn.functional.softmax(scores + mask, dim=-1)
        weights = weights.to(scores.dtype)
        weights = self.dropout(weights)
        return weights


WEIGH = "weights = nn.functional.softmax(scores * self.weight + mask, dim=-1); weights = self.dropout(weights)"
Renamed = written(Attention, f"{WEIGH}; return weights", globals(), "scores, mask", decorators=[renames(old="mask")])


class CalledThis(Attention):
    def forward(this, scores: Tensor, mask: Tensor) -> Tensor:
        weights = nn.functional.softmax(scores * this.weight + mask, dim=-1)
        weights = this.dropout(weights)
        return weights


def test_a_softmax_in_a_wrapper_is_fused_in_it(scores: Tensor, mask: Tensor) -> None:
    module, original = Renamed(0.0), Renamed(0.0)
    report = patch_model(module, patterns=[PATTERN])
    torch.testing.assert_close(module(scores, old=mask), original(scores, mask))
    assert report.calls() == {"": (1, 0)}


def test_a_forward_that_calls_itself_otherwise_is_reported(scores: Tensor, mask: Tensor) -> None:
    module, original = CalledThis(0.0), CalledThis(0.0)
    (site,) = patch_model(module, patterns=[PATTERN]).skipped
    assert "its first parameter is not called self" in site.detail
    assert torch.equal(module(scores, mask), original(scores, mask))


class InAnotherMethod(Weighing):
    """Which it inherits."""


WITHOUT_A_MASK = "weights = nn.functional.softmax(scores, dim=-1); return weights + mask + self.dropout(scores)"


def test_a_softmax_in_another_method_is_fused_there(scores: Tensor, mask: Tensor) -> None:
    module, original = InAnotherMethod(0.0), InAnotherMethod(0.0)
    report = patch_model(module, patterns=[PATTERN])
    torch.testing.assert_close(module(scores, mask), original(scores, mask))
    torch.testing.assert_close(module.weigh(scores, mask), original.weigh(scores, mask))
    assert report.calls() == {"": (2, 0)}
    assert "+    scores_ = scores" in report.diff("")
    assert torch.equal(unpatch_model(module)(scores, mask), original(scores, mask))


def test_what_is_no_region_in_another_method_is_reported() -> None:
    (site,) = patch_model(
        written(Weighing, WITHOUT_A_MASK, globals(), "scores, mask", "weigh")(), patterns=[PATTERN]
    ).skipped
    assert site.reason == "unknown_forward"
    assert site.detail == (
        "weigh: `weights = nn.functional.softmax(scores, dim=-1)` has no mask in it or just before it, and is followed "
        "by `return weights + mask + self.dropout(scores)`, not by its dropout"
    )


class WithASum(Attention):
    def __init__(self, p: float = 0.25) -> None:
        super().__init__(p)
        self.dense, self.norm, self.last = nn.Linear(5, 5), nn.LayerNorm(5), nn.Dropout(p)


ALBERT = f"{WEIGH}; out = self.dense(weights); out = self.last(out); return self.norm(scores + out)"
Albert = written(WithASum, ALBERT, globals(), "scores, mask")
"""Attention, dropout, residual and norm in one forward."""


def test_attention_and_a_sum_in_one_forward_are_both_fused(scores: Tensor, mask: Tensor) -> None:
    module = Albert(0.0)
    original = copy.deepcopy(module)
    report = patch_model(module)
    (site,) = report.patched
    assert (site.pattern, site.detail) == (PATTERN, "and dropout_add_norm")
    assert_agree(outcome(module, scores, mask), outcome(original, scores, mask), 1e-4)
    assert report.calls() == {"": (2, 0)}


def test_a_sum_is_fused_where_the_attention_beside_it_is_not(scores: Tensor, mask: Tensor) -> None:
    module, original = Albert(0.0), Albert(0.0)
    original.load_state_dict(module.state_dict())
    (site,) = patch_model(module, attention=False).patched
    assert site.pattern == "dropout_add_norm"
    torch.testing.assert_close(module(scores, mask), original(scores, mask))


class Projecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.dropout = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.1)


SCALED_BY_A_CHILD = """
    scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2))
    scores = scores / math.sqrt(self.key.out_features)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(self.query.weight.dtype)
    weights = self.dropout(weights)
    return torch.matmul(weights, x)"""
"""An attention that reads numbers and weights of its projections."""


def test_a_region_may_read_a_child_s_attributes() -> None:
    model, x = nn.Sequential(written(Projecting, SCALED_BY_A_CHILD, globals())()).eval(), torch.randn(2, 4, 5, HIDDEN)
    report = patch_and_compare(model, lambda: outcome(model, x), patterns=[PATTERN])
    assert [site.pattern for site in report.patched] == [PATTERN], report


@pytest.mark.parametrize("name", NO_REGION)
def test_what_is_no_region_is_reported(name: str) -> None:
    report = patch_model(attention(NO_REGION[name]), patterns=[PATTERN])
    assert not report.patched and [site.reason for site in report.skipped] == ["unknown_forward"]


@pytest.mark.parametrize(
    "kind", ["bool mask", "wider mask", "mask of more dimensions", "mask of more rows", "float64", "inplace", "hooked"]
)
def test_what_does_not_fit_runs_as_it_was_written(kind: str, scores: Tensor, mask: Tensor) -> None:
    module, plain = Attention(0.0), Attention(0.0)
    report = patch_model(module, patterns=[PATTERN])
    if kind == "bool mask":
        mask = mask == 0
    elif kind == "wider mask":  # and nothing casts what becomes float32 by it
        module, plain, scores = module.bfloat16(), plain.bfloat16(), scores.bfloat16()
    elif kind == "mask of more rows":
        scores = scores[:1]
    elif kind == "mask of more dimensions":
        mask = mask.expand(4, 2, 2, 1, 5)
    elif kind == "float64":
        module, plain, scores, mask = module.double(), plain.double(), scores.double(), mask.double()
    elif kind == "inplace":
        module.dropout.inplace = True
    else:
        module.dropout.register_forward_hook(lambda module, args, output: output)
    assert torch.equal(module(scores, mask), plain(scores, mask))
    assert report.calls() == {"": (0, 1)}


def test_a_region_that_computes_something_else_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax_regions, "region_softmax", lambda scores, masks, **_: torch.softmax(scores, dim=-1))
    report = patch_model(Attention(), patterns=[PATTERN])
    assert not report.patched and {site.reason for site in report.skipped} == {"verify_failed"}


def test_compiles_without_a_graph_break(scores: Tensor, mask: Tensor) -> None:
    assert_compiles(Attention(0.0), scores, mask, patterns=[PATTERN])
