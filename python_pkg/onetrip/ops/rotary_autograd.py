"""The rotation of q and k with gradients: one function for any backend, and autograd around it.

_Rotary for eager calls; for traced ones the operator onetrip::rotary with its fake version and its autograd formula.
The map is linear in q and k: its backward is the transposed map, so each of the two is the other one's backward, to any
order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.rotary import Operands, RotaryPlan, empty_adjacent
from . import rotary_native
from .common.backends import KERNEL_DTYPES, choose, formulas
from .common.native import EagerCall, direct_apply, eager_backward, eager_forward, in_memory
from .common.operators import filled, register, register_gradients, unfilled
from .common.tracing import have_storage

Pair = tuple[Tensor | None, Tensor | None]


def rotate(backend: str, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, plan: RotaryPlan) -> Pair:
    """reference.rotary.rotate on any backend, for any strides. Results have the layout of q and of k (adjacent)."""
    q = None if q is None else adjacent(q)
    k = None if k is None else adjacent(k)
    cos, sin = adjacent(cos), adjacent(sin)
    if backend == "cpu":
        return rotary_native.rotate(q, k, cos, sin, plan)
    q_out, k_out = formulas(backend, "rotary").rotate(Operands(q, k, cos, sin), plan)
    if backend == "reference":
        return _laid_out(q_out, q), _laid_out(k_out, k)
    return q_out, k_out


def adjacent(tensor: Tensor) -> Tensor:
    """The tensor with its values in memory and its columns next to each other; copied only where they are not."""
    if tensor.is_neg() or tensor._is_zerotensor():
        tensor = in_memory(tensor)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _laid_out(result: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The result as empty_like lays it out: with the strides of `like` where that is dense."""
    return None if result is None or like is None else empty_adjacent(like, result.dtype).copy_(result)


Call = tuple[None, EagerCall | None, RotaryPlan, RotaryPlan, str]
"""No rng, rotary_native.eager_call where it can read the operands as they are and both q and k have gradients, plan,
that of gradients, backend."""


def _forward_of_any(ctx: Any, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, call: Call) -> Pair:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin)
    _, _, plan, _, backend = ctx.call = call
    results = rotate(backend, q, k, cos, sin, plan)
    needs_q, needs_k = ctx.needs_input_grad[:2]
    if not (needs_q and needs_k):
        ctx.mark_non_differentiable(*(y for y in results[needs_q : 2 - needs_k] if y is not None))
    return results


def _backward_of_any(ctx: Any, saved: tuple[Tensor, ...] | None, grads: tuple[Any, ...]) -> Any:
    (cos, sin), (_, _, plan, of_gradients, backend) = saved or ctx.saved_tensors, ctx.call
    dq, dk = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))
    if not have_storage(dq, dk):
        dq, dk = formulas("reference", "rotary").rotate(Operands(dq, dk, cos, sin), of_gradients)
    elif torch.is_grad_enabled():  # to be differentiated again
        dq, dk = apply(dq, dk, cos, sin, (None, None, of_gradients, plan, backend))
    else:
        dq, dk = rotate(backend, dq, dk, cos, sin, of_gradients)
    return dq, dk, None, None, None


class _Rotary(torch.autograd.Function):
    """The eager path. Saves cos and sin only."""

    forward = eager_forward("rotary", _forward_of_any)
    backward = eager_backward("rotary", _backward_of_any)


apply = direct_apply(_Rotary)


def _rotary(q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, *plan: Any) -> tuple[Tensor, ...]:
    given = RotaryPlan(*plan)
    dtypes = {tensor.dtype for tensor in (q, k, cos) if tensor is not None} | {given.dtype or cos.dtype}
    backend = choose("onetrip::rotary", cos.device, dtypes <= KERNEL_DTYPES, "rotary")
    return filled(cos, rotate(backend, q, k, cos, sin, given))


def _rotary_fake(q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, *plan: Any) -> tuple[Tensor, ...]:
    dtype = RotaryPlan(*plan).dtype
    q, k = (None if x is None else empty_adjacent(x if x.stride(-1) == 1 else x.contiguous(), dtype) for x in (q, k))
    return filled(cos, (q, k))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, cos, sin, *plan = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin)
    ctx.of_gradients = RotaryPlan(*plan).of_gradients((k if q is None else q).dtype)
    needs_q, needs_k, *needs_angles = ctx.needs_input_grad[:4]
    if not any(needs_angles):
        ctx.mark_non_differentiable(*output[needs_q : 2 - needs_k])


def _autograd_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(ctx.needs_input_grad[2:4]):
        raise RuntimeError(
            "rotary_embedding: cos and sin had no gradients when torch.export, torch.jit.trace or make_fx recorded the "
            "call; record it with cos and sin that require grad"
        )
    wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
    found = torch.ops.onetrip.rotary(*wanted, *ctx.saved_tensors, *ctx.of_gradients)
    dq, dk = unfilled(found, (grad is not None for grad in wanted))
    return dq, dk, *[None] * 5


register(
    "rotary(Tensor? q, Tensor? k, Tensor cos, Tensor sin, bool interleaved, bool inverse, ScalarType? dtype) "
    "-> (Tensor q, Tensor k)",
    _rotary,
    _rotary_fake,
)
register_gradients("rotary", _setup_context, _autograd_backward, twice_differentiable=True)
