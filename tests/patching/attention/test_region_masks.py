"""Masks and position biases that a forward adds to its scores, one after another, before its own softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model
from onetrip.patching.attention import region_softmax as fused_region
from onetrip.patching.attention import softmax_regions
from onetrip.patching.attention.softmax_regions import SoftmaxRegions, read_softmax_regions
from patching_cases import written
from torch import Tensor, nn

PATTERN = "attention_softmax"


class TwoMasks(nn.Module):
    """As MPNet's, which adds its position bias in place."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.size, self.dropout, self.weight = 8, nn.Dropout(p), nn.Parameter(torch.ones(5))

    def forward(self, scores, bias=None, mask=None):
        scores = scores * self.weight
        scores = scores / math.sqrt(self.size)
        if bias is not None:
            scores += bias
        if mask is not None:
            scores = scores + mask
        weights = nn.functional.softmax(scores, dim=-1)
        weights = self.dropout(weights)
        return weights


def regions_of(*statements: str) -> list[tuple[tuple[str, ...], str]]:
    """(masks, scale) of each region of a forward: the statements, then softmax and dropout."""
    lines = [
        *statements,
        "weights = torch.softmax(scores, dim=-1)",
        "weights = self.dropout(weights)",
        "return weights",
    ]
    found = read_softmax_regions(written(TwoMasks, "\n".join(lines), globals(), "scores, bias, mask"))
    assert isinstance(found, SoftmaxRegions)
    for region in found.chosen:  # no more statements than those that it takes the place of
        assert len(region.statements) == len(region.masks) + (region.scale != "1.0") + 2
    return [(region.masks, region.scale) for region in found.chosen]


SCALED, BIASED, MASKED = "scores = scores / math.sqrt(self.size)", "scores = scores + bias", "scores = scores + mask"
SCALE, CAST_BIAS = "1.0 / math.sqrt(self.size)", "in_dtype_of_(scores_, bias)"
HAS_BIAS = "if bias is not None"
TO_SCORES = "mask.to(scores.dtype)"
CHAINS = {
    "two": ([SCALED, BIASED, MASKED], ("bias", "mask"), True),
    "without a scale": ([BIASED, MASKED], ("bias", "mask"), False),
    "in place": ([SCALED, "scores += bias", MASKED], (CAST_BIAS, "mask"), True),
    "in place, twice": (
        [SCALED, "scores += mask", "scores += bias"], ("in_dtype_of_(scores_, mask)", CAST_BIAS), True),
    "under an if": (
        [SCALED, f"{HAS_BIAS}: scores += bias", MASKED], (f"{CAST_BIAS} if bias is not None else None", "mask"), True,
    ),
    "a choice under an if": (
        ["if bias is not None: scores = scores + (bias if self.training else mask)"],
        ("(bias if self.training else mask) if bias is not None else None",), False,
    ),
    # Other names may stand for the scores, also where an addition before did not run.
    "in place, not scaled": (["raw = scores", "scores += bias", MASKED], ("mask",), False),
    "in place after an if": ([f"if self.training: {MASKED}", "scores += bias", BIASED], ("bias",), False),
    # In the dtype of a sum.
    "in place after a sum": ([SCALED, MASKED, "scores += bias", MASKED], ("mask",), False),
    "cast after a sum": ([SCALED, BIASED, f"scores = scores + {TO_SCORES}"], (TO_SCORES,), False),
    "cast first": ([SCALED, f"scores = scores + {TO_SCORES}", BIASED], (TO_SCORES, "bias"), True),
    "its size": (
        [SCALED, BIASED, "scores = scores + mask[: scores.size(-1)]"], ("bias", "mask[:scores.size(-1)]"), True),
    "its values": ([SCALED, "scores = scores + scores", MASKED], ("mask",), False),
    "a test of its values": ([SCALED, "if scores is not bias: scores += bias", MASKED], ("mask",), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_which_additions_join_the_softmax(name: str) -> None:
    statements, masks, has_scale = CHAINS[name]
    assert regions_of(*statements) == [
        (masks, SCALE.replace("math.sqrt(self.size)", "(math.sqrt(self.size))") if has_scale else "1.0")
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("has_mask", [True, False], ids=["mask", ""])
def test_a_position_bias_joins_the_mask(
    dtype: torch.dtype, batch: int, has_mask: bool, scores: Tensor, mask: Tensor
) -> None:
    """The bias stays float32: adding it in place leaves the scores in their dtype. batch: of the bias; 0 for none."""
    module, original = TwoMasks().to(dtype), TwoMasks()
    bias = torch.linspace(-2.0, 2.0, 60).view(2, 2, 3, 5)[:batch].clone().requires_grad_()
    operands = (bias if batch else None, mask.to(dtype).clamp(min=torch.finfo(dtype).min) if has_mask else None)
    report = patch_model(module, patterns=[PATTERN])
    results = []
    for each, given in ((module, scores.to(dtype)), (original, scores)):
        y = each(given, *operands)
        y.float().pow(2).sum().backward()
        results.append((y, each.weight.grad, bias.grad))
        bias.grad = None
    (y, dweight, dbias), (expected, expected_dweight, expected_dbias) = results
    close = {"atol": 2e-2, "rtol": 5e-2} if dtype == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
    assert y.dtype == dtype and report.calls() == {"": (1, 0)}
    torch.testing.assert_close(y.float(), expected, **close)
    torch.testing.assert_close(dweight.float(), expected_dweight, **close)
    torch.testing.assert_close(dbias, expected_dbias, **close)


def test_a_bias_learns_where_scores_do_not(scores: Tensor, mask: Tensor) -> None:
    """Also compiled, without a graph break."""
    module, original, bias = TwoMasks(), TwoMasks(), torch.randn(1, 2, 3, 5, requires_grad=True)
    patch_model(module, patterns=[PATTERN])
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    gradients = []
    for each in (original, module, compiled):
        each.weight.requires_grad_(False)
        gradients += torch.autograd.grad(each(scores, bias, mask).pow(2).sum(), bias)
        assert each(scores, bias.detach(), mask).grad_fn is None
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


def test_masks_are_added_as_float32_scores_would_be(scores: Tensor) -> None:
    bias, mask = (torch.linspace(x, x + 1.0, 5).bfloat16() for x in (100.0, 0.1))
    expected = torch.softmax(scores + bias + mask, dim=-1)
    torch.testing.assert_close(softmax_regions.region_softmax(scores, (bias, None, mask), None), expected)


def test_a_bias_learns_beside_scores_that_count_for_nothing(scores: Tensor) -> None:
    bias, target = torch.randn(2, 2, 3, 5, requires_grad=True), torch.randn(2, 2, 3, 5)
    ours = softmax_regions.region_softmax(scores, (bias,), None, scale=0.0)
    theirs = torch.softmax(0.0 * scores + bias, dim=-1)
    torch.testing.assert_close(*(torch.autograd.grad((y * target).sum(), bias)[0] for y in (ours, theirs)))


def test_what_a_float16_mask_hides_stays_hidden(scores: Tensor, mask: Tensor) -> None:
    scores, mask = scores.half(), mask.half().clamp(min=torch.finfo(torch.float16).min)
    bias = torch.linspace(-20.0, 20.0, 30).view(1, 2, 3, 5).half()
    module, original = TwoMasks().half(), TwoMasks()
    report = patch_model(module, patterns=[PATTERN])
    weights = module(scores, bias, mask)
    assert report.calls() == {"": (1, 0)} and not weights[..., 4].any()
    torch.testing.assert_close(weights.float(), original(scores.float(), bias.float(), mask.float()), atol=4e-3, rtol=0)


@pytest.mark.parametrize(("bias", "mask"), [(1e-6, None), (None, torch.zeros(5, dtype=torch.float64)), (None, 1e-6)])
def test_what_is_no_mask_is_added_as_before(bias: Any, mask: Any, scores: Tensor) -> None:
    module = TwoMasks()
    report = patch_model(module, patterns=[PATTERN])
    ours, theirs = (each(scores, bias, mask) for each in (module, TwoMasks()))
    assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        module(scores, torch.zeros(2, 2, 2, 3, 5))
    assert report.calls() == {"": (0, 2)}


def test_forward_mode_sees_biases_that_learn(scores: Tensor) -> None:
    bias = torch.randn(2, 2, 3, 5)

    def loss(given: Tensor) -> Tensor:
        return (softmax_regions.region_softmax(scores, (given, given), None) ** 2).sum()

    def expected(given: Tensor) -> Tensor:
        return (torch.softmax(scores + given + given, dim=-1) ** 2).sum()

    tangent = torch.randn(bias.shape)
    ours, theirs = (torch.func.jvp(torch.func.grad(function), (bias,), (tangent,))[1] for function in (loss, expected))
    torch.testing.assert_close(ours, theirs)


def test_gradients_of_float32_biases_are_summed_in_float32() -> None:
    scores, bias = torch.zeros(64, 1, 1, 2).bfloat16(), torch.zeros(1, 1, 1, 2, requires_grad=True)
    weights = softmax_regions.region_softmax(scores, (bias, torch.zeros(2)), None)
    weights.backward(torch.linspace(1.0, 1.3, 128).view(64, 1, 1, 2).to(weights.dtype).mul(torch.tensor([1.0, 0.0])))
    whole, rounded = bias.grad, bias.grad.bfloat16().float()
    assert whole.shape == bias.shape and not torch.equal(whole, rounded)


@pytest.mark.parametrize(("batch", "by_softmax"), [(1, True), (2, False)])
def test_a_bias_of_the_scores_shape_has_its_gradient_from_theirs(
    batch: int, by_softmax: bool, monkeypatch: pytest.MonkeyPatch, scores: Tensor
) -> None:
    """The softmax would write one more tensor of that size, in float32."""
    module, learned = TwoMasks(), []
    patch_model(module, patterns=[PATTERN])
    compute = fused_region.softmax
    monkeypatch.setattr(
        fused_region,
        "softmax",
        lambda x, mask, **more: (learned.append(mask.requires_grad), compute(x, mask, **more))[1],
    )
    module(scores, torch.randn(batch, 2, 3, 5, requires_grad=True))
    assert learned == [by_softmax]


def test_a_sum_of_masks_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = softmax_regions.region_softmax
    monkeypatch.setattr(
        softmax_regions, "region_softmax", lambda x, masks, *more, **o: compute(x, masks[-1:], *more, **o)
    )
    report = patch_model(TwoMasks(), patterns=[PATTERN])
    assert not report.patched and {site.reason for site in report.skipped} == {"verify_failed"}
