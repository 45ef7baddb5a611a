"""glu with gradients: one forward and one backward for any backend, and autograd around them.

As softmax_autograd.py: _Glu for eager calls; for traced ones the operators onetrip::glu and onetrip::glu_backward, with
their fake versions and their autograd formula. One operator serves glu, glu_packed and bias_activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.glu import GluPlan, Gradients, Operands, reads_result
from ..reference.philox import Rng
from . import glu_native
from .common.backends import KERNEL_DTYPES, choose, formulas
from .common.native import EagerCall, Maybe, direct_apply, eager_backward, eager_forward, made_like, matrix, vector
from .common.operators import filled, register, register_gradients, unfilled
from .common.tracing import have_storage, refuse_double_backward


def result_dtype(gate: Tensor, up: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """What the unfused expression gives."""
    dtype = gate.dtype
    for tensor in (up, bias):
        if tensor is not None and tensor.dtype is not dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _of_dtype(operands: Operands, dtype: torch.dtype) -> Operands:
    """gate and up in the dtype of the result, which holds every value of theirs."""
    gate, up, bias = operands
    if gate.dtype is dtype and (up is None or up.dtype is dtype):
        return operands
    return Operands(gate.to(dtype), None if up is None else up.to(dtype), bias)


def _shape(gate: Tensor, plan: GluPlan) -> torch.Size:
    return gate.shape if plan.gate_first is None else torch.Size((*gate.shape[:-1], gate.shape[-1] // 2))


def _memory_order(gate: Tensor) -> list[int] | None:
    """gate's dimensions from the outermost in memory to the innermost; None: in this order already, or expanded."""
    if gate.is_contiguous():
        return None
    strides, in_order = gate.stride(), list(range(gate.dim()))
    order = sorted(in_order, key=strides.__getitem__, reverse=True)
    if order == in_order or any(strides[dim] == 0 and gate.shape[dim] > 1 for dim in in_order):
        return None
    return order


def _is_free(order: list[int], operands: Operands, plan: GluPlan) -> bool:
    """Whether a kernel can run over the operands in this order: a bias, and halves, are of the last dimension, and
    dropout counts the elements in logical order."""
    if plan.dropout_p > 0.0:
        return False
    return order[-1] == len(order) - 1 or (plan.gate_first is None and operands.bias is None)


def _permuted(operands: Operands, order: list[int]) -> Operands:
    gate, up, bias = operands
    return Operands(gate.permute(order), None if up is None else up.permute(order), bias)


def _restored(tensor: Maybe, order: list[int]) -> Maybe:
    """The inverse permutation."""
    return tensor if tensor is None else tensor.permute([order.index(dim) for dim in range(len(order))])


def forward(backend: str, operands: Operands, plan: GluPlan, rng: Rng | None) -> Tensor:
    """reference.glu.forward on any backend, for operands of any rank, strides, size and dtypes; y has gate's layout."""
    order = _memory_order(operands.gate)
    if order is None:
        y = _contiguous(backend, operands, plan, rng)
    elif _is_free(order, operands, plan):
        y = _restored(_contiguous(backend, _permuted(operands, order), plan, rng), order)
    else:
        y = _restored(_contiguous(backend, operands, plan, rng).permute(order).contiguous(), order)
    return y.detach() if y._is_view() else y  # a view must not be edited in place when a Function returns it


def _contiguous(backend: str, operands: Operands, plan: GluPlan, rng: Rng | None) -> Tensor:
    """forward's y, contiguous."""
    dtype = result_dtype(*operands)
    operands = _of_dtype(operands, dtype)
    if operands.gate.numel() == 0:
        return operands.gate.new_empty(_shape(operands.gate, plan))
    if backend == "cpu":
        return glu_native.forward(operands, plan, rng)
    y: Tensor = formulas(backend, "glu").forward(_matrices(operands), plan, rng).view(_shape(operands.gate, plan))
    return y


def backward(
    backend: str,
    dy: Tensor,
    operands: Operands,
    plan: GluPlan,
    wants: tuple[bool, bool, bool],
    rng: Rng | None,
) -> Gradients:
    """reference.glu.backward on any backend; each gradient has its operand's shape and dtype."""
    order = _memory_order(operands.gate)
    if order is None or not _is_free(order, operands, plan):
        return _contiguous_gradients(backend, dy, operands, plan, wants, rng)
    dgate, dup, dbias = _contiguous_gradients(backend, dy.permute(order), _permuted(operands, order), plan, wants, rng)
    return Gradients(_restored(dgate, order), _restored(dup, order), dbias)


def _contiguous_gradients(
    backend: str,
    dy: Tensor,
    operands: Operands,
    plan: GluPlan,
    wants: tuple[bool, bool, bool],
    rng: Rng | None,
) -> Gradients:
    """backward's gradients, contiguous."""
    gate, up, _ = operands
    if gate.numel() == 0:
        return Gradients(*made_like(operands, wants, torch.zeros_like))
    operands = _of_dtype(operands, dy.dtype)
    if backend == "cpu":
        dgate, dup, dbias = glu_native.backward(dy, operands, plan, wants, rng)
    else:
        dgate, dup, dbias = formulas(backend, "glu").backward(matrix(dy), _matrices(operands), plan, wants, rng)
    if dgate is not None:
        dgate = dgate.view(gate.shape).to(gate.dtype)
    if dup is not None and up is not None:
        dup = dup.view(up.shape).to(up.dtype)
    return Gradients(dgate, dup, dbias)


def _matrices(operands: Operands) -> Operands:
    gate, up, bias = operands
    return Operands(matrix(gate), matrix(up), vector(bias))


Call = tuple[Rng | None, EagerCall | None, GluPlan, str, torch.dtype]
"""rng, glu_native.eager_call where it can read the operands as they are, plan, backend, gate's dtype."""


def _forward_of_any(ctx: Any, gate: Tensor, up: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
    rng, _, plan, backend, _ = ctx.call = call
    operands = Operands(gate, up, bias)
    y = forward(backend, operands, plan, rng)
    ctx.save_for_backward(y if reads_result(plan, operands) else gate, up, bias)
    return y


def _backward_of_any(ctx: Any, saved: tuple[Tensor, ...] | None, grads: tuple[Any, ...]) -> Any:
    refuse_double_backward("glu")
    rng, _, plan, backend, dtype = ctx.call
    (dy,), operands = grads, Operands(*(saved or ctx.saved_tensors))
    gate, up, bias = operands
    shape, columns = dy.shape, dy.shape[-1:]
    kept = _shape(gate, plan), shape if up is None else up.shape, columns if bias is None else bias.shape
    if kept != (shape, shape, columns):
        raise RuntimeError("glu: what was saved for backward must keep its shape")
    rng = None if reads_result(plan, operands) else rng
    backend = backend if have_storage(dy) else "reference"
    dgate, dup, dbias = backward(backend, dy, operands, plan, ctx.needs_input_grad[:3], rng)
    return None if dgate is None else dgate.to(dtype), dup, dbias, None


class _Glu(torch.autograd.Function):
    """The eager path. Saves the operands, of relu the result, and nothing else."""

    forward = eager_forward("glu", _forward_of_any)
    backward = eager_backward("glu", _backward_of_any)


apply = direct_apply(_Glu)


def _backend(operands: Operands) -> str:
    in_kernel_dtypes = all(tensor is None or tensor.dtype in KERNEL_DTYPES for tensor in operands)
    return choose("onetrip::glu", operands.gate.device, in_kernel_dtypes, "glu")


def _forward(gate: Tensor, up: Tensor | None, bias: Tensor | None, rng: Tensor | None, *plan: Any) -> Tensor:
    operands = Operands(gate, up, bias)
    return forward(_backend(operands), operands, GluPlan(*plan), rng)


def _backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, bias: Tensor | None, rng: Tensor | None, wants: Any, *plan: Any
) -> tuple[Tensor, ...]:
    operands = Operands(gate, up, bias)
    return filled(dy, backward(_backend(operands), dy, operands, GluPlan(*plan), tuple(wants), rng))


def _forward_fake(gate: Tensor, up: Tensor | None, bias: Tensor | None, rng: Tensor | None, *plan: Any) -> Tensor:
    y = gate.new_empty(_shape(gate, GluPlan(*plan)), dtype=result_dtype(gate, up, bias))
    order = _memory_order(gate)
    return y if order is None else _restored(y.new_empty([y.shape[dim] for dim in order]), order)


def _backward_fake(
    dy: Tensor, gate: Tensor, up: Tensor | None, bias: Tensor | None, rng: Tensor | None, wants: Any, *plan: Any
) -> tuple[Tensor, ...]:
    operands, order = Operands(gate, up, bias), _memory_order(gate)
    if order is None or not _is_free(order, operands, GluPlan(*plan)):
        return filled(dy, made_like(operands, wants, torch.empty_like))
    dgate, dup, dbias = made_like(_permuted(operands, order), wants, torch.empty_like)
    return filled(dy, (_restored(dgate, order), _restored(dup, order), dbias))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, bias, rng, *plan = inputs
    ctx.plan, ctx.dtype = plan, gate.dtype
    if reads_result(GluPlan(*plan), (gate, up, bias)):
        gate, rng = output, None
    ctx.save_for_backward(gate, up, bias, rng)


def _autograd_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    wants = list(ctx.needs_input_grad[:3])
    found = torch.ops.onetrip.glu_backward(dy, *ctx.saved_tensors, wants, *ctx.plan)
    dgate, *others = unfilled(found, wants)
    return (None if dgate is None else dgate.to(ctx.dtype), *others, None, *([None] * len(ctx.plan)))


_PLAN_SCHEMA = (
    "str activation, bool? gate_first, float dropout_p, "
    "bool interleaved=False, float? limit=None, float alpha=1.0, float up_offset=0.0"
)
register(f"glu(Tensor gate, Tensor? up, Tensor? bias, Tensor? rng, {_PLAN_SCHEMA}) -> Tensor", _forward, _forward_fake)
register_gradients("glu", _setup_context, _autograd_backward)
register(
    f"glu_backward(Tensor dy, Tensor gate, Tensor? up, Tensor? bias, Tensor? rng, bool[3] wants, {_PLAN_SCHEMA}) "
    "-> (Tensor dgate, Tensor dup, Tensor dbias)",
    _backward,
    _backward_fake,
)
