"""The row_norm family: its operators, who provides them, and the cases that are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from onetrip import ops
from torch import Tensor

from ..measure.cases import Case, Dropout, LeastBytes, Operator, Outputs, dtypes, gpu_cases, warm_cases, width_cases
from ..measure.providers import LIBRARIES, form, imported
from ..measure.side_by_side import measure as measure

EPS = 1e-5
WIDTHS = (64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384)
QUICK_WIDTHS = (64, 1024, 16384)
WARM_SHAPES = ((256, 768), (2048, 320), (2048, 768), (2048, 1024), (8192, 320))
Function = Callable[..., Any]


def _transformer_engine(module_name: str) -> Function:
    """Its modules, with the weights of the case in place of their own parameters."""
    make = imported(LIBRARIES["transformer-engine"].module, module_name)
    modules: dict[tuple[int, torch.dtype], torch.nn.Module] = {}

    def call(x: Tensor, weight: Tensor, norm_bias: Tensor | None = None) -> Outputs:
        key = x.shape[-1], x.dtype
        if key not in modules:
            modules[key] = make(x.shape[-1], eps=EPS, device=x.device, dtype=x.dtype)
        parameters = modules[key]._parameters
        parameters["weight"] = weight
        if norm_bias is not None:
            parameters["bias"] = norm_bias
        return modules[key](x)

    return call


def _flash_attn(norm: str, dropout_p: float, return_residual: bool) -> Mapping[str, Callable[[], Function]]:
    """Its Triton kernel is in every wheel; the older CUDA one is a package of its own."""

    def call(
        norm_fn: Function,
        x: Tensor,
        weight: Tensor,
        norm_bias: Tensor | None = None,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Outputs:
        options = {"eps": EPS, "dropout_p": dropout_p, "prenorm": return_residual, "is_rms_norm": norm == "rms"}
        return norm_fn(x if bias is None else x + bias, weight, norm_bias, residual=residual, **options)

    return form("flash-attn", "layer_norm_fn", call, "flash_attn.ops.triton.layer_norm")


_TRANSFORMER_ENGINE = "transformer-engine"
_LAYER_NORM = {
    **form("liger", "liger_layer_norm", lambda f, x, weight, norm_bias: f(x, weight, norm_bias, EPS)),
    **form(
        "apex", "fused_layer_norm_affine", lambda f, x, weight, norm_bias: f(x, weight, norm_bias, x.shape[-1:], EPS)
    ),
    _TRANSFORMER_ENGINE: lambda: _transformer_engine("LayerNorm"),
}
"""QuACK's has no backward."""
_RMS_NORM = {
    **form("liger", "liger_rms_norm", lambda f, x, weight: f(x, weight, EPS, in_place=False)),
    **form("apex", "fused_rms_norm_affine", lambda f, x, weight: f(x, weight, x.shape[-1:], EPS)),
    **form("quack", "rmsnorm", lambda f, x, weight: f(x, weight, eps=EPS)),
    _TRANSFORMER_ENGINE: lambda: _transformer_engine("RMSNorm"),
}
"""Liger's is not called in place: its backward would write into the gradient that it is given."""
_ADD_RMS_NORM = {
    **form(
        "liger",
        "liger_fused_add_rms_norm",
        lambda f, x, residual, weight: f(x, residual, weight, EPS, in_place=False),
    ),
    **form("quack", "rmsnorm", lambda f, x, residual, weight: f(x, weight, residual=residual, eps=EPS, prenorm=True)),
}


def _operator(
    name: str,
    norm: str | None,
    *,
    residual: bool = False,
    bias: bool = False,
    dropout_p: float = 0.0,
    return_residual: bool = False,
    others: Mapping[str, Callable[[], Function]] | None = None,
) -> Operator:
    """others: what other libraries have beside flash-attn."""
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

    of_flash_attn = {} if norm is None else _flash_attn(norm, dropout_p, return_residual)
    found = {**of_flash_attn, **(others or {})}
    return Operator(name, matrices, vectors, formula, fused, least_bytes, dropout_p, others=found)


LAYER_NORM = _operator("layer_norm", "layer", others=_LAYER_NORM)
RMS_NORM = _operator("rms_norm", "rms", others=_RMS_NORM)
BIAS_DROPOUT_RESIDUAL_LAYER_NORM = {
    p: _operator(f"bias_dropout_residual_layer_norm-p{p:g}", "layer", residual=True, bias=True, dropout_p=p)
    for p in (0.1, 0.0)
}
BIAS_DROPOUT_RESIDUAL = _operator("bias_dropout_residual-p0.1", None, residual=True, bias=True, dropout_p=0.1)
ADD_RMS_NORM = _operator("add_rms_norm", "rms", residual=True, return_residual=True, others=_ADD_RMS_NORM)

FUSED = (*BIAS_DROPOUT_RESIDUAL_LAYER_NORM.values(), BIAS_DROPOUT_RESIDUAL, ADD_RMS_NORM)
SINGLE = (LAYER_NORM, RMS_NORM)
WARM = (LAYER_NORM, BIAS_DROPOUT_RESIDUAL_LAYER_NORM[0.0])


def cases(quick: bool = False) -> list[Case]:
    found = [Case(operator, 4096, 1024, dtype, full=True) for dtype in dtypes(quick) for operator in FUSED]
    found += width_cases(SINGLE, QUICK_WIDTHS if quick else WIDTHS, quick)
    found += warm_cases(WARM, WARM_SHAPES, quick)
    if not quick:
        found += gpu_cases((*SINGLE, *BIAS_DROPOUT_RESIDUAL_LAYER_NORM.values()))
    return found
