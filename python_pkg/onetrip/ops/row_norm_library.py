"""The row_norm family as torch.library operators: what torch.compile, fake tensors and dispatch modes see.

onetrip::row_norm and onetrip::row_norm_backward are functional; what a call does not produce is an empty tensor.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from ..reference.row_norm import GradDtypes, RowNormPlan
from . import row_norm_autograd as ops
from .backends import KERNEL_DTYPES, choose
from .native import dtypes_of
from .tracing import reject_onnx_export

_PLAN_SCHEMA = (
    "int norm, float eps, float weight_offset, float dropout_p, ScalarType z_dtype, ScalarType n_dtype, "
    "ScalarType y_dtype, bool store_z, bool center_z, bool store_stats"
)

library = torch.library.Library("onetrip", "DEF")
library.define(
    "row_norm(Tensor x, Tensor? residual, Tensor? bias, Tensor? weight, Tensor? norm_bias, Tensor? rng, "
    f"{_PLAN_SCHEMA}) -> (Tensor y, Tensor z, Tensor mean, Tensor rstd)"
)
library.define(
    "row_norm_backward(Tensor? dy, Tensor? dz, Tensor? z, Tensor? mean, Tensor? rstd, Tensor? weight, Tensor? rng, "
    "ScalarType? x_dtype, ScalarType? residual_dtype, ScalarType? bias_dtype, ScalarType? weight_dtype, "
    f"ScalarType? norm_bias_dtype, {_PLAN_SCHEMA}) "
    "-> (Tensor dx, Tensor dresidual, Tensor dbias, Tensor dweight, Tensor dnorm_bias)"
)


def call(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    rng: Tensor | None,
    plan: RowNormPlan,
) -> tuple[Tensor, Tensor]:
    """(y, z) by the operator; what the plan does not ask for is an empty tensor."""
    reject_onnx_export()
    y, z, _, _ = torch.ops.onetrip.row_norm(x, residual, bias, weight, norm_bias, rng, *plan)
    return y, z


def _backend(device: torch.device, *dtypes: torch.dtype | None) -> str:
    return choose("onetrip::row_norm", device, all(dtype in KERNEL_DTYPES for dtype in dtypes if dtype is not None))


def _filled(device: torch.device, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(torch.empty(0, dtype=torch.float32, device=device) if t is None else t for t in tensors)


def _forward(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    rng: Tensor | None,
    *plan_fields: Any,
) -> tuple[Tensor, ...]:
    plan = RowNormPlan(*plan_fields)
    backend = _backend(x.device, *dtypes_of(x, residual, bias, weight, norm_bias))
    if backend == "cuda":
        x, residual = ops.kernel_pair(x, residual, plan.z_dtype)
    return _filled(x.device, *ops.forward(backend, x, residual, bias, weight, norm_bias, rng, plan))


def _forward_fake(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    rng: Tensor | None,
    *plan_fields: Any,
) -> tuple[Tensor, ...]:
    reject_onnx_export()  # torch.onnx.export(dynamo=True): Dynamo does not trace the check in call
    plan = RowNormPlan(*plan_fields)
    n_rows = prod(x.shape[:-1])  # torch.Size.numel would make every number of rows a shape of its own
    acc = torch.float64 if plan.z_dtype == torch.float64 else torch.float32

    def new(wanted: bool, size: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=x.device) if wanted else _filled(x.device, None)[0]

    return (
        new(plan.norm != 0, x.shape, plan.y_dtype),
        new(plan.store_z, x.shape, plan.z_dtype),
        new(ops.has_mean(plan), (n_rows,), acc),
        new(plan.store_stats, (n_rows,), acc),
    )


def _backward(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    rng: Tensor | None,
    *dtypes_and_plan: Any,
) -> tuple[Tensor, ...]:
    grad_dtypes, plan = cast(GradDtypes, dtypes_and_plan[:5]), RowNormPlan(*dtypes_and_plan[5:])
    given = cast(Tensor, dy if dy is not None else dz)
    backend = _backend(given.device, *dtypes_of(dy, dz, z, weight), *grad_dtypes)
    return _filled(given.device, *ops.backward(backend, dy, dz, z, mean, rstd, weight, rng, plan, grad_dtypes))


def _backward_fake(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    rng: Tensor | None,
    *dtypes_and_plan: Any,
) -> tuple[Tensor, ...]:
    given = cast(Tensor, dy if dy is not None else dz)
    sizes = (given.shape, given.shape, given.shape[-1:], given.shape[-1:], given.shape[-1:])
    return _filled(
        given.device,
        *(
            None if dtype is None else torch.empty(size, dtype=dtype, device=given.device)
            for size, dtype in zip(sizes, dtypes_and_plan[:5], strict=True)
        ),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, bias, weight, norm_bias, rng, *plan_fields = inputs
    plan = RowNormPlan(*plan_fields)
    y, z, mean, rstd = output
    ctx.set_materialize_grads(False)
    # Neither has what is not there (an empty tensor) a gradient, nor a centred z, which nobody but backward reads.
    constants = (None if plan.norm else y, z if plan.center_z or not plan.store_z else None, mean, rstd)
    ctx.mark_non_differentiable(*(tensor for tensor in constants if tensor is not None))
    ctx.plan = plan
    ctx.dtypes = dtypes_of(x, residual, bias, weight, norm_bias)
    if plan.norm:
        ctx.save_for_backward(z if plan.store_z else x, mean if ops.has_mean(plan) else None, rstd, weight, rng)
    else:
        ctx.save_for_backward(None, None, None, None, rng)


def _autograd_backward(ctx: Any, dy: Tensor | None, dz: Tensor | None, *_: None) -> tuple[Any, ...]:
    plan: RowNormPlan = ctx.plan
    z, mean, rstd, weight, rng = ctx.saved_tensors
    wanted = cast(
        GradDtypes,
        tuple(dtype if needed else None for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad, strict=False)),
    )
    gradients = ops.input_gradients(_traced_backward, dy, dz, z, mean, rstd, weight, rng, plan, wanted)
    return (*gradients, None, *([None] * len(plan)))


def _traced_backward(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    rng: Any,
    plan: RowNormPlan,
    grad_dtypes: GradDtypes,
) -> Any:
    gradients = torch.ops.onetrip.row_norm_backward(dy, dz, z, mean, rstd, weight, rng, *grad_dtypes, *plan)
    return tuple(None if dtype is None else gradient for gradient, dtype in zip(gradients, grad_dtypes, strict=True))


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError("onetrip: the backward of row_norm operators cannot be differentiated again")


library.impl("row_norm", _forward, "CompositeExplicitAutograd")
library.impl("row_norm_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("onetrip::row_norm", _forward_fake, lib=library)
torch.library.register_fake("onetrip::row_norm_backward", _backward_fake, lib=library)
torch.library.register_autograd("onetrip::row_norm", _autograd_backward, setup_context=_setup_context, lib=library)
torch.library.register_autograd("onetrip::row_norm_backward", _no_double_backward, lib=library)
