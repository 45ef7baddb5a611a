"""softmax(scale * q k^T + mask) v with everything that transformers' eager attention functions know, for less memory.

Sources: Vaswani et al. 2017, section 3.2; soft caps, Gemma 2 (Riviere et al. 2024); attention sinks, Xiao et al. 2023.
Products of matrices are torch's; between them stands one call of the softmax family. What is kept for backward is q, k,
v and one tensor of the size of the probabilities (softmax.py says which). Scores and dropped probabilities are not:
backward makes the latter again by one elementwise pass.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...reference.softmax import SoftmaxPlan
from ..common.backends import DISPATCHER, HALF, KERNEL_DTYPES, choose
from ..common.checks import DTYPES, check_device
from ..common.masks import broadcasts, kernel_mask
from ..common.rng import eager_rng, traced_rng
from ..common.tracing import (
    autocast_dtype,
    is_autocasting,
    is_traced,
    is_transformed,
    refuse_double_backward,
    watched_as,
)
from ..softmax import softmax
from .heads import (
    BackwardOperands,
    Operands,
    Plan,
    Wanted,
    as_products_read,
    attend,
    gradients,
    saturated_mask,
)
from .recomputed import Recomputed, attend_in_cache


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    rng: tuple[int, int] | None = None,
    need_weights: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(output, weights) = (weights value, dropout(softmax(scores + mask))), scores = scale query key^T.

    query: (batch, heads, Q, width). key, value: (batch, key heads, K, width or any other), each key head shared by
    heads / key heads neighbouring heads. One dtype; any strides. output: (batch, heads, Q, value's width), of
    any strides. weights: (batch, heads, Q, K), before dropout probabilities; differentiable, kept alive by the caller
    alone.
    mask: as softmax's, bool (True keeps) or added, broadcastable to the weights; may require grad. A float16 mask of
    finfo.min beside float16 scores masks as the most negative float32, which float16 addition makes of it.
    softcap: scores become softcap * tanh(scores / softcap). position_bias: added like a mask, of its own gradient.
    sinks: one more column of scores, broadcastable to (batch, heads, Q, 1); its weights are dropped. softcap excludes
    position_bias and sinks. causal, dropout_p, rng: as softmax's.
    need_weights: False returns None in their place. On a CPU, with nothing but scale, causal and a mask that needs no
    gradient, they are not kept for backward then, and scores of half types are as accurate as float32 (recomputed.py).

    Under autocast query, key and value are cast to its dtype, and so are both results.
    Deterministic for a given rng. Saves query, key, value and, except as need_weights says, one tensor of the size of
    weights for backward; with softcap, backward computes the scores again. Gradients cannot be differentiated again.
    Raises ValueError or TypeError for wrong arguments.
    """
    if softcap is not None and (position_bias is not None or sinks is not None):
        raise ValueError("attention: softcap must be None with position_bias or sinks, got both")
    _check(query, key, value, mask, position_bias, sinks)
    device = query.device
    if (dtype := autocast_dtype(query)) is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if mask is not None and position_bias is not None and mask.requires_grad:
        mask, position_bias = mask + position_bias, None
    traced = is_traced(query, key, value, mask, position_bias, sinks)
    as_on = watched_as() if traced else device.type
    if as_on is None or is_transformed():
        operands = Operands(query, key, value, mask, position_bias, sinks)
        output, weights = _composed(operands, scale, softcap, causal, dropout_p, rng)
        return output, weights if need_weights else None

    if sinks is not None:
        mask = _beside_sinks(mask, key.shape[2])
    operands = Operands(query, key, value, mask, position_bias, sinks)
    needs_grad = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in operands)
    # The softmax multiplies by the scale for nothing; but biases and sinks must not be multiplied.
    is_scaled_there = softcap is None and position_bias is None and sinks is None
    in_softmax = scale if is_scaled_there else 1.0 if softcap is None else softcap
    plan = Plan(
        SoftmaxPlan(float(in_softmax), causal, float(dropout_p), store_p=needs_grad and dropout_p > 0.0),
        alpha=1.0 if is_scaled_there else float(scale / in_softmax),
        has_softcap=softcap is not None,
        backend=DISPATCHER if traced else choose("attention", device, query.dtype in KERNEL_DTYPES),
        on_cpu=as_on == "cpu",
    )
    if not need_weights and plan.on_cpu and not traced and _is_plain(operands, plan):
        added = None if mask is None else saturated_mask(kernel_mask(query, mask), query)
        if query.dtype in HALF:
            plan = plan._replace(softmax=plan.softmax._replace(scale=1.0), alpha=float(scale))
        compute = Recomputed.apply if needs_grad else attend_in_cache
        return compute(query, key, value, added, plan), None
    used_rng = traced_rng(rng, dropout_p, device) if traced else eager_rng(rng, dropout_p, device)
    if needs_grad:
        output, weights = _Attention.apply(*operands, used_rng, plan)
    else:
        output, weights, _ = attend(operands, used_rng, plan)
    if not need_weights:
        return output, None
    return output, weights if sinks is None else weights[..., 1:]


def _is_plain(operands: Operands, plan: Plan) -> bool:
    """Whether Recomputed computes it."""
    _, _, _, mask, position_bias, sinks = operands
    learns = mask is not None and mask.requires_grad
    is_bare = position_bias is None and sinks is None and not plan.has_softcap
    return is_bare and not learns and plan.softmax.dropout_p == 0.0


def _check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, position_bias: Tensor | None, sinks: Tensor | None
) -> None:
    """Raises ValueError or TypeError for operands that do not fit each other: kernels read them by address."""
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    fit = all(len(shape) == 4 for shape in shapes) and shapes[1][:3] == shapes[2][:3]
    if not fit or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        raise ValueError(
            "attention: query, key and value must be (batch, heads, Q, width), (batch, key heads, K, width) and "
            f"(batch, key heads, K, any width), got {', '.join(map(str, shapes))}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"attention: heads must be a multiple of key heads, got {query.shape[1]} and {key.shape[1]}")
    weights = *query.shape[:3], key.shape[2]
    for name, added, shape in (
        ("mask", mask, weights),
        ("position_bias", position_bias, weights),
        ("sinks", sinks, (*weights[:3], 1)),
    ):
        if added is None:
            continue
        may_be_bool = name == "mask"
        if added.dtype not in DTYPES and not (may_be_bool and added.dtype == torch.bool):
            or_bool = " or bool" if may_be_bool else ""
            raise TypeError(
                f"attention: {name} must be float32, float16, bfloat16, float64{or_bool}, got {added.dtype}"
            )
        check_device("attention", name, added, query, "query")
        if not broadcasts(added.shape, shape):
            raise ValueError(f"attention: {name} must broadcast to {shape}, got {tuple(added.shape)}")


def _composed(
    operands: Operands,
    scale: float,
    softcap: float | None,
    causal: bool,
    dropout_p: float,
    rng: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    """The same by operators that compilers and transforms see."""
    query, key, value, mask, position_bias, sinks = operands
    n_repeats = query.shape[1] // key.shape[1]
    if n_repeats > 1:
        # Not repeat_interleave: for torch.jit.trace n_repeats is a tensor of the CPU, which indexes nothing on a GPU.
        key, value = (each.unsqueeze(2).expand(-1, -1, n_repeats, -1, -1).flatten(1, 2) for each in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3))
    if position_bias is not None or sinks is not None:
        scores, scale = scores * scale, 1.0
    if softcap is not None:
        scores, scale = torch.tanh(scores * (scale / softcap)), softcap
    if position_bias is not None:
        scores = scores + position_bias.to(scores.dtype)
    if sinks is not None:
        mask = _beside_sinks(mask, scores.shape[-1])
        scores = torch.cat([sinks.to(scores.dtype).expand(*scores.shape[:-1], 1), scores], dim=-1)
    weights = softmax(scores, saturated_mask(mask, scores), scale=scale, causal=causal, dropout_p=dropout_p, rng=rng)
    if sinks is not None:
        weights = weights[..., 1:]
    return torch.matmul(weights, value), weights


def _beside_sinks(mask: Tensor | None, n_keys: int) -> Tensor | None:
    """The mask of keys and, before them, of a column of sinks that every query sees: before, so that causal, which
    counts from the last column, stays what it is."""
    if mask is None:
        return None
    return functional.pad(
        mask.expand(*mask.shape[:-1], n_keys), (1, 0), value=True if mask.dtype == torch.bool else 0.0
    )


def _without_memory(tensor: Tensor) -> Tensor:
    """For its shape only."""
    return tensor.new_empty(()).expand(tensor.shape)


class _Attention(torch.autograd.Function):
    """Saves what the wanted gradients read of query, key and value, and weights or, where dropout made them another
    tensor, the probabilities."""

    @staticmethod
    def forward(ctx: Any, *operands_and_call: Any) -> tuple[Tensor, Tensor]:
        operands, (rng, plan) = Operands(*operands_and_call[:6]), operands_and_call[6:]
        operands = as_products_read(operands, plan)
        output, weights, p = attend(operands, rng, plan)
        ctx.set_materialize_grads(False)
        of_query, of_key, _, *of_added = ctx.needs_input_grad[:6]
        of_scores = of_query or of_key or any(of_added)
        capped = of_scores and plan.has_softcap  # worked out again
        reads = (of_key or capped, of_query or capped, of_scores)
        saved = [each if is_read else _without_memory(each) for each, is_read in zip(operands[:3], reads, strict=True)]
        ctx.save_for_backward(*saved, weights if p is None else p)
        ctx.plan = plan
        ctx.kinds = tuple(None if each is None else (tuple(each.shape), each.dtype) for each in operands[3:])
        return output, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_double_backward("attention")
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return (None,) * 8
        # Backward may be called under autocast.
        with torch.autocast(given.device.type, enabled=False) if is_autocasting(given) else nullcontext():
            return _Attention._backward(ctx, *grads)

    @staticmethod
    def _backward(ctx: Any, doutput: Tensor | None, dweights: Tensor | None) -> Any:
        query, key, value, p = ctx.saved_tensors
        plan: Plan = ctx.plan
        (mask, position_bias, sinks), wants = ctx.kinds, ctx.needs_input_grad
        bias, index = (position_bias, 4) if position_bias is not None else (mask, 3)
        bias_shape = bias[0] if bias is not None and wants[index] else None
        if bias_shape is not None and index == 4 and sinks is not None:
            bias_shape = (*bias_shape[:-1], p.shape[-1])
        which = Wanted(wants[0], wants[1], wants[2], sinks is not None and wants[5], bias_shape)
        dquery, dkey, dvalue, dsinks, dbias = gradients(
            BackwardOperands(doutput, dweights, query, key, value, p), which, plan
        )
        if dbias is not None:
            dbias = (
                dbias if dbias.shape == bias[0] else dbias[..., p.shape[-1] - key.shape[2] :].sum_to_size(bias[0])
            ).to(bias[1])
        if dsinks is not None:
            dsinks = dsinks.sum_to_size(sinks[0]).to(sinks[1])
        dmask, dposition_bias = (None, dbias) if index == 4 else (dbias, None)
        return dquery, dkey, dvalue, dmask, dposition_bias, dsinks, None, None
