"""y = dropout(act(gate) * up), or y = dropout(act(gate + bias)), and the gradients: gated linear units, activations.

Sources: gated linear units, Dauphin et al. 2017, with other activations Shazeer 2020; GELU and SiLU, Hendrycks & Gimpel
2016; squared ReLU, So et al. 2021; SwiGLU with bounds, gpt-oss, OpenAI 2025. Computed in float32 (float64
for float64) from inputs as stored, rounded once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import accumulator_dtype
from .philox import Rng, dropout

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "relu", "quick_gelu")
"""gelu is exact, by erf; relu2 is relu(x)^2; quick_gelu is x sigmoid(1.702 x)."""

SOFTCAP = "softcap"
KERNEL_ACTIVATIONS = (*ACTIVATIONS, SOFTCAP)
"""The index is the kernels' code. softcap is alpha tanh(x / alpha)."""

_TANH_LINEAR, _TANH_CUBIC = math.sqrt(2.0 / math.pi), math.sqrt(2.0 / math.pi) * 0.044715


class GluPlan(NamedTuple):
    """Everything about one call that is not a tensor."""

    activation: str
    gate_first: bool | None = None
    """None: gate and up are two tensors, or there is no up. Else one tensor holds both halves, gate first or last."""
    dropout_p: float = 0.0
    interleaved: bool = False
    """The tensor that holds both has gate in its even columns, up in its odd ones; gate_first is True."""
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    """silu: g sigmoid(alpha g) (clamp(up, -limit, limit) + up_offset), g = min(gate, limit). softcap: alpha is the cap.
    Other activations take none of them."""

    @property
    def has_numbers(self) -> bool:
        """Whether limit, alpha or up_offset of silu is given."""
        return self.activation == "silu" and (self.limit, self.alpha, self.up_offset) != (None, 1.0, 0.0)

    @property
    def sigmoid_alpha(self) -> float:
        """alpha of the activations x sigmoid(alpha x)."""
        return 1.702 if self.activation == "quick_gelu" else self.alpha


class Operands(NamedTuple):
    """What forward reads. Here and in Triton matrices [n_rows, n_cols] of one dtype; in ops of any rank and dtypes."""

    gate: Tensor
    """Holds gate and up, [n_rows, 2 * n_cols], where the plan has gate_first."""
    up: Tensor | None = None
    bias: Tensor | None = None
    """[n_cols], of any dtype."""


OperandTuple = tuple[Tensor, Tensor | None, Tensor | None]


class Gradients(NamedTuple):
    """What backward returns: shaped like the operands; None where not wanted."""

    gate: Tensor | None
    up: Tensor | None
    bias: Tensor | None


def halves(matrix: Tensor, plan: GluPlan) -> tuple[Tensor, Tensor]:
    """(gate, up) of one tensor that holds both in its last dimension."""
    if plan.interleaved:
        return matrix[..., ::2], matrix[..., 1::2]
    first, second = matrix.chunk(2, dim=-1)
    return (first, second) if plan.gate_first else (second, first)


def _joined(gate: Tensor, up: Tensor, plan: GluPlan) -> Tensor:
    """The inverse of halves."""
    if plan.interleaved:
        return torch.stack((gate, up), dim=-1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])
    return torch.cat((gate, up) if plan.gate_first else (up, gate), dim=-1)


def _operands(operands: Operands, plan: GluPlan) -> tuple[Tensor, Tensor | None]:
    """The activation's argument, and the factor, as sums are kept."""
    gate, up, bias = operands
    if plan.gate_first is not None:
        gate, up = halves(gate, plan)
    acc = accumulator_dtype(gate.dtype)
    x = gate.to(acc)
    return x if bias is None else x + bias.to(acc), None if up is None else up.to(acc)


def _bounded(x: Tensor, up: Tensor | None, plan: GluPlan) -> tuple[Tensor, Tensor | None]:
    """min(x, limit), and clamp(up, -limit, limit) + up_offset."""
    if up is not None and plan.limit is not None:
        x, up = x.clamp(max=plan.limit), up.clamp(-plan.limit, plan.limit)
    return x, up if up is None or plan.up_offset == 0.0 else up + plan.up_offset


def _activation(x: Tensor, plan: GluPlan) -> Tensor:
    activation, alpha = plan.activation, plan.sigmoid_alpha
    if activation in ("silu", "quick_gelu"):
        return x * torch.sigmoid(x if alpha == 1.0 else alpha * x)
    if activation == "gelu":
        return 0.5 * x * torch.special.erfc(x * -math.sqrt(0.5))
    if activation == "gelu_tanh":
        return x * torch.sigmoid(2.0 * x * (_TANH_LINEAR + _TANH_CUBIC * x * x))
    if activation == SOFTCAP:
        return alpha * torch.tanh(x / alpha)
    return torch.relu(x) if activation == "relu" else torch.relu(x).square()


def _slope(x: Tensor, plan: GluPlan) -> Tensor:
    """The activation's derivative."""
    activation, alpha = plan.activation, plan.sigmoid_alpha
    if activation in ("silu", "quick_gelu"):
        scaled = x if alpha == 1.0 else alpha * x
        value = torch.sigmoid(scaled)
        return value + alpha * (x * value * torch.sigmoid(-scaled))  # finite where alpha * x overflows
    if activation == "gelu":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return 0.5 * torch.special.erfc(x * -math.sqrt(0.5)) + x * density
    if activation == "gelu_tanh":
        square = (x * x).clamp(max=2.0**16)  # finite: beyond, it is multiplied by 0
        u = 2.0 * x * (_TANH_LINEAR + _TANH_CUBIC * square)
        inner = 2.0 * (_TANH_LINEAR + 3.0 * _TANH_CUBIC * square)
        return torch.sigmoid(u) + x * torch.sigmoid(u) * torch.sigmoid(-u) * inner
    if activation == SOFTCAP:  # 1 - tanh^2 would cancel
        e = torch.exp(-2.0 * (x / alpha).abs())
        return 4.0 * e / (1.0 + e).square()
    return 2.0 * torch.relu(x)


def reads_result(plan: GluPlan, operands: OperandTuple) -> bool:
    """Whether backward takes forward's y in place of gate: relu(x) and what is kept of it tell the sign of x, and the
    next layer keeps y anyway."""
    return plan.activation == "relu" and operands[1] is None and plan.gate_first is None


def forward(operands: Operands, plan: GluPlan, rng: Rng | None = None) -> Tensor:
    """Returns y, of gate's dtype. rng: (seed, offset) of the dropout."""
    x, up = _bounded(*_operands(operands, plan), plan)
    y = _activation(x, plan)
    return dropout(y if up is None else y * up, plan.dropout_p, rng).to(operands.gate.dtype)


def backward(
    dy: Tensor, operands: Operands, plan: GluPlan, wants: tuple[bool, bool, bool], rng: Rng | None = None
) -> Gradients:
    """wants: which of the Gradients; that of a tensor of both halves is gate's. The bias's is summed over the rows, in
    float32 (float64). Where reads_result gate is forward's y: the bias is not added to it, and rng is not needed."""
    if reads_result(plan, operands):
        gate, factor = _operands(operands._replace(bias=None), plan)
    else:
        gate, factor = _operands(operands, plan)
    x, up = _bounded(gate, factor, plan)
    gradient = dropout(dy.to(x.dtype), plan.dropout_p, rng)
    dup = gradient * _activation(x, plan) if up is not None else None
    dx = gradient if up is None else gradient * up
    if plan.activation != "relu":
        dx = dx * _slope(x, plan)
    if plan.activation in ("relu", "relu2"):  # as torch's relu: 0 even of an infinite gradient; passes where x is NaN
        dx = torch.where(x <= 0.0, torch.zeros_like(dx), dx)
    if plan.limit is not None and factor is not None and dup is not None:  # as torch.clamp's, also of NaN
        dx = torch.where(gate <= plan.limit, dx, torch.zeros_like(dx))
        dup = torch.where(factor.abs() <= plan.limit, dup, torch.zeros_like(dup))
    dbias = dx.sum(dim=0).to(operands.bias.dtype) if wants[2] and operands.bias is not None else None
    dgate = dx
    if plan.gate_first is not None:
        assert dup is not None
        dgate, dup = _joined(dx, dup, plan), None
    dtype = dy.dtype
    return Gradients(
        dgate.to(dtype) if wants[0] else None, dup.to(dtype) if wants[1] and dup is not None else None, dbias
    )
