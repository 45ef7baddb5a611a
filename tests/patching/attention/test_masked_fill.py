"""Scores that a mask fills with the least number before their softmax, in rows that it hides everywhere, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip.patching import patch_model
from onetrip.patching.attention import masked_fill
from onetrip.patching.attention.softmax_regions import SoftmaxRegions, read_softmax_regions
from outcomes import assert_compiles
from patching_cases import written
from torch import Tensor, nn
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

PATTERN = "attention_softmax"
LEAST = torch.finfo(torch.float32).min
FILL = "scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)"
BMM = "context = torch.bmm({0}.view(-1, {0}.size(-2), {0}.size(-1)), values)"
PRODUCT = BMM.format("weights")


class Filled(nn.Module):
    """As DeBERTa's; gives its weights, too."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, scores, mask, values):  # type: ignore[no-untyped-def]
        scores = scores.masked_fill(mask, torch.finfo(values.dtype).min)
        weights = nn.functional.softmax(scores, dim=-1)
        weights = self.dropout(weights)
        context = torch.bmm(weights.view(-1, weights.size(-2), weights.size(-1)), values)
        return context, weights


@pytest.fixture
def hidden() -> Tensor:
    """Hides the last columns, and of the second batch whole rows."""
    mask = torch.zeros(2, 1, 3, 5, dtype=torch.bool)
    mask[:, :, :, 3:] = mask[1, :, 1:] = True
    return mask


@pytest.fixture
def values() -> Tensor:
    return torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1))


def outcome(module: Any, scores: Tensor, mask: Any, values: Tensor, autocast: bool = False) -> list[Tensor]:
    """Outputs, and gradients where all of them count."""
    scores, values = scores.clone().requires_grad_(), values.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = module(scores, mask, values)
    generator = torch.Generator().manual_seed(2)
    loss = sum((y.float() * torch.randn(y.shape, generator=generator)).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, (scores, values))]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_rows_that_are_hidden_have_equal_weights_and_no_gradient(
    dtype: torch.dtype, scores: Tensor, hidden: Tensor, values: Tensor
) -> None:
    module = Filled()
    report = patch_model(module, patterns=[PATTERN])
    actual = outcome(module, 4 * scores.to(dtype), hidden, values.to(dtype))
    expected = outcome(Filled(), 4 * scores.to(dtype).float(), hidden, values.to(dtype).float())
    bound = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs, **bound)
    assert report.calls() == {"": (1, 0)}
    weights, gradient = actual[1], actual[2]
    assert (weights[1, :, 1:] == torch.tensor(0.2, dtype=dtype)).all() and not gradient[1, :, 1:].any()
    assert gradient[0].any() and gradient[1, :, :1].any()


def test_under_autocast_the_product_rounds_what_it_reads(scores: Tensor, hidden: Tensor, values: Tensor) -> None:
    module = Filled()
    report = patch_model(module, patterns=[PATTERN])
    actual, expected = (outcome(each, scores, hidden, values, autocast=True) for each in (module, Filled()))
    assert [each.dtype for each in actual] == [each.dtype for each in expected] and report.calls() == {"": (1, 0)}
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)


def test_compiled_without_a_break(scores: Tensor, hidden: Tensor, values: Tensor) -> None:
    assert_compiles(Filled(), scores, hidden, values, compute=outcome, patterns=[PATTERN])


def compare(body: str, scores: Tensor, hidden: Tensor, values: Tensor, train: bool = True) -> None:
    """Of a forward that is patched: fused, and what the original computes."""
    cls = written(Filled, body, globals(), "scores, mask, values")
    module, original = (cls(0.0).train(train) for _ in range(2))
    report = patch_model(module, patterns=[PATTERN])
    for ours, theirs in zip(*(outcome(m, scores, hidden, values) for m in (module, original)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert report.calls() == {"": (1, 0)}


LINES = f"""
{FILL}
weights = torch.softmax(scores, dim=-1)
dropped = self.dropout(weights)
"""


def test_the_lowest_number_of_another_dtype(scores: Tensor, hidden: Tensor, values: Tensor) -> None:
    body = f"{LINES.replace('scores.dtype', 'torch.float16')}{BMM.format('dropped')}; return (context,)"
    compare(body, scores, hidden, values)


@pytest.mark.parametrize("train", [True, False])
def test_the_product_takes_the_name_of_the_weights_before_dropout(
    train: bool, scores: Tensor, hidden: Tensor, values: Tensor
) -> None:
    body = f"{LINES}{BMM.format('dropped').replace('context', 'weights')}; return values, weights"
    compare(body, scores, hidden, values, train)


def test_saved_by_torch_jit(scores: Tensor, hidden: Tensor, values: Tensor, tmp_path: Any) -> None:
    module = Filled().eval()
    patch_model(module, patterns=[PATTERN])
    traced = torch.jit.trace(module, (scores, hidden, values))
    torch.jit.save(traced, tmp_path / "traced.pt")
    for ours, theirs in zip(traced(scores, hidden, values), Filled()(scores, hidden, values), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["integers", "a number", "too wide", "more dimensions", "a transform"])
def test_what_may_not_be_added_is_filled_as_before(kind: str, scores: Tensor, hidden: Tensor, values: Tensor) -> None:
    module = Filled()
    report = patch_model(module, patterns=[PATTERN])
    if kind == "too wide":
        with pytest.raises(RuntimeError):
            module(scores, torch.zeros(2, 2, 3, 4, dtype=torch.bool), values)
    elif kind == "more dimensions":
        for ours, theirs in zip(*(each(scores, hidden[None], values) for each in (module, Filled())), strict=True):
            torch.testing.assert_close(ours, theirs)
    elif kind == "a transform":
        tangent = torch.ones_like(scores)
        ours, theirs = (
            torch.func.jvp(lambda x, each=each: each(x, hidden, values)[0], (scores,), (tangent,))[1]
            for each in (module, Filled())
        )
        torch.testing.assert_close(ours, theirs)
    else:
        with pytest.raises((RuntimeError, TypeError)):
            module(scores, hidden.long() if kind == "integers" else 1, values)
    assert report.calls() == {"": (int(kind in ("more dimensions", "a transform")), 0)}


def test_the_fill_of_deberta_v2_joins_the_softmax() -> None:
    found = read_softmax_regions(DisentangledSelfAttention)
    assert isinstance(found, SoftmaxRegions) and [region.fill for region in found.chosen] == ["~attention_mask"]


FORWARDS = {
    "as DeBERTa's": ([FILL], [PRODUCT], True),
    "a number": (["scores = scores.masked_fill(~mask, -1e9)"], [PRODUCT], False),
    "a mask of another function": ([FILL.replace("torch.finfo", "torch.iinfo")], [PRODUCT], False),
    "a dtype that is computed": ([FILL.replace("(scores.dtype", "(self.next().dtype")], [PRODUCT], False),
    "a mask that is computed": ([FILL.replace("mask,", "self.mask(),")], [PRODUCT], False),
    "in place, where other names may see it": ([FILL.replace("fill(", "fill_(")], [PRODUCT], False),
    "another name": ([FILL.replace("scores =", "filled =")], [PRODUCT], False),
    "other scores": ([FILL.replace("scores.m", "values.m")], [PRODUCT], False),
    "a sum after it": ([FILL, "scores = scores + mask"], [PRODUCT], False),
    "scores read later": ([FILL], [PRODUCT, "context = context + scores"], False),
    "weights that are written to": ([FILL], [PRODUCT, "weights *= 2.0"], False),
    "weights beside the output": ([FILL], [PRODUCT, "return context, weights"], True),
    "no product": ([FILL], ["context = weights * values"], False),
    "another function": ([FILL], [PRODUCT.replace("bmm", "baddbmm")], False),
    "the weights' name": ([FILL], [PRODUCT.replace("context", "weights"), "context = weights"], False),
    "values of the weights": ([FILL], [PRODUCT.replace("values", "values * weights.sum()")], False),
    "weights on the right": ([FILL], ["context = values @ weights"], False),
    "other views": ([FILL], [PRODUCT.replace("-1, weights.size(-2)", "-1, 3")], False),
    "other rows": ([FILL], [PRODUCT.replace("view", "expand")], False),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_which_fills_join_the_softmax(name: str) -> None:
    before, after, joins = FORWARDS[name]
    lines = [*before, "weights = torch.softmax(scores, dim=-1)", "weights = self.dropout(weights)", *after]
    cls = written(Filled, "\n".join([*lines, "return context"]), globals(), "scores, mask, values")
    found = read_softmax_regions(cls)
    regions = found.chosen if isinstance(found, SoftmaxRegions) else ()
    assert [bool(region.fill) for region in regions] == [joins] * len(regions) and (regions or not joins)
    assert [len(region.statements) for region in regions if joins] == [4] * joins


@pytest.mark.parametrize("broken", ["product", "read"])
def test_rows_that_pass_gradients_on_are_not_verified(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "product": lambda self, weights, values: torch.bmm(weights, values),
        "read": lambda self, weights: weights,
    }
    monkeypatch.setattr(masked_fill.AddedMask, broken, wrong[broken])
    report = patch_model(Filled(), patterns=[PATTERN])
    assert not report.patched and {site.reason for site in report.skipped} == {"verify_failed"}
