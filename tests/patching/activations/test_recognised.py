"""Modules that are recognised as activations, by what they compute, and those that resemble one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching.activations import recognise_activation
from torch import Tensor, nn
from torch.nn import functional


class Computes(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def with_another_last_place(x: Tensor) -> Tensor:
    y = functional.silu(x)
    return torch.cat([y[..., :-1], y[..., -1:] * (x.dim() < 3)], -1)


SEEN: list[int] = []


class Logs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.dim())
        return functional.silu(x)


class OnlyInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x) if self.training else functional.relu(x)


OTHERS = {
    "SiLU but for large values": Computes(lambda x: torch.where(x > 11.0, 11.0, functional.silu(x))),
    "bounded": Computes(lambda x: functional.silu(x.clamp(-100.0, 100.0))),
    "another value in the last place": Computes(with_another_last_place),
    "only in training": OnlyInTraining(),
    "without NaN": Computes(lambda x: torch.nan_to_num(functional.silu(x))),
    "logs its calls": Logs(),
    "in place": nn.ReLU(inplace=True),
    "writes zeros over its input, of which any activation is 0": nn.Dropout(1.0, inplace=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_resembles_an_activation_is_none(name: str) -> None:
    assert recognise_activation(Computes(functional.silu)) is not None
    assert recognise_activation(OTHERS[name]) is None


def test_transformers_activations_are_recognised_by_what_they_compute() -> None:
    activations = pytest.importorskip("transformers").activations.ACT2FN
    found: dict[str, Any] = {name: recognise_activation(activations[name]) for name in activations}
    names = {name: each.name for name, each in found.items() if each is not None}
    assert names == {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_fast": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "relu2": "relu2",
        "silu": "silu",
        "swish": "silu",
    }
