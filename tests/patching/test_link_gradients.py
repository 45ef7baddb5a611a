"""Gradients of linked sums: whole, whoever asks for them and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from outcomes import assert_agree, outcome
from patching_cases import WIDTH, BackwardInBackward, Stack, inputs, n_links, pair
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("no_link_is_left")


def by_autograd_grad(states: list[Tensor], loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, states))


def by_autograd_grad_of_one(states: list[Tensor], loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [states[1], *model.parameters()], retain_graph=True))


def by_backward_for_inputs(states: list[Tensor], loss: Tensor, model: nn.Module) -> list[Tensor]:
    parameters = list(model.parameters())
    loss.backward(inputs=[states[0], *parameters])
    return [states[0].grad, *(each.grad for each in parameters)]


def by_retain_grad(states: list[Tensor], loss: Tensor, model: nn.Module) -> list[Tensor]:
    for each in states:
        each.retain_grad()
    loss.backward()
    return [each.grad for each in (*states, *model.parameters())]


def by_hooks(states: list[Tensor], loss: Tensor, model: nn.Module) -> list[Tensor]:
    """Registered after the norm ran; they change the gradient, too."""
    seen: list[Tensor] = []
    for each in states:
        each.register_hook(lambda grad: seen.append(grad) or grad * 0.5)
    loss.backward()
    return [*seen, *(each.grad for each in model.parameters())]


def by_two_backwards(states: list[Tensor], loss: Tensor, model: nn.Module) -> list[Tensor]:
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, states, retain_graph=True)
    loss.backward()
    return [states[0].grad, *(each.grad for each in model.parameters())]


def of_batches(states: list[Tensor], loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, states, torch.tensor([1.0, 2.0]), is_grads_batched=True))


@pytest.mark.parametrize(
    "gradients",
    [by_autograd_grad, by_autograd_grad_of_one, by_backward_for_inputs, by_retain_grad, by_hooks, by_two_backwards,
     of_batches],
)  # fmt: skip
@pytest.mark.parametrize("view", [False, True])
def test_the_gradient_of_a_linked_sum_is_whole(gradients: Callable[..., list[Tensor]], view: bool) -> None:
    """A hidden state's gradient has what comes through the next layer's norm, whoever asks for it and when."""
    found = []
    for model in reversed(pair()):
        if view:
            model.call = lambda layer, h: layer(h).view(h.shape)
            model(*inputs())
        states = model.states(inputs()[0].requires_grad_())
        loss = model.final(states[-1]).square().sum()
        model.zero_grad()
        found.append(gradients(states, loss, model))
        assert isinstance(model, Stack) and (len(found) == 2 or n_links(model) == 6)
    assert_agree(*found)


def test_a_backward_after_a_failed_one_does_not_take_its_gradients() -> None:
    found = []
    for model in reversed(pair()):
        assert isinstance(model, Stack)
        model.zero_grad()
        state = model.states(*inputs())[-1]
        other = state * 1.0
        loss = model.final(state).square().sum() + other.sum()

        def fail(grad: Tensor) -> None:
            raise RuntimeError("stop")

        handle = other.register_hook(fail)  # runs between the norm's backward and the sum's
        with pytest.raises(RuntimeError, match="stop"):
            loss.backward(retain_graph=True)
        handle.remove()
        model.zero_grad()
        other.sum().backward()
        found.append([each.grad for each in model.layers.parameters()])
    assert_agree(*found)


def test_a_backward_between_those_of_the_norm_and_the_sum() -> None:
    found = []
    for model in reversed(pair()):
        assert isinstance(model, Stack)
        losses: list[Tensor] = []
        state = model.states(*inputs())[-1]
        early = BackwardInBackward.apply(state, losses)  # made before the norm: its backward runs after the norm's
        loss = (early + model.final(state)).square().sum()
        losses.append(loss)
        model.zero_grad()
        loss.backward(retain_graph=True)
        found.append([each.grad for each in model.parameters()])
    assert_agree(*found)


def test_a_frozen_sum_does_not_require_grad_for_its_norms_weight() -> None:
    found = []
    for model in reversed(pair(n_layers=1)):
        model.layers.requires_grad_(False)
        model.zero_grad()
        state = model.states(*inputs())[-1]
        assert not state.requires_grad
        model.final(state).sum().backward()
        found.append([model.final.weight.grad])
    assert_agree(*found)


def test_hooks_registered_before_the_norm_runs_see_the_whole_gradient() -> None:
    """As FSDP registers them: on the output of a layer, in a forward hook."""
    found: list[list[Tensor]] = []
    for model in reversed(pair()):
        seen: list[Tensor] = []
        model.layers[0].register_forward_hook(
            lambda _, args, z, seen=seen: z.register_hook(lambda grad: seen.append(grad.clone())) and None
        )
        found.append([*outcome(model, *inputs()).values(), *seen])
        assert len(seen) == 1
    assert_agree(*found)


def test_hooks_on_a_view_between_a_sum_and_its_norm() -> None:
    """Each of two views may be watched: a norm of the second is not linked."""
    found = []
    for model in reversed(pair()):
        assert isinstance(model, Stack)
        for _ in range(2):
            state = model.states(*inputs())[-1]
            rows = state.view(-1, WIDTH)
            rows.retain_grad()
            model.zero_grad()
            model.final(rows.view(state.shape)).square().sum().backward()
        found.append([rows.grad])
    assert_agree(*found)


def test_a_layers_backward_hook_sees_its_whole_gradient() -> None:
    original, model = pair()
    gradients: tuple[list[Tensor], list[Tensor]] = [], []
    for each, seen in zip((original, model), gradients, strict=True):
        layer = each.layers[0]
        layer.register_full_backward_hook(lambda _, before, after, seen=seen: seen.append(after[0].clone()))
        outcome(each, *inputs())
    assert len(gradients[0]) == 1
    assert_agree(gradients[1], gradients[0])
