"""Modules of the row_norm family."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from ..ops import bias_dropout_residual, bias_dropout_residual_norm
from ..ops import row_norm as ops
from ..ops.common.checks import check_bool, check_eps, check_probability, check_tensor
from ..reference.row_norm import NORM_LAYER, NORM_RMS


def _over_normalized_shape(
    module: torch.nn.LayerNorm | torch.nn.RMSNorm, norm: int, x: Tensor, eps: float, bias: Tensor | None, **options: Any
) -> Tensor:
    """The norm over all dimensions of normalized_shape, which are one row."""
    function, shape = type(module).__name__, module.normalized_shape
    check_tensor(function, "x", x)
    if x.shape[-len(shape) :] != shape:
        raise ValueError(f"{function}: x must end in the normalized_shape {tuple(shape)}, got {tuple(x.shape)}")
    weight: Tensor | None = module.weight
    if len(shape) == 1:
        return ops.row_norm(function, norm, (x, None, None, weight, bias), eps=eps, **options)
    rows = x.reshape(*x.shape[: -len(shape)], prod(shape))
    weight, bias = (None if vector is None else vector.flatten() for vector in (weight, bias))
    return ops.row_norm(function, norm, (rows, None, None, weight, bias), eps=eps, **options).view(x.shape)


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm computed by onetrip.ops.layer_norm: same arguments, parameters and state_dict.

    x: (*, *normalized_shape), float32, float16, bfloat16 or float64. Returns a tensor like x (float32 under CUDA
    autocast). Raises ValueError where x does not end in normalized_shape.
    """

    def forward(self, x: Tensor) -> Tensor:
        return _over_normalized_shape(self, NORM_LAYER, x, self.eps, self.bias, follow_autocast=True)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm computed by onetrip.ops.rms_norm: same arguments, parameters and state_dict, and two options
    more.

    x: (*, *normalized_shape), float32, float16, bfloat16 or float64. eps None: the machine epsilon of the statistics'
    dtype.
    weight_offset, cast_before_weight: as in onetrip.ops.rms_norm.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        weight_offset: float = 0.0,
        cast_before_weight: bool | Literal["weight"] = False,
    ) -> None:
        ops.check_cast("RMSNorm", cast_before_weight, "rms")
        ops.check_weight_offset("RMSNorm", weight_offset, elementwise_affine)
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.weight_offset = weight_offset
        self.cast_before_weight = cast_before_weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with gain 1: weight + weight_offset."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - getattr(self, "weight_offset", 0.0))

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        return text + (f", cast_before_weight={self.cast_before_weight!r}" if self.cast_before_weight else "")

    def forward(self, x: Tensor) -> Tensor:
        eps = self.eps
        if eps is None:
            is_double = isinstance(x, Tensor) and x.dtype == torch.float64
            eps = torch.finfo(torch.float64 if is_double else torch.float32).eps
        return _over_normalized_shape(
            self,
            NORM_RMS,
            x,
            eps,
            None,
            follow_autocast=True,
            weight_offset=self.weight_offset,
            cast_before_weight=self.cast_before_weight,
        )


class BiasDropoutResidual(torch.nn.Module):
    """residual + dropout(x + bias): see onetrip.ops.bias_dropout_residual.

    n_cols: size of the last dimension. p: dropout probability, used while training. bias: learn one, (n_cols,), zeros
    at first.
    """

    def __init__(self, n_cols: int, p: float = 0.1, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_probability("BiasDropoutResidual", "p", p)
        self.n_cols, self.p = n_cols, p
        self.bias: Parameter | None
        self.register_parameter("bias", Parameter(torch.zeros(n_cols, device=device, dtype=dtype)) if bias else None)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return bias_dropout_residual(x, residual, self.bias, dropout_p=self.p if self.training else 0.0)

    def extra_repr(self) -> str:
        return f"{self.n_cols}, p={self.p}, bias={self.bias is not None}"


class BiasDropoutResidualNorm(torch.nn.Module):
    """norm(residual + dropout(x + bias)): see onetrip.ops.bias_dropout_residual_norm.

    n_cols: size of the last dimension. p: dropout probability, used while training. norm: "layer" or "rms". bias:
    learn the bias added to x. elementwise_affine: learn weight (ones at first) and, for layer norm, norm_bias (zeros).
    """

    def __init__(
        self,
        n_cols: int,
        p: float = 0.1,
        norm: Literal["layer", "rms"] = "layer",
        eps: float = 1e-5,
        bias: bool = True,
        elementwise_affine: bool = True,
        *,
        weight_offset: float = 0.0,
        cast_before_weight: bool | Literal["weight"] = False,
        return_residual: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if norm not in ("layer", "rms"):
            raise ValueError(f'BiasDropoutResidualNorm: norm must be "layer" or "rms", got {norm!r}')
        check_probability("BiasDropoutResidualNorm", "p", p)
        check_eps("BiasDropoutResidualNorm", eps)
        ops.check_weight_offset("BiasDropoutResidualNorm", weight_offset, elementwise_affine)
        ops.check_cast("BiasDropoutResidualNorm", cast_before_weight, norm)
        check_bool("BiasDropoutResidualNorm", "return_residual", return_residual)
        self.n_cols, self.p, self.eps, self.return_residual = n_cols, p, eps, return_residual
        self.norm: Literal["layer", "rms"] = norm
        self.weight_offset, self.cast_before_weight = weight_offset, cast_before_weight

        def parameter(wanted: bool, fill: float) -> Parameter | None:
            return Parameter(torch.full((n_cols,), fill, device=device, dtype=dtype)) if wanted else None

        self.bias: Parameter | None
        self.weight: Parameter | None
        self.norm_bias: Parameter | None
        self.register_parameter("bias", parameter(bias, 0.0))
        self.register_parameter("weight", parameter(elementwise_affine, 1.0 - weight_offset))
        self.register_parameter("norm_bias", parameter(elementwise_affine and norm == "layer", 0.0))

    def forward(self, x: Tensor, residual: Tensor | None) -> Any:
        return bias_dropout_residual_norm(
            x,
            residual,
            self.weight,
            self.norm_bias,
            bias=self.bias,
            dropout_p=self.p if self.training else 0.0,
            norm=self.norm,
            eps=self.eps,
            weight_offset=self.weight_offset,
            cast_before_weight=self.cast_before_weight,
            return_residual=self.return_residual,
        )

    def extra_repr(self) -> str:
        return f"{self.n_cols}, p={self.p}, norm={self.norm!r}, eps={self.eps}, bias={self.bias is not None}"
