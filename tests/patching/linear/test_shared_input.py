"""Linear layers that read one tensor: gradients summed by their products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import outcomes
import pytest
import torch
from onetrip.patching import calls, patch_model, unpatch_model
from outcomes import assert_agree, assert_compiles, assert_equal, assert_obeys, patch_and_compare, penalty_gradients
from patching_cases import WIDTH, Projections, inputs, randomised, written
from torch import Tensor, nn


class Attention(nn.Module):
    """Three layers of one input, and one of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True, True))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        y = torch.softmax(q @ self.k(x).transpose(-1, -2), dim=-1) @ self.v(x)
        return self.out(y)


CHOSEN = """
    is_cross = other is not None
    q = self.q(x)
    current = other if is_cross else x
    if is_cross:
        k = self.k(current)
        v = self.v(current)
    else:
        k = self.k(current)
        v = self.v(current)
    return self.out(torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v)"""
Chosen = written(Attention, CHOSEN, globals(), "x, other=None")
"""As BART's: another name for the input."""
FUSED = {
    "attention": (Attention, 3),
    "chosen": (Chosen, 3),
    # The first layer's result, and the last one's, are not part of the loss.
    "unused": (written(Attention, "self.q(x); y = self.out(self.k(x)); self.v(x); return y", globals()), 3),
    # Results are written to, as GPT-NeoX scales its queries.
    "in place": (
        written(Attention, "q = self.q(x).mul_(0.5); k = self.k(x).add_(1.0); return self.out(q * k)", globals()), 2
    ),
}  # fmt: skip


outcome = functools.partial(outcomes.outcome, is_leaf=False)


def test_an_input_that_was_scaled_between_two_layers_has_its_own_gradient() -> None:
    """In place, as autograd allows where no weight's gradient needs the input."""
    body = "x = 2 * x; q = self.q(x); x.mul_(3.0); return self.out(q * self.k(x) * self.v(x))"
    model, (x,) = randomised(written(Attention, body, globals())()), inputs()
    for layer in (model.q, model.k, model.v):
        layer.requires_grad_(False)
    expected = outcome(model, x)
    assert [site.pattern for site in patch_model(model).patched] == ["shared_input"]
    assert_agree(outcome(model, x), expected)


@pytest.mark.parametrize("name", FUSED)
def test_gradients_are_the_unpatched_model_s(name: str) -> None:
    make, n_calls = FUSED[name]
    model, (x,) = randomised(make()), inputs()
    expected = outcome(model, x)
    report = patch_model(model)
    assert [site.pattern for site in report.patched] == ["shared_input"]
    ours = outcome(model, x)
    assert torch.equal(ours["y"], expected["y"])
    assert_agree(ours, expected)
    assert report.calls() == {"": (n_calls, 0)}
    unpatch_model(model)
    assert_equal(outcome(model, x), expected)


def test_layers_of_two_tensors_in_one_forward() -> None:
    model, (x,) = randomised(Chosen()), inputs()
    patch_and_compare(model, lambda: outcome(model, x, x.flip(0)))


def test_a_tensor_written_to_between_two_layers_raises_as_ever() -> None:
    body = "x = 2 * x; q = self.q(x); with torch.no_grad(): x += 0.0; return self.out(q * self.k(x) + self.v(x))"
    model, (x,) = randomised(written(Attention, body, globals())()), inputs()
    patch_model(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outcome(model, x)


def test_an_input_of_another_dtype_raises_as_ever() -> None:
    model, (x,) = randomised(Projections()), inputs()
    assert patch_model(model).patched
    with pytest.raises(RuntimeError, match="dtype"):
        outcome(model, x.bfloat16())


def test_small_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x,) = randomised(Attention()), inputs()
    expected = outcome(model, x)
    report = patch_model(model)
    monkeypatch.setattr(calls, "SMALLEST", x.numel() + 1)
    assert_equal(outcome(model, x), expected)
    assert report.calls() == {"": (0, 0)}


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hooked": lambda model: model.k.register_forward_hook(lambda module, args, y: 2.0 * y),
    "subclassed": lambda model: setattr(model, "k", Doubled(WIDTH, WIDTH, bias=False)),
    "frozen": lambda model: [each.requires_grad_(False) for each in (model.q.weight, model.v.bias)],
}


@pytest.mark.parametrize("name", CHANGES)
def test_layers_changed_after_patching(name: str) -> None:
    assert_obeys(CHANGES[name], randomised(Attention()), *inputs(), compute=outcome)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    """The input is cast once; results have the bits of the unpatched model."""
    model, (x,) = randomised(Attention()), inputs()

    def run() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return outcome(model, x.to(dtype))

    expected = run()
    patch_model(model)
    ours = run()
    assert torch.equal(ours["y"], expected["y"])
    assert_agree(ours, expected, 3e-2)


def test_the_input_is_cast_once_where_saved_tensors_are_packed(x: Tensor) -> None:
    model = randomised(Attention())
    patch_model(model)
    cast = (2.0 * x).bfloat16()
    packed: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == cast.dtype and tensor.shape == cast.shape and torch.equal(tensor, cast):
            packed[tensor.data_ptr()] = tensor.detach()
        return tensor.clone()

    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(2.0 * leaf)
    assert len(packed) == 1
    y.sum().backward()


def test_second_derivatives() -> None:
    model, (x,) = randomised(Attention()).double(), inputs()
    expected = penalty_gradients(model, x.double())
    patch_model(model.float())
    assert_agree(penalty_gradients(model, x), expected, relative=1e-4)


@pytest.mark.parametrize("make", [Attention, Chosen])
def test_compiles_without_a_break(make: type[Attention]) -> None:
    assert_compiles(randomised(make()), *inputs(), compute=outcome)
