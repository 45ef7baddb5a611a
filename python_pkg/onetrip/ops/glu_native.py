"""From tensors to the native glu launchers. Allocates what they write."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..reference.glu import ACTIVATIONS, GluPlan, Gradients, Operands
from .common.backends import native
from .common.native import DTYPE_CODE, Launcher, empty, raise_error, rows, vector, where

Columns = tuple[Tensor | None, int, int]
"""Columns of a tensor, as launchers read them: the first of them, and the row stride, in elements."""
_NONE: Columns = (None, 0, 0)


@lru_cache(maxsize=4096)
def _forward_launcher(dtype: torch.dtype, bias: torch.dtype | None, activation: str) -> Launcher:
    code = ACTIVATIONS.index(activation)  # enum Activation in csrc/launch.h
    return native().glu_forward(DTYPE_CODE[dtype], DTYPE_CODE[bias], code)  # type: ignore[union-attr]


@lru_cache(maxsize=4096)
def _backward_launcher(dtype: torch.dtype, bias: torch.dtype | None, activation: str) -> Launcher:
    code = ACTIVATIONS.index(activation)
    return native().glu_backward(DTYPE_CODE[dtype], DTYPE_CODE[bias], code)  # type: ignore[union-attr]


def _gate_and_up(gate: Tensor, up: Tensor | None, gate_first: bool | None, n_cols: int) -> tuple[Columns, Columns]:
    """Both halves of gate where it holds them."""
    if gate_first is None:
        gate, stride = rows(gate, n_cols)
        if up is None:
            return (gate, 0, stride), _NONE
        up, up_stride = rows(up, n_cols)
        return (gate, 0, stride), (up, 0, up_stride)
    matrix, stride = rows(gate, 2 * n_cols)
    first, second = (matrix, 0, stride), (matrix, n_cols, stride)
    return (first, second) if gate_first else (second, first)


def forward(operands: Operands, plan: GluPlan) -> Tensor:
    """reference.glu.forward by the native library, for operands of any rank and strides; y is contiguous."""
    gate, up, bias = operands
    activation, gate_first = plan
    shape = gate.shape
    n_cols = shape[-1]
    if gate_first is not None:
        n_cols //= 2
        shape = torch.Size((*shape[:-1], n_cols))
    columns, up_columns = _gate_and_up(gate, up, gate_first, n_cols)
    y = empty(gate, gate_first is None and columns[0] is gate, shape, gate.dtype)
    launch = _forward_launcher(gate.dtype, None if bias is None else bias.dtype, activation)
    device, stream = where(gate)
    code = launch(device, stream, y.numel() // n_cols, n_cols, *columns, *up_columns, vector(bias), y)
    if code:
        raise_error("glu forward", gate, code)
    return y


def backward(dy: Tensor, operands: Operands, plan: GluPlan, wants: tuple[bool, bool, bool]) -> Gradients:
    """reference.glu.backward by the native library, for operands of any rank and strides; gradients are contiguous."""
    gate, up, bias = operands
    activation, gate_first = plan
    wants_gate, wants_up, wants_bias = wants
    n_cols = dy.shape[-1]
    n_rows = dy.numel() // n_cols
    columns, up_columns = _gate_and_up(gate, up, gate_first, n_cols)
    dy, dy_stride = rows(dy, n_cols)
    dgate = empty(gate, gate.is_contiguous(), gate.shape, gate.dtype) if wants_gate else None
    dup = empty(up, up.is_contiguous(), up.shape, up.dtype) if wants_up and up is not None else None
    dbias = workspace = None
    device, stream = where(dy)
    if wants_bias and bias is not None:
        dbias = torch.empty(n_cols, dtype=bias.dtype, device=dy.device)
        n_floats = native().glu_workspace(n_rows, n_cols)  # type: ignore[union-attr]
        workspace = torch.empty(n_floats, dtype=torch.float32, device=dy.device)
    if gate_first is None:
        dcolumns, dup_columns = (dgate, 0, n_cols), (dup, 0, n_cols)
    else:
        assert dgate is not None
        dcolumns, dup_columns = _gate_and_up(dgate, None, gate_first, n_cols)
    launch = _backward_launcher(dy.dtype, None if bias is None else bias.dtype, activation)
    inputs, outputs = (dy, 0, dy_stride, *columns, *up_columns, vector(bias)), (*dcolumns, *dup_columns)
    code = launch(device, stream, n_rows, n_cols, *inputs, *outputs, dbias, workspace)
    if code:
        raise_error("glu backward", dy, code)
    return Gradients(dgate, dup, dbias)
