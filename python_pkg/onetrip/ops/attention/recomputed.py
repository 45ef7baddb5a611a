"""Attention on a CPU that keeps no scores: a few heads at a time, so that their scores stay in the cache.

Forward and backward go through cuts of heads whose scores fit in a second-level cache. Backward computes the
probabilities of a cut again from query and key (Dao et al. 2022, section 3.1, without tiles of keys). Moves query, key,
value and output once, and their gradients once; saves query, key, value and mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.tracing import have_storage, refuse_double_backward
from ..softmax_autograd import forward as softmax
from .heads import (
    BackwardOperands,
    Cut,
    Gradients,
    Plan,
    Wanted,
    cuts_of,
    folded,
    gradients_of_cut,
    of_heads,
    write_scores,
)

_CUT_BYTES = 1 << 20
"""Scores that are worked on at a time, a thread: a second-level cache (2 x 12 heads of 384 queries in bfloat16, Zen 4:
forward and backward take 11.9 ms with 1 MiB, 16.4 with 256 KiB; 32 heads of 512: 26 ms, with 4 MiB 34)."""
_EVERYTHING: Cut = (slice(None), slice(None))


class Recomputed(torch.autograd.Function):
    """output of (query, key, value, mask, plan), as attention.attention has it, without dropout."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, plan: Plan) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.plan = plan
        return attend(query, key, value, mask, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_double_backward("attention")
        query, key, value, mask = ctx.saved_tensors
        of_query, of_key, of_value, *_ = ctx.needs_input_grad
        wants = Wanted(of_query, of_key, of_value, sinks=False, bias_shape=None)
        with torch.autocast("cpu", enabled=False):  # of whoever calls backward
            found = _gradients(grads[0], query, key, value, mask, wants, ctx.plan)
        return found.query, found.key, found.value, None, None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, plan: Plan) -> Tensor:
    """The output, laid out (batch, queries, heads, width) as models read it next."""
    batch, n_heads, n_queries, _ = query.shape
    n_repeats = n_heads // key.shape[1]
    output = query.new_empty(batch, n_queries, n_heads, value.shape[3]).transpose(1, 2)
    cuts = cuts_of(query, key, key.shape[2], _CUT_BYTES)
    buffer = _scores_buffer(query[of_heads(cuts[0], n_repeats)], key)
    for cut in cuts:
        heads, values = of_heads(cut, n_repeats), value[cut]
        p = _probabilities(query[heads], key[cut], _of_cut(mask, heads), buffer, plan)
        rows = torch.bmm(folded(p, values.shape[1]), values.flatten(0, 1))
        output[heads] = rows.view(*p.shape[:3], value.shape[3])
    return output


def _gradients(
    doutput: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, wants: Wanted, plan: Plan
) -> Gradients:
    n_repeats = query.shape[1] // key.shape[1]
    if not have_storage(doutput):
        p = _probabilities(query, key, mask, _scores_buffer(query, key), plan)
        operands = BackwardOperands(doutput, None, query, key, value, p)
        return gradients_of_cut(operands, None, wants, plan._replace(backend="reference"))
    found = Gradients(
        torch.empty_like(query) if wants.query else None,
        torch.empty_like(key) if wants.key else None,
        torch.empty_like(value) if wants.value else None,
        sinks=None,
        bias=None,
    )
    cuts = cuts_of(query, key, key.shape[2], _CUT_BYTES)
    p_buffer, buffer = (_scores_buffer(query[of_heads(cuts[0], n_repeats)], key) for _ in range(2))
    for cut in cuts:
        heads = of_heads(cut, n_repeats)
        q, k, v, do = (  # each is read by two products
            each[place].contiguous() for each, place in ((query, heads), (key, cut), (value, cut), (doutput, heads))
        )
        p = _probabilities(q, k, _of_cut(mask, heads), p_buffer, plan)
        operands = BackwardOperands(do, None, q, k, v, p)
        pieces = gradients_of_cut(operands, buffer[: p.shape[0], : p.shape[1]], wants, plan)
        for whole, place, piece in zip(found, (heads, cut, cut), pieces, strict=False):
            if whole is not None and piece is not None:
                whole[place] = piece
    return found


def _scores_buffer(query: Tensor, key: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:3], key.shape[2])


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, buffer: Tensor, plan: Plan) -> Tensor:
    """The probabilities of one cut, in buffer, which may have more batches and heads."""
    scores = buffer[: query.shape[0], : query.shape[1]]
    write_scores(scores, query, key, None, None, plan)
    return softmax(plan.backend, scores, mask, None, plan.softmax, may_overwrite=True)[0]


def _of_cut(mask: Tensor | None, heads: Cut) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    return mask[tuple(each if size > 1 else slice(None) for each, size in zip(heads, mask.shape, strict=False))]
