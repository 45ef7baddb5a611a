"""The row_norm family: its operators, who provides them, and the cases that are measured."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from onetrip import ops
from torch import Tensor

from ..measure import libraries
from ..measure.cases import ELEMENTS, Case, Dropout, LeastBytes, Operator, Outputs, gpu_cases
from ..measure.side_by_side import measure as measure

EPS = 1e-5
WIDTHS = (64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384)
QUICK_WIDTHS = (64, 1024, 16384)
WARM_SHAPES = ((256, 768), (2048, 320), (2048, 768), (2048, 1024), (8192, 320))


def _operator(
    name: str,
    norm: str | None,
    *,
    residual: bool = False,
    bias: bool = False,
    dropout_p: float = 0.0,
    return_residual: bool = False,
) -> Operator:
    matrices = ("x", "residual") if residual else ("x",)
    vectors = ("bias",) if bias else ()
    if norm is not None:
        vectors += ("weight", "norm_bias") if norm == "layer" else ("weight",)

    def formula(
        dropout: Dropout,
        x: Tensor,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
    ) -> Outputs:
        z = x if bias is None else x + bias
        if dropout_p > 0.0:
            z = dropout(z)
        if residual is not None:
            z = residual + z
        if norm is None:
            return z
        if norm == "layer":
            y = F.layer_norm(z, (z.shape[-1],), weight, norm_bias, EPS)
        else:
            y = F.rms_norm(z, (z.shape[-1],), weight, EPS)
        return (y, z) if return_residual else y

    def fused(
        x: Tensor,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
    ) -> Outputs:
        if residual is None:
            return ops.layer_norm(x, weight, norm_bias, EPS) if norm == "layer" else ops.rms_norm(x, weight, EPS)
        if norm is None:
            return ops.bias_dropout_residual(x, residual, bias, dropout_p=dropout_p)
        return ops.bias_dropout_residual_norm(
            x,
            residual,
            weight,
            norm_bias,
            bias=bias,
            dropout_p=dropout_p,
            norm=norm,
            eps=EPS,
            return_residual=return_residual,
        )

    def least_bytes(n_rows: int, n_cols: int, itemsize: int) -> LeastBytes:
        matrix, vector = n_rows * n_cols * itemsize, n_cols * itemsize
        parameters = len(vectors) * vector
        # z is written wherever it is not simply x: without a norm it is the output, with one backward needs it. The row
        # statistics (at most 8 bytes a row) are left out, which keeps this a lower bound.
        writes_z = residual or bias or dropout_p > 0.0
        forward = matrix * (len(matrices) + (norm is not None) + writes_z) + parameters
        # Without dropout the gradients of x and of residual are one tensor; without a norm either, they are dz itself.
        if norm is None:
            backward = matrix * (2 if dropout_p > 0.0 else 1) + parameters
        else:
            reads = 2 + return_residual  # dy, z, and dz where z was returned
            writes = 2 if residual and dropout_p > 0.0 else 1
            backward = matrix * (reads + writes) + vector + parameters
        return LeastBytes(forward, backward)

    others = libraries.row_norm(norm, EPS, residual=residual, dropout_p=dropout_p, return_residual=return_residual)
    return Operator(name, matrices, vectors, formula, fused, least_bytes, dropout_p, others=others)


LAYER_NORM = _operator("layer_norm", "layer")
RMS_NORM = _operator("rms_norm", "rms")
BIAS_DROPOUT_RESIDUAL_LAYER_NORM = {
    p: _operator(f"bias_dropout_residual_layer_norm-p{p:g}", "layer", residual=True, bias=True, dropout_p=p)
    for p in (0.1, 0.0)
}
BIAS_DROPOUT_RESIDUAL = _operator("bias_dropout_residual-p0.1", None, residual=True, bias=True, dropout_p=0.1)
ADD_RMS_NORM = _operator("add_rms_norm", "rms", residual=True, return_residual=True)

FUSED = (*BIAS_DROPOUT_RESIDUAL_LAYER_NORM.values(), BIAS_DROPOUT_RESIDUAL, ADD_RMS_NORM)
SINGLE = (LAYER_NORM, RMS_NORM)
WARM = (LAYER_NORM.warm(), BIAS_DROPOUT_RESIDUAL_LAYER_NORM[0.0].warm())


def cases(quick: bool = False) -> list[Case]:
    dtypes = (torch.float32,) if quick else (torch.float32, torch.bfloat16)
    found = [Case(operator, 4096, 1024, dtype, full=True) for dtype in dtypes for operator in FUSED]
    for dtype in dtypes:
        for operator in SINGLE:
            for width in QUICK_WIDTHS if quick else WIDTHS:
                found.append(Case(operator, ELEMENTS // width, width, dtype, full=width == 1024))
        for shape in WARM_SHAPES[:1] if quick else WARM_SHAPES:
            found += [Case(operator, *shape, dtype, full=False) for operator in WARM]
    if not quick:
        found += gpu_cases((*SINGLE, *BIAS_DROPOUT_RESIDUAL_LAYER_NORM.values()))
    return found
