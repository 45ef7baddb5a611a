"""softmax as torch.library operators: what torch.compile, fake tensors and dispatch modes see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.softmax import SoftmaxPlan
from . import softmax_autograd
from .backends import KERNEL_DTYPES, choose
from .softmax import kernel_mask
from .tracing import reject_onnx_export

_PLAN_SCHEMA = "float scale, bool causal, float dropout_p, bool store_p"

library = torch.library.Library("onetrip", "FRAGMENT")
library.define(f"softmax(Tensor scores, Tensor? mask, Tensor? rng, {_PLAN_SCHEMA}) -> (Tensor y, Tensor p)")
library.define(
    f"softmax_backward(Tensor dy, Tensor p, SymInt[]? mask_shape, bool wants_dscores, {_PLAN_SCHEMA}) "
    "-> (Tensor dscores, Tensor dmask)"
)


def call(scores: Tensor, mask: Tensor | None, rng: Tensor | None, plan: SoftmaxPlan) -> Tensor:
    """y by the operator."""
    reject_onnx_export()
    y, _ = torch.ops.onetrip.softmax(scores, mask, rng, *plan)
    return y


def _backend(tensor: Tensor) -> str:
    return choose("onetrip::softmax", tensor.device, tensor.dtype in KERNEL_DTYPES)


def _forward(scores: Tensor, mask: Tensor | None, rng: Tensor | None, *plan_fields: Any) -> tuple[Tensor, Tensor]:
    plan = SoftmaxPlan(*plan_fields)
    y, p = softmax_autograd.forward(_backend(scores), scores, kernel_mask(scores, mask), rng, plan)
    return y, scores.new_empty(0) if p is None else p


def _forward_fake(scores: Tensor, mask: Tensor | None, rng: Tensor | None, *plan_fields: Any) -> tuple[Tensor, Tensor]:
    reject_onnx_export()  # torch.onnx.export(dynamo=True): Dynamo does not trace the check in call
    plan = SoftmaxPlan(*plan_fields)
    y = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    return y, torch.empty_like(y) if plan.store_p else scores.new_empty(0)


def _backward(
    dy: Tensor, p: Tensor, mask_shape: list[int] | None, wants_dscores: bool, *plan_fields: Any
) -> tuple[Tensor, Tensor]:
    shape = None if mask_shape is None else tuple(mask_shape)
    gradients = softmax_autograd.backward(_backend(dy), dy, p, shape, SoftmaxPlan(*plan_fields), wants_dscores)
    dscores, dmask = (dy.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dscores, dmask


def _backward_fake(
    dy: Tensor, p: Tensor, mask_shape: list[int] | None, wants_dscores: bool, *plan_fields: Any
) -> tuple[Tensor, Tensor]:
    acc = torch.float64 if dy.dtype == torch.float64 else torch.float32
    return (
        torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if wants_dscores else dy.new_empty(0),
        dy.new_empty(0) if mask_shape is None else dy.new_empty(mask_shape, dtype=acc),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, mask, _, *plan_fields = inputs
    ctx.plan = SoftmaxPlan(*plan_fields)
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    y, p = output
    ctx.mark_non_differentiable(p)
    ctx.save_for_backward(p if ctx.plan.store_p else y)


def _autograd_backward(ctx: Any, dy: Tensor, *_: None) -> tuple[Any, ...]:
    (p,) = ctx.saved_tensors
    plan: SoftmaxPlan = ctx.plan
    needs_scores, needs_mask = ctx.needs_input_grad[:2]
    shape = ctx.mask[0] if needs_mask else None
    dscores, dmask = torch.ops.onetrip.softmax_backward(dy, p, shape, needs_scores, *plan)
    return (
        dscores if needs_scores else None,
        dmask.to(ctx.mask[1]) if needs_mask else None,
        None,
        *([None] * len(plan)),
    )


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError("onetrip: the backward of softmax cannot be differentiated again")


library.impl("softmax", _forward, "CompositeExplicitAutograd")
library.impl("softmax_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("onetrip::softmax", _forward_fake, lib=library)
torch.library.register_fake("onetrip::softmax_backward", _backward_fake, lib=library)
torch.library.register_autograd("onetrip::softmax", _autograd_backward, setup_context=_setup_context, lib=library)
torch.library.register_autograd("onetrip::softmax_backward", _no_double_backward, lib=library)
