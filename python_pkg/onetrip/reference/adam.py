"""One step of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019), with states of 8 or of 32 bits.

8-bit states are quantised in blocks of 128 consecutive elements (block-wise dynamic quantisation: Dettmers et al.
2022), the first moment m by a signed map, and of the second moment its square root s, by an unsigned map: a code is
the nearest entry of the map to value / scale, scale the largest magnitude of its block in float32.

What every backend computes, in float32, every operation rounded by itself:

    g = grad * grad_factor  (+ l2 * p)                       grad_factor: 1 / grad_scale, negative to maximize
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + ((1 - beta2) * g) * g                    v = s * s of 8-bit states; s = sqrt(v)
    u = (m * inv_bias_correction1) / (s * inv_sqrt_bias_correction2 + eps)
    u = clamp(u, -C_t, C_t)                                  8-bit states only; NaN stays NaN
    p = round_to(param dtype, p * decay - lr * u)            decay: 1 - lr * weight_decay, or 1 with L2 decay

p is the master weight where there is one (rounding.py: join), and becomes its parameter and residual (split).

C_t bounds |u| of exact Adam (Cauchy-Schwarz over the gradients' weights in m and v), so the clamp meets quantisation
error only. That holds for betas that do not change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .rounding import RESIDUALS, Rounding, join, round_stochastically, split

BLOCK = 128
"""Consecutive elements of the whole parameter that share a scale."""
ZERO_CODE = 127
"""Code of 0 in the signed map; in the unsigned one it is 0."""
_SMALLEST_SCALE = 2.0**-126  # below, its reciprocal is not finite: such a block is stored as zeros


class Slot(NamedTuple):
    """One parameter, or one part of it that starts at a multiple of 128 of its elements; all contiguous."""

    param: Tensor
    """float32, float16 or bfloat16."""
    exp_avg: Tensor
    """Shaped like param; uint8 codes, or float32."""
    exp_avg_sq: Tensor
    """As exp_avg; codes are of the square root."""
    exp_avg_scale: Tensor | None
    """[ceil(numel / 128)] float32; None for float32 states."""
    exp_avg_sq_scale: Tensor | None
    step: Tensor
    """float32, 0-dimensional: the steps taken so far. Parts of one parameter share it."""
    group: int
    residual: Tensor | None = None
    """Shaped like param, of 16 bits: int8 or int16, what its master weight has beyond it."""
    random_bits: tuple[int, int] | None = None
    """(key, index of the first element): of a bfloat16 param without residual that is rounded stochastically."""

    @property
    def rounding(self) -> Rounding:
        if self.residual is not None:
            return next(rounding for rounding, dtype in RESIDUALS.items() if self.residual.dtype == dtype)
        return Rounding.NEAREST if self.random_bits is None else Rounding.STOCHASTIC


class Group(NamedTuple):
    """Numbers of a param group in this step."""

    lr: float | Tensor
    """A Tensor: float32, one element, on the device of the parameters."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


class Scalars(NamedTuple):
    """struct AdamScalars of csrc/launch.h."""

    grad_factor: float
    l2: float
    decay: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_bias_correction1: float
    inv_sqrt_bias_correction2: float
    eps: float
    lr: float
    largest_update: float
    step: float


def _magnitudes(signed: bool) -> list[float]:
    """The entries >= 0: 0, then in each of seven decades the middles of 2^i (unsigned: 2^(i+1)) equal steps, then 1."""
    values = [0.0, 1.0]
    for i in range(7):
        n_steps = 2**i if signed else 2 ** (i + 1)
        bounds = [0.1 + 0.9 * j / n_steps for j in range(n_steps + 1)]
        values += [10.0 ** (i - 6) * (low + high) / 2 for low, high in pairwise(bounds)]
    return sorted(values)


@functools.cache
def code_map(signed: bool) -> tuple[float, ...]:
    """256 increasing values, each a float32 number: what the codes 0 to 255 stand for."""
    magnitudes = _magnitudes(signed)
    values = [-value for value in reversed(magnitudes[1:-1])] + magnitudes if signed else magnitudes
    return tuple(torch.tensor(values, dtype=torch.float64, device="cpu").to(torch.float32).tolist())


@functools.cache
def thresholds(signed: bool) -> tuple[float, ...]:
    """Where magnitudes change code: entry q - 1 is the least float32 number that is nearer to magnitude q than to
    q - 1, or as near to both. 128 entries (signed), or 255."""
    magnitudes = [value for value in code_map(signed) if value >= 0.0]
    halves = [(low + high) / 2 for low, high in pairwise(magnitudes)]
    middles = torch.tensor(halves, dtype=torch.float64, device="cpu")
    least = middles.to(torch.float32)
    above = torch.nextafter(least, torch.full_like(least, torch.inf))
    return tuple(torch.where(least.to(torch.float64) < middles, above, least).tolist())


def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _blocks(flat: Tensor) -> Tensor:
    """[n_blocks, 128], zeros after the end."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def encode(blocks: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """uint8 codes of float32 blocks [n_blocks, 128], none of whose magnitudes exceeds its scale [n_blocks]."""
    inverse = torch.where(scale == 0.0, 0.0, 1.0 / scale)
    normalized = blocks * inverse[:, None]
    magnitude = normalized.abs().nan_to_num(nan=0.0)
    codes = torch.bucketize(magnitude, _table(thresholds(signed), blocks.device), right=True)
    if signed:
        codes = torch.where(normalized < 0.0, ZERO_CODE - codes.clamp(max=127), ZERO_CODE + codes)
    else:
        codes = torch.where(blocks > 0.0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8)


def quantize(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes uint8, shaped like values; scales float32 [ceil(numel / 128)]) of float32 values, blocks of 128 in the
    contiguous order.

    A block with a value that is not finite gets a scale that is not finite, so that it dequantises to nothing finite.
    A magnitude > 0 of the unsigned map never gets code 0. A block below 2^-126 is stored as zeros.
    """
    blocks = _blocks(values.reshape(-1))
    scale = blocks.abs().amax(dim=1)
    scale = torch.where(scale < _SMALLEST_SCALE, 0.0, scale)  # NaN stays
    return encode(blocks, scale, signed).view(-1)[: values.numel()].view(values.shape), scale


def dequantize(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """float32, shaped like codes: map[code] * scale of its block."""
    values = _table(code_map(signed), codes.device)[codes.reshape(-1).long()]
    return (_blocks(values) * scale[:, None]).view(-1)[: codes.numel()].view(codes.shape)


def largest_update(beta1: float, beta2: float, t: float) -> float:
    """C_t: |m_hat| / sqrt(v_hat) of exact Adam after t steps with these betas never exceeds it, whatever the gradients
    were."""
    if beta1 != 0.0 and beta2 == 0.0:
        return math.inf
    ratio = beta1 * beta1 / beta2 if beta1 != 0.0 else 0.0
    if ratio == 0.0:  # or too small for float64
        geometric = 1.0
    else:
        exponent = t * math.log(ratio)
        if exponent > 700.0:
            return math.inf
        geometric = t if abs(1.0 - ratio) < 1e-9 else math.expm1(exponent) / (ratio - 1.0)
    return (1.0 - beta1) / (1.0 - beta1**t) * math.sqrt((1.0 - beta2**t) / (1.0 - beta2)) * math.sqrt(geometric)


def scalars(group: Group, t: float, grad_scale: float) -> Scalars:
    """For step number t (1 is the first), computed in float64."""
    lr = float(group.lr)
    return Scalars(
        grad_factor=(-1.0 if group.maximize else 1.0) / grad_scale,
        l2=0.0 if group.decoupled else group.weight_decay,
        decay=1.0 - lr * group.weight_decay if group.decoupled else 1.0,
        one_minus_beta1=1.0 - group.beta1,
        beta2=group.beta2,
        one_minus_beta2=1.0 - group.beta2,
        inv_bias_correction1=1.0 / (1.0 - group.beta1**t),
        inv_sqrt_bias_correction2=1.0 / math.sqrt(1.0 - group.beta2**t),
        eps=group.eps,
        lr=lr,
        largest_update=largest_update(group.beta1, group.beta2, t),
        step=t,
    )


def _square_root(v: Tensor) -> Tensor:
    """Rounded correctly, which torch's own of float32 is not everywhere (vector libraries are off by one in the last
    place)."""
    return v.to(torch.float64).sqrt().to(torch.float32)


def _update(slot: Slot, grad: Tensor, s: Scalars) -> None:
    """One slot's parameter and states, in place."""
    p = slot.param.to(torch.float32) if slot.residual is None else join(slot.param, slot.residual)
    g = grad.to(torch.float32) * s.grad_factor
    if s.l2 != 0.0:
        g = g + p * s.l2
    quantized = slot.exp_avg_scale is not None
    if quantized:
        assert slot.exp_avg_scale is not None and slot.exp_avg_sq_scale is not None
        m = dequantize(slot.exp_avg, slot.exp_avg_scale, signed=True)
        root = dequantize(slot.exp_avg_sq, slot.exp_avg_sq_scale, signed=False)
        v = root * root
    else:
        m, v = slot.exp_avg, slot.exp_avg_sq
    m = m + (g - m) * s.one_minus_beta1
    v = v * s.beta2 + (g * s.one_minus_beta2) * g
    root = _square_root(v)
    u = (m * s.inv_bias_correction1) / (root * s.inv_sqrt_bias_correction2 + s.eps)
    if quantized:
        u = u.clamp(-s.largest_update, s.largest_update)
        for values, codes, scale, signed in (
            (m, slot.exp_avg, slot.exp_avg_scale, True),
            (root, slot.exp_avg_sq, slot.exp_avg_sq_scale, False),
        ):
            new_codes, new_scale = quantize(values, signed)
            codes.copy_(new_codes)
            scale.copy_(new_scale)  # type: ignore[union-attr]
    else:
        slot.exp_avg.copy_(m)
        slot.exp_avg_sq.copy_(v)
    p = p * s.decay - u * s.lr
    if slot.residual is not None:
        p, residual = split(p, slot.param.dtype, slot.residual.dtype)
        slot.residual.copy_(residual)
    elif slot.random_bits is not None:
        key, first = slot.random_bits
        p = round_stochastically(p, key, int(s.step), first)
    slot.param.copy_(p)


@torch.no_grad()
def step(
    slots: Sequence[Slot],
    grads: Sequence[Tensor],
    groups: Sequence[Group],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step for every slot; params, states and step counts change in place.

    grads: contiguous, shaped like the slots' params; float32, float16 or bfloat16. grad_scale: gradients are divided
    by it. found_inf: where it is not 0, nothing changes.
    """
    if found_inf is not None and float(found_inf) != 0.0:
        return
    scale = 1.0 if grad_scale is None else float(grad_scale)
    numbers = [scalars(groups[slot.group], float(slot.step) + 1.0, scale) for slot in slots]
    for counter in {id(slot.step): slot.step for slot in slots}.values():
        counter += 1
    for slot, grad, of_slot in zip(slots, grads, numbers, strict=True):
        _update(slot, grad, of_slot)
