"""Links at run time: a residual sum and a norm that reads it in a branch, a child or the next layer become one call."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.measure import saved_bytes
from onetrip.ops import row_norm, row_norm_autograd
from onetrip.ops.common.native import read
from onetrip.patching import calls, links, patch_model, unpatch_model
from outcomes import assert_agree, outcome, patched_pair
from patching_cases import WIDTH, Stack, inputs, n_links, pair, randomised
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("no_link_is_left")


def assert_same(model: nn.Module, original: nn.Module) -> None:
    assert_agree(outcome(model, *inputs()), outcome(original, *inputs()))


def test_a_sum_and_a_norm_in_a_branch_or_in_the_next_layer_are_one_call() -> None:
    original, model = pair()
    report = patch_model(model)
    before = report.calls()
    assert_same(model, original)
    assert n_links(model) == 6
    fused = {name: calls[0] - before[name][0] for name, calls in report.calls().items()}
    assert [fused[f"layers.{i}"] for i in range(3)] == [2, 2, 2]
    assert sum(calls[1] for calls in report.calls().values()) == 0


def test_a_linked_pair_launches_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair(n_layers=1)
    called: list[str] = []
    monkeypatch.setattr(read, "operands", lambda _: -1)  # forward then is Python's
    forward = row_norm.forward
    monkeypatch.setattr(row_norm, "forward", lambda *a: called.append("forward") or forward(*a))
    backward = row_norm_autograd.backward
    monkeypatch.setattr(row_norm_autograd, "backward", lambda *a: called.append("backward") or backward(*a))
    with torch.no_grad():
        model(*inputs())
    assert called == ["forward"] * 3  # the first norm, and both sums with theirs
    model(inputs()[0].requires_grad_()).sum().backward()
    assert called[3:] == ["backward"] * 3


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_links_hold_in_every_grad_mode(grad: Any) -> None:
    original, model = pair()
    with grad():
        for _ in range(3):
            torch.testing.assert_close(model(*inputs()), original(*inputs()), rtol=1e-4, atol=1e-5)
    assert_same(model, original)


def test_hidden_states_are_the_sums_themselves() -> None:
    original, model = pair()
    for ours, theirs in zip(model.states(*inputs()), original.states(*inputs()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    model(*inputs())  # takes what states() left


def test_small_sums_are_not_linked(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    """Also not by a model that has linked large ones: it may generate after a long prompt."""
    _, model = pair()
    monkeypatch.setattr(calls, "SMALLEST", x.numel() + 1)
    called: list[str] = []
    apart = links.sum_before_norm
    monkeypatch.setattr(links, "sum_before_norm", lambda *a, **k: called.append("linked") or apart(*a, **k))
    model(x)
    assert called == []
    model(torch.cat([x, x]))
    assert len(called) == 6
    other = randomised(Stack())
    patch_model(other)
    for _ in range(2):
        other(x)
    assert n_links(other) == 0


@pytest.mark.parametrize(("device", "least"), [("cpu", 1 << 18), ("cuda", 1 << 24)])
def test_from_which_size_on(device: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU waits for Python longer than it takes for a pass over fewer elements."""
    monkeypatch.setattr(calls, "SMALLEST", 1 << 18)
    with FakeTensorMode():
        assert calls.is_large(torch.empty(least, device=device))
        assert not calls.is_large(torch.empty(least - 1, device=device))


@pytest.mark.parametrize("change", [lambda h: h * 2.0, Tensor.detach], ids=["replaced", "detached"])
def test_a_hook_that_replaces_a_layers_output_is_seen(change: Callable[[Tensor], Tensor]) -> None:
    original, model = pair()
    for each in (original, model):
        each.layers[1].register_forward_hook(lambda module, args, output: change(output))
    for _ in range(6):
        assert_same(model, original)
    assert n_links(model) == 5


def test_a_norms_own_hooks_run() -> None:
    original, model = pair()
    for each in (original, model):
        each.layers[1].first.register_forward_hook(lambda module, args, output: output + 1.0)
        each.layers[2].first.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
    assert_same(model, original)


@pytest.mark.parametrize("edit", [torch.relu_, lambda y: y.mul_(2.0), lambda y: y.index_fill_(2, torch.tensor(0), 0.0)])
@pytest.mark.parametrize("view", [False, True])
def test_a_linked_norms_result_may_be_edited_in_place(edit: Callable[[Tensor], Tensor], view: bool) -> None:
    original, model = pair()
    for each in (original, model):
        if view:
            each.call = lambda layer, h: layer(h).view(h.shape)
            each(*inputs())
        final = each.final
        each.forward = lambda h, each=each, final=final: edit(final(each.states(h)[-1]))
    assert_same(model, original)


def test_an_edit_in_place_between_layers_is_seen() -> None:
    """Also by backward: the sum's gradient must not need what the edit wrote over."""
    original, model = pair()
    for each in (original, model):
        each.between = lambda h: h.mul_(1.5)
    for _ in range(5):
        assert_same(model, original)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("linked_before", [False, True])
def test_checkpointed_layers_are_right_and_keep_nothing_more(use_reentrant: bool, linked_before: bool) -> None:
    original, model = pair()
    if not linked_before:
        unpatch_model(model)
        model = copy.deepcopy(original)
        patch_model(model)
    for each in (original, model):
        each.call = lambda layer, h: checkpoint(layer, h, use_reentrant=use_reentrant)
    for _ in range(5):
        assert_same(model, original)
    x = inputs()[0].requires_grad_()
    assert saved_bytes(lambda: model(x)) <= saved_bytes(lambda: original(x))


class Reshaped(torch.autograd.Function):
    """Returns a view of its input, with a gradient of its own."""

    @staticmethod
    def forward(_: Any, h: Tensor) -> Tensor:
        return h.view(-1, WIDTH)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Any:
        return 3.0 * grad.view(*inputs()[0].shape)


@pytest.mark.parametrize("call", ["reentrant checkpoint", "autograd.Function"])
def test_a_view_made_outside_the_graph_of_its_sum_is_no_link(call: str) -> None:
    """As OPT's layers under reentrant checkpoints: they return views of their last sums."""
    original, model = pair(n_layers=2)
    for each in (original, model):
        if call == "autograd.Function":
            each.call = lambda layer, h: Reshaped.apply(layer(h)).view(h.shape)
        else:
            each.call = lambda layer, h: checkpoint(lambda h: layer(h).view(h.shape), h, use_reentrant=True)
    for _ in range(3):
        assert_same(model, original)


def test_views_of_a_sum_are_linked() -> None:
    original, model = pair()
    for each in (original, model):
        each.call = lambda layer, h: layer(h).view(h.shape)
    report = patch_model(model)
    before = report.calls()
    for _ in range(2):
        assert_same(model, original)
    assert report.calls()["final"][0] - before["final"][0] == 2
    assert n_links(model) == 6


def test_saved_bytes_are_those_of_the_original() -> None:
    original, model = pair()
    x = inputs()[0].requires_grad_()
    assert saved_bytes(lambda: model(x)) <= saved_bytes(lambda: original(x))


def test_one_layer_called_several_times() -> None:
    model, original, _ = patched_pair(randomised(Stack(1)))
    for each in (original, model):
        each.call = lambda layer, h: layer(layer(layer(h)))
    for _ in range(6):
        assert_same(model, original)


def test_a_copy_links_its_own_norms() -> None:
    original, model = pair()
    clone = copy.deepcopy(model)
    assert n_links(clone) == 0
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.mul_(2.0)
    doubled = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2.0)
    for _ in range(2):
        assert_same(clone, doubled)
        assert_same(model, original)
    assert n_links(clone) == 6


def test_tensors_carry_no_trace_of_a_link() -> None:
    _, model = pair()
    state = model.states(*inputs())[1]
    assert not vars(state) if hasattr(state, "__dict__") else True
    torch.save(state, buffer := io.BytesIO())
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), state.detach())
    model(*inputs())


def test_new_weights_of_a_linked_norm_are_used() -> None:
    original, model = pair()
    for each in (original, model):
        each.layers[1].first.weight = nn.Parameter(torch.full((WIDTH,), 3.0))
        each.layers[2].first = nn.LayerNorm(WIDTH)
    for _ in range(5):
        assert_same(model, original)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_keeps_the_unfused_dtypes(dtype: torch.dtype) -> None:
    original, model = pair()
    x = inputs()[0].to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(x), original(x)
        again = model(x)
    assert ours.dtype == again.dtype == theirs.dtype
    torch.testing.assert_close(again, theirs, rtol=5e-2, atol=5e-2)


def test_a_compiled_model_has_no_graph_break() -> None:
    original, model = pair(n_layers=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(compiled, original)
    assert_same(model, original)


def test_dropout_is_drawn_in_the_linked_call() -> None:
    """With p = 0.5, half of the branch comes through, doubled; the same seed draws the same mask."""
    _, model = pair(n_layers=1, p=0.5)
    model.train()
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(model(*inputs()))
    assert torch.equal(*outputs)
    assert not torch.equal(model(*inputs()), outputs[0])


def norm_after(model: Stack, between: Callable[[nn.Module, Tensor], Tensor], grad: bool = True) -> list[Tensor | None]:
    """A layer's output, passed by `between` to the next layer's norm: result and gradients."""
    norm = model.layers[1].first
    model.zero_grad()
    with torch.set_grad_enabled(grad):
        z = model.layers[0](*inputs())
    y = between(norm, z)
    if y.requires_grad:
        (y * torch.cos(torch.arange(y.numel())).view_as(y)).sum().backward()
    return [y.detach(), *(None if each.grad is None else each.grad.clone() for each in model.parameters())]


def without_grad(norm: nn.Module, z: Tensor) -> Tensor:
    with torch.no_grad():
        return norm(z)


def of_a_view_without_grad(norm: nn.Module, z: Tensor) -> Tensor:
    with torch.no_grad():
        rows = z.view(-1, WIDTH)
    return norm(rows)


def after_requires_grad(norm: nn.Module, z: Tensor) -> Tensor:
    return norm(z if z.requires_grad else z.requires_grad_())


def after_an_update(norm: nn.Module, z: Tensor) -> Tensor:
    with torch.no_grad():
        norm.weight.mul_(1.5)
    return norm(z)


def after_another_weight(norm: nn.Module, z: Tensor) -> Tensor:
    norm.weight = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=z.dtype))
    return norm(z)


def at_once(norm: nn.Module, z: Tensor) -> Tensor:
    return norm(z)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "between",
    [at_once, without_grad, of_a_view_without_grad, after_requires_grad, after_an_update, after_another_weight],
)
def test_a_norm_in_another_grad_mode_or_with_other_weights_computes(between: Any, grad: bool) -> None:
    original, model = pair(n_layers=2)
    for _ in range(2):
        for ours, theirs in zip(norm_after(model, between, grad), norm_after(original, between, grad), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_jit_trace_of_a_model_that_never_ran_sees_the_same_graph_twice() -> None:
    model, original, _ = patched_pair(randomised(Stack()))
    traced = torch.jit.trace(model, inputs())
    torch.testing.assert_close(traced(*inputs()), original(*inputs()), rtol=1e-4, atol=1e-5)
