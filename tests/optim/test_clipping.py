"""max_grad_norm: gradients clipped by their norm within the step."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_cases import with_each_number_of_threads
from onetrip import use_backend
from onetrip.optim import Adam8bit, AdamW8bit
from optim_cases import SHAPES, give_grad, make_params, same, set_grads, snapshot
from torch import Tensor

HALF = torch.float16, torch.bfloat16


def norm_of(params: list[Tensor]) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None))


def pair(dtype: torch.dtype = torch.float32, cls: Any = AdamW8bit, **arguments: Any) -> list[tuple[list[Tensor], Any]]:
    """Equal parameters twice, each with an optimizer: the first clips within the step."""
    clipping, other = make_params(dtype=dtype), make_params(dtype=dtype)
    return [
        (clipping, cls(clipping, lr=1e-2, max_grad_norm=0.5, **arguments)),
        (other, cls(other, lr=1e-2, **arguments)),
    ]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("arguments", [{}, {"optim_bits": 32, "maximize": True}], ids=["8-bit", "32-bit-maximize"])
@pytest.mark.parametrize("cls", [AdamW8bit, Adam8bit])
@pytest.mark.promise("adam B10, B11")
def test_steps_as_after_clip_grad_norm(cls: Any, arguments: dict[str, Any], backend: str) -> None:
    (clipping, ours), (clipped, theirs) = pair(cls=cls, **arguments)
    with use_backend(backend):
        for step in range(4):
            for params in (clipping, clipped):
                set_grads(params, step)
            given = [p.grad.clone() for p in clipping]
            expected = torch.nn.utils.clip_grad_norm_(clipped, 0.5)
            ours.step()
            theirs.step()
            assert same([p.grad for p in clipping], given)
            assert ours.last_grad_norm.dtype == torch.float32 and ours.last_grad_norm.shape == ()
            torch.testing.assert_close(ours.last_grad_norm, expected)
    for p, q, before in zip(clipping, clipped, make_params(), strict=True):
        # A moment close to the border between two codes may take the other.
        torch.testing.assert_close(
            p, q, rtol=0, atol=0.02 * float((q - before).detach().abs().max()) if p.numel() else 0
        )


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_norms_are_of_float64_sums(dtype: torch.dtype) -> None:
    (params, optimizer), _ = pair(dtype)
    set_grads(params, 0)
    params[0].grad.mul_(300.0)  # a float16 norm would be infinite
    optimizer.step()
    torch.testing.assert_close(float(optimizer.last_grad_norm), norm_of(params), rtol=1e-7, atol=0)
    assert all(bool(p.isfinite().all()) for p in params)


def test_gradients_of_other_dtypes_and_parameters_without() -> None:
    params = make_params([(64, 100), (300,), (5000,), (7,)])
    params.append(torch.nn.Parameter(torch.randn(10, 6).t()))  # strided: its copy counts once
    give_grad(params[0], torch.randn(64, 100).bfloat16())
    give_grad(params[1], torch.randn(300).half())
    params[2].grad, params[4].grad = torch.randn(5000), torch.randn(6, 10)
    optimizer = AdamW8bit([{"params": params[:2]}, {"params": params[2:]}], max_grad_norm=math.inf)
    optimizer.step()
    torch.testing.assert_close(float(optimizer.last_grad_norm), norm_of(params), rtol=1e-7, atol=0)
    params[0].grad = params[1].grad = None
    optimizer.step()
    torch.testing.assert_close(float(optimizer.last_grad_norm), norm_of(params), rtol=1e-7, atol=0)


@pytest.mark.parametrize("limit", [1e4, math.inf])
def test_a_norm_below_the_limit_changes_no_bit(limit: float) -> None:
    """Under a limit of inf an infinite norm, too."""
    (params, optimizer), (others, plain) = pair()
    optimizer.max_grad_norm = limit
    for step in range(3):
        for each in (params, others):
            set_grads(each, step)
            if step == 2 and limit == math.inf:
                each[1].grad[3] = math.inf
        optimizer.step()
        plain.step()
    assert same(snapshot(optimizer), snapshot(plain)) and optimizer.last_grad_norm.isinf() == (limit == math.inf)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_propagates_as_in_torch(value: float) -> None:
    (clipping, ours), (clipped, theirs) = pair(optim_bits=32)
    for params in (clipping, clipped):
        set_grads(params, 0)
        params[1].grad[3] = value
    torch.nn.utils.clip_grad_norm_(clipped, 0.5)
    ours.step()
    theirs.step()
    torch.testing.assert_close(clipping, clipped, equal_nan=True)
    assert not ours.last_grad_norm.isfinite()


def test_with_a_grad_scaler() -> None:
    """The norm is that of the gradients as unscaled; a step that the scaler skips changes nothing."""
    (params, optimizer), (others, plain) = pair()
    plain.max_grad_norm = 0.5
    for each in (params, others):
        set_grads(each, 0)
    for p in others:
        p.grad.mul_(1024.0)
    plain.grad_scale, plain.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    optimizer.step()
    plain.step()
    assert same(optimizer.last_grad_norm, plain.last_grad_norm)
    assert same(params, others)
    before = snapshot(plain)
    others[0].grad[0, 0] = math.inf
    plain.found_inf = torch.tensor(1.0)
    plain.step()
    assert same(snapshot(plain), before)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_no_bit_depends_on_the_threads(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator).to(dtype) for n in (1_000_003, 4097, 5)]

    def norm() -> Tensor:
        params = [torch.nn.Parameter(torch.zeros(grad.shape, dtype=dtype)) for grad in grads]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer = AdamW8bit(params, max_grad_norm=1.0)
        optimizer.step()
        return optimizer.last_grad_norm

    first, *others = with_each_number_of_threads(norm)
    assert all(same(other, first) for other in others)


def test_copies_keep_it_and_checkpoints_do_not() -> None:
    (params, optimizer), _ = pair()
    set_grads(params, 0)
    optimizer.step()
    assert copy.deepcopy(optimizer).max_grad_norm == pickle.loads(pickle.dumps(optimizer)).max_grad_norm == 0.5
    other = AdamW8bit(make_params(), max_grad_norm=2.0)
    other.load_state_dict(optimizer.state_dict())
    assert other.max_grad_norm == 2.0
    assert AdamW8bit(make_params()).last_grad_norm is None


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("1", TypeError), (True, TypeError)],
)
def test_wrong_limits(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_grad_norm must be"):
        AdamW8bit(make_params(), max_grad_norm=value)
    optimizer = AdamW8bit(make_params())
    with pytest.raises(error, match="max_grad_norm must be"):
        optimizer.max_grad_norm = value


def test_parameters_of_fsdp1_are_refused() -> None:
    """Their gradients are one rank's, which nothing on them tells."""
    params = make_params(SHAPES[:1])
    params[0]._fsdp_flattened = True  # torch.distributed.fsdp._common_utils.FSDP_FLATTENED
    set_grads(params, 0)
    with pytest.raises(ValueError, match="max_grad_norm must be None for parameters of FullyShardedDataParallel"):
        AdamW8bit(params, max_grad_norm=1.0).step()


def test_the_norm_is_that_of_all_devices() -> None:
    optimizer = AdamW8bit([torch.nn.Parameter(torch.zeros(3))])
    squares = torch.tensor([9.0, 16.0], dtype=torch.float64)
    optimizer._tables = [SimpleNamespace(sum_of_squares=partial(squares.select, 0, i)) for i in range(2)]
    for grad_scale, norm in ((None, 5.0), (2.0, 2.5)):
        scale = optimizer._clipping_scale(1.0, grad_scale)
        assert optimizer.last_grad_norm == norm
        assert scale == pytest.approx((norm + 1e-6) * (grad_scale or 1.0))
