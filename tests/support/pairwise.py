"""Parametrises a test by few cases in which every pair of choices meets."""

from __future__ import annotations

import itertools
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
    places = list(itertools.combinations(range(len(axes)), 2))

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, j, row[i], row[j]) for i, j in places}

    candidates = {row: pairs(row) for row in itertools.product(*(range(len(axis)) for axis in axes))}
    missing = set().union(*candidates.values())
    used: Counter[tuple[int, int, int, int]] = Counter()
    rows = []
    while missing:
        # The row with most new pairs; among equals, that whose pairs were used least: all choices come about equally
        # often.
        best = max(candidates, key=lambda row: (len(candidates[row] & missing), -sum(used[p] for p in candidates[row])))
        used.update(candidates[best])
        missing -= candidates.pop(best)
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
