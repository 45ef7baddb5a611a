"""How a parameter of 16 bits keeps the part of an update that its dtype cannot hold.

A master weight is a float32 in two parts: the parameter, which is the 16-bit number nearest to it, and a residual, in
units of 2^-16 (int16: 32 bits in all) or 2^-8 (int8: 24 bits) of the parameter's last place. With int16 a master weight
is held exactly, but for what float16 cannot hold: beyond 65504, or below 2^-14.

Stochastic rounding keeps no residual: it rounds up with the probability that makes the expectation exact.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from .philox import random_bits


class Rounding(IntEnum):
    """enum class AdamRounding of csrc/launch.h."""

    NEAREST = 0
    RESIDUAL_8 = 1
    RESIDUAL_16 = 2
    STOCHASTIC = 3


RESIDUALS = {Rounding.RESIDUAL_8: torch.int8, Rounding.RESIDUAL_16: torch.int16}
"""Dtypes of residuals."""
RESIDUAL_DTYPES = {24: RESIDUALS[Rounding.RESIDUAL_8], 32: RESIDUALS[Rounding.RESIDUAL_16]}
"""The same by the bits of a master weight."""


def _unit(weight: Tensor) -> Tensor:
    """float32: the last place of float16 numbers; 2^-24 for subnormal ones."""
    exponent = (weight.view(torch.int16).to(torch.int32) >> 10) & 31
    return ((exponent.clamp(min=1) + (127 - 15 - 10)) << 23).view(torch.float32)


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The master weight, float32, of a bfloat16 or float16 weight and its residual, shaped alike.

    A residual that would change the sign of a bfloat16 counts as 0: the weight was set to 0 since the last step.
    """
    bits = 8 * residual.element_size()
    if weight.dtype == torch.bfloat16:
        upper = weight.float().view(torch.int32)
        joined = upper + (residual.to(torch.int32) << (16 - bits))
        return torch.where((joined ^ upper) < 0, upper, joined).view(torch.float32)
    return weight.float() + residual.float() * (_unit(weight) * 2.0**-bits)


def split(master: Tensor, weight_dtype: torch.dtype, residual_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(weight, residual) of a float32 master weight: residual 0 where the weight is not finite.

    bfloat16: of two that are as near, the weight is the one farther from 0. float16: the even one, as torch rounds.
    """
    bits = 8 * residual_dtype.itemsize
    if weight_dtype == torch.bfloat16:
        of_master = master.view(torch.int32)
        lower = of_master.to(torch.int16).to(torch.int32)  # in units of float32
        weight = torch.where(master.isnan(), torch.nan, (of_master - lower).view(torch.float32)).to(torch.bfloat16)
        residual = (lower + (1 << (16 - bits) >> 1)) >> (16 - bits)
    else:
        weight = master.to(torch.float16)
        residual = ((master - weight.float()) * (2.0**bits / _unit(weight))).round()
    residual = torch.where(weight.isfinite(), residual, 0)
    return weight, residual.clamp(max=torch.iinfo(residual_dtype).max).to(residual_dtype)


def round_stochastically(values: Tensor, key: int, step: int, first: int) -> Tensor:
    """bfloat16 of float32 values: 16 random bits are added below its last place, and what is below cut off. Element i
    takes the bits of element first + i of dropout's with rng=(key, step)."""
    random = random_bits(values.numel(), (key, step), values.device, first).view(values.shape).to(torch.int32)
    rounded = ((values.view(torch.int32) + random) & ~0xFFFF).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)
