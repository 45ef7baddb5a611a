"""LayerNorm, RMSNorm, and bias + dropout + residual with or without a norm: one family of kernels.

z = residual + dropout(x + bias);  y = norm(z) * weight + norm_bias. Sources: layer norm, Ba, Kiros & Hinton 2016;
RMS norm, Zhang & Sennrich 2019; dropout, Srivastava et al. 2014 by Philox4x32-10 (Salmon et al. 2011).

Eager calls go straight to an autograd.Function around the kernel launch; traced calls (torch.compile, fake tensors,
dispatch modes) go through the torch.library operators of row_norm_library.py, which run the same kernels. Under
torch.func's transforms and forward-mode differentiation the formulas are composed of torch's operators instead.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

from torch import Tensor

from ..reference.row_norm import NORM_LAYER, NORM_NONE, NORM_RMS
from .checks import raise_unknown
from .row_norm_call import check_cast, row_norm


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, **unknown: NoReturn
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba, Kiros & Hinton 2016).

    x: float32, float16, bfloat16 or float64, rank 1 and up, any strides. weight, bias: (n_cols,), any of these dtypes,
    or None.
    Returns a tensor shaped like x, of x's dtype (float32 under CUDA autocast, as F.layer_norm). Statistics are float32.
    Saves x and two float32 numbers a row for backward. Deterministic. Raises ValueError or TypeError for wrong
    arguments.
    """
    if unknown:
        raise_unknown("layer_norm", unknown)
    return row_norm("layer_norm", NORM_LAYER, x, None, None, weight, bias, eps=eps, follow_autocast=True)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool | Literal["weight"] = False,
    **unknown: NoReturn,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension (Zhang & Sennrich 2019).

    x: float32, float16, bfloat16 or float64, rank 1 and up, any strides. weight: (n_cols,), any of these dtypes, or
    None.
    weight_offset: 1 for the (1 + weight) of Gemma.
    cast_before_weight: False rounds once, to x's dtype, after the weight (F.rms_norm, OLMo2, Gemma); True rounds the
    normalised
        value to x's dtype first, and the result has the dtype of weight * that (Llama, Mistral, Qwen); "weight" rounds
        it to the weight's dtype first if that is float16 or bfloat16, else not at all (T5).
    Saves x and one float32 number a row for backward. Deterministic. Raises ValueError or TypeError for wrong
    arguments.
    """
    if unknown:
        raise_unknown("rms_norm", unknown)
    if cast_before_weight is not False:
        check_cast("rms_norm", cast_before_weight, "rms")
    return row_norm(
        "rms_norm",
        NORM_RMS,
        x,
        None,
        None,
        weight,
        None,
        eps=eps,
        weight_offset=weight_offset,
        cast_before_weight=cast_before_weight,
    )


def bias_dropout_residual(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    rng: tuple[int, int] | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """residual + dropout(x + bias), the end of a transformer sublayer (Vaswani et al. 2017, section 5.4).

    x, residual: one shape, float32, float16, bfloat16 or float64, rank 1 and up, any strides. bias: (n_cols,) or None.
    dropout_p: probability of dropping an element; what is dropped is exactly 0, what is kept is multiplied by 1 / (1 -
    p).
    rng: None draws (seed, offset) from torch's generator of x's device; a pair of ints pins the mask
    (dropout_keep_mask).
    Returns a tensor shaped like x, of the dtype that the unfused expression gives. No mask is stored: backward draws
    it again. Deterministic for a given rng. Raises ValueError or TypeError for wrong arguments.
    """
    if unknown:
        raise_unknown("bias_dropout_residual", unknown)
    if residual is None:
        raise TypeError("bias_dropout_residual: residual must be a Tensor, got NoneType")
    return row_norm("bias_dropout_residual", NORM_NONE, x, residual, bias, None, None, dropout_p=dropout_p, rng=rng)


def bias_dropout_residual_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    norm: Literal["layer", "rms"] = "layer",
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    cast_before_weight: bool | Literal["weight"] = False,
    return_residual: bool = False,
    rng: tuple[int, int] | None = None,
    **unknown: NoReturn,
) -> Any:
    """norm(z) * (weight + weight_offset) + norm_bias, z = residual + dropout(x + bias): a sublayer's end in one pass.

    x, residual: one shape, float32, float16, bfloat16 or float64, rank 1 and up, any strides; residual None adds
    nothing.
    weight, norm_bias, bias: (n_cols,) or None. norm: "layer" (as layer_norm) or "rms" (as rms_norm, cast_before_weight
    too).
    dropout_p, rng: as bias_dropout_residual. z is rounded once, to the dtype that the unfused expression gives.
    Returns y, or (y, z) with return_residual. Both are shaped like x; gradients flow through both.
    Saves z and one or two float32 numbers a row for backward, no mask. Deterministic for a given rng.
    Raises ValueError or TypeError for wrong arguments.
    """
    function = "bias_dropout_residual_norm"
    if unknown:
        raise_unknown(function, unknown)
    if norm not in ("layer", "rms"):
        raise ValueError(f'{function}: norm must be "layer" or "rms", got {norm!r}')
    if cast_before_weight is not False:
        check_cast(function, cast_before_weight, norm)
    return row_norm(
        function,
        NORM_LAYER if norm == "layer" else NORM_RMS,
        x,
        residual,
        bias,
        weight,
        norm_bias,
        eps=eps,
        weight_offset=weight_offset,
        cast_before_weight=cast_before_weight,
        follow_autocast=norm == "layer",
        dropout_p=dropout_p,
        return_residual=return_residual,
        rng=rng,
    )
