"""Parameters, gradients and comparisons for the tests of onetrip.optim."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from onetrip.optim import AdamW8bit
from tolerances import bits
from torch import Tensor

SHAPES = ((64, 100), (4096,), (129,), (), (0, 3), (2, 3, 5))
"""8-bit states (by default) for the first two; a last block of 128, and none that is whole."""


def make_params(shapes: Iterable[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params: Iterable[Tensor], step: int) -> None:
    """The same for the same step number."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def give_grad(p: Tensor, grad: Tensor) -> None:
    """A gradient of any dtype: before torch had grad_dtype, an assignment took none but the parameter's."""
    if hasattr(p, "grad_dtype"):
        p.grad_dtype = None
        p.grad = grad
    else:
        data, p.data = p.data, torch.empty_like(grad)
        p.grad = grad
        p.data = data


def train(optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        set_grads((p for group in optimizer.param_groups for p in group["params"]), step)
        optimizer.step()


def trained(steps: int = 3, **arguments: Any) -> AdamW8bit:
    optimizer = AdamW8bit(make_params(), **arguments)
    train(optimizer, range(steps))
    return optimizer


def steps_taken(entry: dict[str, Tensor]) -> float:
    """By a parameter's state, of 8 or 32 bits."""
    return float(entry["n_steps"] if "n_steps" in entry else entry["step"])


def bits_of(entry: dict[str, Tensor]) -> int:
    """Bits of a parameter's state: 8 or 32."""
    moment = entry["exp_avg_codes"] if "exp_avg_codes" in entry else entry["exp_avg"]
    return 8 * moment.element_size()


def snapshot(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Copies of the parameters, and of the whole state."""
    params = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return params, copy.deepcopy(optimizer.state_dict())


class Rows(torch.utils.data.Dataset):
    """Rows of tokens, for Trainers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 200, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


@contextmanager
def rejected(optimizer: torch.optim.Optimizer, error: type[Exception], message: str) -> Iterator[None]:
    """What happens here raises the error, and changes neither parameters nor states."""
    before = snapshot(optimizer)
    with pytest.raises(error, match=message):
        yield
    assert same(snapshot(optimizer), before)


def same(a: Any, b: Any) -> bool:
    """Bit for bit, dtypes and containers too."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and bits(a).equal(bits(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
