"""Attention on a CPU that keeps no scores: a few heads at a time, so that their scores stay in the cache.

Forward and backward go through cuts of heads whose scores fit in a second-level cache, or have one key head. Backward
computes the probabilities of a cut again from query and key (Dao et al. 2022, section 3.1, without tiles of keys).
Saves query, key, value and mask.

torch's products of half types round their results to these types: of scores, that would cost accuracy that SDPA has.
A second product gives what the rounding took, and the softmax adds both in float32. Both are multiplied by the scale
before they are rounded, so that float16 overflows where scores do, not where q k^T does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.backends import HALF
from ..common.tracing import have_storage, refuse_double_backward
from ..softmax_autograd import forward as softmax
from .heads import (
    EVERYTHING,
    BackwardOperands,
    Cut,
    Gradients,
    Plan,
    Wanted,
    cuts_of,
    each_of,
    empty_output,
    folded,
    gradients_of_cut,
    of_heads,
    write_scores,
)

_CACHE_BYTES = 1 << 20
"""Scores that are worked on at a time, a thread: what a second-level cache holds (Zen 4: 256 KiB take 1.4 times as long
for 2 x 12 heads of 384 queries in bfloat16, 4 MiB 1.3 times for 32 heads of 512)."""


class Recomputed(torch.autograd.Function):
    """attention.attention's output for (query, key, value, mask, plan), without dropout."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, plan: Plan) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.plan = plan
        return attend_in_cache(query, key, value, mask, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_double_backward("attention")
        query, key, value, mask = ctx.saved_tensors
        of_query, of_key, of_value, *_ = ctx.needs_input_grad
        wants = Wanted(of_query, of_key, of_value, sinks=False, bias_shape=None)
        with torch.autocast("cpu", enabled=False):  # of whoever calls backward
            found = _gradients(grads[0], query, key, value, mask, wants, ctx.plan)
        return found.query, found.key, found.value, None, None


class _Buffers(NamedTuple):
    """Memory that the cuts share, for the batches and heads of the largest one."""

    scores: Tensor
    rest: Tensor
    """What rounding took from scores of half types; in backward the gradient of the probabilities after that."""

    def of(self, query: Tensor) -> _Buffers:
        batch, n_heads = query.shape[:2]
        return _Buffers(self.scores[:batch, :n_heads], self.rest[:batch, :n_heads])


def _buffers(query: Tensor, key: Tensor) -> _Buffers:
    shape = *query.shape[:3], key.shape[2]
    return _Buffers(query.new_empty(shape), query.new_empty(shape))


def attend_in_cache(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, plan: Plan) -> Tensor:
    """The output, see empty_output."""
    n_repeats = query.shape[1] // key.shape[1]
    output = empty_output(query, value)
    cuts = cuts_of(query, key, key.shape[2], _CACHE_BYTES)
    buffers = _buffers(query[of_heads(cuts[0], n_repeats)], key)
    for cut in each_of(cuts, key):
        heads, values = of_heads(cut, n_repeats), value[cut]
        p = _probabilities(query[heads], key[cut], _of_cut(mask, heads), buffers, plan)
        rows = torch.bmm(folded(p, values.shape[1]), values.flatten(0, 1))
        output[heads] = rows.view(*p.shape[:3], value.shape[3])
    return output


def _gradients(
    doutput: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, wants: Wanted, plan: Plan
) -> Gradients:
    n_repeats = query.shape[1] // key.shape[1]
    # Batched gradients (is_grads_batched, vectorised jacobians) have no storage that a kernel could read.
    is_batched = not have_storage(doutput)
    cuts = [EVERYTHING] if is_batched else cuts_of(query, key, key.shape[2], _CACHE_BYTES)
    buffers = _buffers(query[of_heads(cuts[0], n_repeats)], key)
    if is_batched:
        p = _probabilities(query, key, mask, buffers, plan)
        operands = BackwardOperands(doutput, None, query, key, value, p)
        return gradients_of_cut(operands, None, wants, plan._replace(backend="reference"))
    found = Gradients(
        torch.empty_like(query) if wants.query else None,
        torch.empty_like(key) if wants.key else None,
        torch.empty_like(value) if wants.value else None,
        sinks=None,
        bias=None,
    )
    for cut in each_of(cuts, key):
        heads = of_heads(cut, n_repeats)
        q, k, v, do = (  # each is read by several products
            each[place].contiguous() for each, place in ((query, heads), (key, cut), (value, cut), (doutput, heads))
        )
        p = _probabilities(q, k, _of_cut(mask, heads), buffers, plan)
        pieces = gradients_of_cut(BackwardOperands(do, None, q, k, v, p), buffers.of(q).rest, wants, plan)
        for whole, place, piece in zip(found, (heads, cut, cut), pieces, strict=False):
            if whole is not None and piece is not None:
                whole[place] = piece
    return found


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, buffers: _Buffers, plan: Plan) -> Tensor:
    """The probabilities of one cut, in buffers.scores."""
    scores, rest = buffers.of(query)
    write_scores(scores, query, key, None, None, plan)
    if query.dtype in HALF:
        n_key_heads = key.shape[1]
        q, k, rounded = folded(query, n_key_heads), key.flatten(0, 1), folded(scores, n_key_heads)
        torch.baddbmm(rounded, q, k.transpose(1, 2), beta=-1.0, alpha=plan.alpha, out=folded(rest, n_key_heads))
        if query.dtype == torch.float16:
            rest.nan_to_num_(0.0, 0.0, 0.0)  # an infinite score has no rest
        mask = rest if mask is None else _masked(rest, mask)
    return softmax(plan.backend, scores, mask, None, plan.softmax, may_overwrite=True)[0]


def _masked(rest: Tensor, mask: Tensor) -> Tensor:
    """rest + mask, in float32 where the mask has more to add than 0 and -inf; rest may be written over. (A NaN that a
    bool mask hides stays NaN then, as in SDPA.)"""
    if mask.dtype == torch.bool:
        return rest.add_(torch.zeros_like(mask, dtype=rest.dtype).masked_fill_(~mask, -torch.inf))
    return rest + mask.float()


def _of_cut(mask: Tensor | None, heads: Cut) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    return mask[tuple(each if size > 1 else slice(None) for each, size in zip(heads, mask.shape, strict=False))]
