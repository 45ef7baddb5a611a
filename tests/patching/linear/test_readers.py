"""Gradients of a tensor that linear layers and then a residual sum read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.ops import row_norm_autograd
from onetrip.patching import calls, patch_model
from onetrip.patching.linear import readers
from outcomes import Outcome, assert_agree, parameter_gradients
from patching_cases import WIDTH, inputs, randomised
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

DROPOUT = 0.25


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.q(h) * self.k(h)) * self.v(h)


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT), nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor, residual: Tensor) -> Tensor:
        h = self.dense(h)
        h = self.drop(h)
        return self.norm(h + residual)


class Expansion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(WIDTH, WIDTH), nn.GELU()

    def forward(self, h: Tensor) -> Tensor:
        return self.act(self.dense(h))


class Layer(nn.Module):
    """As BERT's: both sums read what linear layers of other modules have read."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mixed = Projections(), Output()
        self.expand, self.expanded = Expansion(), Output()
        self.between: Callable[[Tensor], Any] = lambda h: None
        self.side: list[Tensor] = []
        self.branch: Callable[[Tensor], Tensor] = lambda h: h

    def forward(self, h: Tensor) -> Tensor:
        mixed = self.branch(self.mix(h))
        self.between(h)
        h = self.mixed(mixed, h)
        expanded = self.branch(self.expand(h))
        self.between(h)
        return self.expanded(expanded, h)


@pytest.fixture
def model() -> Any:
    model = randomised(nn.Sequential(Layer(), Layer())).train()
    patch_model(model)
    return model


def step(model: nn.Module, x: Tensor) -> Outcome:
    """The output and every gradient; the same masks in every call."""
    torch.manual_seed(1)
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(2.0 * leaf)
    loss = y.square().sum()
    for module in model.modules():
        while getattr(module, "side", None):
            loss = loss + module.side.pop().sum()
    loss.backward()
    assert leaf.grad is not None
    return {"y": y.detach(), "x": leaf.grad} | parameter_gradients(model)


def without_sharing(compute: Callable[[], Any]) -> Any:
    smallest, calls.SMALLEST = calls.SMALLEST, 1 << 40
    try:
        return compute()
    finally:
        calls.SMALLEST = smallest


def assert_as_without(model: nn.Module, x: Tensor, relative: float = 1e-5) -> None:
    """The second step is the first in which single layers make readers."""
    expected = without_sharing(lambda: step(model, x))
    for _ in range(3):
        found = step(model, x)
        assert torch.equal(found["y"], expected["y"])
        assert_agree(found, expected, relative)


def n_sums(model: nn.Module, x: Tensor) -> int:
    operators = traffic(lambda: step(model, x)).operators.values()
    return sum(each.calls for each in operators if each.name in ("aten::add", "aten::add_"))


def test_gradients_and_no_sums_of_gradients(model: Any) -> None:
    (x,) = inputs()
    assert_as_without(model, x)
    before = without_sharing(lambda: n_sums(model, x))
    # Each layer has two for the inputs of q, k and v, one for each of the residuals.
    assert n_sums(model, x) == before - 2 * 4


def test_what_reads_a_gradient_sees_all_of_it(model: Any) -> None:
    """Hooks on the tensor that is shared, and backwards for it alone."""
    (x,) = inputs()

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


def test_a_branch_that_does_not_depend_on_the_layers(model: Any) -> None:
    (x,) = inputs()
    for layer in model:
        layer.branch = lambda h: h.detach()
    assert_as_without(model, x)


class OutputWithoutNorm(Output):
    def forward(self, h: Tensor, residual: Tensor) -> Tensor:
        h = self.dense(h)
        h = self.drop(h)
        return h + residual


def test_a_gradient_that_others_have_is_not_written_to() -> None:
    """Without a norm the residual's gradient is the sum's own."""
    layer, (x,) = randomised(Layer()).train(), inputs()
    layer.expanded = OutputWithoutNorm()
    patch_model(layer)
    for _ in range(3):
        seen: list[Tensor] = []
        y = layer(2.0 * x.clone().requires_grad_())
        y.register_hook(lambda g: seen.append(g))  # noqa: B023
        gradient = torch.full_like(y, 3.0) * y.detach()
        expected = gradient.clone()
        y.backward(gradient)
        assert torch.equal(gradient, expected) and torch.equal(seen[0], expected)


def test_layers_that_run_before_the_sum_in_backward(model: Any) -> None:
    """Their results are part of the loss, but not of the sum's branch."""
    (x,) = inputs()
    for layer in model:
        layer.branch = lambda h, layer=layer: layer.side.append(h) or h.detach()
    assert_as_without(model, x)


def test_a_backward_within_a_backward(model: Any) -> None:
    """A reentrant checkpoint of a function that reads a tensor of its surroundings, which others have read before."""
    (x,) = inputs()

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


def test_a_tensor_detached_in_place_before_the_sum(model: Any) -> None:
    """The layers' gradient goes to what made the tensor, the sum's does not."""
    (x,) = inputs()
    for layer in model:
        layer.between = lambda h: h.detach_().requires_grad_() if not h.is_leaf else None
    assert_as_without(model, x)


def test_a_tensor_written_to_before_the_sum_is_read_itself(model: Any) -> None:
    (x,) = inputs()
    for parameter in model.parameters():  # or autograd refuses
        parameter.requires_grad_(parameter.dim() == 1)
    for layer in model:
        layer.between = lambda h: h.mul_(0.5) if h.grad_fn.name() != "MulBackward0" else None
        layer.expand.act = nn.Identity()
    assert_as_without(model, x)


@pytest.mark.parametrize("frozen", ["mix.q", "expand.dense", "mixed.dense"])
def test_frozen_layers(model: Any, frozen: str) -> None:
    (x,) = inputs()
    for layer in model:
        layer.get_submodule(frozen).requires_grad_(False)
    assert_as_without(model, x)


def test_results_that_are_kept_do_not_lead_into_a_graph_that_was_freed(model: Any) -> None:
    """As a cache of keys and values does; the input is a leaf, and read again."""
    (x,) = inputs()
    kept: list[Tensor] = []
    leaf = x.clone().requires_grad_()
    for layer in model:
        layer.mix.register_forward_hook(lambda module, args, y: kept.append(y))
    for _ in range(3):
        model(leaf).sum().backward()


def test_a_graph_that_is_kept_gives_the_same_gradients_twice(model: Any) -> None:
    (x,) = inputs()
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        y = model(2.0 * leaf).square().sum()
        first, again = (torch.autograd.grad(y, leaf, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, again)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(model: Any, use_reentrant: bool) -> None:
    (x,) = inputs()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, h: Tensor) -> Any:
            for layer in self.inner:
                h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=use_reentrant)
            return h

    assert_as_without(Checkpointed(), x)


def test_autocast(model: Any) -> None:
    (x,) = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_without(model, x, relative=3e-2)


class PreNorm(nn.Module):
    """As Llama's: layers read the result of a norm, and nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), Projections()
        self.between: Callable[[Tensor], Any] = lambda h: None
        self.side: list[Tensor] = []

    def forward(self, h: Tensor) -> Tensor:
        normed = self.norm(h)
        mixed = self.mix(normed)
        self.between(normed)
        return h + mixed


class Casts(TorchDispatchMode):
    """Counts casts of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func is torch.ops.aten._to_copy.default and args[0].dim() == 3
        return func(*args, **(kwargs or {}))


def n_casts(model: nn.Module, x: Tensor) -> int:
    with Casts() as casts:
        step(model, x)
    return casts.n


@pytest.fixture
def pre_norm() -> Any:
    model = randomised(nn.Sequential(PreNorm(), PreNorm())).train()
    patch_model(model, patterns=("layer_norm", "shared_input"))
    return model


def test_under_autocast_a_norm_reads_the_gradient_of_layers_as_it_is(pre_norm: Any) -> None:
    """q, k and v share the cast of the norm's result, and there is none back."""
    (x,) = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_without(pre_norm, x, relative=3e-2)
        pre_norm[1].between = pre_norm[1].side.append  # the loss reads a norm's result, too
        assert_as_without(pre_norm, x, relative=3e-2)
        pre_norm[1].between = lambda h: None
        # Those of the sum's gradient are left, and one of each norm's result.
        assert without_sharing(lambda: n_casts(pre_norm, x)) == 2 * (1 + 3 + 3)
        assert n_casts(pre_norm, x) == 2 * (1 + 1)


def test_under_autocast_what_reads_a_norms_gradient_sees_all_of_it(pre_norm: Any) -> None:
    """Hooks, also on a result that is gone, retain_grad, backwards for chosen tensors, and for the weights as well."""
    (x,) = inputs()

    def gradients() -> list[Tensor]:
        found: list[Tensor] = []
        kept: list[Tensor] = []
        pre_norm[0].between = lambda h: h.register_hook(lambda g: found.append(g.clone()))
        pre_norm[1].between = lambda h: (kept.append(h), h.retain_grad())
        with torch.autocast("cpu", torch.bfloat16):
            y = pre_norm(2.0 * x.clone().requires_grad_())
        y = y.square().sum()
        alone = torch.autograd.grad(y, [*kept, pre_norm[0].norm.weight], retain_graph=True)
        again = torch.autograd.grad(y, pre_norm[0].norm.weight, retain_graph=True)
        found.clear()
        pre_norm.zero_grad()
        y.backward()
        return [*alone, *again, *found, kept[0].grad, *(p.grad for p in pre_norm.parameters())]

    expected = without_sharing(gradients)
    for _ in range(2):
        found = gradients()
        assert [each.dtype for each in found] == [each.dtype for each in expected]
        assert_agree(found, expected, 3e-2)


class TwoReaders(PreNorm):
    """Two children read the norm's result; the second may run under another autocast."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.more = Projections()

    def forward(self, h: Tensor) -> Tensor:
        normed = self.norm(h)
        mixed = self.mix(normed)
        with torch.autocast("cpu", self.dtype):
            return h + mixed + self.more(normed)


@pytest.mark.parametrize("case", ["plain", "frozen", "another dtype"])
def test_under_autocast_two_groups_of_readers(case: str) -> None:
    """Where the first group's weights are frozen nothing keeps its cast: the second makes another one."""
    model, (x,) = randomised(nn.Sequential(TwoReaders(), TwoReaders())).train(), inputs()
    patch_model(model, patterns=("layer_norm", "shared_input"))
    for layer in model:
        layer.mix.requires_grad_(case != "frozen")
        layer.dtype = torch.float16 if case == "another dtype" else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_without(model, x, relative=3e-2)


@pytest.mark.parametrize("is_plain", [True, False], ids=["native forward", "Python's"])
def test_under_autocast_a_norms_gradient_is_not_filled_with_zeros(
    pre_norm: Any, monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    """Where all of it comes from layers that read a cast."""
    (x,) = inputs()
    x = x if is_plain else x.mT.contiguous().mT
    seen: list[Tensor | None] = []
    original = row_norm_autograd._with_narrow
    monkeypatch.setattr(row_norm_autograd, "_with_narrow", lambda node, dy: (seen.append(dy), original(node, dy))[1])
    with torch.autocast("cpu", torch.bfloat16):
        step(pre_norm, x)
    assert seen == [None, None]


class Nested(torch.autograd.Function):
    """The identity. Its backward runs another backward through the same graph."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, losses: list[Tensor]) -> Tensor:
        ctx.losses = losses
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.losses:
            ctx.losses.pop().backward(retain_graph=True)
        return grads[0], None


def test_under_autocast_a_backward_between_the_layers_and_the_norm(pre_norm: Any) -> None:
    (x,) = inputs()

    def gradients() -> Outcome:
        pre_norm.zero_grad()
        losses: list[Tensor] = []
        with torch.autocast("cpu", torch.bfloat16):
            normed = pre_norm[0].norm(x)
            early = Nested.apply(normed, losses)  # made before the layers: its backward runs after theirs
            loss = (early + pre_norm[0].mix(normed)).square().sum()
        losses.append(loss)
        loss.backward(retain_graph=True)
        return parameter_gradients(pre_norm[0])

    expected = without_sharing(gradients)
    assert_agree(gradients(), expected, 3e-2)


@pytest.fixture
def without_norms() -> Any:
    """Layers read a sum with dropout, whose residual others have read."""
    model = nn.Sequential(Layer(), Layer())
    for layer in model:
        layer.mixed, layer.expanded = OutputWithoutNorm(), OutputWithoutNorm()
    randomised(model).train()
    patch_model(model)
    return model


def test_under_autocast_layers_read_a_sum_without_a_norm(without_norms: Any) -> None:
    (x,) = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_without(without_norms, x, relative=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_a_gpu(model: Any, pre_norm: Any, without_norms: Any, dtype: torch.dtype) -> None:
    """Products of half-precision operands are added to float32 gradients."""
    x = inputs()[0].cuda()
    models = [model, pre_norm] if dtype == torch.float16 else [model, pre_norm, without_norms]  # which overflows
    for each in (each.cuda() for each in models):
        with torch.autocast("cuda", dtype):
            assert_as_without(each, x, relative=3e-2)


def test_in_eval_mode_sums_are_as_ever(model: Any) -> None:
    (x,) = inputs()
    model.eval()
    assert_as_without(model, x)


def test_nothing_is_kept_of_results_that_are_gone(model: Any) -> None:
    """Also without a backward, and without the garbage collector."""
    (x,) = inputs()
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
def test_what_was_read_is_freed_as_without_sharing(model: Any, use_checkpoint: bool) -> None:
    """In a checkpoint by the end of its forward, else by that of the backward; the graph itself lives on."""
    (x,) = inputs()
    read: list[weakref.ref[Tensor]] = []
    for layer in model:
        layer.between = lambda h: read.append(weakref.ref(h))

    def inner(h: Tensor) -> Tensor:
        return model(2.0 * h)  # type: ignore[no-any-return]

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
    block, counter = Output().train(), CompileCounter()
    patch_model(block)
    monkeypatch.setattr(calls, "SMALLEST", 2 * 20 * WIDTH)
    compiled = torch.compile(block, backend=counter, dynamic=True)
    for n_rows in (10, 40):
        x = torch.randn(2, n_rows, WIDTH, requires_grad=True)
        compiled(x, 2.0 * x)
    assert counter.frame_count == 1
