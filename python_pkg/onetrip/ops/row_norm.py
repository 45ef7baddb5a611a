"""LayerNorm, RMSNorm, and bias + dropout + residual with or without a norm: one family of kernels.

z = residual + dropout(x + bias);  y = norm(z) * weight + norm_bias. Sources: layer norm, Ba, Kiros & Hinton 2016;
RMS norm, Zhang & Sennrich 2019; dropout, Srivastava et al. 2014 by Philox4x32 (Salmon et al. 2011).

This file has the public functions, their checks and the plan of a call. row_norm_autograd.py has the eager and the
traced path, row_norm_native.py the native launch. Under torch.func's transforms and forward-mode differentiation the
formulas are composed of torch's operators instead.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..reference import row_norm as reference
from ..reference.philox import Rng
from ..reference.row_norm import NORM_LAYER, NORM_NONE, NORM_RMS, Dtypes, Operands, OperandTuple, Outputs, RowNormPlan
from .common.backends import HALF, KERNEL_DTYPES, check_composed, choose
from .common.checks import (
    LARGEST,
    check_bool,
    check_eps,
    check_finite,
    check_like,
    check_out_dtype,
    check_parameter,
    check_probability,
    check_rows,
    raise_unknown,
)
from .common.native import EagerCall, as_rows, read
from .common.rng import check_rng, eager_rng, traced_rng
from .common.tracing import is_recorded, path_of, path_of_plain_tensors, reject_onnx_export
from .row_norm_autograd import apply, forward
from .row_norm_native import cuda_dtypes, decode, dtypes_of, eager_call


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba, Kiros & Hinton 2016).

    x: float32, float16, bfloat16 or float64, rank 1 and up, any strides. weight, bias: (n_cols,), any of these dtypes,
    or None.
    out_dtype: float32, float16 or bfloat16, of the result, rounded once; None for x's (float32 under CUDA autocast, as
        F.layer_norm).
    Returns a tensor shaped like x. Statistics are float32.
    Saves x and two float32 numbers a row for backward. Deterministic. Raises ValueError or TypeError for wrong
    arguments.
    """
    if unknown:
        raise_unknown("layer_norm", unknown)
    if out_dtype is not None:
        check_out_dtype("layer_norm", out_dtype)
    operands = x, None, None, weight, bias
    return row_norm("layer_norm", NORM_LAYER, operands, eps=eps, follow_autocast=True, out_dtype=out_dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool | Literal["weight"] = False,
    out_dtype: torch.dtype | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension (Zhang & Sennrich 2019).

    x: float32, float16, bfloat16 or float64, rank 1 and up, any strides. weight: (n_cols,), any of these dtypes, or
    None.
    weight_offset: finite, 1 for the (1 + weight) of Gemma; 0 without a weight.
    cast_before_weight: False rounds once, to x's dtype, after the weight (F.rms_norm, OLMo2, Gemma); True rounds the
    normalised
        value to x's dtype first, and the result has the dtype of weight * that (Llama, Mistral, Qwen); "weight" rounds
        it to the weight's dtype first if that is float16 or bfloat16, else not at all (T5).
    out_dtype: as in layer_norm; rounded after the weight.
    Saves x and one float32 number a row for backward. Deterministic. Raises ValueError or TypeError for wrong
    arguments.
    """
    if unknown:
        raise_unknown("rms_norm", unknown)
    if cast_before_weight is not False:
        check_cast("rms_norm", cast_before_weight, "rms")
    if out_dtype is not None:
        check_out_dtype("rms_norm", out_dtype)
    return row_norm(
        "rms_norm",
        NORM_RMS,
        (x, None, None, weight, None),
        eps=eps,
        weight_offset=weight_offset,
        cast_before_weight=cast_before_weight,
        out_dtype=out_dtype,
    )


def bias_dropout_residual(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    rng: tuple[int, int] | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """residual + dropout(x + bias), the end of a transformer sublayer (Vaswani et al. 2017, section 5.4).

    x, residual: one shape, float32, float16, bfloat16 or float64, rank 1 and up, any strides; residual None adds
    nothing. bias: (n_cols,) or None.
    dropout_p: probability of dropping an element; what is dropped is exactly 0, what is kept is multiplied by 1 / (1 -
    p). p counts as rounded to 1/65536, in both; of p > 0 something is dropped, of p < 1 something kept.
    rng: None draws (seed, offset) from torch's generator of x's device; a pair of ints pins the mask
    (dropout_keep_mask).
    Returns a tensor shaped like x, of the dtype that the unfused expression gives. No mask is stored: backward draws
    it again. Deterministic for a given rng. Raises ValueError or TypeError for wrong arguments.
    """
    if unknown:
        raise_unknown("bias_dropout_residual", unknown)
    return row_norm("bias_dropout_residual", NORM_NONE, (x, residual, bias, None, None), dropout_p=dropout_p, rng=rng)


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
    check_bool(function, "return_residual", return_residual)
    return norm_of_sum(
        x,
        residual,
        weight,
        norm_bias,
        bias=bias,
        norm=norm,
        eps=eps,
        weight_offset=weight_offset,
        cast_before_weight=cast_before_weight,
        dropout_p=dropout_p,
        return_residual=return_residual,
        rng=rng,
    )


def norm_of_sum(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    *,
    bias: Tensor | None,
    norm: Literal["layer", "rms"],
    **options: Any,
) -> Any:
    """bias_dropout_residual_norm without checks of its options: those of row_norm."""
    return row_norm(
        "bias_dropout_residual_norm",
        NORM_LAYER if norm == "layer" else NORM_RMS,
        (x, residual, bias, weight, norm_bias),
        follow_autocast=norm == "layer",
        **options,
    )


def sum_before_norm(x: Tensor, residual: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(y, z) as norm_of_sum with return_residual, for a norm that may be called later, or never.

    y has no gradient until row_norm_autograd.deferred_norm gives it one (traced calls: it has).
    """
    y, z = norm_of_sum(x, residual, return_residual=True, defers_norm=True, **options)
    return y, z


def check_cast(function: str, cast_before_weight: object, norm: str) -> None:
    if not isinstance(cast_before_weight, (bool, str)) or cast_before_weight not in (False, True, "weight"):
        raise ValueError(f'{function}: cast_before_weight must be False, True or "weight", got {cast_before_weight!r}')
    if norm == "layer" and cast_before_weight:
        raise ValueError(f'{function}: cast_before_weight must be False with norm="layer", got {cast_before_weight!r}')


def check_weight_offset(function: str, weight_offset: float, has_weight: bool) -> None:
    check_finite(function, "weight_offset", weight_offset)
    if weight_offset != 0.0 and not has_weight:
        raise ValueError(f"{function}: weight_offset must be 0 without a weight, got {weight_offset}")


def _check(
    function: str,
    operands: OperandTuple,
    eps: float,
    weight_offset: float,
    dropout_p: float,
    rng: tuple[int, int] | None,
) -> None:
    x, residual, bias, weight, norm_bias = operands
    check_rows(function, "x", x)
    if residual is not None:
        check_like(function, "residual", residual, x)
    norm_bias_name = "norm_bias" if function == "bias_dropout_residual_norm" else "bias"
    for name, vector in (("bias", bias), ("weight", weight), (norm_bias_name, norm_bias)):
        if vector is not None:
            check_parameter(function, name, vector, x)
    check_eps(function, eps)
    check_weight_offset(function, weight_offset, weight is not None)
    check_probability(function, "dropout_p", dropout_p)
    check_rng(function, rng)


def _composed(operands: OperandTuple, rng: Rng | None, plan: RowNormPlan) -> Outputs:
    """By torch's own operators, which every transform of torch.func and forward-mode differentiation know."""
    x, residual, *parameters = operands
    rows: Any = (None if tensor is None else as_rows(tensor) for tensor in (x, residual))
    plain = plan._replace(store_z=True, center_z=False, store_stats=False)
    y, z, _, _ = reference.forward(Operands(*rows, *parameters), rng, plain)
    return Outputs(None if y is None else y.view(x.shape), None if z is None else z.view(x.shape))


def _make_plan(
    norm: int,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool | Literal["weight"],
    dropout_p: float,
    autocast_to_float32: bool,
    out_dtype: torch.dtype | None,
    needs_grad: bool,
    return_residual: bool,
    dtypes: Dtypes,
) -> RowNormPlan:
    """The plan of a call with tensors of these dtypes.

    Dtypes are those that the unfused expression gives; autocast runs torch's own norms in float32 on CUDA, not on the
    CPU.
    """
    z, weight = dtypes.x, dtypes.weight
    assert z is not None
    for other in (dtypes.bias, dtypes.residual):
        z = z if other is None else torch.promote_types(z, other)
    z_is_x = dtypes.residual is None and dtypes.bias is None and dropout_p == 0.0
    n, y = torch.float32, z
    if norm == NORM_RMS and weight is not None and cast_before_weight:
        n = z
        if cast_before_weight == "weight":
            n = weight if weight in HALF else torch.promote_types(z, torch.float32)
        y = torch.promote_types(n, weight)
    elif autocast_to_float32 and z in HALF:
        y = torch.float32
    if out_dtype is not None:
        y = out_dtype
    return RowNormPlan(
        norm=norm,
        eps=eps,
        weight_offset=weight_offset,
        dropout_p=dropout_p,
        z_dtype=z,
        n_dtype=n,
        y_dtype=y,
        store_z=norm == NORM_NONE or (not z_is_x and (needs_grad or return_residual)),
        # One float32 number a row less to save. Rounding z - mean to a half type would lose accuracy; float32 does not.
        center_z=norm == NORM_LAYER and not z_is_x and not return_residual and z == torch.float32,
        store_stats=needs_grad and norm != NORM_NONE,
    )


@lru_cache(maxsize=4096)
def _prepare(defers_norm: bool, *arguments: Any) -> tuple[RowNormPlan, Dtypes, bool, dict[str, EagerCall]]:
    """What eager calls with these arguments of _make_plan have in common: their plan, the operands' dtypes, whether
    kernels compute with all dtypes, and the call of each native backend that can read the operands as they are.

    The last argument is the operands' dtypes, or the code of operands that read.operands knows."""
    known = arguments[-1]
    dtypes, are_plain = decode(known) if type(known) is int else (known, False)
    plan = _make_plan(*(*arguments[:-1], dtypes))
    all_dtypes = (*dtypes, plan.z_dtype, plan.y_dtype)
    in_kernel_dtypes = all(dtype in KERNEL_DTYPES for dtype in all_dtypes if dtype is not None)
    calls = {}
    if are_plain:
        return_residual = arguments[-2]
        calls["cpu"] = eager_call(plan, dtypes, return_residual and plan.store_z, defers_norm)
        if cuda_dtypes(dtypes, plan.z_dtype) == dtypes:
            calls["cuda"] = calls["cpu"]
    return plan, dtypes, in_kernel_dtypes, calls


def row_norm(
    function: str,
    norm: int,
    operands: OperandTuple,
    *,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    cast_before_weight: bool | Literal["weight"] = False,
    follow_autocast: bool = False,
    out_dtype: torch.dtype | None = None,
    dropout_p: float = 0.0,
    return_residual: bool = False,
    defers_norm: bool = False,
    rng: tuple[int, int] | None = None,
) -> Any:
    """Every function of the family. function: its name, for messages. defers_norm: see sum_before_norm."""
    code = -1  # compilers see only the checks
    if (
        not is_compiling()
        and rng is None
        and type(eps) is float
        and eps >= 0.0
        and type(weight_offset) is float
        and (weight_offset == 0.0 or (operands[3] is not None and -LARGEST <= weight_offset <= LARGEST))
        and type(dropout_p) is float
        and 0.0 <= dropout_p <= 1.0
    ):
        code = read.operands(operands)
    if code >= 0:
        path = path_of_plain_tensors()
    else:
        _check(function, operands, eps, weight_offset, dropout_p, rng)
        path = path_of(*operands)

    x, residual, bias, weight, norm_bias = operands
    needs_grad = (path == "traced" and is_recorded()) or (
        torch.is_grad_enabled()
        and (
            x.requires_grad
            or (residual is not None and residual.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (weight is not None and weight.requires_grad)
            or (norm_bias is not None and norm_bias.requires_grad)
        )
    )
    plan_arguments = (
        norm,
        eps,
        weight_offset,
        cast_before_weight,
        dropout_p,
        follow_autocast and x.is_cuda and torch.is_autocast_enabled("cuda"),
        out_dtype,
        needs_grad,
        return_residual,
        dtypes_of(operands) if code < 0 or path != "eager" else code,
    )
    if path == "composed":
        check_composed(function, x.device)
        plan = _make_plan(*plan_arguments)  # type: ignore[arg-type]
        y, z, _, _ = _composed(operands, traced_rng(rng, dropout_p, x.device), plan)
    elif path == "traced":
        reject_onnx_export()
        plan = _make_plan(*plan_arguments)  # type: ignore[arg-type]
        y, z, _, _ = torch.ops.onetrip.row_norm(*operands, traced_rng(rng, dropout_p, x.device), *plan)
    else:
        plan, dtypes, in_kernel_dtypes, calls = _prepare(defers_norm, *plan_arguments)
        backend = choose(function, x.device, in_kernel_dtypes)
        used_rng = None if dropout_p == 0.0 else eager_rng(rng, dropout_p, x.device)
        call = calls.get(backend)
        if needs_grad or call is not None:
            return_z = return_residual and plan.store_z
            if needs_grad:
                with_call = (used_rng, call, plan, backend, dtypes, return_z, defers_norm)
                outputs = apply(x, residual, bias, weight, norm_bias, with_call)
                # z depends on no parameter of the norm. A deferred norm finds the sum by z's node.
                may_be_still = return_z and not x.requires_grad and not defers_norm
                if may_be_still and not any(each is not None and each.requires_grad for each in (residual, bias)):
                    outputs = outputs[0], outputs[1].detach()
            else:
                outputs = call(operands, used_rng)  # type: ignore[misc]
            return (outputs, x) if return_residual and not return_z else outputs
        else:
            y, z, _, _ = forward(backend, operands, used_rng, plan)
    if return_residual:
        return y, z if plan.store_z else x
    return y if norm else z
