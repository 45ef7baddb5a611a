"""Parametrises a test by few cases in which every pair of choices meets."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch


def short(value: Any) -> str:
    """A word for the id of a test: f32 of torch.float32."""
    names = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    if isinstance(value, torch.dtype):
        return names.get(value, "bool")
    return value.__name__ if isinstance(value, Callable) else str(value).replace(" ", "+")


def covering(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows of one choice from each axis: every two choices of two axes stand together in one of them."""
    choices = [(axis, i) for axis, values in enumerate(axes) for i in range(len(values))]
    bit = {pair: 1 << n for n, pair in enumerate(itertools.combinations(choices, 2))}

    candidates = {
        row: [bit[pair] for pair in itertools.combinations(enumerate(row), 2)]
        for row in itertools.product(*(range(len(axis)) for axis in axes))
    }
    masks = {row: sum(bits) for row, bits in candidates.items()}
    missing = functools.reduce(operator.or_, masks.values())
    used: Counter[int] = Counter()
    rows = []
    while missing:
        # The row with most new pairs; among equals, that whose pairs were used least: all choices come about equally
        # often.
        new = {row: (mask & missing).bit_count() for row, mask in masks.items()}
        most = max(new.values())
        best = min((row for row, n in new.items() if n == most), key=lambda row: sum(used[b] for b in candidates[row]))
        used.update(candidates[best])
        missing &= ~masks.pop(best)
        rows.append(tuple(axis[i] for axis, i in zip(axes, best, strict=True)))
    return rows


def pairwise(indirect: Sequence[str] = (), **axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """axes: the values of each parameter, or {id: value}. indirect: the parameters that are fixtures."""
    named = [
        list(axis.items() if isinstance(axis, Mapping) else ((short(v), v) for v in axis)) for axis in axes.values()
    ]
    rows = covering(named)
    cases = [pytest.param(*(value for _, value in row), id="-".join(name for name, _ in row)) for row in rows]
    return pytest.mark.parametrize(list(axes), cases, indirect=list(indirect))
