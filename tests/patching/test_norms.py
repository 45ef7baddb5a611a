"""What is recognised as a norm, by what it computes and how it is written, and what must not be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from outcomes import assert_agree, outcome
from patching_cases import WIDTH, LlamaLike, Norm, inputs, randomised, written
from row_norm_cases import torch_has_eps_in_float32
from torch import Tensor, nn
from torch.nn import functional


class GemmaLike(Norm):
    def scaled(self, z: Tensor) -> Tensor:
        return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.epsilon)

    def forward(self, h: Tensor) -> Tensor:
        return (self.scaled(h.float()) * (1.0 + self.gain.float())).type_as(h)


def leaf(body: str, **options: bool) -> Any:
    return written(Norm, body, globals(), "h")(**options)


ROOT = "torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.epsilon)"
OLMO2 = f"z = h.float(); return (self.gain * (z * {ROOT})).to(h.dtype)"
COHERE = f"z = h.float(); z = z - z.mean(-1, keepdim=True); return (self.gain.float() * z * {ROOT}).to(h.dtype)"
T5 = """
    h = h * torch.rsqrt(h.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.epsilon)
    if self.gain.dtype in (torch.float16, torch.bfloat16):
        h = h.to(self.gain.dtype)
    return self.gain * h"""
CONSTANT = "return functional.layer_norm(h, (WIDTH,), self.gain, self.shift, 3e-3)"
ONE_PLUS = "return functional.layer_norm(h, (WIDTH,), self.gain + 1, self.shift, self.epsilon)"
WEIGHTLESS = f"z = h.float(); return (z * {ROOT}).to(h.dtype)"


class ConvNextLike(nn.LayerNorm):
    def __init__(self, data_format: str) -> None:
        super().__init__(WIDTH, eps=1e-6)
        self.data_format = data_format

    def forward(self, h: Tensor) -> Tensor:
        if self.data_format == "channels_first":
            return super().forward(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(h)


class Subclass(nn.LayerNorm):
    """Adds nothing to forward."""


# What torch's own RMSNorm is found to compute.
STATISTICS, CAST = ("float32", "") if torch_has_eps_in_float32() else ("x.dtype", ", cast_before_weight=True")
LEAVES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "nn.LayerNorm": (lambda: nn.LayerNorm(WIDTH), "layer_norm", "layer_norm(input, self.weight, self.bias, self.eps)"),
    "nn.LayerNorm-no-bias": (lambda: nn.LayerNorm(WIDTH, bias=False), "layer_norm", "self.eps)"),
    "nn.LayerNorm-no-affine": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "layer_norm", "self.eps)"),
    "nn.LayerNorm-subclass": (lambda: Subclass(WIDTH), "layer_norm", "self.eps)"),
    "nn.RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-4), "rms_norm", f"rms_norm(x, self.weight, self.eps{CAST})"),
    "nn.RMSNorm-eps-None": (lambda: nn.RMSNorm(WIDTH), "rms_norm", f"finfo({STATISTICS}).eps{CAST})"),
    "nn.RMSNorm-no-affine": (lambda: nn.RMSNorm(WIDTH, 1e-4, elementwise_affine=False), "rms_norm", "self.eps)"),
    "llama-like": (LlamaLike, "rms_norm", "rms_norm(h, self.gain, self.epsilon, cast_before_weight=True)"),
    "olmo2-like": (lambda: leaf(OLMO2), "rms_norm", "rms_norm(h, self.gain, self.epsilon)"),
    "gemma-like": (GemmaLike, "rms_norm", "rms_norm(h, self.gain, self.epsilon, weight_offset=1.0)"),
    "t5-like": (lambda: leaf(T5), "rms_norm", "rms_norm(h, self.gain, self.epsilon, cast_before_weight='weight')"),
    "cohere-like": (lambda: leaf(COHERE), "layer_norm", "layer_norm(h, self.gain, None, self.epsilon)"),
    "constant-eps": (lambda: leaf(CONSTANT, bias=True), "layer_norm", "layer_norm(h, self.gain, self.shift, 0.003)"),
    "one-plus-layer-norm": (lambda: leaf(ONE_PLUS, bias=True), "layer_norm", "weight_offset=1.0)"),
    "convnext-channels-last": (lambda: ConvNextLike("channels_last"), "layer_norm", "layer_norm(h, self.weight, self"),
    "weightless": (lambda: leaf(WEIGHTLESS, weight=False), "rms_norm", "rms_norm(h, None, self.epsilon)"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_leaf_norm_is_recognised(name: str, x: Tensor) -> None:
    make, pattern, call = LEAVES[name]
    model = nn.Sequential(randomised(make())).eval()
    expected = model(x)
    report = patch_model(model)
    assert [site.pattern for site in report.patched] == [pattern], report
    diff = report.diff("0")
    assert call in re.sub(r", out_dtype=half_result\(self, spec, \w+\)", "", diff), diff
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


class NormThenGate(LlamaLike):
    """As Qwen3-Next's: the normed rows are rounded, the product with the gate is rounded once."""

    def forward(self, h: Tensor, z: Tensor) -> Tensor:
        return (super().forward(h) * functional.silu(z.float())).to(h.dtype)


class MaybeGatedNorm(NormThenGate):
    def forward(self, h: Tensor, z: Tensor | None = None) -> Tensor:
        return LlamaLike.forward(self, h) if z is None else super().forward(h, z)


class SigmoidGatedNorm(LlamaLike):
    def forward(self, h: Tensor, z: Tensor) -> Tensor:
        return super().forward(h) * torch.sigmoid(z)


class TwiceGatedNorm(LlamaLike):
    def forward(self, h: Tensor, z: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(h) * functional.silu(z) * factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [NormThenGate, MaybeGatedNorm])
def test_a_norm_whose_result_is_gated_is_a_norm_and_a_gated_product(make: type[Norm], dtype: torch.dtype) -> None:
    module, (x,) = randomised(make()).to(dtype), (x.to(dtype) for x in inputs())
    expected = outcome(module, x, x.flip(0))
    report = patch_model(module)
    assert [site.pattern for site in report.patched] == ["rms_norm"], report
    assert_agree(outcome(module, x, x.flip(0)), expected, relative=1e-5 if dtype == torch.float32 else 2e-2)
    assert report.calls() == {"": (1, 0)}
    module(x, x[:1].flip(1))  # a gate that is broadcast
    assert report.calls() == {"": (1, 1)}


def test_a_gate_that_is_not_given_runs_the_original() -> None:
    module, (x,) = randomised(MaybeGatedNorm()), inputs()
    expected = module(x)
    report = patch_model(module)
    assert torch.equal(module(x), expected) and report.calls() == {"": (0, 1)}


class CallsAGatedNorm(nn.Module):
    """Without its gate, after a residual sum: not the norm that was recognised."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.1), MaybeGatedNorm()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        h = self.drop(a)
        h = h + b
        return self.norm(h)


def test_a_sum_before_a_gated_norm_is_fused_without_it() -> None:
    module, (x,) = randomised(CallsAGatedNorm()).eval(), inputs()
    expected = module(x, x.flip(0))
    report = patch_model(module)
    torch.testing.assert_close(module(x, x.flip(0)), expected)
    assert {site.name: site.pattern for site in report.patched} == {"": "dropout_add", "norm": "rms_norm"}


class CountingNorm(Norm):
    calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.gain * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon)


SEEN: list[int] = []


class ChannelsFirst(nn.LayerNorm):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.transpose(-1, -2)).transpose(-1, -2)


class PermutesFourDimensions(nn.LayerNorm):
    """As norms of images and token rows are written: rank 4 has its channels at dimension 1."""

    def forward(self, h: Tensor) -> Tensor:
        if h.dim() != 4:
            return super().forward(h)
        return super().forward(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class HeadNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return self.weight[0] * functional.rms_norm(h, (WIDTH,))


class OneScaleNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps, self.scale = 1e-6, nn.Parameter(torch.ones(1))

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)


def quantised() -> nn.Module:
    norm = nn.LayerNorm(WIDTH, bias=False)
    norm.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.int8), requires_grad=False)
    return norm


def kernelized() -> nn.Module:
    class HubNorm(LlamaLike):
        kernel_layer_name = "RMSNorm"

    norm = HubNorm()
    norm.forward = lambda h: h
    return norm


OF_CHANNELS = "unsupported_shape: normalises dimension 1 (channels first); the operators, the last"
HAS_EFFECTS = "unknown_forward: its forward does more than to compute its result"
GUARDS = "unknown_forward: its forward replaces or rejects Inf or NaN"
SCALED = "return self.gain * h * torch.rsqrt"
NEGATIVES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gated-first": (GatedNorm, "extra_forward_args"),
    "then-sigmoid": (SigmoidGatedNorm, "extra_forward_args"),
    "then-gated-by-two": (TwiceGatedNorm, "extra_forward_args"),
    "unbiased-variance": (lambda: leaf(f"{SCALED}(h.var(-1, keepdim=True) + self.epsilon)"), "unknown_forward"),
    "sum-of-squares": (lambda: leaf(f"{SCALED}(h.pow(2).sum(-1, keepdim=True) + self.epsilon)"), "unknown_forward"),
    "clamped-not-added-eps": (
        lambda: leaf(f"{SCALED}(h.pow(2).mean(-1, keepdim=True).clamp(min=self.epsilon))"), "unknown_forward"
    ),
    "eps-of-normalize": (
        lambda: leaf("return functional.normalize(h, dim=-1) * WIDTH**0.5 * self.gain"), "unknown_forward"
    ),
    "clamped-root": (
        lambda: leaf("return self.gain * h / h.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-6)"), "unknown_forward"
    ),
    "bounded-input": (lambda: leaf(f"z = h.clamp(-50, 50); return self.gain * z * {ROOT}"), "unknown_forward"),
    "over-another-dimension": (
        lambda: leaf(f"{SCALED}(h.pow(2).mean(0, keepdim=True) + self.epsilon)"), "unknown_forward"
    ),
    # Of any size.
    "another-dimension-in-rank-4": (
        lambda: leaf(f"n = h.dim(); {SCALED}(h.pow(2).mean(-2 if n == 4 else -1, keepdim=True) + self.epsilon)"),
        "unknown_forward",
    ),
    "another-in-training": (
        lambda: leaf(f"z = h; h = self.gain * h * {ROOT}; return h * 2 if self.training else h"), "unknown_forward"
    ),
    "counts-its-calls": (CountingNorm, "unknown_forward"),
    "logs-its-calls": (lambda: leaf(f"z = h; SEEN.append(1); return self.gain * h * {ROOT}"), HAS_EFFECTS),
    "counts-outside": (lambda: leaf(f"z = h; SEEN[:] = [1]; return self.gain * h * {ROOT}"), HAS_EFFECTS),
    "without-nan": (lambda: leaf(f"z = h = torch.nan_to_num(h); return self.gain * h * {ROOT}"), GUARDS),
    "without-nan-after": (lambda: leaf(f"z = h; return torch.nan_to_num(self.gain * h * {ROOT})"), GUARDS),
    "counts-in-a-global": (lambda: leaf(f"global N; N = 1; z = h; return self.gain * h * {ROOT}"), HAS_EFFECTS),
    "rejects-negative-inf": (
        lambda: leaf(f"assert not h.isneginf().any(); z = h; return self.gain * h * {ROOT}"), GUARDS
    ),
    "rejects-inf": (lambda: leaf(f"assert h.isfinite().all(); z = h; return self.gain * h * {ROOT}"), GUARDS),
    "channels-first": (lambda: ChannelsFirst(WIDTH), "unsupported_shape"),
    "channels-first-images": (lambda: ConvNextLike("channels_first"), OF_CHANNELS),
    "permutes-four-dimensions": (lambda: PermutesFourDimensions(WIDTH), OF_CHANNELS),
    "one-group": (lambda: nn.GroupNorm(1, WIDTH), "unsupported_shape"),
    "two-dimensions": (lambda: nn.LayerNorm((5, WIDTH)), "unsupported_shape"),
    "two-dimensional-weight": (HeadNorm, "unsupported_shape"),
    "one-scale-for-all-columns": (OneScaleNorm, "unsupported_shape"),
    "instance-norm": (lambda: nn.InstanceNorm1d(WIDTH, affine=True), "unknown_forward"),
    "float64": (lambda: nn.LayerNorm(WIDTH).double(), "unsupported_dtype"),
    "quantised": (quantised, "quantized"),
    "kernelized": (kernelized, "kernelized_already"),
}  # fmt: skip


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("name", NEGATIVES)
def test_what_is_no_leaf_norm_is_left_alone(name: str, verify: bool) -> None:
    make, reason = NEGATIVES[name]
    model = nn.Sequential(make())
    before, state = type(model[0]), dict(vars(model[0]))
    report = patch_model(model, verify=verify)
    assert report.patched == () and type(model[0]) is before and vars(model[0]) == state
    (site,) = report.skipped
    assert site.name == "0" and reason in (site.reason, f"{site.reason}: {site.detail}")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name)
        for name, make in {
            "GELU": nn.GELU,
            "LeakyReLU": lambda: nn.LeakyReLU(1e-3),
            "PReLU": lambda: nn.PReLU(WIDTH),
            "Identity": nn.Identity,
            "BatchNorm2d": lambda: nn.BatchNorm2d(WIDTH),
            "SyncBatchNorm": lambda: nn.SyncBatchNorm(WIDTH),
            "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3)),
            "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        }.items()
    ],
)
def test_what_nobody_takes_for_a_norm_is_not_mentioned(make: Callable[[], nn.Module]) -> None:
    report = patch_model(nn.Sequential(make(), nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH)))
    assert report.patched == () and report.skipped == ()


def test_a_nested_tensor_is_left_to_the_original() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH)})
    x = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)])
    expected = model["norm"](x)
    report = patch_model(model)
    for ours, theirs in zip(model["norm"](x).unbind(), expected.unbind(), strict=True):
        assert torch.equal(ours, theirs)
    assert report.calls()["norm"] == (0, 1)


def test_instances_that_differ_in_an_attribute_differ() -> None:
    """In one that is no number: nothing is concluded from one instance for another."""

    class OfDict(nn.Module):
        def __init__(self, eps: float) -> None:
            super().__init__()
            self.weight, self.options = nn.Parameter(torch.ones(8)), {"eps": eps}

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.options["eps"]) * self.weight

    model, x = nn.Sequential(OfDict(1e-6), OfDict(1.0)), torch.randn(3, 8)
    expected = [norm(x) for norm in model]
    patch_model(model)
    for norm, y in zip(model, expected, strict=True):
        torch.testing.assert_close(norm(x), y)


class Configured(Norm):
    """Attributes besides eps, which its class has."""

    eps = 1e-3

    def __init__(self) -> None:
        super().__init__()
        del self.epsilon
        self.is_on, self.shift, self.n_calls, self.table = True, 0.0, 0, {}

    @property
    def offset(self) -> float:
        return self.shift

    def count(self) -> None:
        self.n_calls += 1

    def forward(self, h: Tensor) -> Tensor:
        if not self.is_on:
            return h
        return (self.gain + self.offset) * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Configured()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class AfterASum(Alone):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + x.flip(0))


@pytest.mark.parametrize(
    "name, value, n_fused", [("is_on", False, 0), ("shift", 1.0, 0), ("eps", 10.0, 1), ("n_calls", 3, 1)]
)
@pytest.mark.parametrize("make", [Alone, AfterASum])
def test_an_attribute_of_a_norm_that_changes_later_counts(
    make: type[nn.Module], name: str, value: Any, n_fused: int
) -> None:
    model, (x,) = randomised(make()), inputs()
    report = patch_model(model)
    (site,) = report.patched
    assert site.pattern == ("rms_norm" if make is Alone else "add_norm")
    setattr(model.norm, name, value)
    actual = model(x)
    assert report.calls()[site.name] == (n_fused, 1 - n_fused)
    unpatch_model(model)
    torch.testing.assert_close(actual, model(x))


class NamedAsTheRewrite(Configured):
    """Its parameter has a name that the rewritten forward adds."""

    def forward(self, spec: Tensor) -> Tensor:
        return (self.gain + self.offset) * spec * torch.rsqrt(spec.pow(2).mean(-1, keepdim=True) + self.eps)


def test_a_parameter_may_have_a_name_that_the_rewrite_adds() -> None:
    model, (x,) = randomised(Alone()), inputs()
    model.norm = NamedAsTheRewrite()
    expected = model(x)
    report = patch_model(model)
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)
    assert [site.detail for site in report.skipped] and not report.patched
