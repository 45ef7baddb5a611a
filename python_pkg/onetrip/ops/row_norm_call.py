"""From a public function of the row_norm family to whatever computes it: checks, dtypes, backend, autograd."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..reference import row_norm as reference
from ..reference.philox import Rng
from ..reference.row_norm import NORM_LAYER, NORM_NONE, NORM_RMS, RowNormPlan
from .backends import KERNEL_DTYPES, choose, native
from .checks import check_eps, check_like, check_number, check_parameter, check_probability, check_rows
from .native import Dtypes, Launcher, dtypes_of, forward_launcher, operands
from .native import row_norm_forward as native_forward
from .rng import check_rng
from .row_norm_autograd import apply, forward, kernel_pair
from .tracing import eager_rng, is_jit_tracing, is_recorded, is_traced, is_transformed, traced_rng

_HALF = (torch.float16, torch.bfloat16)


def check_cast(function: str, cast_before_weight: object, norm: str) -> None:
    if not isinstance(cast_before_weight, (bool, str)) or cast_before_weight not in (False, True, "weight"):
        raise ValueError(f'{function}: cast_before_weight must be False, True or "weight", got {cast_before_weight!r}')
    if norm == "layer" and cast_before_weight:
        raise ValueError(f'{function}: cast_before_weight must be False with norm="layer", got {cast_before_weight!r}')


def _check(
    function: str,
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    weight_offset: float,
    dropout_p: float,
    rng: tuple[int, int] | None,
) -> None:
    check_rows(function, "x", x)
    if residual is not None:
        check_like(function, "residual", residual, x)
    norm_bias_name = "norm_bias" if function == "bias_dropout_residual_norm" else "bias"
    for name, vector in (("bias", bias), ("weight", weight), (norm_bias_name, norm_bias)):
        if vector is not None:
            check_parameter(function, name, vector, x)
    check_eps(function, eps)
    check_number(function, "weight_offset", weight_offset)
    check_probability(function, "dropout_p", dropout_p)
    check_rng(function, rng)


def _composed(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
) -> tuple[Tensor | None, Tensor | None]:
    """(y, z) by torch's own operators, which every transform of torch.func and forward-mode differentiation know."""
    rows = None if residual is None else residual.reshape(-1, x.shape[-1])
    plain = plan._replace(store_z=True, center_z=False, store_stats=False)
    y, z, _, _ = reference.forward(x.reshape(-1, x.shape[-1]), rows, bias, weight, norm_bias, rng, plain)
    return None if y is None else y.view(x.shape), None if z is None else z.view(x.shape)


def _make_plan(
    norm: int,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool | Literal["weight"],
    dropout_p: float,
    autocast_to_float32: bool,
    needs_grad: bool,
    return_residual: bool,
    z_is_x: bool,
    dtypes: Dtypes,
) -> RowNormPlan:
    """The plan of a call with tensors of these dtypes.

    Dtypes are those that the unfused expression gives; autocast runs torch's own norms in float32 on CUDA, not on the
    CPU.
    """
    x, residual, bias, weight, _ = dtypes
    z = x
    for other in (bias, residual):
        z = z if other is None else torch.promote_types(z, other)
    n, y = torch.float32, z
    if norm == NORM_RMS and weight is not None and cast_before_weight:
        n = z
        if cast_before_weight == "weight":
            n = weight if weight in _HALF else torch.promote_types(z, torch.float32)
        y = torch.promote_types(n, weight)
    elif autocast_to_float32 and z in _HALF:
        y = torch.float32
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
def _prepare(*arguments: Any) -> tuple[RowNormPlan, bool, Launcher | None]:
    """What eager calls with these arguments of _make_plan have in common: their plan, whether kernels compute with all
    of its dtypes, and the native launcher."""
    plan = _make_plan(*arguments)
    dtypes = arguments[-1]
    in_kernel_dtypes = all(
        dtype in KERNEL_DTYPES for dtype in (*dtypes, plan.z_dtype, plan.y_dtype) if dtype is not None
    )
    return plan, in_kernel_dtypes, forward_launcher(plan, *dtypes) if in_kernel_dtypes and native() else None


def row_norm(
    function: str,
    norm: int,
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    *,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    cast_before_weight: bool | Literal["weight"] = False,
    follow_autocast: bool = False,
    dropout_p: float = 0.0,
    return_residual: bool = False,
    rng: tuple[int, int] | None = None,
) -> Any:
    """Every public function of the family. function: its name, for messages."""
    # Compilers see _check only.
    known = None if is_compiling() else operands(x, residual, bias, weight, norm_bias)
    if (
        known is not None
        and rng is None
        and type(eps) is float
        and eps >= 0.0
        and type(weight_offset) is float
        and type(dropout_p) is float
        and 0.0 <= dropout_p <= 1.0
    ):
        dtypes, are_plain = known
        traced = is_in_torch_dispatch_mode() or is_jit_tracing()
    else:
        _check(function, x, residual, bias, weight, norm_bias, eps, weight_offset, dropout_p, rng)
        dtypes, are_plain = cast(Dtypes, dtypes_of(x, residual, bias, weight, norm_bias)), False
        traced = is_traced(x, residual, bias, weight, norm_bias)

    z_is_x = residual is None and bias is None and dropout_p == 0.0
    needs_grad = (traced and is_recorded()) or (
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
        needs_grad,
        return_residual,
        z_is_x,
        dtypes,
    )
    device = x.device
    if traced:
        from .row_norm_library import call

        seeds = traced_rng(rng, dropout_p, device)
        y, z = call(x, residual, bias, weight, norm_bias, seeds, _make_plan(*plan_arguments))
        return (y, x if z_is_x else z) if return_residual else y if norm else z

    plan, in_kernel_dtypes, launch = _prepare(*plan_arguments)
    transformed = is_transformed()
    backend = choose(function, device, in_kernel_dtypes and not transformed)
    if backend == "cuda":
        given = x, residual
        x, residual = kernel_pair(x, residual, plan.z_dtype)
        are_plain = are_plain and x is given[0] and residual is given[1]
    if not are_plain or backend not in ("cpu", "cuda"):
        launch = None
    used_rng = None if dropout_p == 0.0 else eager_rng(rng, dropout_p, device)
    if needs_grad and not transformed:
        return_z = return_residual and not z_is_x
        outputs = apply(x, residual, bias, weight, norm_bias, (used_rng, plan, backend, dtypes, return_z, launch))
        return (outputs, x) if return_residual and z_is_x else outputs
    if transformed:
        outputs = _composed(x, residual, bias, weight, norm_bias, used_rng, plan)
    elif launch is None:
        outputs = forward(backend, x, residual, bias, weight, norm_bias, used_rng, plan)
    else:
        outputs = native_forward(x, residual, bias, weight, norm_bias, used_rng, plan, launch)
    if return_residual:
        return outputs[0], x if z_is_x else outputs[1]
    return outputs[0] if norm else outputs[1]
