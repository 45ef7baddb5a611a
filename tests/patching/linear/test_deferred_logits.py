"""linear_cross_entropy: deferred logits in a loss that copies them, edits them, or is an autograd.Function."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model
from outcomes import assert_agree, loss_outcome
from patching_cases import VOCABULARY, build
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")


def made() -> tuple[Any, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, VOCABULARY, (2, 9), generator=generator) for _ in range(2))
    return build("llama").train(), {"input_ids": ids, "labels": labels}


def assert_a_step_agrees(loss: Callable[[Any, Tensor], Tensor], is_fused: bool = False) -> None:
    """A step of a model with loss(logits, labels) as its loss is the unpatched model's."""
    model, inputs = made()
    model.loss_function = lambda logits, labels, *args, **kwargs: loss(logits, labels)
    expected = loss_outcome(model, inputs)
    report = patch_model(model, patterns=["linear_cross_entropy"])
    assert_agree(loss_outcome(model, inputs), expected)
    assert report.calls()[""] == ((1, 0) if is_fused else (0, 1))


def flat(logits: Any, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1))


def test_logits_read_before_a_view_of_their_contiguous_slice() -> None:
    def with_z_loss(logits: Any, labels: Tensor) -> Tensor:
        shifted = logits[..., :-1, :].contiguous()
        z_loss = logits.float().logsumexp(-1).square().mean()
        return flat(shifted, labels[..., 1:]) + z_loss

    assert_a_step_agrees(with_z_loss)
    assert_a_step_agrees(lambda y, labels: flat(y[..., :-1, :].contiguous(), labels[..., 1:]), is_fused=True)


def _without_classes(y: Any) -> None:
    y[..., :20] = -30.0


@pytest.mark.parametrize("edit", [_without_classes, lambda y: y.div_(2.0)], ids=["setitem", "div_"])
@pytest.mark.parametrize("edited", ["logits", "made of them"])
def test_an_edit_in_place_changes_views_and_no_copy(edited: str, edit: Callable[[Any], Any]) -> None:
    def loss(logits: Any, labels: Tensor) -> Tensor:
        source = logits if edited == "logits" else logits * 2.0
        shifted, sharp, view = source[..., :-1, :].contiguous(), source * 4.0, source.view(2, -1, VOCABULARY)
        edit(source)
        return flat(shifted, labels[..., 1:]) + flat(sharp, labels) + flat(view, labels)

    assert_a_step_agrees(loss)


class CrossEntropy(torch.autograd.Function):
    """As those of apex, flash-attn and Liger-Kernel."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        probabilities = logits.softmax(-1)
        ctx.save_for_backward(probabilities - functional.one_hot(labels, VOCABULARY))
        return -probabilities.gather(-1, labels[..., None]).log().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.saved_tensors[0] * grads[0] / ctx.saved_tensors[0][..., 0].numel(), None


def with_a_metric(logits: Any, labels: Tensor) -> Tensor:
    with torch.no_grad():
        logits.argmax(-1)
    return CrossEntropy.apply(logits.view(-1, VOCABULARY), labels.view(-1))


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, labels: CrossEntropy.apply(y, labels),
        lambda y, labels: checkpoint(flat, y, labels, use_reentrant=True),
    ],
    ids=["function", "checkpoint"],
)
def test_a_function_of_autograd_raises_where_it_would_lose_the_gradient(loss: Any) -> None:
    model, inputs = made()
    patch_model(model, patterns=["linear_cross_entropy"])
    logits = model(**inputs).logits
    for _ in range(2):  # also where the logits are computed already
        with pytest.raises(RuntimeError, match=r"logits\.tensor\(\)"):
            loss(logits, inputs["labels"])
        with torch.no_grad():
            logits.argmax(-1)
    loss(logits.tensor(), inputs["labels"]).backward()
    assert model.lm_head.weight.grad.any()


def test_a_model_in_a_reentrant_checkpoint_returns_logits_with_their_gradient() -> None:
    model, inputs = made()
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()

    def step() -> dict[str, Tensor]:
        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            output = model(inputs_embeds=x, labels=inputs["labels"])
            return output.loss, output.logits

        model.zero_grad()
        loss, logits = checkpoint(run, embeddings.requires_grad_(), use_reentrant=True)
        (loss + logits.square().mean()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = step()
    patch_model(model, patterns=["linear_cross_entropy"])
    assert_agree(step(), expected)


def test_deferred_logits_are_pickled_as_the_logits() -> None:
    model, inputs = made()
    patch_model(model, patterns=["linear_cross_entropy"])
    logits = model(**inputs).logits
    loaded = pickle.loads(pickle.dumps(logits))
    assert type(loaded) is Tensor and torch.equal(loaded, logits.tensor())


def test_losses_that_keep_the_gradient_beside_functions_of_autograd() -> None:
    assert_a_step_agrees(with_a_metric)  # the logits are a tensor once they are computed
    assert_a_step_agrees(lambda y, labels: CrossEntropy.apply(y.flatten(0, 1), labels.flatten()))
    assert_a_step_agrees(lambda y, labels: checkpoint(flat, y, labels, use_reentrant=False), is_fused=True)


def test_a_model_in_a_function_of_autograd_returns_a_tensor() -> None:
    """A Function that computes gradients in its forward, as for a cache of them."""
    model, inputs = made()

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            with torch.enable_grad():
                return torch.autograd.grad(model(**inputs).logits.square().sum(), weight)[0]

    expected = Gradient.apply(model.lm_head.weight)
    patch_model(model, patterns=["linear_cross_entropy"])
    torch.testing.assert_close(Gradient.apply(model.lm_head.weight), expected)
