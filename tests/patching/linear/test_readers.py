"""Gradients of a tensor that linear layers and then a residual sum read."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import calls, patch_model
from onetrip.patching.linear import readers
from outcomes import assert_agree
from patching_cases import (
    WIDTH,
    Layer,
    Projections,
    Tail,
    TailWithoutNorm,
    assert_as_without,
    checkpointed,
    inputs,
    randomised,
    step,
    without_sharing,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter


def n_sums(model: nn.Module, x: Tensor) -> int:
    operators = traffic(lambda: step(model, x)).operators.values()
    return sum(each.calls for each in operators if each.name in ("aten::add", "aten::add_"))


def test_gradients_and_no_sums_of_gradients(model: Any, x: Tensor) -> None:
    assert_as_without(model, x)
    before = without_sharing(lambda: n_sums(model, x))
    # Each layer has two for the inputs of q, k and v, one for each of the residuals.
    assert n_sums(model, x) == before - 2 * 4


def test_what_reads_a_gradient_sees_all_of_it(model: Any, x: Tensor) -> None:
    """Hooks on the tensor that is shared, and backwards for it alone."""

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        found: list[Tensor] = []
        hidden: list[Tensor] = []
        for layer in model:
            layer.between = lambda h: (hidden.append(h), h.register_hook(lambda g: found.append(g.clone())))
        y = model(2.0 * x.clone().requires_grad_()).square().sum()
        alone = torch.autograd.grad(y, hidden, retain_graph=True)
        found.clear()
        y.backward()
        return [*alone, *found]

    expected = without_sharing(gradients)
    for _ in range(2):
        assert_agree(gradients(), expected)


def test_a_branch_that_does_not_depend_on_the_layers(model: Any, x: Tensor) -> None:
    for layer in model:
        layer.branch = lambda h: h.detach()
    assert_as_without(model, x)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_gradient_that_others_have_is_not_written_to(requires_grad: bool) -> None:
    """Without a norm the residual's gradient is the sum's own."""
    layer, (x,) = randomised(Layer()).train(), inputs()
    layer.expanded = TailWithoutNorm()
    patch_model(layer)
    for _ in range(3):
        seen: list[Tensor] = []
        y = layer(2.0 * x.clone().requires_grad_())
        y.register_hook(lambda g: seen.append(g))  # noqa: B023
        gradient = (3.0 * y.detach()).requires_grad_(requires_grad)
        expected = gradient.detach().clone()
        y.backward(gradient)
        assert torch.equal(gradient, expected) and torch.equal(seen[0], expected)


def test_a_gradient_of_both_operands_is_not_written_to_while_a_hook_has_it(model: Any, x: Tensor) -> None:
    """Without dropout the residual's gradient is the branch's, too."""
    seen: list[Tensor] = []

    def branch(h: Tensor) -> Tensor:
        h.register_hook(seen.append)
        return h

    def gradients() -> list[Tensor]:
        seen.clear()
        step(model, x)
        return list(seen)

    for layer in model:
        layer.branch = branch
    expected = without_sharing(gradients)
    for _ in range(2):
        assert_agree(gradients(), expected)


class Sums(Layer):
    """Sums of two tensors, either of which may be the one that layers have read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        mixed = self.mix(h)
        h = self.norm_1(mixed + h)
        expanded = self.expand(h)
        return self.norm_2(h + expanded)


def test_either_operand_of_a_sum_may_be_the_one_that_layers_read() -> None:
    model, (x,) = randomised(Sums()).train(), inputs()
    patch_model(model)
    assert_as_without(model, x)
    before = without_sharing(lambda: n_sums(model, x))
    assert n_sums(model, x) == before - 4


class WithLeaf(Projections):
    """A sum of a leaf and what linear layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.leaf = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn_like(inputs()[0]))

    def forward(self, h: Tensor) -> Tensor:
        mixed = torch.tanh(self.q(h) * self.k(h)) * self.v(h)
        leaf = self.leaf
        return self.norm(leaf + h) * mixed


def test_a_leaf_takes_a_gradient_of_its_own() -> None:
    """A hook may write to it while the layers are yet to run: an optimizer in backward."""
    model, (x,) = randomised(WithLeaf()).train(), inputs()
    expected = step(model, x)["x"]
    patch_model(model)

    def clear(leaf: Any) -> None:
        leaf.grad.zero_()

    model.leaf.register_post_accumulate_grad_hook(clear)
    for _ in range(3):
        assert_agree([step(model, x)["x"]], [expected])


def test_gradients_of_a_batch(model: Any, x: Tensor) -> None:
    def gradients() -> Tensor:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = model(2.0 * leaf).square().sum((1, 2))
        return torch.autograd.grad(y, leaf, torch.eye(len(y)), is_grads_batched=True)[0]

    expected = without_sharing(gradients)
    for _ in range(3):
        assert_agree([gradients()], [expected])


def test_layers_that_run_before_the_sum_in_backward(model: Any, x: Tensor) -> None:
    """Their results are part of the loss, but not of the sum's branch."""
    for layer in model:
        layer.branch = lambda h, layer=layer: layer.side.append(h) or h.detach()
    assert_as_without(model, x)


def test_a_backward_within_a_backward(model: Any, x: Tensor) -> None:
    """A reentrant checkpoint of a function that reads a tensor of its surroundings, which others have read before."""

    class Surrounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.start = model, nn.Parameter(x.clone())

        def forward(self, h: Tensor) -> Any:
            unused, h = h, self.start  # a leaf: both backwards reach it
            anchor = torch.ones((), requires_grad=True)
            first = self.inner[0](h)
            again = torch.utils.checkpoint.checkpoint(
                lambda scale: self.inner[0](h) * scale, anchor, use_reentrant=True
            )
            return self.inner[1](first) * again + self.inner[0].expand(h) + 0.0 * unused

    assert_as_without(Surrounded(), x)


def test_a_tensor_detached_in_place_before_the_sum(model: Any, x: Tensor) -> None:
    """The layers' gradient goes to what made the tensor, the sum's does not."""
    for layer in model:
        layer.between = lambda h: h.detach_().requires_grad_() if not h.is_leaf else None
    assert_as_without(model, x)


def test_a_tensor_written_to_before_the_sum_is_read_itself(model: Any, x: Tensor) -> None:
    for parameter in model.parameters():  # or autograd refuses
        parameter.requires_grad_(parameter.dim() == 1)
    for layer in model:
        layer.between = lambda h: h.mul_(0.5) if h.grad_fn.name() != "MulBackward0" else None
        layer.expand.act = nn.Identity()
    assert_as_without(model, x)


@pytest.mark.parametrize("frozen", ["mix.q", "expand.dense", "mixed.dense"])
def test_frozen_layers(model: Any, frozen: str, x: Tensor) -> None:
    for layer in model:
        layer.get_submodule(frozen).requires_grad_(False)
    assert_as_without(model, x)


def test_results_that_are_kept_do_not_lead_into_a_graph_that_was_freed(model: Any, x: Tensor) -> None:
    """As a cache of keys and values does; the input is a leaf, and read again."""
    kept: list[Tensor] = []
    leaf = x.clone().requires_grad_()
    for layer in model:
        layer.mix.register_forward_hook(lambda module, args, y: kept.append(y))
    for _ in range(3):
        model(leaf).sum().backward()


def test_a_graph_that_is_kept_gives_the_same_gradients_twice(model: Any, x: Tensor) -> None:
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        y = model(2.0 * leaf).square().sum()
        first, again = (torch.autograd.grad(y, leaf, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, again)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(model: Any, use_reentrant: bool, x: Tensor) -> None:
    for layer in model:
        checkpointed(layer, use_reentrant)
    assert_as_without(model, x)


def test_in_eval_mode_sums_are_as_ever(model: Any, x: Tensor) -> None:
    model.eval()
    assert_as_without(model, x)


def test_nothing_is_kept_of_results_that_are_gone(model: Any, x: Tensor) -> None:
    """Also without a backward, and without the garbage collector."""
    step(model, x)
    gc.collect()
    before = len(readers.reads)
    gc.disable()
    try:
        y = model(2.0 * x.clone().requires_grad_())
        assert len(readers.reads) > before
        del y
        assert len(readers.reads) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_what_was_read_is_freed_as_without_sharing(model: Any, use_checkpoint: bool, x: Tensor) -> None:
    """In a checkpoint by the end of its forward, else by that of the backward; the graph itself lives on."""
    read: list[weakref.ref[Tensor]] = []
    for layer in model:
        layer.between = lambda h: read.append(weakref.ref(h))

    def inner(h: Tensor) -> Tensor:
        return model(2.0 * h)

    for _ in range(2):
        read.clear()
        leaf = x.clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(inner, leaf, use_reentrant=False) if use_checkpoint else inner(leaf)
        assert len(read) == 4
        if not use_checkpoint:
            y.sum().backward()
        assert y.grad_fn is not None and not any(each() is not None for each in read)


def test_a_compiled_sum_has_one_graph_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum looks for readers from calls.SMALLEST elements on; no graph may be guarded by that."""
    block, counter = Tail().train(), CompileCounter()
    patch_model(block)
    monkeypatch.setattr(calls, "SMALLEST", 2 * 20 * WIDTH)
    compiled = torch.compile(block, backend=counter, dynamic=True)
    for n_rows in (10, 40):
        x = torch.randn(2, n_rows, WIDTH, requires_grad=True)
        compiled(x, 2.0 * x)
    assert counter.frame_count == 1
