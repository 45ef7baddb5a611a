"""What a module computes, with every gradient, and how that of a patched one compares with the unpatched one's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from onetrip.patching import PatchReport, patch_model
from torch import Tensor, nn

Outcome = dict[str, Tensor]
"""Outputs and gradients by name."""

compiles_transformers = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="transformers 5 does not compile beside torch 2.6"
)


def patched_pair(module: nn.Module, **options: Any) -> tuple[Any, Any, PatchReport]:
    """(patched, unpatched, report) of a module and its copy."""
    original = copy.deepcopy(module)
    return module, original, patch_model(module, **options)


def outcome(model: Any, *given: Tensor, is_leaf: bool = True, **options: Any) -> Outcome:
    """The output, or the first one, and every gradient. is_leaf: whether the model reads the leaves of the graph."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    model.zero_grad()
    y = model(*(leaves if is_leaf else [2.0 * leaf for leaf in leaves]), **options)
    y = y if isinstance(y, Tensor) else y[0]
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y))
    gradients = {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)} | parameter_gradients(model)
    return {"y": y.detach()} | {name: grad for name, grad in gradients.items() if grad is not None}


def loss_outcome(model: Any, inputs: dict[str, Any]) -> Outcome:
    """Loss, logits and every gradient of a model of transformers; hidden states where it returns them."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    found = {"loss": output.loss.detach(), "logits": output.logits.detach()}
    found |= {f"hidden state {i}": h.detach() for i, h in enumerate(output.get("hidden_states") or ())}
    return found | parameter_gradients(model)


def parameter_gradients(model: nn.Module) -> Outcome:
    """Copies of the gradients there are, by the parameters' names before torch.compile."""
    parameters = model.named_parameters()
    return {name.replace("_orig_mod.", ""): p.grad.clone() for name, p in parameters if p.grad is not None}


def assert_agree(ours: Outcome | Sequence[Tensor], theirs: Outcome | Sequence[Tensor], relative: float = 1e-5) -> None:
    """Every tensor within `relative` of the largest element of its counterpart, and not all of them zeros."""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        ours, theirs = ({str(i): tensor for i, tensor in enumerate(each)} for each in (ours, theirs))
    assert ours.keys() == theirs.keys() and any(tensor.any() for tensor in theirs.values())
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        error, largest = (float(each.detach().abs().max()) for each in (ours[name] - tensor, tensor))
        assert error <= relative * largest + 1e-6, f"{name}: {error:.2e} of {largest:.2e}"


def assert_equal(ours: Outcome, theirs: Outcome) -> None:
    """The same values."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def penalty_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """In float64, of the sum of the squares of the gradient of the input."""
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(2.0 * leaf).square().sum(), leaf, create_graph=True)
    parameters = [each for each in model.parameters() if each.requires_grad]
    return [each.double() for each in torch.autograd.grad(gradient.square().sum(), parameters)]


def patch_and_compare(model: Any, run: Callable[[], Outcome], relative: float = 1e-5, **options: Any) -> PatchReport:
    """Patches the model: run() gives what it gave before, within `relative`; 0: the same values."""
    expected = run()
    report = patch_model(model, **options)
    found = run()
    if relative:
        assert_agree(found, expected, relative)
    else:
        assert_equal(found, expected)
    return report


def assert_compiles(model: nn.Module, *given: Any, compute: Callable[..., Any] = outcome, **options: Any) -> None:
    """The model, patched and compiled without a break in its graph, computes what it computes unpatched."""
    expected = compute(model, *given)
    patch_model(model, **options)
    torch._dynamo.reset()
    assert_agree(compute(torch.compile(model, backend="aot_eager", fullgraph=True), *given), expected)


def assert_follows_transforms(model: nn.Module, x: Tensor, **options: Any) -> None:
    """The model, patched, has the values that it has unpatched under vmap of grad, and under torch.jit.trace."""

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

    def gradients() -> Any:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)

    expected = gradients()
    patch_model(model, **options)
    assert_equal(gradients(), expected)
    traced: Any = torch.jit.trace(model, x)
    assert torch.equal(traced(2 * x), model(2 * x))


def assert_obeys(change: Callable[[Any], Any], model: Any, *given: Any, compute: Any = outcome, **options: Any) -> Any:
    """After a change the patched model computes what the unpatched one does after it. Returns the report."""
    model, original, report = patched_pair(model, **options)
    for each in (model, original):
        torch.manual_seed(0)
        change(each)
    assert_agree(compute(model, *given), compute(original, *given), 1e-4)
    return report
