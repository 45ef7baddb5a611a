"""Pattern cross_entropy: the model returns its logits as tensors, their loss is one operator."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from onetrip import use_backend
from onetrip.measure import saved_bytes
from onetrip.patching import PATTERNS, patch_model
from onetrip.patching.watched_logits import WatchedLogits, plain_outputs
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CLASSES = 61


class Model(nn.Module):
    """Computes a loss of its logits with a function that a test gives."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES)
        self.loss = loss

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.embeddings(input_ids))
        return (self.loss(logits, labels), logits, {"also": [logits]})


IDS = torch.randint(CLASSES, (2, 9), generator=torch.Generator().manual_seed(0))
LABELS = torch.where(torch.arange(9) < 3, -100, IDS.flip(0))


def flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **options)


def outcome(model: Model) -> tuple[Any, list[Tensor]]:
    """What the model returns; its loss and the gradients of its parameters."""
    outputs = model(IDS, labels=LABELS)
    outputs[0].sum().backward()
    return outputs, [outputs[0].detach(), *(parameter.grad for parameter in model.parameters())]


def compared(model: Model, fused: bool) -> None:
    """The patched model returns the same logits; its loss and gradients are at most twice as far from float64's as the
    unpatched one's. fused: whether the loss is one operator."""
    other, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    report = patch_model(other, patterns=["cross_entropy"])
    (loss, logits, _), theirs = outcome(model)
    (same_kind, same, nested), ours = outcome(other)
    assert report.calls()[""] == ((1, 0) if fused else (0, 1))
    assert type(same_kind) is type(same) is type(nested["also"][0]) is Tensor and same_kind.dtype == loss.dtype
    assert torch.equal(same, logits)
    for actual, expected, truth in zip(ours, theirs, outcome(exact)[1], strict=True):
        bound = 2.0 * (expected - truth).abs().max() + 1e-6 * truth.abs().max()
        assert (actual - truth).abs().max() <= bound


def _changed(wide: Tensor, labels: Tensor, part: Any = lambda w: w[..., :7]) -> Tensor:
    rows = wide.view(-1, CLASSES)
    part(wide).mul_(0.25)
    return torch.logsumexp(rows, 1).mean() - rows[:, 3].mean()


class Overwriting(torch.autograd.Function):
    """A cross-entropy that writes its gradient over its input, as Liger-Kernel's does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = rows.detach().clone().requires_grad_()
            loss = functional.cross_entropy(leaf, labels)
            (gradient,) = torch.autograd.grad(loss, leaf)
        rows.detach().copy_(gradient)
        ctx.save_for_backward(rows.detach())
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[0], None


FUSED = {
    "rows": flat,
    "sum": lambda y, labels: flat(y, labels, reduction="sum") / 7,
    "none": lambda y, labels: flat(y, labels, reduction="none"),
    "another ignored label": lambda y, labels: flat(y, labels.clamp_min(0), ignore_index=0),
    "smoothing": lambda y, labels: flat(y, labels, label_smoothing=0.1),
    "shifted": lambda y, labels: flat(y[..., :-1, :].contiguous(), labels[..., 1:].contiguous()),
    "selected rows": lambda y, labels: functional.cross_entropy(y[labels != -100], labels[labels != -100]),
    "module": lambda y, labels: nn.CrossEntropyLoss()(y.reshape(-1, y.size(-1)), labels.reshape(-1)),
    "float32": lambda y, labels: flat(y.float(), labels),
    "float32 by to": lambda y, labels: flat(y.to(torch.float32).to(labels.device), labels),
    "float32 rows": lambda y, labels: flat(y.flatten(0, 1).float(), labels),
    "capped, scaled, added to": lambda y, labels: flat(3.0 * torch.tanh((y + torch.ones(CLASSES)) / 3.0), labels),
}
BY_TORCH = {
    "class weights": lambda y, labels: flat(y, labels, weight=torch.arange(1.0, CLASSES + 1).to(y.dtype)),
    "probabilities": lambda y, labels: functional.cross_entropy(y, torch.full_like(y, 1 / CLASSES)),
    "classes second": lambda y, labels: functional.cross_entropy(y.transpose(1, 2), labels),
    "another loss": lambda y, labels: functional.nll_loss(y.float().log_softmax(-1).view(-1, CLASSES), labels.view(-1)),
    "squares": lambda y, labels: torch.stack([y.float().square().mean(), (1.0 - y).abs().mean()]).sum(),
    "the float32 values change in place": lambda y, labels: _changed(y.float(), labels),
    "a view of them changes": lambda y, labels: _changed(y.float(), labels, lambda w: w.view(-1, CLASSES)[..., :7]),
    "they change without grad": lambda y, labels: _changed(y.float(), labels, lambda w: w.data),
    "a function overwrites them": lambda y, labels: Overwriting.apply(y.float().view(-1, CLASSES), labels.view(-1)),
    "a function of autograd": lambda y, labels: checkpoint(torch.square, y, use_reentrant=True).mean(),
    "joined": lambda y, labels: torch.cat([y.float(), y.float()], -1).logsumexp(-1).mean(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loss", FUSED)
def test_a_loss_of_rows_of_logits_is_one_operator(loss: str, dtype: torch.dtype) -> None:
    compared(Model(FUSED[loss]).to(dtype), fused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loss", BY_TORCH)
def test_any_other_use_sees_plain_tensors(loss: str, dtype: torch.dtype) -> None:
    compared(Model(BY_TORCH[loss]).to(dtype), fused=False)


def test_where_no_kernel_runs_torch_computes_the_loss() -> None:
    with use_backend("reference"):
        compared(Model(flat), fused=False)


def test_logits_changed_in_place() -> None:
    """As Chameleon excludes classes before its loss; after the conversion to float32 it would be too late."""

    def masked(logits: Tensor, labels: Tensor) -> Tensor:
        logits[..., :7] = -1e3
        return flat(logits.mul_(0.5).float(), labels.clamp_min(7))

    compared(Model(masked).to(torch.bfloat16), fused=True)

    def late(logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits.float()
        logits.zero_()
        return flat(wide, labels)

    model = Model(late).to(torch.bfloat16)
    patch_model(model, patterns=["cross_entropy"])
    with pytest.raises(RuntimeError, match="modified in place after their conversion"):
        model(IDS, labels=LABELS)


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_float32_values_first_read_without_grad_keep_their_graph(without_grad: Any) -> None:
    def with_a_metric(logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits.float().view(-1, CLASSES)
        with without_grad():
            rows.argmax(-1)
        return flat(rows, labels)

    compared(Model(with_a_metric).to(torch.bfloat16), fused=False)


@pytest.mark.parametrize("is_view", [False, True])
def test_hooks_of_the_float32_values_see_their_gradient(is_view: bool) -> None:
    seen: list[Tensor] = []

    def hooked(logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits.float()
        with torch.no_grad():
            wide.argmax(-1)
        rows = wide.view(-1, CLASSES) if is_view else wide
        rows.register_hook(lambda gradient: seen.append(gradient) or 4.0 * gradient)
        return flat(rows, labels)

    for dtype in (torch.float32, torch.bfloat16):
        compared(Model(hooked).to(dtype), fused=dtype == torch.float32)
    assert len(seen) == 6 and all(gradient.abs().sum() > 0 for gradient in seen)


def test_a_model_in_a_model_counts_one_loss() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(flat)

        def get_output_embeddings(self) -> nn.Module:
            return self.inner.head

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            return self.inner(input_ids, labels=labels)

    model = Outer()
    report = patch_model(model, patterns=["cross_entropy"])
    model(IDS, labels=LABELS)
    assert report.calls() == {"": (1, 0), "inner": (1, 0), "inner.head": (1, 0)}


def saved(loss: Any, patterns: tuple[str, ...]) -> int:
    model = Model(loss).to(torch.bfloat16)
    patch_model(model, patterns=patterns)
    return saved_bytes(lambda: model(IDS, labels=LABELS)[0], excluded=list(model.parameters()))


@pytest.mark.parametrize("loss", BY_TORCH)
def test_no_more_is_saved_for_another_loss(loss: str) -> None:
    assert 0 < saved(BY_TORCH[loss], ("cross_entropy",)) <= saved(BY_TORCH[loss], ())


def test_metadata_of_the_float32_values_makes_no_copy() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        wide: Any = logits.float()
        assert (wide.shape, wide.size(-1), wide.dtype, wide.device) == (
            logits.shape,
            CLASSES,
            torch.float32,
            IDS.device,
        )
        assert wide.requires_grad and not wide.is_cuda and wide.float() is wide and wide._float32.wide is None
        return flat(wide, labels)

    model = Model(loss).to(torch.bfloat16)
    patch_model(model, patterns=["cross_entropy"])
    model(IDS, labels=LABELS)


def test_less_is_saved_for_backward() -> None:
    """bfloat16: the logits, which the model returns, and no copy of them in float32."""
    unpatched, logits = saved(FUSED["float32"], ()), IDS.numel() * CLASSES * 2
    assert unpatched >= 2 * logits  # log-probabilities in float32
    assert saved(FUSED["float32"], ("cross_entropy",)) < unpatched - logits // 2


def test_a_view_of_a_slice_in_float32() -> None:
    """The conversion copies it, so that unpatched it can be viewed."""
    loss = lambda y, labels: flat(y[:, 1:].float(), labels[:, 1:].contiguous())  # noqa: E731
    compared(Model(loss).to(torch.bfloat16), fused=True)


def test_it_is_a_default_pattern_and_linear_cross_entropy_comes_before_it() -> None:
    assert "cross_entropy" in PATTERNS
    model = Model(flat)
    assert {site.pattern for site in patch_model(copy.deepcopy(model)).patched} == {"cross_entropy"}
    report = patch_model(model, patterns=[*PATTERNS, "linear_cross_entropy"])
    assert {site.pattern for site in report.patched} == {"linear_cross_entropy"}


class Pair(NamedTuple):
    a: Any
    b: Any


def test_outputs_of_any_kind_are_plain() -> None:
    plain, others = torch.randn(2, 3), [torch.ones(1), None]
    watched = WatchedLogits.of(plain)
    assert plain_outputs(watched) is plain and plain_outputs(others) is others
    outputs = plain_outputs({"a": (watched, None), "b": [watched, 1], "c": Pair(watched, 2), "d": ({"e": watched},)})
    assert outputs["a"][0] is outputs["b"][0] is outputs["c"].a is outputs["d"][0]["e"] is plain
