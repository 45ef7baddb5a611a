"""From tensors to the native glu launchers. Allocates what they write."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..reference.glu import KERNEL_ACTIVATIONS, GluPlan, Gradients, Operands, OperandTuple, reads_result
from ..reference.philox import Rng
from .common.backends import formulas, native
from .common.native import DTYPE_CODE, DTYPE_OF_DIGIT, EagerCall, Launcher, made_like, raise_error, rows, vector, where

Columns = tuple[Tensor | None, int, int]
"""Columns of a tensor, as launchers read them: the first of them, and the row stride, in elements."""
_NONE: Columns = (None, 0, 0)


def _plan_arguments(dtype: torch.dtype, bias: torch.dtype | None, plan: GluPlan) -> tuple[Any, ...]:
    """What both launchers are made of. The enum Activation in csrc/launch.h has a last one, of limit and the others,
    and of interleaved columns."""
    is_clamped = plan.has_numbers or plan.interleaved
    code = len(KERNEL_ACTIVATIONS) if is_clamped else KERNEL_ACTIVATIONS.index(plan.activation)
    numbers = math.inf if plan.limit is None else plan.limit, plan.alpha, plan.up_offset, plan.interleaved
    return DTYPE_CODE[dtype], DTYPE_CODE[bias], code, plan.dropout_p, numbers


@lru_cache(maxsize=4096)
def _forward_launcher(dtype: torch.dtype, bias: torch.dtype | None, plan: GluPlan) -> Launcher:
    return native().glu_forward(*_plan_arguments(dtype, bias, plan))


@lru_cache(maxsize=4096)
def _backward_launcher(dtype: torch.dtype, bias: torch.dtype | None, plan: GluPlan, draws: bool) -> Launcher:
    return native().glu_backward(*_plan_arguments(dtype, bias, plan), draws)


@lru_cache(maxsize=4096)
def eager_call(plan: GluPlan, code: int, backend: str) -> EagerCall | None:
    """The call for operands of this code (read.operands of gate, up and bias), on the CPU or by Triton; None where
    kernels cannot read them as they are. As forward of a Function it saves gate, or y where backward reads that, up and
    bias."""
    gate, up, bias = (DTYPE_OF_DIGIT[code // 2 // 4**place % 4] for place in (2, 1, 0))
    is_plain = code > 0 and code % 2 == 1 and backend in ("cpu", "triton") and up in (None, gate)
    if not is_plain or gate is None or (bias is not None and torch.promote_types(gate, bias) != gate):
        return None
    saves_result = reads_result(plan, (gate, up, bias))  # type: ignore[arg-type]  # dtypes tell as well
    launchers = (
        _forward_launcher(gate, bias, plan),
        _backward_launcher(gate, bias, plan, not saves_result),
    )
    kernels = None
    if backend == "triton":
        module = formulas("triton", "glu")
        kernels = module.forward, module.backward, plan
    return native().glu_eager(*launchers, plan.gate_first, saves_result, kernels)


def _gate_and_up(gate: Tensor, up: Tensor | None, plan: GluPlan, n_cols: int) -> tuple[Columns, Columns]:
    """Both halves of gate where it holds them."""
    if plan.gate_first is None:
        gate, stride = rows(gate, n_cols)
        if up is None:
            return (gate, 0, stride), _NONE
        up, up_stride = rows(up, n_cols)
        return (gate, 0, stride), (up, 0, up_stride)
    matrix, stride = rows(gate, 2 * n_cols)
    first, second = (matrix, 0, stride), (matrix, 1 if plan.interleaved else n_cols, stride)
    return (first, second) if plan.gate_first else (second, first)


def forward(operands: OperandTuple, plan: GluPlan, rng: Rng | None = None) -> Tensor:
    """reference.glu.forward by the native library, for operands of any rank and strides; y is contiguous."""
    gate, up, bias = operands
    n_cols = gate.shape[-1] if plan.gate_first is None else gate.shape[-1] // 2
    columns, up_columns = _gate_and_up(gate, up, plan, n_cols)
    y = gate.new_empty((*gate.shape[:-1], n_cols))
    launch = _forward_launcher(gate.dtype, None if bias is None else bias.dtype, plan)
    code = launch(-1, 0, y.numel() // n_cols, n_cols, *columns, *up_columns, vector(bias), y, rng)
    if code:
        raise_error("glu forward", gate, code)
    return y


def backward(
    dy: Tensor, operands: Operands, plan: GluPlan, wants: tuple[bool, bool, bool], rng: Rng | None = None
) -> Gradients:
    """reference.glu.backward by the native library, for operands of any rank and strides; gradients are contiguous."""
    gate, up, bias = operands
    n_cols = dy.shape[-1]
    n_rows = dy.numel() // n_cols
    columns, up_columns = _gate_and_up(gate, up, plan, n_cols)
    dy, dy_stride = rows(dy, n_cols)
    dgate, dup, dbias = found = Gradients(*made_like(operands, wants, torch.empty_like))
    workspace = None
    device, stream = where(dy)
    if dbias is not None:
        n_floats = native().glu_workspace(n_rows, n_cols)
        workspace = torch.empty(n_floats, dtype=torch.float32, device=dy.device)
    if plan.gate_first is None:
        dcolumns, dup_columns = (dgate, 0, n_cols), (dup, 0, n_cols)
    else:
        assert dgate is not None
        dcolumns, dup_columns = _gate_and_up(dgate, None, plan, n_cols)
    launch = _backward_launcher(dy.dtype, None if bias is None else bias.dtype, plan, rng is not None)
    added = None if reads_result(plan, operands) else vector(bias)
    inputs, outputs = (dy, 0, dy_stride, *columns, *up_columns, added), (*dcolumns, *dup_columns)
    code = launch(device, stream, n_rows, n_cols, *inputs, *outputs, dbias, workspace, rng)
    if code:
        raise_error("glu backward", dy, code)
    return found
