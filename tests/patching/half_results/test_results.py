"""Norms whose result only matrix products read, under autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.ops.row_norm_autograd import deferred_norm
from onetrip.patching import half_results, links, patch_model, unpatch_model
from outcomes import Outcome, assert_agree, assert_equal, loss_outcome, outcome
from patching_cases import (
    DECODER,
    WIDTH,
    Direct,
    NormBlock,
    checkpointed,
    tiny_model,
    token_ids,
    written,
)
from torch import Tensor, matmul, nn  # noqa: F401 (forwards read them)
from torch.nn import functional  # noqa: F401
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

peft = pytest.importorskip("peft")

HALF = torch.bfloat16
OWN = "model.layers.0.input_layernorm"


NAMED = """
    y = self.norm(x)
    batch, rows = y.shape[:2]
    rest = (*y.shape[:-1], y.size(-1), y.numel(), y.dim(), y.device) if y is not None else ()
    again = y.view(batch * rows, -1) if mask is None else y
    y = self.down(functional.gelu(self.up(again.unsqueeze(0)))).view(batch, rows, -1)
    return x + y * len(rest[:1])"""
Named = written(NormBlock, NAMED, globals(), "x, mask=None")
"""Shapes are read, and another name and a view of it."""
FUNCTIONS = """
    y = self.norm(x)
    h = functional.linear(y, self.weight) + torch.matmul(y, self.weight) + matmul(y, self.weight) + y @ self.weight
    return x + h + torch.addmm(self.weight[0], y.flatten(0, 1), mat2=self.weight).view(x.shape)"""
Functions = written(NormBlock, FUNCTIONS, globals())
LOOPED = """
    y = self.norm(x)
    h = x
    for _ in range(2):
        h = h + functional.linear(y, self.weight)
    del y
    return h"""
Looped = written(NormBlock, LOOPED, globals())
ABSENT = "y = self.norm(x); h = self.cross(y) if cross else functional.linear(y, self.weight); return x + h"
Absent = written(NormBlock, ABSENT, globals(), "x, cross=False")
"""A child that other configurations have."""
Added = written(NormBlock, "y = self.norm(x); return y + functional.linear(y, self.weight)", globals())


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, first: int, *, hidden: Tensor, **options: Any) -> Tensor:
        return self.dense(hidden) * first


class Handed(NormBlock):
    """To a child, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(2, hidden=self.norm(x), more=None)


PROVEN = (Direct, Named, Functions, Looped, Absent, Handed)


def built(kind: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    model = kind()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def autocast() -> Any:
    with torch.autocast("cpu", HALF):
        yield


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs something with norms as ever."""

    def run(function: Callable[..., Any], *args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(half_results, "_known", {})
            return function(*args)

    return run


@pytest.mark.parametrize("kind", PROVEN)
def test_a_norm_rounds_what_only_products_read(autocast: None, kind: Any, x: Tensor) -> None:
    model = built(kind)
    expected = outcome(model, x)
    patch_model(model, patterns=("layer_norm",))
    actual = outcome(model, x)
    assert torch.equal(actual["y"], expected["y"])
    assert_agree(actual, expected, relative=1e-2)
    assert model.norm(x).dtype == HALF
    with torch.autocast("cpu", torch.float16):
        assert model.norm(x).dtype == torch.float16
    with torch.autocast("cpu", enabled=False):
        assert model.norm(x).dtype == torch.float32
    assert model.norm(x.to(HALF)).dtype == HALF  # as ever
    unpatch_model(model)
    assert model.norm(x).dtype == torch.float32


def test_a_property_that_raises_stops_nothing(autocast: None, x: Tensor) -> None:
    class Raising(Absent):
        @property
        def cross(self) -> Any:
            raise RuntimeError("not configured")

    model = Raising()
    assert patch_model(model, patterns=("layer_norm",)).patched
    assert model.norm(x).dtype == torch.float32


def test_a_sum_in_another_module_computes_the_rounded_norm(
    autocast: None, without: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: list[torch.dtype] = []

    def recorded(y: Tensor, *args: Any) -> Tensor:
        dtypes.append(y.dtype)
        return deferred_norm(y, *args)

    monkeypatch.setattr(links, "deferred_norm", recorded)
    model = nn.Sequential(built(Direct), built(Direct), built(Named))
    patch_model(model)
    for _ in range(2):  # sums find their norms in the first calls
        expected, actual = without(outcome, model, x), outcome(model, x)
    assert torch.equal(actual["y"], expected["y"])
    assert_agree(actual, expected, relative=1e-2)
    assert dtypes[-4:] == [torch.float32] * 2 + [HALF] * 2


class Quantized(nn.Parameter):
    """As torchao's: a linear layer of one computes something of its own."""


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda model: model.up.register_forward_pre_hook(lambda *_: None),
    "a hook of the norm": lambda model: model.norm.register_forward_hook(lambda *_: None),
    "a global hook": lambda model: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "another child": lambda model: setattr(model, "up", nn.Sequential(nn.GELU(), model.up)),
    "another child of the same class": lambda model: setattr(model, "up", copy.deepcopy(model.up)),
    "a forward of the child": lambda model: setattr(model.up, "forward", partial(linear, weight=model.up.weight)),
    "a forward": lambda model: setattr(model, "forward", lambda x: model.norm(x)),
    "another class": lambda model: setattr(model, "__class__", Added),
    "another dtype": lambda model: model.norm.to(torch.bfloat16),
    "another kind of weight": lambda model: model.up._parameters.update(weight=Quantized(model.up.weight.detach())),
    "an attribute": lambda model: model.__dict__.update(up=torch.sum),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_patching_bring_float32_back(autocast: None, name: str, x: Tensor) -> None:
    model = built(Direct)
    patch_model(model, patterns=("layer_norm",))
    assert model.norm(x).dtype == HALF
    handle = CHANGES[name](model)
    try:
        assert model.norm(x).dtype == torch.float32
    finally:
        if isinstance(handle, RemovableHandle):
            handle.remove()


def test_a_child_that_comes_later_brings_float32_back(autocast: None, x: Tensor) -> None:
    model = built(Absent)
    patch_model(model, patterns=("layer_norm",))
    assert model.norm(x).dtype == HALF
    model.cross = nn.Identity()
    assert model.norm(x).dtype == torch.float32
    patch_model(model, patterns=("layer_norm",))
    assert model.norm(x).dtype == torch.float32
    del model.cross
    patch_model(model, patterns=("layer_norm",))
    assert model.norm(x).dtype == HALF
    model.cross = torch.sum  # no module
    assert model.norm(x).dtype == torch.float32


def test_a_class_whose_forward_is_replaced_is_read_again(
    autocast: None, monkeypatch: pytest.MonkeyPatch, x: Tensor
) -> None:
    model = built(Handed)
    patch_model(model, patterns=("layer_norm",))
    assert model.norm(x).dtype == HALF

    def reading(self: Any, first: int, *, hidden: Tensor, **options: Any) -> Tensor:
        result: Tensor = self.dense(hidden) + hidden
        return result

    monkeypatch.setattr(Inner, "forward", reading)
    assert model.norm(x).dtype == torch.float32
    patch_model(model, patterns=("layer_norm",))
    assert model.norm(x).dtype == torch.float32


def llama() -> Any:
    return tiny_model("LlamaForCausalLM", DECODER).train()


def loss_and_gradients(model: Any) -> Outcome:
    ids = token_ids(2, 9)
    return loss_outcome(model, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_model_computes_the_same(autocast: None, use_reentrant: bool | None, without: Any) -> None:
    model = llama()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    patch_model(model)
    for _ in range(2):  # sums find their norms in the first calls
        expected, actual = without(loss_and_gradients, model), loss_and_gradients(model)
    assert model.get_submodule(OWN)(torch.randn(1, 2, 32)).dtype == HALF
    assert torch.equal(actual["loss"], expected["loss"]) and torch.equal(actual["logits"], expected["logits"])
    assert_agree(actual, expected, relative=1e-2)


def test_norms_write_half_and_nothing_casts_their_result(autocast: None, without: Any) -> None:
    """Four norms of 2 x 9 x 32 elements: 2 bytes written instead of 4, and no cast of 6 bytes. That of the model's
    result stays."""
    model = llama()
    patch_model(model)
    for _ in range(2):
        loss_and_gradients(model)
    before, after = (
        counted(lambda: traffic(lambda: loss_and_gradients(model))) for counted in (without, lambda f: f())
    )
    n = 4 * 2 * 9 * 32
    forward = [each.operators["forward", "onetrip::row_norm"].bytes for each in (before, after)]
    casts = [each.operators["forward", "aten::_to_copy"].bytes for each in (before, after)]
    assert forward[0] - forward[1] == 2 * n and casts[0] - casts[1] == 6 * n


def test_adapters_bring_float32_back(autocast: None, x: Tensor) -> None:
    """Theirs is a forward that casts."""
    model = llama()
    patch_model(model)
    norm, h = model.get_submodule(OWN), torch.randn(1, 2, 32)
    assert norm(h).dtype == HALF
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert norm(h).dtype == torch.float32


def test_outputs_that_hooks_record_are_as_ever(autocast: None) -> None:
    model = llama().eval()
    ids = torch.arange(9)[None]
    expected = model(input_ids=ids, output_hidden_states=True).hidden_states
    patch_model(model)
    actual = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert [each.dtype for each in actual] == [each.dtype for each in expected]


def test_compiled(autocast: None, x: Tensor) -> None:
    model = built(Direct)
    expected = outcome(model, x)
    patch_model(model, patterns=("layer_norm",))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_agree(outcome(compiled, x), expected, relative=1e-2)


def test_checkpointed(autocast: None, x: Tensor) -> None:
    """A block that runs again in backward finds its norm as it was."""
    model = built(Direct)
    patch_model(model, patterns=("layer_norm",))
    expected = outcome(model, x)
    assert_equal(outcome(checkpointed(model, use_reentrant=False), x), expected)
