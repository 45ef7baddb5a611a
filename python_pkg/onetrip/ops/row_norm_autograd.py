"""The row_norm family with gradients: one forward and one backward for any backend, and autograd around them.

Eager calls take _RowNorm, an autograd.Function; a norm whose value a sum in another module has computed gets its
gradient by deferred_norm. Traced calls (torch.compile, fake tensors, dispatch modes) take the
torch.library operators onetrip::row_norm and onetrip::row_norm_backward: below are what they compute, their fake
versions, their autograd formula and their schemas. They are functional; what a call does not produce is an empty
tensor.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from ..reference import accumulator_dtype
from ..reference.philox import Rng
from ..reference.row_norm import (
    BackwardOperands,
    Dtypes,
    Gradients,
    Operands,
    OperandTuple,
    Outputs,
    OutputTuple,
    RowNormPlan,
    gradients_of,
    outputs_of,
)
from . import row_norm_native
from .common.backends import KERNEL_DTYPES, choose, formulas
from .common.native import EagerCall, direct_apply, eager_backward, eager_forward, matrix, reshaped, vector
from .common.operators import filled, register, register_gradients, unfilled
from .common.tracing import have_storage, refuse_double_backward
from .row_norm_native import cuda_dtypes, dtypes_of, split_stats

Call = tuple[Rng | None, EagerCall | None, RowNormPlan, str, Dtypes, bool, bool]
"""rng, row_norm_native.eager_call where it can read all operands as they are, plan, backend, the operands' dtypes,
whether z is returned too, whether y has its gradient by deferred_norm."""


def forward(backend: str, operands: OperandTuple, rng: Rng | None, plan: RowNormPlan) -> OutputTuple:
    """reference.row_norm.forward on any backend, for x of any rank, strides and size; y and z are shaped like x."""
    x, residual, *parameters = operands
    if x.numel() == 0:
        return outputs_of(plan, x, x.new_zeros)
    if backend == "cuda":
        dtypes = cuda_dtypes(dtypes_of(operands), plan.z_dtype)
        operands = Operands(x.to(dtypes.x), None if residual is None else residual.to(dtypes.residual), *parameters)
    if backend in ("cpu", "cuda"):
        return row_norm_native.forward(operands, rng, plan)
    operands = Operands(matrix(x), matrix(residual), *map(vector, parameters))
    y, z, mean, rstd = formulas(backend, "row_norm").forward(operands, rng, plan)
    y, z = (None if tensor is None else reshaped(tensor, x.shape) for tensor in (y, z))
    return Outputs(y, z, mean, rstd)


def backward(backend: str, operands: BackwardOperands, rng: Rng | None, plan: RowNormPlan, wanted: Dtypes) -> Gradients:
    """reference.row_norm.backward on any backend, for any rank, strides and size."""
    given = operands.given
    if given.numel() == 0:
        return gradients_of(wanted, given, given.new_zeros)
    if backend == "cuda" and wanted.residual is not None:  # of z's dtype, see cuda_dtypes
        found = row_norm_native.backward(operands, rng, plan, wanted._replace(residual=plan.z_dtype))
        assert found.dresidual is not None
        return found._replace(dresidual=found.dresidual.to(wanted.residual))
    if backend in ("cpu", "cuda"):
        return row_norm_native.backward(operands, rng, plan, wanted)
    dy, dz, z, mean, rstd, weight = operands
    if dy is None:
        z = None
    elif z is not None and rstd is None:
        z, mean, rstd = split_stats(z, mean, given.shape)
    operands = BackwardOperands(matrix(dy), matrix(dz), matrix(z), mean, rstd, vector(weight))
    dx, dresidual, *parameters = formulas(backend, "row_norm").backward(operands, rng, plan, wanted)
    views = (None if tensor is None else tensor.view(given.shape) for tensor in (dx, dresidual))
    return Gradients(*views, *parameters)


def input_gradients(
    compute: Callable[..., Gradients],
    operands: BackwardOperands,
    rng: Rng | None,
    plan: RowNormPlan,
    wanted: Dtypes,
) -> Gradients:
    """The gradients by compute(operands, rng, plan, wanted), which is not asked for what equals dz or another one."""
    dy, dz = operands[:2]
    if dy is None and dz is None:
        return Gradients()
    x, residual, bias, weight, norm_bias = wanted
    if dy is None:
        weight = norm_bias = None
    # g, the gradient of z, is dz where there is no dy. The residual's gradient is g; so is x's without dropout.
    g, dx_is_g = dz if dy is None else None, plan.dropout_p == 0.0
    shared = dx_is_g and x is not None and g is None and residual == x
    if dy is not None and not shared:
        return compute(operands, rng, plan, wanted) if any(wanted) else Gradients()
    computed = Dtypes(
        None if dx_is_g and g is not None else x, None if shared or g is not None else residual, bias, weight, norm_bias
    )
    dx, dresidual, *parameters = compute(operands, rng, plan, computed) if any(computed) else Gradients()
    if shared:
        dresidual = dx
    if g is not None:
        dresidual = None if residual is None else g.to(residual)
        if dx_is_g:
            dx = None if x is None else g.to(x)
    return Gradients(dx, dresidual, *parameters)


def share_residual_gradient(result: Tensor, give: Callable[[Any, Tensor | None], Tensor | None]) -> bool:
    """Let backward return give(node, dresidual) for dresidual.

    result: of a row_norm. False, and nothing is done, where its gradients are not computed here."""
    node: Any = result.grad_fn
    if getattr(type(node), "_forward_cls", None) is not _RowNorm and not hasattr(node, "give_residual"):
        return False
    node.give_residual = give
    return True


def _shared(node: Any, gradients: Gradients) -> Gradients:
    give = getattr(node, "give_residual", None)
    return gradients if give is None else gradients._replace(dresidual=give(node, gradients.dresidual))


def _wanted(dtypes: Dtypes, needs_input_grad: Iterable[bool]) -> Dtypes:
    return Dtypes(*[dtype if needed else None for dtype, needed in zip(dtypes, needs_input_grad, strict=False)])


def _forward_of_any(ctx: Any, *operands_and_call: Any) -> Any:
    operands: Any = operands_and_call[:5]
    call: Call = operands_and_call[5]
    rng, _, plan, backend, _, return_z, defers_norm = call
    y, z, mean, rstd = forward(backend, operands, rng, plan)
    ctx.set_materialize_grads(False)
    if plan.norm:
        ctx.save_for_backward(operands[0] if z is None else z, mean, rstd, operands[3])
    ctx.call = call
    if defers_norm:
        ctx.mark_non_differentiable(y)
    return (y, z) if return_z else y if plan.norm else z


def _as_saved(saved: tuple[Any, ...], device: torch.device, plan: RowNormPlan, dtypes: Dtypes) -> tuple[Any, ...]:
    """z, mean, rstd and weight as forward saved them, whatever hooks made of them."""
    stats = accumulator_dtype(plan.z_dtype)
    kinds = zip(saved, (plan.z_dtype, stats, stats, dtypes.weight), strict=True)
    return tuple(None if tensor is None else tensor.to(device, dtype).contiguous() for tensor, dtype in kinds)


def _backward_of_any(ctx: Any, saved: tuple[Any, ...] | None, grads: tuple[Tensor | None, ...]) -> Any:
    refuse_double_backward("row_norm")
    rng, _, plan, backend, dtypes, *_ = ctx.call
    dy, dz = (grads[0], grads[1] if len(grads) > 1 else None) if plan.norm else (None, grads[0])
    dy = _with_left(ctx, dy)
    if dy is not None and dy.dtype != plan.y_dtype:
        plan = plan._replace(y_dtype=dy.dtype)
    # Without dy nothing saved is read: a z that was edited in place then raises no error.
    saved = (None,) * 4 if dy is None else _as_saved(saved or ctx.saved_tensors, dy.device, plan, dtypes)
    # Batched gradients (is_grads_batched, vectorised jacobians) have no storage that a kernel could read.
    compute = partial(backward, backend if have_storage(dy, dz) else "reference")
    operands = BackwardOperands(dy, dz, *saved)
    wanted = _wanted(dtypes, ctx.needs_input_grad)
    return *_shared(ctx, input_gradients(compute, operands, rng, plan, wanted)), None


class _RowNorm(torch.autograd.Function):
    """The eager path. Saves z (or x, where they are the same) and one or two float32 numbers a row; never a mask."""

    forward = eager_forward("row_norm", _forward_of_any)
    backward = eager_backward("row_norm", _backward_of_any)


apply = direct_apply(_RowNorm)


@cache
def _anchor() -> tuple[Tensor, Any]:
    """(anchor, its node)."""
    with _disable_current_modes():
        tensor = torch.empty(0, device="cpu", requires_grad=True)
        return tensor, get_gradient_edge(tensor).node


def anchor() -> Tensor:
    """An input of every node that leaves a gradient for another node instead of returning it. No user asks for its own
    gradient: its node runs in ordinary backwards only."""
    return _anchor()[0]


def _is_ordinary_backward() -> bool:
    """Whether the backward that runs now is one of all leaves that it reaches, of which the anchor is one."""
    return bool(torch._C._will_engine_execute_node(_anchor()[1]))


def _leave(node: Any, gradient: Tensor) -> bool:
    """Leave the gradient of y for node, which runs later in this backward. False where it has been left one. Of a
    backward that fails it stays with the graph."""
    left: dict[int, Tensor] = node.__dict__.setdefault("left", {})
    # By the engine's number of the backward: another one may run in between.
    return left.setdefault(torch._C._current_graph_task_id(), gradient) is gradient


def _with_left(node: Any, dy: Tensor | None) -> Tensor | None:
    """dy, and the gradient of y that was left for node in this backward."""
    left = getattr(node, "left", None)
    gradient = left.pop(torch._C._current_graph_task_id(), None) if left else None
    if gradient is None or dy is None:
        return dy if gradient is None else gradient
    return dy + gradient


@dataclass(frozen=True)
class LeftGradient:
    """The gradient of a norm's result y from those who read a cast of it, left for the norm as it is."""

    node: Any
    """Of the norm."""
    y: weakref.ref[Tensor]
    hooks: OrderedDict[int, Any]
    """y's, which are seen when y is gone, too."""

    @classmethod
    def of(cls, y: Tensor) -> LeftGradient | None:
        """None where y is not the result of a norm."""
        node: Any = y.grad_fn
        function = getattr(type(node), "_forward_cls", None)
        plan = node.call[2] if function is _RowNorm else getattr(node, "row_norm_plan", None)
        if function is not _DeferredNorm and (plan is None or not plan.norm or y.output_nr != 0):
            return None
        if y._backward_hooks is None:
            y.register_hook(lambda _: None).remove()  # what hooks y will have is in this dict from now on
        hooks: Any = y._backward_hooks
        return cls(node, weakref.ref(y), hooks)

    def leave(self, gradient: Tensor) -> Tensor | None:
        """What to return as the gradient of y, now that all who read the cast have run: None where the norm finds it,
        gradient itself where y's own may be looked at (hooks, retain_grad, a backward for chosen inputs). Hooks on the
        norm's node cannot be seen: they get None."""
        y = self.y()
        is_seen = self.hooks or (y is not None and y.retains_grad) or torch.is_grad_enabled()
        # Who read another cast may have left one.
        return None if not is_seen and _is_ordinary_backward() and _leave(self.node, gradient) else gradient


class _DeferredNorm(torch.autograd.Function):
    """y = norm(x), where x is the z of a sum whose node has computed y too, or a view of it.

    In an ordinary backward the gradient of y is left for the sum's node, which runs later and computes with both in
    one pass; x gets none from here. Where x's gradient may be seen (hooks, retain_grad, a backward for chosen inputs),
    it is computed here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, norm_bias: Tensor | None, _: Tensor, call: Any) -> Tensor:
        # y is no argument of its own, or autograd would return a view of it.
        (y, ctx.node) = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.shape = y.shape
        # Detached: a view must not be edited in place when a Function returns it.
        result: Tensor = y.view(x.shape).detach()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_double_backward("row_norm")
        (x,), node = ctx.saved_tensors, ctx.node
        dy = _with_left(ctx, *grads)
        if dy is None:
            return (None,) * 5
        dy = dy.reshape(ctx.shape)
        if _is_ordinary_backward() and not _has_hooks(x) and not _has_hooks(x._base) and _leave(node, dy):
            return (None,) * 5
        _, _, plan, backend, dtypes, *_ = node.call
        needs_x, needs_weight, needs_norm_bias, *_ = ctx.needs_input_grad
        wanted = Dtypes(
            x=x.dtype if needs_x else None,
            weight=dtypes.weight if needs_weight else None,
            norm_bias=dtypes.norm_bias if needs_norm_bias else None,
        )
        operands = BackwardOperands(dy, None, *node.saved_tensors)
        backend = backend if have_storage(dy) else "reference"
        found = backward(backend, operands, None, plan._replace(dropout_p=0.0, y_dtype=dy.dtype), wanted)
        return None if found.dx is None else found.dx.view(x.shape), found.dweight, found.dnorm_bias, None, None


def _has_hooks(tensor: Tensor | None) -> bool:
    return tensor is not None and (bool(tensor._backward_hooks) or tensor.retains_grad)


def deferred_norm(y: Tensor, x: Tensor, z: Tensor, weight: Tensor | None, norm_bias: Tensor | None) -> Tensor:
    """y shaped like x, as the result of a norm that is called with x now.

    y, z: by row_norm with defers_norm. x: z or a view of it. Gradients flow to x, weight and norm_bias.
    """
    if y.requires_grad or not z.requires_grad or not torch.is_grad_enabled():
        return y if x is z else y.view(x.shape)
    result: Tensor = _apply_deferred(x, weight, norm_bias, anchor(), (y, z.grad_fn))
    return result


_apply_deferred = direct_apply(_DeferredNorm)


def _split_forward(arguments: tuple[Any, ...]) -> tuple[Operands, Tensor | None, RowNormPlan]:
    return Operands(*arguments[:5]), arguments[5], RowNormPlan(*arguments[6:])


def _split_backward(arguments: tuple[Any, ...]) -> tuple[BackwardOperands, Tensor | None, Dtypes, RowNormPlan]:
    return BackwardOperands(*arguments[:6]), arguments[6], Dtypes(*arguments[7:12]), RowNormPlan(*arguments[12:])


def _backend(device: torch.device, dtypes: Iterable[torch.dtype | None]) -> str:
    return choose("onetrip::row_norm", device, all(dtype in KERNEL_DTYPES for dtype in dtypes if dtype is not None))


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    operands, rng, plan = _split_forward(arguments)
    return filled(operands.x, forward(_backend(operands.x.device, dtypes_of(operands)), operands, rng, plan))


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    operands, rng, wanted, plan = _split_backward(arguments)
    dy, dz, z, _, _, weight = operands
    dtypes = [tensor.dtype for tensor in (dy, dz, z, weight) if tensor is not None]
    backend = _backend(operands.given.device, (*dtypes, *wanted))
    return filled(operands.given, backward(backend, operands, rng, plan, wanted))


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    operands, _, plan = _split_forward(arguments)
    return filled(operands.x, outputs_of(plan, operands.x, operands.x.new_empty))


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    operands, _, wanted, _ = _split_backward(arguments)
    return filled(operands.given, gradients_of(wanted, operands.given, operands.given.new_empty))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    operands, rng, plan = _split_forward(inputs)
    y, z, mean, rstd = output
    ctx.set_materialize_grads(False)
    # Absent outputs (empty tensors) have no gradient, nor has a centred z, which only backward reads, nor a z of
    # operands without gradients.
    has_dz = plan.store_z and not plan.center_z and any(ctx.needs_input_grad[:3])
    constants = (None if plan.norm else y, None if has_dz else z, mean, rstd)
    ctx.mark_non_differentiable(*(tensor for tensor in constants if tensor is not None))
    ctx.row_norm_plan = plan
    ctx.dtypes = dtypes_of(operands)
    ctx.give_residual = None
    saved = (z if plan.store_z else operands.x, mean if plan.has_mean else None, rstd, operands.weight)
    ctx.save_for_backward(*(saved if plan.norm else (None,) * 4), rng)


def _autograd_backward(ctx: Any, dy: Tensor | None, dz: Tensor | None, *_: None) -> tuple[Any, ...]:
    *saved, rng = ctx.saved_tensors
    wanted = _wanted(ctx.dtypes, ctx.needs_input_grad)
    dy, plan = _with_left(ctx, dy), ctx.row_norm_plan
    plan = plan if dy is None else plan._replace(y_dtype=dy.dtype)
    gradients = input_gradients(_traced_backward, BackwardOperands(dy, dz, *saved), rng, plan, wanted)
    return (*_shared(ctx, gradients), None, *([None] * len(plan)))


def _traced_backward(operands: BackwardOperands, rng: Any, plan: RowNormPlan, wanted: Dtypes) -> Gradients:
    gradients = torch.ops.onetrip.row_norm_backward(*operands, rng, *wanted, *plan)
    return Gradients(*unfilled(gradients, wanted))


_PLAN_SCHEMA = (
    "int norm, float eps, float weight_offset, float dropout_p, ScalarType z_dtype, ScalarType n_dtype, "
    "ScalarType y_dtype, bool store_z, bool center_z, bool store_stats"
)
register(
    "row_norm(Tensor x, Tensor? residual, Tensor? bias, Tensor? weight, Tensor? norm_bias, Tensor? rng, "
    f"{_PLAN_SCHEMA}) -> (Tensor y, Tensor z, Tensor mean, Tensor rstd)",
    _forward,
    _forward_fake,
)
register_gradients("row_norm", _setup_context, _autograd_backward)
register(
    "row_norm_backward(Tensor? dy, Tensor? dz, Tensor? z, Tensor? mean, Tensor? rstd, Tensor? weight, Tensor? rng, "
    "ScalarType? x_dtype, ScalarType? residual_dtype, ScalarType? bias_dtype, ScalarType? weight_dtype, "
    f"ScalarType? norm_bias_dtype, {_PLAN_SCHEMA}) "
    "-> (Tensor dx, Tensor dresidual, Tensor dbias, Tensor dweight, Tensor dnorm_bias)",
    _backward,
    _backward_fake,
)
