"""cross_entropy with gradients: the eager path, and for traced calls the operators of torch.library.

As softmax_autograd.py: autograd.Functions for eager calls; for traced ones operators with their fake versions and their
autograd formulas. Losses, and what is beside them, are float32 (float64 for float64).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference import accumulator_dtype
from ..reference.cross_entropy import NO_INDEX, CrossEntropyPlan, RowStatistics
from . import cross_entropy_linear as linear
from . import cross_entropy_native
from .common.backends import KERNEL_DTYPES, choose
from .common.native import direct_apply, in_memory, made_like, rows
from .common.operators import filled, register, register_gradients, unfilled
from .common.tracing import have_storage, refuse_double_backward, watched_as
from .cross_entropy_linear import Linear, Wants


def count_labels(function: str, labels: Tensor, n_classes: int, ignore_index: int) -> int | None:
    """How many labels (contiguous) are not ignored. Raises ValueError where one of them is no class. None on a
    GPU: the host would have to wait for the count."""
    if labels.device.type != "cpu":
        return None
    n_kept = cross_entropy_native.kept_labels(labels, n_classes, ignore_index)
    if n_kept >= 0:
        return n_kept
    kept = labels[labels != ignore_index]
    wrong = kept[(kept < 0) | (kept >= n_classes)]
    if wrong.numel():
        of_tokens = ignore_index == NO_INDEX
        argument, or_ignored = ("tokens", "") if of_tokens else ("labels", f" or ignore_index ({ignore_index})")
        raise ValueError(f"{function}: {argument} must be in [0, {n_classes}){or_ignored}, got {wrong[0].item()}")
    return kept.numel()


def forward(backend: str, logits: Tensor, labels: Tensor, plan: CrossEntropyPlan) -> RowStatistics:
    """reference.cross_entropy.forward on any backend. logits: [n_rows, n_cols], any strides; labels: contiguous."""
    if logits.numel() == 0:
        loss = logits.new_zeros(logits.shape[0], dtype=accumulator_dtype(logits.dtype))
        return RowStatistics(loss, loss.new_zeros((*loss.shape, 2)), None)
    found: RowStatistics = linear.row_functions(backend).forward(rows(logits, logits.shape[1])[0], labels, plan)
    return found


def forward_reduced(
    backend: str, logits: Tensor, labels: Tensor, n_kept: int | None, plan: CrossEntropyPlan, is_mean: bool
) -> tuple[Tensor, Tensor, Tensor | float]:
    """(the sum or mean of the losses, the stats of each row, what each loss is multiplied by in it)."""
    if backend == "cpu" and n_kept is not None and logits.numel() > 0:
        divisor = max(n_kept, 1) if is_mean else 1
        loss, stats = cross_entropy_native.total(rows(logits, logits.shape[1])[0], labels, plan, divisor)
        return loss, stats, 1.0 / divisor
    found = forward(backend, logits, labels, plan)
    weight = linear.mean_weight(labels, n_kept, plan.ignore_index, found.loss.dtype) if is_mean else 1.0
    return found.loss.sum() * weight, found.stats, weight


def backward(
    backend: str, logits: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, plan: CrossEntropyPlan
) -> Tensor:
    """reference.cross_entropy.backward on any backend. weights: [n_rows] or [1]."""
    if logits.numel() == 0:
        return torch.zeros_like(logits)
    functions = linear.row_functions(backend)
    if stats.dim() == 1 and backend != "cpu":  # of cross_entropy_native.total
        stats = stats[: 2 * logits.shape[0]].view(-1, 2)
    saved = labels.contiguous(), stats.contiguous()  # whatever hooks made of them
    dlogits: Tensor = functions.backward(rows(logits, logits.shape[1])[0], *saved, weights.contiguous(), plan)
    return dlogits


class CrossEntropy(torch.autograd.Function):
    """The eager path of cross_entropy. Saves logits and labels themselves, and two numbers a row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: tuple[Tensor, int | None, CrossEntropyPlan, str, str]) -> Tensor:
        labels, n_kept, plan, backend, reduction = call
        weight: Tensor | float = 1.0
        if reduction == "none":
            loss, stats, _ = forward(backend, logits, labels, plan)
        else:
            loss, stats, weight = forward_reduced(backend, logits, labels, n_kept, plan, reduction == "mean")
        ctx.save_for_backward(logits, labels, stats)
        ctx.call = plan, backend, weight
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_double_backward("cross_entropy")
        plan, backend, weight = ctx.call
        logits, labels, stats = ctx.saved_tensors
        weights = (grads[0] * weight).reshape(-1)
        return backward(backend if have_storage(grads[0]) else "reference", logits, labels, stats, weights, plan), None


class LinearReduced(torch.autograd.Function):
    """The eager path of linear_cross_entropy with a sum or a mean: forward computes the gradients too. Backward
    multiplies them in place and returns them; a second one, of a retained graph, computes them again. Where
    linear.keeps_dlogits forward ends with the gradient of the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: tuple[tuple[Any, ...], bool]
    ) -> Tensor:
        others, is_mean = call
        linear_call = Linear.of(hidden, weight, bias, *others)
        ctx.call = others[1:], is_mean
        wants = ctx.needs_input_grad[:3]
        ctx.keeps_dlogits = linear.keeps_dlogits(linear_call, wants)
        if ctx.keeps_dlogits:
            index = linear_call.kept_index()
            loss, dlogits = linear.total_and_dlogits(linear_call, index, is_mean)
            ctx.dtypes_and_rows = linear.dtypes_of(weight, bias), hidden.shape[0]
            ctx.save_for_backward(dlogits, index, hidden if wants[1] else None, weight)
            return loss
        loss, ctx.gradients, ctx.factors = linear.reduced(linear_call, is_mean, wants)
        ctx.save_for_backward(hidden, weight, bias, linear_call.labels)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_double_backward("cross_entropy")
        (dloss,), (others, is_mean) = grads, ctx.call
        if ctx.keeps_dlogits:
            dlogits, index, hidden, weight = ctx.saved_tensors
            (dtypes, n_rows), wants = ctx.dtypes_and_rows, ctx.needs_input_grad[:3]
            ctx.gradients = linear.products(dlogits, index, hidden, weight, dtypes, n_rows, wants)
            ctx.factors = torch.ones(2, dtype=dloss.dtype, device="cpu")
        if ctx.gradients is not None and not have_storage(dloss):  # batched gradients
            return *linear.multiplied(ctx.gradients, dloss, ctx.factors), None
        found, ctx.gradients = ctx.gradients, None
        if found is not None:
            linear.multiply_(found, dloss, ctx.factors, others[1])
            return *found, None
        call = Linear.of(*ctx.saved_tensors, *others)
        dloss = dloss.reshape(1)
        if is_mean:
            dloss = dloss * linear.mean_weight(call.labels, call.n_kept, call.plan.ignore_index, dloss.dtype)
        return *linear.by_row_backward(call, dloss, None, ctx.needs_input_grad[:3]), None


class LinearByRow(torch.autograd.Function):
    """The eager path of a loss (and entropy) for each row. Backward computes the chunks again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: tuple[tuple[Any, ...], bool, float]
    ) -> tuple[Tensor, Tensor | None]:
        others, wants_entropy, ctx.sign = call
        linear_call = Linear.of(hidden, weight, bias, *others)
        ctx.save_for_backward(hidden, weight, bias, linear_call.labels)
        ctx.others = others[1:]
        return linear.by_row(linear_call, wants_entropy, ctx.sign)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_double_backward("cross_entropy")
        dloss, dentropy = (None if gradient is None else gradient.contiguous() for gradient in grads)
        assert dloss is not None
        if not have_storage(dloss, dentropy):
            raise RuntimeError("onetrip: gradients of linear cross-entropy by row cannot be batched")
        dloss = dloss * ctx.sign
        dentropy = None if dentropy is None else in_memory(dentropy)
        call = Linear.of(*ctx.saved_tensors, *ctx.others)
        return *linear.by_row_backward(call, dloss, dentropy, ctx.needs_input_grad[:3]), None


apply = direct_apply(CrossEntropy)
apply_reduced = direct_apply(LinearReduced)
apply_by_row = direct_apply(LinearByRow)


def _backend(operator: str, tensor: Tensor) -> str:
    return choose(f"onetrip::{operator}", tensor.device, tensor.dtype in KERNEL_DTYPES, "cross_entropy")


def _forward(logits: Tensor, labels: Tensor, *plan: Any) -> tuple[Tensor, Tensor]:
    call, labels = CrossEntropyPlan(*plan), labels.contiguous()
    count_labels("onetrip::cross_entropy", labels, logits.shape[1], call.ignore_index)
    found = forward(_backend("cross_entropy", logits), logits, labels, call)
    return found.loss, found.stats


def _backward(logits: Tensor, labels: Tensor, stats: Tensor, dloss: Tensor, *plan: Any) -> Tensor:
    backend = _backend("cross_entropy_backward", logits)
    return backward(backend, logits, labels.contiguous(), stats.contiguous(), dloss, CrossEntropyPlan(*plan))


def _linear(operator: str, tensors: tuple[Any, ...], chunk_rows: int, plan: tuple[Any, ...]) -> Linear:
    hidden, weight, bias, labels = tensors
    call, labels = CrossEntropyPlan(*plan), labels.contiguous()
    function = "linear_logprobs" if call.ignore_index == NO_INDEX else f"onetrip::{operator}"
    n_kept = count_labels(function, labels, weight.shape[0], call.ignore_index)
    return Linear.of(hidden, weight, bias, labels, call, _backend(operator, hidden), chunk_rows, n_kept)


def _linear_reduced(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, is_mean: bool, chunk_rows: int, wants: Any,
    *plan: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _linear("linear_cross_entropy", (hidden, weight, bias, labels), chunk_rows, plan)
    loss, gradients, factors = linear.reduced(call, is_mean, tuple(wants))
    return loss, *filled(hidden, gradients), factors


def _linear_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, wants_entropy: bool, chunk_rows: int,
    *plan: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = _linear("linear_cross_entropy_rows", (hidden, weight, bias, labels), chunk_rows, plan)
    loss, entropy = linear.by_row(call, wants_entropy)
    return loss, loss.new_empty(0) if entropy is None else entropy


def _linear_rows_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, dloss: Tensor, dentropy: Tensor | None,
    chunk_rows: int, wants: Any, *plan: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _linear("linear_cross_entropy_rows_backward", (hidden, weight, bias, labels), chunk_rows, plan)
    dentropy = None if dentropy is None else dentropy.contiguous()
    return filled(hidden, linear.by_row_backward(call, dloss.contiguous(), dentropy, tuple(wants)))


def _numbers(like: Tensor, *shape: Any) -> Tensor:
    return like.new_empty(shape, dtype=accumulator_dtype(like.dtype))


def _fake_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, wants: Any) -> tuple[Tensor, ...]:
    return filled(hidden, made_like((hidden, weight, bias), wants, torch.empty_like))


def _forward_fake(logits: Tensor, labels: Tensor, *plan: Any) -> tuple[Tensor, Tensor]:
    return _numbers(logits, logits.shape[0]), _numbers(logits, logits.shape[0], 2)


def _backward_fake(logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _linear_reduced_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, is_mean: bool, chunk_rows: int, wants: Any,
    *plan: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _numbers(hidden), *_fake_gradients(hidden, weight, bias, wants), _numbers(hidden, 2)


def _linear_rows_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, wants_entropy: bool, *others: Any
) -> tuple[Tensor, Tensor]:
    n_rows = labels.shape[0]
    return _numbers(hidden, n_rows), _numbers(hidden, n_rows if wants_entropy else 0)


def _linear_rows_backward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, dloss: Tensor, dentropy: Tensor | None,
    chunk_rows: int, wants: Any, *plan: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _fake_gradients(hidden, weight, bias, wants)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, labels, *ctx.plan = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, labels, output[1])


def _autograd(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Any, ...]:
    dlogits = torch.ops.onetrip.cross_entropy_backward(*ctx.saved_tensors, dloss, *ctx.plan)
    return dlogits, None, *([None] * len(ctx.plan))


def _save_reduced(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # or zeros of the gradients' sizes are made for the gradients of these outputs
    ctx.n_inputs, ctx.wants = len(inputs), inputs[6]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _autograd_reduced(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * ctx.n_inputs
    *found, factors = ctx.saved_tensors
    dhidden, dweight, dbias = unfilled(found, ctx.wants)
    if watched_as() is not None and found[0].dtype != torch.float16:  # a step's loss: LinearReduced multiplies by 1
        return dhidden, dweight, dbias, *([None] * (ctx.n_inputs - 3))
    return *linear.multiplied((dhidden, dweight, dbias), dloss, factors), *([None] * (ctx.n_inputs - 3))


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, labels, ctx.wants_entropy, ctx.chunk_rows, *ctx.plan = inputs
    if not ctx.wants_entropy:
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, bias, labels)


def _autograd_rows(ctx: Any, dloss: Tensor, dentropy: Tensor | None) -> tuple[Any, ...]:
    wants: Wants = tuple(ctx.needs_input_grad[:3])
    found = torch.ops.onetrip.linear_cross_entropy_rows_backward(
        *ctx.saved_tensors, dloss, dentropy if ctx.wants_entropy else None, ctx.chunk_rows, wants, *ctx.plan
    )
    return *unfilled(found, wants), *([None] * (3 + len(ctx.plan)))


_PLAN = "int ignore_index, float label_smoothing, float softcap, float lse_square_scale, float scale"
_LINEAR = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
register(
    f"cross_entropy(Tensor logits, Tensor labels, {_PLAN}) -> (Tensor loss, Tensor stats)", _forward, _forward_fake
)
register_gradients("cross_entropy", _save, _autograd)
register(
    f"cross_entropy_backward(Tensor logits, Tensor labels, Tensor stats, Tensor dloss, {_PLAN}) -> Tensor dlogits",
    _backward,
    _backward_fake,
)
register(
    f"linear_cross_entropy({_LINEAR}, bool is_mean, int chunk_rows, bool[3] wants, {_PLAN}) "
    "-> (Tensor loss, Tensor dhidden, Tensor dweight, Tensor dbias, Tensor factors)",
    _linear_reduced,
    _linear_reduced_fake,
)
register_gradients("linear_cross_entropy", _save_reduced, _autograd_reduced)
register(
    f"linear_cross_entropy_rows({_LINEAR}, bool wants_entropy, int chunk_rows, {_PLAN}) "
    "-> (Tensor loss, Tensor entropy)",
    _linear_rows,
    _linear_rows_fake,
)
register_gradients("linear_cross_entropy_rows", _save_rows, _autograd_rows)
register(
    f"linear_cross_entropy_rows_backward({_LINEAR}, Tensor dloss, Tensor? dentropy, int chunk_rows, bool[3] wants, "
    f"{_PLAN}) -> (Tensor dhidden, Tensor dweight, Tensor dbias)",
    _linear_rows_backward,
    _linear_rows_backward_fake,
)
