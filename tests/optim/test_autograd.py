"""What autograd hands over and keeps: gradients of every make, versions of parameters, inference mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from onetrip import use_backend
from onetrip.optim import AdamW8bit
from optim_cases import make_params, same, set_grads, snapshot, train, trained
from torch import Tensor

pytestmark = pytest.mark.promise("adam gradients")

STEPPED = pytest.mark.parametrize("stepped", [False, True], ids=["first-step", "later-step"])


def _imaginary(values: Tensor) -> Tensor:
    """A lazy negation, strided but where it has one element."""
    return torch.complex(torch.zeros_like(values), -values).conj().imag


MAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros-without-memory": lambda values: torch._efficientzerotensor(values.shape, dtype=values.dtype),
    "negated": _imaginary,
    "expanded": lambda values: torch.full((), 0.5).expand(values.shape),
    "strided": lambda values: torch.stack((values, values), dim=-1)[..., 0],
    "inference": lambda values: _in_inference_mode(values),
    "requires-grad": lambda values: values.clone().requires_grad_(),
}


def _in_inference_mode(values: Tensor) -> Tensor:
    with torch.inference_mode():
        return values.clone()


@STEPPED
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("make", MAKES)
def test_a_gradient_of_any_make_is_its_values(make, backend, stepped):
    """The first has a null address: to read there ends the process."""
    ours, plain = (trained(2) if stepped else AdamW8bit(make_params()) for _ in range(2))
    for optimizer in (ours, plain):
        params = optimizer.param_groups[0]["params"]
        set_grads(params, 7)
        for p in params[::2] if make == "zeros-without-memory" else params:
            grad = MAKES[make](p.grad)
            p.grad = grad if optimizer is ours else torch.empty(p.shape).copy_(grad.detach())
    with use_backend(backend):
        for _ in range(2):
            ours.step()
            plain.step()
    assert same(snapshot(ours), snapshot(plain))


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_backward_through_what_a_step_has_overwritten_raises(layout):
    """As with torch.optim: the saved parameter is no longer the one that the loss was computed from."""
    for cls in (torch.optim.AdamW, AdamW8bit):
        p = torch.nn.Parameter(torch.randn(64, 100) if layout == "contiguous" else torch.randn(100, 64).t())
        still = torch.nn.Parameter(torch.randn(5000))
        optimizer = cls([p, still])
        for _ in range(2):
            loss, other = (p * p).sum(), (still * still).sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            other.backward()  # had no gradient, was not stepped
            still.grad = p.grad = None


def test_a_step_that_raises_leaves_versions_alone():
    optimizer = trained()
    params = optimizer.param_groups[0]["params"]
    before = [p._version for p in params]
    params[3].grad = params[3].grad.to_sparse()
    with pytest.raises(RuntimeError, match="must be dense"):
        optimizer.step()
    assert [p._version for p in params] == before


@STEPPED
def test_steps_under_inference_mode_and_outside(stepped):
    """States made under it are ordinary tensors: a step outside may write them."""
    ours, plain = (trained(2) if stepped else AdamW8bit(make_params()) for _ in range(2))
    torch.manual_seed(0)
    strided = [torch.nn.Parameter(torch.ones(8, 600).t()) for _ in range(2)]
    for optimizer, p in zip((ours, plain), strided, strict=True):
        optimizer.add_param_group({"params": p})
    with torch.inference_mode():
        train(ours, range(2, 4))
    train(plain, range(2, 4))
    assert not any(value.is_inference() for state in ours.state.values() for value in state.values())
    with use_backend("reference"):
        train(ours, range(4, 6))
        train(plain, range(4, 6))
    assert same(snapshot(ours), snapshot(plain))


def test_parameters_made_under_inference_mode():
    """They have no version to count."""
    with torch.inference_mode():
        params = make_params()
    optimizer, plain = AdamW8bit(params), AdamW8bit(make_params())
    for step in range(2):
        with torch.inference_mode():
            train(optimizer, [step])
        train(plain, [step])
    assert same([p.detach() for p in params], snapshot(plain)[0])
