"""Sums that something beside their norm may keep, hook or write to: not one autograd node with the norm."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from outcomes import assert_agree, outcome, patched_pair
from patching_cases import WIDTH, Block, inputs, randomised, written
from torch import Tensor, nn

kept: list[Tensor] = []


def keep(h: Tensor) -> None:
    kept.append(h)


def double(h: Tensor) -> None:
    h[:, :2] *= 2.0


class Doubles(nn.Module):
    def forward(self, h: Tensor, *_: Any) -> Tensor:
        h[:, 0] *= 2.0
        return h


class Reader(Block):
    def __init__(self) -> None:
        super().__init__()
        self.doubles, self.several = Doubles(), nn.Sequential(nn.Identity(), Doubles())
        self.kept: Any = []

    def method(self, h: Tensor) -> Tensor:
        return self.doubles(h)


def reader(body: str) -> nn.Module:
    body = "h = a + self.drop(self.proj(a))\n" + textwrap.dedent(body).strip()
    return randomised(written(Reader, body, globals(), "a")())


KEEPS = {
    "a list": "states = []; states.append(h); return self.post(h), states",
    "a list of the module": "self.kept.append(h); return self.post(h), self.kept",
    "a dictionary": "return {'y': self.post(h), 'h': h}",
    "an element": "states = [None]; y = self.post(h); states[0] = h; return y, states",
    "an attribute": "y = self.post(h); self.kept = h; return y, self.kept",
    "an object": "result = dict(y=self.post(h), h=h); return result['y'], result['h']",
    "a function": "y = self.post(h); keep(h); return y, kept.pop()",
    "a tuple assignment": "residual, y = h, self.post(h); return y, residual",
    "two names": "k = residual = h; y = self.post(h); return y, residual",
    "an assignment expression": "y = self.post(h); print((k := h).shape); return y, k",
    "an annotated name": "y = self.post(h); k: Tensor = h; return y, k",
    "a comprehension": "y = self.post(h); states = [t for t in (h, y)]; return y, states",
    "a loop": """
        y = self.post(h)
        for t in (h,):
            k = t
        return y, k""",
    "a repeated list": "y = self.post(h); return y, [h] * 2",
    "a closure": "y = self.post(h); read = lambda: h; return y, read()",
    "a global name": "global last; y = self.post(h); last = h; return y, globals()['last']",
    "a set": "seen = set(); y = self.post(h); seen.add(h); return y, seen.pop()",
    "another name": "residual = h; y = self.post(h); self.kept = residual; return y, self.kept",
}


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in KEEPS.items()])
def test_the_gradient_of_a_sum_that_is_kept_is_whole(body: str) -> None:
    block, original, _ = patched_pair(reader(body))
    for _ in range(3):  # later calls are linked
        found = []
        for each in (block, original):
            each.kept = []
            result = each(*inputs())
            y, h = result.values() if isinstance(result, dict) else result
            h = h[0] if isinstance(h, list) else h
            found.append(torch.autograd.grad((y * torch.arange(WIDTH)).sum(), h))
        assert_agree(*found)


@pytest.mark.parametrize(
    "body",
    [
        "h.register_hook(lambda grad: 0.5 * grad); return self.post(h)",
        "y = self.post(h); residual = h; residual.register_hook(lambda grad: 0.5 * grad); return y",
    ],
)
def test_a_hook_on_a_sum_sees_the_gradient_of_its_norm(body: str) -> None:
    block, original, _ = patched_pair(reader(body))
    for _ in range(3):
        assert_agree(outcome(block, *inputs()), outcome(original, *inputs()))


WRITES = {
    "a function": "double(h); return self.post(h)",
    "a function of a slice": "double(h[:, :]); return self.post(h)",
    "a child": "self.doubles(h); return self.post(h)",
    "a child of two arguments": "b = self.doubles(h, 1); return self.post(h) * b",
    "a child of another name": "residual = h; b = self.doubles(residual); return self.post(h) * b",
    "a child in a branch": """
        if h is not None:
            b = self.doubles(h)
        return self.post(h) * b""",
    "a child of a child": "b = self.several(h); return self.post(h) * b",
    "a method": "b = self.method(h); return self.post(h) * b",
    "a function in place, by position": "b = torch.nn.functional.relu(h, True); return self.post(h) * b",
    "no gradients": "torch.set_grad_enabled(False); b = self.post(h); torch.set_grad_enabled(True); return h * b",
}


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in WRITES.items()])
def test_a_norm_sees_what_was_written_to_its_sum(body: str) -> None:
    block, original, _ = patched_pair(reader(body))
    for _ in range(3):
        assert_agree(outcome(block, *inputs()), outcome(original, *inputs()))
        with torch.no_grad():
            torch.testing.assert_close(block(*inputs()), original(*inputs()), rtol=1e-4, atol=1e-5)
