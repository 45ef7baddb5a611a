"""linear_cross_entropy: deferred logits in a loss that copies them, edits them, or is an autograd.Function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model
from outcomes import assert_agree, loss_outcome
from patching_cases import VOCABULARY, build
from torch import Tensor
from torch.nn import functional

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
