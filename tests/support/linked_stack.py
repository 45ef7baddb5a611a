"""A stack of pre-norm layers whose sums are linked to norms, for the tests of links."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from onetrip.patching import links, patch_model
from patching_cases import WIDTH, LlamaLike, inputs, randomised
from torch import Tensor, nn


class Layer(nn.Module):
    """As an OPT layer: the norm of its first sum stands in a branch, that of its second in the next layer."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), LlamaLike()
        self.mix, self.dense = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(p)
        self.norm_first = True

    def forward(self, h: Tensor, scale: float = 1.0) -> Tensor:
        residual = h
        h = self.first(h)
        h = self.mix(h) * scale
        h = residual + h
        residual = h
        if self.norm_first:
            h = self.second(h)
        h = self.dense(h)
        h = self.drop(h)
        return residual + h


class Stack(nn.Module):
    def __init__(self, n_layers: int = 3, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(p) for _ in range(n_layers)])
        self.final = nn.LayerNorm(WIDTH)
        self.between: Callable[[Tensor], Tensor] | None = None
        self.call: Callable[..., Any] = lambda layer, h: layer(h)

    def forward(self, h: Tensor) -> Tensor:
        return self.final(self.states(h)[-1])

    def states(self, h: Tensor) -> list[Tensor]:
        states = [h]
        for layer in self.layers:
            h = self.call(layer, h)
            if self.between is not None:
                h = self.between(h)
            states.append(h)
        return states


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and every gradient."""
    x = x.clone().requires_grad_()
    y = model(x)
    model.zero_grad()
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y))
    return [y.detach(), *(each.grad.clone() for each in (x, *model.parameters()))]


def pair(**options: Any) -> tuple[Stack, Stack]:
    """A model and the same patched, its links made."""
    original = randomised(Stack(**options))
    model = copy.deepcopy(original)
    patch_model(model)
    step(model, *inputs())
    return original, model  # type: ignore[return-value]


def n_links(model: nn.Module) -> int:
    ids = {id(module) for module in model.modules()}
    return sum(site.link is not None for (owner, _), site in links._sites.items() if owner in ids)


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
