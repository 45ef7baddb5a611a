"""Rows of tokens to the order of experts, and back: out[t] = sum_j weights[t, j] * y[places[t, j]].

A mixture of experts (Shazeer et al. 2017) sends each token to k experts, whose matrix products read rows sorted by
expert: row places[t, j] of y is token t's j-th. places names every row once, so that each map has a gather as gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def combine(y: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y: [n_tokens * k, n_cols]; places, weights: [n_tokens, k] -> [n_tokens, n_cols] of dtype.

    Products and sums are of accumulator_dtype, in the order of j, rounded once; differentiable.
    """
    total: Tensor | None = None
    for j in range(places.shape[1]):
        rows = _wide(y.index_select(0, places[:, j]))
        if weights is not None:
            rows = rows * _wide(weights[:, j : j + 1])
        total = rows if total is None else total + rows
    assert total is not None
    return total.to(dtype)


def combine_backward(
    dout: Tensor, y: Tensor, places: Tensor, weights: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """(dy, dweights), of the dtypes of y and weights: dy[places[t, j]] = weights[t, j] * dout[t], and dweights[t, j] =
    sum(dout[t] * y[places[t, j]])."""
    wants_y, wants_weights = wants
    dy = dout.new_empty(y.shape, dtype=y.dtype) if wants_y else None
    dweights = dout.new_empty(weights.shape, dtype=weights.dtype) if wants_weights else None
    dout = _wide(dout)
    for j in range(places.shape[1]):
        if dweights is not None:
            dweights[:, j] = (dout * _wide(y.index_select(0, places[:, j]))).sum(1)
        if dy is not None:
            dy[places[:, j]] = (dout * _wide(weights[:, j : j + 1])).to(y.dtype)
    return dy, dweights


def dispatch(x: Tensor, places: Tensor) -> Tensor:
    """x: [n_tokens, n_cols] -> [n_tokens * k, n_cols], whose row places[t, j] is x[t]; differentiable."""
    flat = places.reshape(-1)
    positions = torch.arange(flat.shape[0], device=flat.device)
    return x.index_select(0, torch.zeros_like(flat).scatter(0, flat, positions) // places.shape[1])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
