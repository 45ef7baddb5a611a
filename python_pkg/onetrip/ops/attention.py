"""softmax(scale * q k^T + mask) v with everything that transformers' eager attention functions know, for less memory.

Sources: Vaswani et al. 2017, section 3.2; soft caps, Gemma 2 (Riviere et al. 2024); attention sinks, Xiao et al. 2023.
Products of matrices are torch's; between them stands one call of the softmax family. What is kept for backward is q, k,
v and one tensor of the size of the probabilities (softmax.py says which). Scores and dropped probabilities are not:
backward makes the latter again by one elementwise pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..reference.philox import Rng
from ..reference.softmax import SoftmaxPlan
from .backends import KERNEL_DTYPES, choose
from .softmax import kernel_mask, softmax
from .softmax_autograd import backward, forward
from .tracing import eager_rng, have_storage, is_traced, is_transformed, refuse_double_backward


class _Plan(NamedTuple):
    """Everything about one call that is not a tensor."""

    softmax: SoftmaxPlan
    alpha: float
    """What the products q k^T are multiplied by on their way out of the matrix product."""
    has_softcap: bool
    backend: str


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
) -> tuple[Tensor, Tensor]:
    """(output, weights) = (weights value, dropout(softmax(scores + mask))), scores = scale query key^T.

    query: (batch, heads, Q, width). key, value: (batch, key heads, K, width or any other), each key head shared by
    heads / key heads neighbouring heads. One dtype; any strides. output: (batch, heads, Q, value's width). weights:
    (batch, heads, Q, K), before dropout probabilities; differentiable, kept alive by the caller alone.
    mask: as softmax's, bool (True keeps) or added, broadcastable to the weights; may require grad. A float16 mask of
    finfo.min beside float16 scores masks as the most negative float32, which float16 addition makes of it.
    softcap: scores become softcap * tanh(scores / softcap). position_bias: added like a mask, of its own gradient.
    sinks: one more column of scores, broadcastable to (batch, heads, Q, 1); its weights are dropped. softcap excludes
    position_bias and sinks. causal, dropout_p, rng: as softmax's.

    Under autocast query, key and value are cast to its dtype, and so are both results.
    Deterministic for a given rng. Saves query, key, value and one tensor of the size of weights for backward; with
    softcap, backward computes the scores again. Gradients cannot be differentiated again.
    """
    if softcap is not None and (position_bias is not None or sinks is not None):
        raise ValueError("attention: softcap must be None with position_bias or sinks, got both")
    device = query.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if mask is not None and position_bias is not None and mask.requires_grad:
        mask, position_bias = mask + position_bias, None
    traced = is_traced(query, key, value, mask, position_bias, sinks)
    if traced or is_transformed():
        return _composed(query, key, value, mask, scale, softcap, position_bias, sinks, causal, dropout_p, rng)

    if sinks is not None:
        mask = _beside_sinks(mask, key.shape[2])
    tensors = (query, key, value, mask, position_bias, sinks)
    needs_grad = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    # The softmax multiplies by the scale for nothing; but biases and sinks must not be multiplied.
    in_softmax = softcap if softcap is not None else scale if position_bias is None and sinks is None else 1.0
    plan = _Plan(
        SoftmaxPlan(float(in_softmax), causal, float(dropout_p), store_p=needs_grad and dropout_p > 0.0),
        alpha=float(scale if in_softmax == 1.0 else scale / in_softmax),
        has_softcap=softcap is not None,
        backend=choose("attention", device, query.dtype in KERNEL_DTYPES),
    )
    used_rng = eager_rng(rng, dropout_p, device)
    if needs_grad:
        output, weights = _Attention.apply(*tensors, used_rng, plan)
    else:
        output, weights, _ = _forward(*tensors, used_rng, plan)
    return output, weights if sinks is None else weights[..., 1:]


def _composed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    dropout_p: float,
    rng: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    """The same by operators that compilers and transforms see."""
    n_repeats = query.shape[1] // key.shape[1]
    if n_repeats > 1:
        key, value = (each.repeat_interleave(n_repeats, dim=1) for each in (key, value))
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


def saturated_mask(mask: Tensor | None, scores: Tensor) -> Tensor | None:
    """A float16 mask whose finfo.min swallows float16 scores, as sums in float16 do: a row of nothing else gives equal
    weights in every dtype. (The softmax adds in float32, where -65504 leaves the scores what they are.)"""
    if mask is None or mask.dtype != torch.float16 or scores.dtype != torch.float16:
        return mask
    return mask.float().masked_fill(mask == torch.finfo(torch.float16).min, torch.finfo(torch.float32).min)


def _product(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """alpha * a b, multiplied before it is rounded."""
    if alpha == 1.0:
        return torch.bmm(a, b)
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0.0, alpha=alpha)


def _scores(query: Tensor, key: Tensor, position_bias: Tensor | None, sinks: Tensor | None, plan: _Plan) -> Tensor:
    """What the softmax multiplies and masks: (batch, heads, Q, K), with sinks (batch, heads, Q, 1 + K)."""
    batch, n_heads, n_queries, _ = query.shape
    n_keys = key.shape[2]
    q, k = _folded(query, key.shape[1]), key.flatten(0, 1)
    if position_bias is None and sinks is None:
        scores = _product(q, k.transpose(1, 2), plan.alpha)
        if plan.has_softcap:
            scores.tanh_()
        return scores.view(batch, n_heads, n_queries, n_keys)
    scores = query.new_empty(batch, n_heads, n_queries, n_keys + (sinks is not None))
    of_keys = scores
    if sinks is not None:
        of_keys = scores[..., 1:]
        scores[..., :1].copy_(sinks)
    if position_bias is not None:
        of_keys.copy_(position_bias)
    rows = scores.view(q.shape[0], q.shape[1], -1)[..., scores.shape[-1] - n_keys :]
    rows.baddbmm_(q, k.transpose(1, 2), beta=float(position_bias is not None), alpha=plan.alpha)
    return scores


def _folded(heads: Tensor, n_key_heads: int) -> Tensor:
    """(batch * key heads, queries of all heads that share one, width): products with keys and values need no copies of
    these, and their gradients sum over the heads by themselves."""
    batch, _, _, width = heads.shape
    return heads.reshape(batch * n_key_heads, -1, width)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    rng: Rng | None,
    plan: _Plan,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(output, weights, p): the weights with those of the sinks, p as the softmax stores it."""
    scores = _scores(query, key, position_bias, sinks, plan)
    kernel = None if mask is None else saturated_mask(kernel_mask(scores, mask), scores)
    weights, p = forward(plan.backend, scores, kernel, rng, plan.softmax, may_overwrite=True)
    output = torch.bmm(_folded(weights, key.shape[1])[..., weights.shape[-1] - key.shape[2] :], value.flatten(0, 1))
    return output.view(*query.shape[:3], value.shape[3]), weights, p


class _Attention(torch.autograd.Function):
    """Saves query, key, value, and weights or, where dropout made them another tensor, the probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        position_bias: Tensor | None,
        sinks: Tensor | None,
        rng: Rng | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        output, weights, p = _forward(query, key, value, mask, position_bias, sinks, rng, plan)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, weights if p is None else p)
        ctx.plan = plan
        ctx.kinds = tuple(
            None if each is None else (tuple(each.shape), each.dtype) for each in (mask, position_bias, sinks)
        )
        return output, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_double_backward("attention")
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return (None,) * 8
        with torch.autocast(given.device.type, enabled=False):  # of whoever calls backward
            return _Attention._backward(ctx, *grads)

    @staticmethod
    def _backward(ctx: Any, doutput: Tensor | None, dweights: Tensor | None) -> Any:
        query, key, value, p = ctx.saved_tensors
        plan: _Plan = ctx.plan
        (mask, position_bias, sinks), wants = ctx.kinds, ctx.needs_input_grad
        n_key_heads, first = key.shape[1], int(sinks is not None)
        k, v = key.flatten(0, 1), value.flatten(0, 1)

        dvalue = buffer = None
        dy = None if dweights is None else dweights
        if doutput is not None:
            do = _folded(doutput, n_key_heads)
            if wants[2]:
                scale = 1.0 / (1.0 - plan.softmax.dropout_p) if plan.softmax.dropout_p < 1.0 else 0.0
                # A set sign bit says dropped; what it leaves is P, and scale * P was multiplied with the values.
                buffer = None if plan.softmax.dropout_p == 0.0 else p.clamp_min(0.0)
                weights = _folded(p if buffer is None else buffer, n_key_heads)
                dvalue = _product(weights[..., first:].transpose(1, 2), do, scale).view(value.shape)
                del weights
            dy = _gradient_of_weights(do, v, p.shape, dweights, buffer if have_storage(do) else None)
            del buffer
        wants_scores = wants[0] or wants[1] or (sinks is not None and wants[5])
        bias, index = (position_bias, 4) if position_bias is not None else (mask, 3)
        bias_shape = bias[0] if bias is not None and wants[index] else None
        if bias_shape is not None and index == 4 and first:
            bias_shape = (*bias_shape[:-1], p.shape[-1])
        assert dy is not None
        backend = plan.backend if have_storage(dy) else "reference"
        ds, dbias = backward(backend, dy, p, bias_shape, plan.softmax, wants_scores, may_overwrite=dy is not dweights)
        del dy
        if dbias is not None:
            dbias = (dbias if dbias.shape == bias[0] else dbias[..., first:].sum_to_size(bias[0])).to(bias[1])

        dquery = dkey = dsinks = None
        if ds is not None:
            if sinks is not None and wants[5]:
                dsinks = ds[..., :1].sum_to_size(sinks[0]).to(sinks[1])
            if plan.has_softcap:
                tanh = _scores(query, key, None, None, plan)
                ds = ds.addcmul_(ds, tanh.square_(), value=-1.0)
            rows = _folded(ds, n_key_heads)[..., first:]
            if wants[0]:
                dquery = _product(rows, k, plan.alpha).view(query.shape)
            if wants[1]:
                dkey = _product(rows.transpose(1, 2), _folded(query, n_key_heads), plan.alpha).view(key.shape)
        dmask, dposition_bias = (None, dbias) if index == 4 else (dbias, None)
        return dquery, dkey, dvalue, dmask, dposition_bias, dsinks, None, None


def _gradient_of_weights(
    do: Tensor, v: Tensor, shape: torch.Size, dweights: Tensor | None, buffer: Tensor | None
) -> Tensor:
    """do v^T, plus the gradient of the weights where they were used; 0 where the weights of sinks, which are dropped,
    have none. buffer: a tensor of this shape that may be written over; its memory has been touched already."""
    n_keys = v.shape[1]
    if dweights is None and n_keys == shape[-1]:
        out = None if buffer is None else buffer.view(do.shape[0], do.shape[1], n_keys)
        return torch.bmm(do, v.transpose(1, 2), out=out).view(shape)
    dy = do.new_zeros(shape) if dweights is None else dweights.clone(memory_format=torch.contiguous_format)
    dy.view(do.shape[0], do.shape[1], -1)[..., shape[-1] - n_keys :].baddbmm_(do, v.transpose(1, 2))
    return dy
