"""Linear layers that read one tensor, under autocast: one cast, and no gradient cast back."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from onetrip import anatomy
from onetrip.ops import row_norm_autograd
from onetrip.ops.common.backends import HALF
from onetrip.patching import patch_model, patched, unpatch_model
from onetrip.patching.linear import readers
from outcomes import Outcome, assert_agree, parameter_gradients
from packaging.version import Version
from patching_cases import (
    TAIL_DROPOUT,
    WIDTH,
    BackwardInBackward,
    Layer,
    Projections,
    Tail,
    TailWithoutNorm,
    assert_as_without,
    build,
    inputs,
    randomised,
    step,
    without_sharing,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("model", [TAIL_DROPOUT], indirect=True)  # without, rounding alone is worth 4e-2
def test_autocast(model: Any, x: Tensor) -> None:
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


def test_under_autocast_a_norm_reads_the_gradient_of_layers_as_it_is(pre_norm: Any, x: Tensor) -> None:
    """q, k and v share the cast of the norm's result, and there is none back."""
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_without(pre_norm, x, relative=3e-2)
        pre_norm[1].between = pre_norm[1].side.append  # the loss reads a norm's result, too
        assert_as_without(pre_norm, x, relative=3e-2)
        pre_norm[1].between = lambda h: None
        # Those of the sum's gradient are left, and one of each norm's result.
        assert without_sharing(lambda: n_casts(pre_norm, x)) == 2 * (1 + 3 + 3)
        assert n_casts(pre_norm, x) == 2 * (1 + 1)


def test_under_autocast_what_reads_a_norms_gradient_sees_all_of_it(pre_norm: Any, x: Tensor) -> None:
    """Hooks, also on a result that is gone, retain_grad, backwards for chosen tensors, and for the weights as well."""

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


@pytest.mark.parametrize("case", ["plain", "frozen", "another dtype", "checkpoint"])
def test_under_autocast_two_groups_of_readers(case: str) -> None:
    """Where the first group's weights are frozen, or in a checkpoint, nothing keeps its cast: the second makes another
    one."""
    model, (x,) = randomised(nn.Sequential(TwoReaders(), TwoReaders())).train(), inputs()
    patch_model(model, patterns=("layer_norm", "shared_input"))
    for layer in model:
        layer.mix.requires_grad_(case != "frozen")
        layer.dtype = torch.float16 if case == "another dtype" else torch.bfloat16
        if case == "checkpoint":
            layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
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
    original = row_norm_autograd._with_left
    monkeypatch.setattr(row_norm_autograd, "_with_left", lambda node, dy: (seen.append(dy), original(node, dy))[1])
    with torch.autocast("cpu", torch.bfloat16):
        step(pre_norm, x)
    assert seen == [None, None]


def test_under_autocast_a_backward_between_the_layers_and_the_norm(pre_norm: Any, x: Tensor) -> None:
    def gradients() -> Outcome:
        pre_norm.zero_grad()
        losses: list[Tensor] = []
        with torch.autocast("cpu", torch.bfloat16):
            normed = pre_norm[0].norm(x)
            early = BackwardInBackward.apply(normed, losses)  # made before the layers: its backward runs after theirs
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
        layer.mixed, layer.expanded = TailWithoutNorm(), TailWithoutNorm()
    randomised(model).train()
    patch_model(model)
    return model


def test_under_autocast_layers_read_a_sum_without_a_norm(without_norms: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_without(without_norms, x, relative=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("model", [0.0], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_a_gpu(model: Any, pre_norm: Any, without_norms: Any, dtype: torch.dtype) -> None:
    """Products of half-precision operands are added to float32 gradients: at most twice the unpatched model's error."""
    x = inputs()[0].cuda()
    models = (
        [model, pre_norm] if dtype == torch.float16 else [model, pre_norm, without_norms]
    )  # whose results overflow, unpatched too
    for each in (each.cuda() for each in models):
        for module in each.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        original = copy.deepcopy(each)
        unpatch_model(original)
        exact = step(copy.deepcopy(original).double(), x.double())
        with torch.autocast("cuda", dtype):
            theirs, ours = step(original, x), [step(each, x) for _ in range(2)][1]
        for name, expected in exact.items():
            error, allowed = (float((found[name] - expected).norm()) for found in (ours, theirs))
            assert error <= 2.0 * allowed, f"{name}: {error:.2e}, unpatched {allowed:.2e}"


def test_under_autocast_a_gradient_is_not_differentiated_again() -> None:
    """The casts that backward reads lead to no graph."""
    layer, (x,) = randomised(Projections()).train(), inputs()
    patch_model(layer, patterns=("shared_input",))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(2.0 * x.requires_grad_())
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(y.float().square().sum(), x, create_graph=True)


class WeightCasts(Casts):
    """Counts casts of matrices to float32: those of the gradients of weights."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        self.n += func is torch.ops.aten._to_copy.default and y.dim() == 2 and y.dtype == torch.float32
        return y


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_on_a_gpu_products_leave_gradients_of_weights_in_float32(name: str) -> None:
    """Where a sum or an activation adds the layer's bias, and of tied output layers, in a step that is only counted.
    torch before 2.13 has no such products of fake tensors."""
    if name == "bart" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("BART's forward looks at data")
    mode = FakeTensorMode()
    model = anatomy.fake_copy(build(name), mode, torch.float32).train()
    make_batch, sgd = partial(anatomy.make_batch, model, 2, 8), anatomy.OPTIMIZERS["sgd"]

    def n_casts(device_type: str) -> int:
        @contextmanager
        def counted() -> Iterator[None]:
            with patched(model, verify=False), casts:
                yield

        casts = WeightCasts()
        how: dict[str, Any] = {"device_type": device_type, "autocast": torch.bfloat16}
        anatomy.predict(model, make_batch, sgd, mode, peak_only=True, context=counted, **how)
        return casts.n

    assert n_casts("cpu") > 0
    assert (n_casts("cuda") == 0) == (torch.__version__ >= (2, 13))


class Repeated(nn.Module):
    """As ALBERT: one layer, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = Tail()

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(3):
            h = self.tail(h, h)
        return h


def wide(a: Tensor, dtype: torch.dtype, half: torch.dtype | None = None) -> bool:
    """products.widens, as on a GPU: a CPU does such products in two passes."""
    return (half or a.dtype) in HALF and dtype == torch.float32


def test_layers_cast_a_weight_once_and_no_frozen_one(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that runs several times takes autocast's cast from then on."""
    monkeypatch.setattr(readers, "widens", wide)
    seen: list[Tensor] = []
    original = readers.linear
    monkeypatch.setattr(readers, "linear", lambda *given: (seen.append(given[1]), original(*given))[1])
    model = randomised(Repeated()).train()
    patch_model(model)
    for n_steps in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(2.0 * x.requires_grad_())
        assert len(seen) == n_steps
        y.sum().backward()
    model.tail.dense.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        model(2.0 * x)
    assert len(seen) == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_layers_that_run_several_times(
    use_reentrant: bool, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a run without one, whose casts live while it runs again."""
    if use_reentrant and torch.__version__ < (2, 10):
        pytest.skip("reentrant checkpoints under autocast have wrong gradients up to torch 2.9, unpatched, too")
    monkeypatch.setattr(readers, "widens", wide)
    original = randomised(Repeated()).train()
    original.tail.dropout.p = 0.0
    model = copy.deepcopy(original)
    patch_model(model)

    def gradients(each: nn.Module) -> Outcome:
        each.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            first = checkpoint(each, 2.0 * x.requires_grad_(), use_reentrant=use_reentrant)
            plain = each(2.0 * x)
            last = checkpoint(each, 2.0 * x, use_reentrant=use_reentrant)
            loss = (first * plain * last).float().square().mean()
        loss.backward()
        return parameter_gradients(each)

    for _ in range(2):
        assert_agree(gradients(model), gradients(original), 3e-2)


def test_weights_can_be_swapped_after_a_step(x: Tensor) -> None:
    """torch.utils.swap_tensors raises where a weight has weak references."""
    model = nn.Sequential(PreNorm())
    patch_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).square().sum().backward()
    assert all(weakref.getweakrefcount(parameter) == 0 for parameter in model.parameters())
