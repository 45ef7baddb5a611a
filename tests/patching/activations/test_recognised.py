"""Modules that are recognised as activations, by what they compute, and those that resemble one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching.activations import recognise_activation
from torch import Tensor, nn
from torch.nn import functional


class Leaky(nn.Module):
    """SiLU but for large values."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 11.0, 11.0, functional.silu(x))


class Bounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x.clamp(-100.0, 100.0))


class Positional(nn.Module):
    """SiLU, with another value in the last place."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(x)
        return torch.cat([y[..., :-1], y[..., -1:] * (x.dim() < 3)], -1)


class OnlyInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x) if self.training else functional.relu(x)


class Dropped(nn.Dropout):
    """Writes zeros over its input, of which any activation is 0."""

    def __init__(self) -> None:
        super().__init__(1.0, inplace=True)


@pytest.mark.parametrize("make", [Leaky, Bounded, Positional, OnlyInTraining, lambda: nn.ReLU(inplace=True), Dropped])
def test_what_resembles_an_activation_is_none(make: Callable[[], nn.Module]) -> None:
    assert recognise_activation(make()) is None


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
        "relu": "relu",
        "relu2": "relu2",
        "silu": "silu",
        "swish": "silu",
    }
