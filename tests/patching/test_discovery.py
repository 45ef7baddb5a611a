"""What is recognised, by what it computes and how it is written, and what must not be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 16


def randomised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return module.eval()


def inputs(n: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 5, WIDTH, generator=generator) for _ in range(n)]


class Norm(nn.Module):
    """Parts of the leaf norms below, which differ in names, cast orders and where eps comes from."""

    def __init__(self, bias: bool = False, weight: bool = True) -> None:
        super().__init__()
        if weight:
            self.gain = nn.Parameter(torch.ones(WIDTH))
        if bias:
            self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.epsilon = 1e-4


class LlamaLike(Norm):
    def forward(self, h: Tensor) -> Tensor:
        dtype = h.dtype
        h = h.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.gain * h.to(dtype)


class Olmo2Like(Norm):
    def forward(self, h: Tensor) -> Tensor:
        z = h.float()
        return (self.gain * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.epsilon))).to(h.dtype)


class GemmaLike(Norm):
    def scaled(self, z: Tensor) -> Tensor:
        return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.epsilon)

    def forward(self, h: Tensor) -> Tensor:
        return (self.scaled(h.float()) * (1.0 + self.gain.float())).type_as(h)


class T5Like(Norm):
    def forward(self, h: Tensor) -> Tensor:
        h = h * torch.rsqrt(h.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.gain.dtype in (torch.float16, torch.bfloat16):
            h = h.to(self.gain.dtype)
        return self.gain * h


class CohereLike(Norm):
    def forward(self, h: Tensor) -> Tensor:
        z = h.float()
        z = z - z.mean(-1, keepdim=True)
        return (self.gain.float() * z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(h.dtype)


class ConstantEps(Norm):
    def forward(self, h: Tensor) -> Tensor:
        return functional.layer_norm(h, (WIDTH,), self.gain, self.shift, 3e-3)


class OnePlusLayerNorm(Norm):
    def forward(self, h: Tensor) -> Tensor:
        return functional.layer_norm(h, (WIDTH,), self.gain + 1, self.shift, self.epsilon)


class Weightless(Norm):
    def forward(self, h: Tensor) -> Tensor:
        z = h.float()
        return (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(h.dtype)


class Subclass(nn.LayerNorm):
    """Adds nothing to forward."""


LEAVES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "nn.LayerNorm": (lambda: nn.LayerNorm(WIDTH), "layer_norm", "layer_norm(input, self.weight, self.bias, self.eps)"),
    "nn.LayerNorm-no-bias": (lambda: nn.LayerNorm(WIDTH, bias=False), "layer_norm", "self.eps)"),
    "nn.LayerNorm-no-affine": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "layer_norm", "self.eps)"),
    "nn.LayerNorm-subclass": (lambda: Subclass(WIDTH), "layer_norm", "self.eps)"),
    "nn.RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-4), "rms_norm", "rms_norm(x, self.weight, self.eps)"),
    "nn.RMSNorm-eps-None": (lambda: nn.RMSNorm(WIDTH), "rms_norm", "finfo(float32).eps)"),
    "nn.RMSNorm-no-affine": (lambda: nn.RMSNorm(WIDTH, 1e-4, elementwise_affine=False), "rms_norm", "self.eps)"),
    "llama-like": (LlamaLike, "rms_norm", "rms_norm(h, self.gain, self.epsilon, cast_before_weight=True)"),
    "olmo2-like": (Olmo2Like, "rms_norm", "rms_norm(h, self.gain, self.epsilon)"),
    "gemma-like": (GemmaLike, "rms_norm", "rms_norm(h, self.gain, self.epsilon, weight_offset=1.0)"),
    "t5-like": (T5Like, "rms_norm", "rms_norm(h, self.gain, self.epsilon, cast_before_weight='weight')"),
    "cohere-like": (CohereLike, "layer_norm", "layer_norm(h, self.gain, None, self.epsilon)"),
    "constant-eps": (lambda: ConstantEps(bias=True), "layer_norm", "layer_norm(h, self.gain, self.shift, 0.003)"),
    "one-plus-layer-norm": (lambda: OnePlusLayerNorm(bias=True), "layer_norm", "weight_offset=1.0)"),
    "weightless": (lambda: Weightless(weight=False), "rms_norm", "rms_norm(h, None, self.epsilon)"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_leaf_norm_is_recognised(name: str) -> None:
    make, pattern, call = LEAVES[name]
    model = nn.Sequential(randomised(make())).eval()
    (x,) = inputs()
    expected = model(x)
    report = patch_model(model)
    assert [site.pattern for site in report.patched] == [pattern], report
    source = vars(type(model[0]))["_onetrip_rewrite"].source
    assert call in source, source
    torch.testing.assert_close(model(x), expected)
    assert report.calls() == {"0": (1, 0)}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=["w-bf16", "w-fp32"])
def test_leaf_norm_keeps_the_rounding_of_bfloat16(name: str, weight_dtype: torch.dtype) -> None:
    """The same dtype, and the same bits but for one rounding in twenty: another cast order changes a third of them."""
    module = randomised(LEAVES[name][0]()).to(weight_dtype)
    x = inputs()[0].bfloat16()
    expected = module(x)
    report = patch_model(module)
    if not report.patched:  # 1 + w is rounded to bfloat16 there, and the operator would not
        assert name == "one-plus-layer-norm" and report.skipped[0].reason == "unsupported_dtype"
        return
    actual = module(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-5)
    same = torch.isclose(actual.float(), expected.float(), rtol=1e-6, atol=1e-7)
    assert same.float().mean() > 0.95


class GatedNorm(Norm):
    def forward(self, h: Tensor, gate: Tensor | None = None) -> Tensor:
        h = h if gate is None else h * functional.silu(gate)
        return self.gain * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon))


class UnbiasedNorm(Norm):
    def forward(self, h: Tensor) -> Tensor:
        return self.gain * h * torch.rsqrt(h.var(-1, keepdim=True) + self.epsilon)


class SumNorm(Norm):
    def forward(self, h: Tensor) -> Tensor:
        return self.gain * h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + self.epsilon)


class ClampedNorm(Norm):
    def forward(self, h: Tensor) -> Tensor:
        return self.gain * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True).clamp(min=self.epsilon))


class SequenceNorm(Norm):
    def forward(self, h: Tensor) -> Tensor:
        return self.gain * h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + self.epsilon)


class TrainingNorm(Norm):
    def forward(self, h: Tensor) -> Tensor:
        h = self.gain * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return h * 2 if self.training else h


class CountingNorm(Norm):
    calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.gain * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon)


class ChannelsFirst(nn.LayerNorm):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.transpose(-1, -2)).transpose(-1, -2)


class HeadNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return self.weight[0] * functional.rms_norm(h, (WIDTH,))


def quantised() -> nn.Module:
    norm = nn.LayerNorm(WIDTH, bias=False)
    norm.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.int8), requires_grad=False)
    return norm


def kernelized() -> nn.Module:
    class HubNorm(LlamaLike):
        kernel_layer_name = "RMSNorm"

    norm = HubNorm()
    norm.forward = lambda h: h  # type: ignore[method-assign]
    return norm


NEGATIVES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gated": (GatedNorm, "extra_forward_args"),
    "unbiased-variance": (UnbiasedNorm, "unknown_forward"),
    "sum-of-squares": (SumNorm, "unknown_forward"),
    "clamped-not-added-eps": (ClampedNorm, "unknown_forward"),
    "over-another-dimension": (SequenceNorm, "unknown_forward"),
    "another-in-training": (TrainingNorm, "unknown_forward"),
    "counts-its-calls": (CountingNorm, "unknown_forward"),
    "channels-first": (lambda: ChannelsFirst(WIDTH), "not_exact_type"),
    "two-dimensions": (lambda: nn.LayerNorm((5, WIDTH)), "unsupported_shape"),
    "two-dimensional-weight": (HeadNorm, "unsupported_shape"),
    "batch-norm": (lambda: nn.BatchNorm1d(WIDTH), "unknown_forward"),
    "group-norm": (lambda: nn.GroupNorm(4, WIDTH), "unknown_forward"),
    "float64": (lambda: nn.LayerNorm(WIDTH).double(), "unsupported_dtype"),
    "quantised": (quantised, "quantized"),
    "kernelized": (kernelized, "kernelized_already"),
}


@pytest.mark.parametrize("name", NEGATIVES)
def test_what_is_no_leaf_norm_is_left_alone(name: str) -> None:
    make, reason = NEGATIVES[name]
    model = nn.Sequential(make())
    before, state = type(model[0]), dict(vars(model[0]))
    report = patch_model(model)
    assert report.patched == () and type(model[0]) is before and vars(model[0]) == state
    assert [(site.name, site.reason) for site in report.skipped] == [("0", reason)]


@pytest.mark.parametrize(
    "make",
    [nn.Dropout, nn.GELU, lambda: nn.LeakyReLU(1e-3), lambda: nn.PReLU(WIDTH), nn.Identity],
    ids=["Dropout", "GELU", "LeakyReLU", "PReLU", "Identity"],
)
def test_what_nobody_takes_for_a_norm_is_not_mentioned(make: Callable[[], nn.Module]) -> None:
    report = patch_model(nn.Sequential(make(), nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH)))
    assert report.patched == () and report.skipped == ()


class Block(nn.Module):
    """Parts of the blocks below; p is high, so that a mask in the wrong place shows."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.4)
        self.post = nn.LayerNorm(WIDTH)
        self.rms = LlamaLike()
        self.rate = 0.4


class OneExpression(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.post(b + self.drop(self.proj(a)))


class RmsTail(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """With a docstring."""
        a = self.drop(self.proj(a))
        total = a + b
        return self.rms(total)


class WithoutDense(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.post(a + self.drop(b))


class WithoutDropout(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a = self.proj(a)
        return self.post(b + a)


class WithoutNorm(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a = self.proj(a)
        a = self.drop(a)
        return b + a


class FunctionalDropout(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a = functional.dropout(self.second(a), p=self.rate, training=self.training)
        return self.post(a + b)


class FeedForward(Block):
    def forward(self, a: Tensor) -> Tensor:
        h = self.proj(a)
        h = self.drop(h)
        h = self.second(h)
        h = self.drop(h)
        return self.post(h + a)


class ResidualIsTheDense(Block):
    def forward(self, a: Tensor) -> Tensor:
        h = self.proj(a)
        return self.post(self.drop(h) + h)


BLOCKS: dict[str, tuple[type[Block], int, str]] = {
    "one-expression": (OneExpression, 2, "dropout_add_norm"),
    "rms-tail": (RmsTail, 2, "dropout_add_norm"),
    "without-dense": (WithoutDense, 2, "dropout_add_norm"),
    "without-dropout": (WithoutDropout, 2, "add_norm"),
    "without-norm": (WithoutNorm, 2, "dropout_add"),
    "functional-dropout": (FunctionalDropout, 2, "dropout_add_norm"),
    "feed-forward": (FeedForward, 1, "dropout_add_norm"),
    "residual-is-the-dense": (ResidualIsTheDense, 1, "dropout_add_norm"),
}


def output_and_gradients(block: nn.Module, *xs: Tensor) -> list[Tensor | None]:
    leaves = [*(x.clone().requires_grad_() for x in xs), *block.parameters()]
    y = block(*leaves[: len(xs)])
    return [y, *torch.autograd.grad(y, leaves, torch.cos(torch.arange(y.numel())).view_as(y), allow_unused=True)]


@pytest.mark.parametrize("name", BLOCKS)
def test_block_is_recognised(name: str) -> None:
    make, n_inputs, pattern = BLOCKS[name]
    block = randomised(make())
    xs = inputs(n_inputs)
    expected = output_and_gradients(block, *xs)
    report = patch_model(block)
    assert {site.name: site.pattern for site in report.patched}.get("") == pattern, report
    for ours, theirs in zip(output_and_gradients(block, *xs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert report.calls()[""] == (1, 0)


@pytest.mark.parametrize("name", ["one-expression", "without-norm", "functional-dropout"])
def test_block_drops_in_training(name: str) -> None:
    """With p = 0.4, about 0.6 of x comes through, scaled by 1 / 0.6; the residual comes through whole."""
    block = randomised(BLOCKS[name][0]())
    patch_model(block, patterns=["dropout_add_norm", "dropout_add"])
    block.post = nn.LayerNorm(WIDTH) if name != "without-norm" else block.post
    a, b = torch.zeros(1, 2000, WIDTH), torch.zeros(1, 2000, WIDTH)
    with torch.no_grad():
        block.proj.weight.zero_()
        block.proj.bias.fill_(1.0)
        block.second.weight.fill_(1 / WIDTH)
    z = block.train()(a + 1.0, b)
    if name == "without-norm":
        assert abs(float((z != 0).float().mean()) - 0.6) < 0.02
        torch.testing.assert_close(z[z != 0], torch.full_like(z[z != 0], 1 / 0.6))
    else:
        assert abs(float((z > 0).float().mean()) - 0.6) < 0.02


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_block_keeps_its_dtype_under_autocast(name: str, dtype: torch.dtype) -> None:
    """A bias in float32 beside a product in bfloat16 must not make the sum float32."""
    block = randomised(BLOCKS[name][0]())
    xs = [x.to(dtype) for x in inputs(BLOCKS[name][1])]
    with torch.autocast("cpu", torch.bfloat16):
        expected = block(*xs)
        report = patch_model(block)
        actual = block(*xs)
    assert actual.dtype == expected.dtype and report.calls()[""] == (1, 0)
    torch.testing.assert_close(actual, expected, rtol=5e-2, atol=5e-2)


class AddsBeforeDropout(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.post(self.drop(self.proj(a) + b))


class Scales(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.post(self.drop(self.proj(a)) * 0.5 + b)


class UsesTheSumTwice(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        h = self.drop(self.proj(a)) + b
        return self.post(h) + h


class AddsTheDroppedToItself(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        h = self.drop(self.proj(a))
        return self.post(h + h)


class NormsBefore(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.drop(self.proj(self.post(a))) - b


class Branches(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if a.shape[0] > 3:
            return a
        return self.post(self.drop(self.proj(a)) + b)


class InPlace(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a = self.drop(a)
        a += b
        return self.post(a)


class TakesMore(Block):
    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return self.post(self.drop(self.proj(a)) + b)


class ReturnsTuple(Block):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.post(self.drop(self.proj(a)) + b), a


def decorated(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def doubled(self: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        return 2 * forward(self, a, b)

    return doubled


class Decorated(Block):
    @decorated
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.post(self.drop(self.proj(a)) + b)


class OtherDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class HasOtherDropout(OneExpression):
    def __init__(self) -> None:
        super().__init__()
        self.drop = OtherDropout(0.4)


LOOK_ALIKES = [
    AddsBeforeDropout, Scales, UsesTheSumTwice, NormsBefore, Branches, InPlace, TakesMore, ReturnsTuple, Decorated,
    HasOtherDropout, AddsTheDroppedToItself,
]  # fmt: skip


@pytest.mark.parametrize("make", LOOK_ALIKES, ids=lambda make: make.__name__)
def test_what_only_looks_like_a_block_is_left_alone(make: type[Block]) -> None:
    block = make()
    report = patch_model(block, patterns=["dropout_add_norm", "dropout_add"])
    assert type(block) is make and report.patched == ()


def test_a_block_whose_source_lies_fails_verification() -> None:
    """The source says one thing and the code does another, as after an edit on disk: only running it tells."""

    class Block_(OneExpression):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.post(b + self.drop(self.proj(a)))

    Block_.forward.__code__ = Scales.forward.__code__
    source = OneExpression.forward.__code__
    Block_.forward.__code__ = Block_.forward.__code__.replace(
        co_firstlineno=source.co_firstlineno, co_name=source.co_name
    )
    block = Block_()
    report = patch_model(block, patterns=["dropout_add_norm"])
    assert type(block) is Block_ and report.patched == ()
    assert [site.reason for site in report.skipped] == ["verify_failed"]
    assert "error" in report.skipped[0].detail
    assert patch_model(block, patterns=["dropout_add_norm"], verify=False).patched


def break_one(name: str) -> Callable[..., Any]:
    from onetrip.patching.classes import GLOBAL_NAMES

    operator = GLOBAL_NAMES[name]

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        return operator(*args, **kwargs) * 1.001

    return broken


@pytest.mark.parametrize(
    ("operator", "make"),
    [
        ("rms_norm", LlamaLike),
        ("layer_norm", lambda: nn.LayerNorm(WIDTH)),
        ("bias_dropout_residual_norm", OneExpression),
    ],
    ids=["rms_norm", "layer_norm", "bias_dropout_residual_norm"],
)
def test_an_operator_that_is_off_by_a_thousandth_is_not_kept(
    operator: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    from onetrip.patching import classes

    monkeypatch.setattr(classes, "_patched_classes", {})
    monkeypatch.setitem(classes.GLOBAL_NAMES, operator, break_one(operator))
    model = randomised(make())
    report = patch_model(model, patterns=["rms_norm", "layer_norm", "dropout_add_norm"])
    (failed,) = [site for site in report.skipped if site.reason == "verify_failed"]
    assert (
        failed.name == "" and type(model) is type(copy.deepcopy(model)) and "_onetrip_original" not in vars(type(model))
    )


def test_verification_checks_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropout that is right in expectation but drops other elements is not what the operator promises."""
    from onetrip.patching import classes

    operator = classes.GLOBAL_NAMES["bias_dropout_residual_norm"]

    def other_mask(*args: Any, rng: Any = None, **kwargs: Any) -> Tensor:
        return operator(*args, rng=None if rng is None else (rng[0] + 1, rng[1]), **kwargs)

    monkeypatch.setattr(classes, "_patched_classes", {})
    monkeypatch.setitem(classes.GLOBAL_NAMES, "bias_dropout_residual_norm", other_mask)
    report = patch_model(OneExpression(), patterns=["dropout_add_norm"])
    assert [site.reason for site in report.skipped] == ["verify_failed"]
    assert "with dropout" in report.skipped[0].detail
