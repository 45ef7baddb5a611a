"""z = residual + dropout(x + bias);  y = round_to(n_dtype, normalise(z)) * (weight + weight_offset) + norm_bias.

LayerNorm: Ba, Kiros & Hinton 2016. RMSNorm: Zhang & Sennrich 2019. Rows are the last dimension; sums are float32
(float64 for float64). The values of x that dropout drops are exactly zero, whatever they were.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .philox import Rng, dropout_scale, keep_mask

NORM_NONE, NORM_LAYER, NORM_RMS = 0, 1, 2  # as enum Norm in csrc/launch.h


class RowNormPlan(NamedTuple):
    """Everything about one call that is not a tensor."""

    norm: int
    eps: float
    weight_offset: float
    dropout_p: float
    z_dtype: torch.dtype
    n_dtype: torch.dtype
    """The normalised value is rounded to it before the weight; float32: no rounding."""
    y_dtype: torch.dtype
    store_z: bool
    center_z: bool
    """Store z - mean instead of z: backward then needs no mean."""
    store_stats: bool


GradDtypes = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None, torch.dtype | None, torch.dtype | None]
"""Dtypes of the gradients of x, residual, bias, weight, norm_bias; None: not wanted."""

Forward = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Backward = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dropped(values: Tensor, rng: Rng | None, plan: RowNormPlan) -> Tensor:
    if plan.dropout_p == 0.0:
        return values
    assert rng is not None
    keep = keep_mask(tuple(values.shape), plan.dropout_p, rng, values.device)
    return torch.where(keep, values * dropout_scale(plan.dropout_p), 0.0)


def forward(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
) -> Forward:
    """Returns (y, z, mean, rstd); what the plan does not ask for is None.

    x, residual: [n_rows, n_cols]. bias, weight, norm_bias: [n_cols]. y, z: [n_rows, n_cols]. mean, rstd: [n_rows].
    """
    acc = _accumulator(plan.z_dtype)
    z = x.to(acc)
    if bias is not None:
        z = z + bias.to(acc)
    z = _dropped(z, rng, plan)
    if residual is not None:
        z = z + residual.to(acc)
    z = z.to(plan.z_dtype)  # the one rounding: what is normalised is what is stored
    if plan.norm == NORM_NONE:
        return None, z, None, None
    values = z.to(acc)
    mean = values.mean(dim=1) if plan.norm == NORM_LAYER else None
    centred = values if mean is None else values - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(dim=1) + plan.eps)
    normalised = centred * rstd[:, None]
    if plan.n_dtype != torch.float32:
        normalised = normalised.to(plan.n_dtype).to(acc)
    y = normalised
    if weight is not None:
        y = y * (weight.to(acc) + plan.weight_offset)
    if norm_bias is not None:
        y = y + norm_bias.to(acc)
    stored = None if not plan.store_z else centred.to(plan.z_dtype) if plan.center_z else z
    return (
        y.to(plan.y_dtype),
        stored,
        mean if plan.store_stats and not plan.center_z else None,
        rstd if plan.store_stats else None,
    )


def backward(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
    grad_dtypes: GradDtypes,
) -> Backward:
    """Gradients of x, residual, bias, weight, norm_bias, each in its grad_dtypes entry; None where not wanted.

    dy: gradient of y, None where only z was used. dz: gradient of the returned z. z, mean, rstd: as forward stored
    them.
    """
    x_dtype, residual_dtype, bias_dtype, weight_dtype, norm_bias_dtype = grad_dtypes
    acc = _accumulator(plan.z_dtype)
    g = None if dz is None else dz.to(acc)
    dweight = dnorm_bias = None
    if dy is not None:
        assert z is not None and rstd is not None
        centred = z.to(acc) if mean is None else z.to(acc) - mean[:, None]
        normalised = centred * rstd[:, None]
        dy = dy.to(acc)
        if weight_dtype is not None:
            dweight = (dy * normalised).sum(0).to(weight_dtype)
        if norm_bias_dtype is not None:
            dnorm_bias = dy.sum(0).to(norm_bias_dtype)
        wdy = dy if weight is None else dy * (weight.to(acc) + plan.weight_offset)
        through = wdy - normalised * (wdy * normalised).mean(dim=1, keepdim=True)
        if plan.norm == NORM_LAYER:
            through = through - wdy.mean(dim=1, keepdim=True)
        through = through * rstd[:, None]
        g = through if g is None else g + through
    assert g is not None
    dx = dresidual = dbias = None
    if residual_dtype is not None:
        dresidual = g.to(residual_dtype)
    if x_dtype is not None or bias_dtype is not None:
        g = _dropped(g, rng, plan)
        dx = None if x_dtype is None else g.to(x_dtype)
        dbias = None if bias_dtype is None else g.sum(0).to(bias_dtype)
    return dx, dresidual, dbias, dweight, dnorm_bias
