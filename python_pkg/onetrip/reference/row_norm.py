"""z = residual + dropout(x + bias);  y = round_to(n_dtype, normalise(z)) * (weight + weight_offset) + norm_bias.

LayerNorm: Ba, Kiros & Hinton 2016. RMSNorm: Zhang & Sennrich 2019. Rows are the last dimension; sums are float32
(float64 for float64). The values of x that dropout drops are exactly zero, whatever they were.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from . import accumulator_dtype
from .philox import Rng, dropout

NORM_NONE, NORM_LAYER, NORM_RMS = 0, 1, 2  # as enum Norm in csrc/launch.h


class Operands(NamedTuple):
    """What forward reads. Here and in Triton [n_rows, n_cols]; in ops of any rank, rows are the last dimension."""

    x: Tensor
    residual: Tensor | None = None
    """Shaped like x."""
    bias: Tensor | None = None
    """[n_cols], as weight and norm_bias."""
    weight: Tensor | None = None
    norm_bias: Tensor | None = None


OperandTuple = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Operands, or the same as a plain tuple: eager calls save the 3% of their time that making a NamedTuple takes."""


class Outputs(NamedTuple):
    """What forward writes; None: the plan does not ask for it."""

    y: Tensor | None = None
    z: Tensor | None = None
    mean: Tensor | None = None
    """[n_rows], as rstd."""
    rstd: Tensor | None = None


OutputTuple = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class BackwardOperands(NamedTuple):
    """What backward reads. One of dy and dz is there."""

    dy: Tensor | None = None
    """Gradient of y; None where only z was used."""
    dz: Tensor | None = None
    """Gradient of the returned z."""
    z: Tensor | None = None
    """As forward stored it, as mean and rstd."""
    mean: Tensor | None = None
    rstd: Tensor | None = None
    weight: Tensor | None = None

    @property
    def given(self) -> Tensor:
        """dy or dz: it has the shape of x."""
        given = self.dz if self.dy is None else self.dy
        assert given is not None
        return given


class Gradients(NamedTuple):
    """What backward writes; None: not wanted."""

    dx: Tensor | None = None
    dresidual: Tensor | None = None
    dbias: Tensor | None = None
    dweight: Tensor | None = None
    dnorm_bias: Tensor | None = None


class Dtypes(NamedTuple):
    """Dtypes of the operands, or of the gradients that are wanted; None: not there, not wanted."""

    x: torch.dtype | None = None
    residual: torch.dtype | None = None
    bias: torch.dtype | None = None
    weight: torch.dtype | None = None
    norm_bias: torch.dtype | None = None


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

    @property
    def has_mean(self) -> bool:
        """Whether forward stores the rows' means."""
        return self.store_stats and self.norm == NORM_LAYER and not self.center_z


def outputs_of(plan: RowNormPlan, x: Tensor, make: Callable[..., Tensor]) -> Outputs:
    """The tensors that forward writes for this x. make: x.new_empty, or anything that is called like it."""
    n_rows = prod(x.shape[:-1])  # under torch.compile torch.Size.numel would make every number of rows its own shape
    acc = accumulator_dtype(plan.z_dtype)
    return Outputs(
        make(x.shape, dtype=plan.y_dtype) if plan.norm != NORM_NONE else None,
        make(x.shape, dtype=plan.z_dtype) if plan.store_z else None,
        make((n_rows,), dtype=acc) if plan.has_mean else None,
        make((n_rows,), dtype=acc) if plan.store_stats else None,
    )


def gradients_of(wanted: Dtypes, given: Tensor, make: Callable[..., Tensor]) -> Gradients:
    """The tensors that backward writes. given: dy or dz. make: given.new_empty, or anything that is called like it."""
    shape, n_cols = given.shape, given.shape[-1:]
    x, residual, bias, weight, norm_bias = wanted
    return Gradients(
        None if x is None else make(shape, dtype=x),
        None if residual is None else make(shape, dtype=residual),
        None if bias is None else make(n_cols, dtype=bias),
        None if weight is None else make(n_cols, dtype=weight),
        None if norm_bias is None else make(n_cols, dtype=norm_bias),
    )


def forward(operands: Operands, rng: Rng | None, plan: RowNormPlan) -> Outputs:
    x, residual, bias, weight, norm_bias = operands
    acc = accumulator_dtype(plan.z_dtype)
    z = x.to(acc)
    if bias is not None:
        z = z + bias.to(acc)
    z = dropout(z, plan.dropout_p, rng)
    if residual is not None:
        z = z + residual.to(acc)
    z = z.to(plan.z_dtype)  # the one rounding: what is normalised is what is stored
    if plan.norm == NORM_NONE:
        return Outputs(z=z)
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
    return Outputs(y.to(plan.y_dtype), stored, mean if plan.has_mean else None, rstd if plan.store_stats else None)


def backward(operands: BackwardOperands, rng: Rng | None, plan: RowNormPlan, wanted: Dtypes) -> Gradients:
    dy, dz, z, mean, rstd, weight = operands
    acc = accumulator_dtype(plan.z_dtype)
    g = None if dz is None else dz.to(acc)
    dweight = dnorm_bias = None
    if dy is not None:
        assert z is not None and rstd is not None
        centred = z.to(acc) if mean is None else z.to(acc) - mean[:, None]
        normalised = centred * rstd[:, None]
        dy = dy.to(acc)
        if wanted.weight is not None:
            dweight = (dy * normalised).sum(0).to(wanted.weight)
        if wanted.norm_bias is not None:
            dnorm_bias = dy.sum(0).to(wanted.norm_bias)
        wdy = dy if weight is None else dy * (weight.to(acc) + plan.weight_offset)
        through = wdy - normalised * (wdy * normalised).mean(dim=1, keepdim=True)
        if plan.norm == NORM_LAYER:
            through = through - wdy.mean(dim=1, keepdim=True)
        through = through * rstd[:, None]
        g = through if g is None else g + through
    assert g is not None
    dx = dresidual = dbias = None
    if wanted.residual is not None:
        dresidual = g.to(wanted.residual)
    if wanted.x is not None or wanted.bias is not None:
        g = dropout(g, plan.dropout_p, rng)
        dx = None if wanted.x is None else g.to(wanted.x)
        dbias = None if wanted.bias is None else g.sum(0).to(wanted.bias)
    return Gradients(dx, dresidual, dbias, dweight, dnorm_bias)
