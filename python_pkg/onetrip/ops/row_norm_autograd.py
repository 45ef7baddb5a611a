"""Autograd around the kernels of the row_norm family, and the way of a call to its backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..reference import row_norm as reference
from ..reference.philox import Rng
from ..reference.row_norm import NORM_LAYER, Backward, Forward, GradDtypes, RowNormPlan
from . import native
from .backends import REHEARSALS
from .native import Dtypes, Launcher, two_dimensional
from .tracing import have_storage, refuse_double_backward

_NO_GRADS: GradDtypes = (None, None, None, None, None)


def forward(
    backend: str,
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
) -> Forward:
    """reference.row_norm.forward on any backend, for x of any rank, strides and size; y and z are shaped like x."""
    if x.numel() == 0 or backend in REHEARSALS:
        n_rows, acc = x.shape[:-1].numel(), torch.float64 if plan.z_dtype == torch.float64 else torch.float32
        return (
            x.new_empty(x.shape, dtype=plan.y_dtype) if plan.norm else None,
            x.new_empty(x.shape, dtype=plan.z_dtype) if plan.store_z else None,
            x.new_zeros(n_rows, dtype=acc) if has_mean(plan) else None,
            x.new_zeros(n_rows, dtype=acc) if plan.store_stats else None,
        )
    if backend in ("cpu", "cuda"):
        return native.row_norm_forward(x, residual, bias, weight, norm_bias, rng, plan)
    module = reference if backend == "reference" else importlib.import_module("onetrip.kernels.row_norm")
    n_cols = x.shape[-1]
    y, z, mean, rstd = module.forward(
        two_dimensional(x, n_cols),
        None if residual is None else two_dimensional(residual, n_cols),
        native.vector(bias),
        native.vector(weight),
        native.vector(norm_bias),
        rng,
        plan,
    )
    return None if y is None else y.view(x.shape), None if z is None else z.view(x.shape), mean, rstd


def backward(
    backend: str,
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
    grad_dtypes: GradDtypes,
) -> Backward:
    """reference.row_norm.backward on any backend, for any rank, strides and size. One of dy and dz must be given."""
    given = cast(Tensor, dy if dy is not None else dz)
    shape, n_cols = given.shape, given.shape[-1]
    if given.numel() == 0 or backend in REHEARSALS:
        sizes = (shape, shape, (n_cols,), (n_cols,), (n_cols,))
        return cast(
            Backward,
            tuple(
                None if dtype is None else given.new_zeros(size, dtype=dtype)
                for size, dtype in zip(sizes, grad_dtypes, strict=True)
            ),
        )
    if backend == "cuda" and grad_dtypes[1] is not None:
        # As kernel_pair: the residual's gradient is of z's dtype.
        dx, dresidual, *parameters = native.row_norm_backward(
            dy, dz, z, mean, rstd, weight, rng, plan, (grad_dtypes[0], plan.z_dtype, *grad_dtypes[2:])
        )
        return cast(Backward, (dx, cast(Tensor, dresidual).to(grad_dtypes[1]), *parameters))
    if backend in ("cpu", "cuda"):
        return native.row_norm_backward(dy, dz, z, mean, rstd, weight, rng, plan, grad_dtypes)
    if dy is not None and z is not None and rstd is None:
        z, rstd = native.split_stats(z, shape)
    module = reference if backend == "reference" else importlib.import_module("onetrip.kernels.row_norm")
    dx, dresidual, dbias, dweight, dnorm_bias = module.backward(
        None if dy is None else two_dimensional(dy, n_cols),
        None if dz is None else two_dimensional(dz, n_cols),
        None if z is None or dy is None else two_dimensional(z, n_cols),
        mean,
        rstd,
        native.vector(weight),
        rng,
        plan,
        grad_dtypes,
    )
    return (
        None if dx is None else dx.view(shape),
        None if dresidual is None else dresidual.view(shape),
        dbias,
        dweight,
        dnorm_bias,
    )


def has_mean(plan: RowNormPlan) -> bool:
    """Whether the forward pass stores the rows' means."""
    return plan.store_stats and plan.norm == NORM_LAYER and not plan.center_z


def input_gradients(
    compute: Callable[..., Backward],
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
    grad_dtypes: GradDtypes,
) -> Backward:
    """The gradients by compute(dy, ..., grad_dtypes), less what needs no kernel: what equals dz or another one is not
    computed."""
    if dy is None and dz is None:
        return None, None, None, None, None
    x_dtype, residual_dtype, bias_dtype, weight_dtype, norm_bias_dtype = grad_dtypes
    if dy is None:
        weight_dtype = norm_bias_dtype = None
    dx_is_g, g = plan.dropout_p == 0.0, dz if dy is None else None
    # The residual's gradient is g; so is x's where nothing is dropped. What is g already, or twice the same, is not
    # computed.
    kernel_x = None if dx_is_g and g is not None else x_dtype
    kernel_residual = None if g is not None else residual_dtype
    shared = dx_is_g and x_dtype is not None and kernel_residual == x_dtype
    if shared:
        kernel_residual = None
    wanted = (kernel_x, kernel_residual, bias_dtype, weight_dtype, norm_bias_dtype)
    dx = dresidual = dbias = dweight = dnorm_bias = None
    if wanted != _NO_GRADS:
        dx, dresidual, dbias, dweight, dnorm_bias = compute(dy, dz, z, mean, rstd, weight, rng, plan, wanted)
    if shared:
        dresidual = dx
    if g is not None:
        dresidual = None if residual_dtype is None else g.to(residual_dtype)
        if dx_is_g:
            dx = None if x_dtype is None else g.to(x_dtype)
    return dx, dresidual, dbias, dweight, dnorm_bias


class _RowNorm(torch.autograd.Function):
    """The eager path. Saves z (or x, where they are the same) and one or two float32 numbers a row; never a mask."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        bias: Tensor | None,
        weight: Tensor | None,
        norm_bias: Tensor | None,
        call: tuple[Rng | None, RowNormPlan, str, Dtypes, bool, Launcher | None],
    ) -> Any:
        # launch: the native launcher, where a native backend can read all tensors as they are.
        rng, plan, backend, _, return_z, launch = call
        if launch is None:
            y, z, mean, rstd = forward(backend, x, residual, bias, weight, norm_bias, rng, plan)
        else:
            y, z, mean, rstd = native.row_norm_forward(x, residual, bias, weight, norm_bias, rng, plan, launch)
        if return_z:
            ctx.set_materialize_grads(False)
        rng_tensor = None if rng is None or type(rng) is tuple else rng
        if plan.norm:
            ctx.save_for_backward(x if z is None else z, mean, rstd, weight, rng_tensor)
        elif rng_tensor is not None:
            ctx.save_for_backward(None, None, None, None, rng_tensor)
        ctx.call = call if rng_tensor is None else (None, *call[1:])
        return (y, z) if return_z else y if plan.norm else z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_double_backward("row_norm")
        rng, plan, backend, dtypes, _, _ = ctx.call
        z, mean, rstd, weight, rng_tensor = ctx.saved_tensors or (None, None, None, None, None)
        if not plan.norm:
            dy, dz = None, grads[0]
        else:
            dy, dz = grads[0], grads[1] if len(grads) > 1 else None
        wanted = cast(
            GradDtypes,
            tuple(dtype if needed else None for dtype, needed in zip(dtypes, ctx.needs_input_grad, strict=False)),
        )
        rng = rng_tensor if rng is None else rng
        return (
            *input_gradients(
                # Batched gradients (is_grads_batched, vectorised jacobians) have no storage that a kernel could read.
                partial(backward, backend if have_storage(dy, dz) else "reference"),
                *(dy, dz, z, mean, rstd, weight, rng, plan, wanted),
            ),
            None,
        )


# Function.apply less its Python half, which looks for functorch transforms (3 of 8 microseconds): tracing.py looks too.
apply = super(torch.autograd.Function, _RowNorm).apply


def kernel_pair(x: Tensor, residual: Tensor | None, z_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """x and residual as the CUDA kernels take them: of one dtype, or a half x beside a float32 residual.

    Any other mix (rare: a half residual beside a float32 x, a float32 bias beside halves) is cast to z's dtype first.
    """
    if residual is not None and x.dtype in (torch.float16, torch.bfloat16) and residual.dtype == torch.float32:
        return x, residual
    return x.to(z_dtype), None if residual is None else residual.to(z_dtype)
