"""Attention between its operands: two products of matrices and a softmax, and the gradients of all three.

On a CPU a few heads are taken at a time (cuts), so that backward has the temporaries of one cut, not of all scores. It
takes as long as all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...reference.philox import Rng, dropout_scale
from ...reference.softmax import SoftmaxPlan
from ..common.masks import kernel_mask
from ..common.tracing import have_storage, standing_for, watched_as
from ..softmax_autograd import backward, forward


class Operands(NamedTuple):
    """The tensors of one call, as attention.attention takes them."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    position_bias: Tensor | None
    sinks: Tensor | None


class BackwardOperands(NamedTuple):
    """doutput, dweights: of output and weights; one may be None. p: as the softmax stores it."""

    doutput: Tensor | None
    dweights: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    p: Tensor


class Plan(NamedTuple):
    """Everything about one call that is not a tensor."""

    softmax: SoftmaxPlan
    alpha: float
    """What the products q k^T are multiplied by on their way out of the matrix product."""
    has_softcap: bool
    backend: str
    on_cpu: bool
    """Heads are cut, and the softmax takes the memory of the scores."""


def saturated_mask(mask: Tensor | None, scores: Tensor) -> Tensor | None:
    """A float16 mask whose finfo.min swallows float16 scores, as sums in float16 do: a row of nothing else gives equal
    weights in every dtype. (The softmax adds in float32, where -65504 leaves the scores what they are.)"""
    if mask is None or mask.dtype != torch.float16 or scores.dtype != torch.float16:
        return mask
    return mask.float().masked_fill(mask == torch.finfo(torch.float16).min, torch.finfo(torch.float32).min)


def _product(a: Tensor, b: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    """alpha * a b, multiplied before it is rounded."""
    if alpha == 1.0:
        return torch.bmm(a, b, out=out)
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0.0, alpha=alpha, out=out)


# Scores that are worked on at a time on a CPU, a thread.
_CUT_BYTES = 4 << 20

Cut = tuple[slice, slice]
"""Batches and key heads."""
EVERYTHING: Cut = (slice(None), slice(None))


def cuts_of(query: Tensor, key: Tensor, n_cols: int, bytes_a_thread: int) -> list[Cut]:
    """Batches and key heads whose scores, [query heads, queries, n_cols], have bytes_a_thread for each thread; at least
    one key head.

    Products share heads out among threads: a cut that is not everything has as many for each, where it can."""
    batch, n_heads, n_queries, _ = query.shape
    n_key_heads, n_threads = key.shape[1], torch.get_num_threads()
    bytes_of_one = query.element_size() * (n_heads // n_key_heads) * n_queries * n_cols
    at_once = max(1, bytes_a_thread * n_threads // max(bytes_of_one, 1))
    if at_once >= batch * n_key_heads:
        return [EVERYTHING]
    if at_once >= n_key_heads:
        step = _even_step(batch, at_once // n_key_heads)
        return [(slice(i, i + step), slice(None)) for i in range(0, batch, step)]
    if at_once > n_threads:
        at_once -= at_once % n_threads
    step = min(at_once, ceil(_even_step(n_key_heads, at_once) / n_threads) * n_threads)
    return [(slice(i, i + 1), slice(j, j + step)) for i in range(batch) for j in range(0, n_key_heads, step)]


def _even_step(n: int, most: int) -> int:
    """The step of the fewest, most even steps through n that are no longer than `most`."""
    return ceil(n / ceil(n / most))


def each_of(cuts: list[Cut], key: Tensor) -> Iterator[Cut]:
    """The cuts, one after the other. A prediction reads no values: there one stands for all of its shape."""
    if watched_as() is None or not isinstance(key, FakeTensor):
        yield from cuts
        return
    alike: dict[tuple[int, ...], list[Cut]] = {}
    for cut in cuts:
        alike.setdefault(tuple(len(range(n)[part]) for part, n in zip(cut, key.shape, strict=False)), []).append(cut)
    for first, *others in alike.values():
        with standing_for(1 + len(others)):
            yield first


def _cuts(query: Tensor, key: Tensor, n_cols: int, on_cpu: bool) -> list[Cut]:
    """Elsewhere than on a CPU launches cost more than temporaries."""
    return cuts_of(query, key, n_cols, _CUT_BYTES) if on_cpu else [EVERYTHING]


def of_heads(cut: Cut, n_repeats: int) -> Cut:
    """The same cut of query heads."""
    batches, heads = cut
    if heads.stop is None:
        return cut
    return batches, slice(heads.start * n_repeats, heads.stop * n_repeats)


def write_scores(
    scores: Tensor, query: Tensor, key: Tensor, position_bias: Tensor | None, sinks: Tensor | None, plan: Plan
) -> None:
    """What the softmax multiplies and masks: (batch, heads, Q, K), with sinks (batch, heads, Q, 1 + K)."""
    q, k = folded(query, key.shape[1]), key.flatten(0, 1)
    rows = folded(scores, key.shape[1])
    if sinks is not None:
        scores[..., :1].copy_(sinks)
        rows = rows[..., 1:]
    if position_bias is not None:
        scores[..., scores.shape[-1] - key.shape[2] :].copy_(position_bias)
    if sinks is None and position_bias is None:
        _product(q, k.transpose(1, 2), plan.alpha, out=rows)
    else:
        rows.baddbmm_(q, k.transpose(1, 2), beta=float(position_bias is not None), alpha=plan.alpha)
    if plan.has_softcap:
        scores.tanh_()


def folded(heads: Tensor, n_key_heads: int) -> Tensor:
    """(batch * key heads, queries of all heads that share one, width): products with keys and values need no copies of
    these, and their gradients sum over the heads by themselves."""
    batch, n_heads, n_queries, width = heads.shape
    return heads.reshape(batch * n_key_heads, n_heads // n_key_heads * n_queries, width)


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """(batch, heads, queries, width), laid out (batch, queries, heads, width) as models read it next. No view: a model
    may write to it, which autograd forbids for views that a Function returns."""
    (batch, n_heads, n_queries, _), width = query.shape, value.shape[3]
    strides = n_queries * n_heads * width, width, n_heads * width, 1
    return query.new_empty_strided((batch, n_heads, n_queries, width), strides)


def as_products_read(operands: Operands, plan: Plan) -> Operands:
    """The operands whose copies, which the products make of views like transposed heads, backward can read as well."""
    query, key, value = operands[:3]
    n_cols = key.shape[2] + (operands.sinks is not None)
    if len(_cuts(query, key, n_cols, plan.on_cpu)) > 1:
        return operands
    return operands._replace(query=query.contiguous(), key=key.contiguous(), value=value.contiguous())


def attend(operands: Operands, rng: Rng | None, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """(output, weights, p): the weights with those of the sinks, p as the softmax stores it."""
    query, key, value, mask, position_bias, sinks = operands
    batch, n_heads, n_queries, _ = query.shape
    n_key_heads, n_keys = key.shape[1:3]
    n_repeats = n_heads // n_key_heads
    scores = query.new_empty(batch, n_heads, n_queries, n_keys + (sinks is not None))
    cuts = _cuts(query, key, scores.shape[-1], plan.on_cpu)
    bias, sink = (
        None if each is None else each.expand(*scores.shape[:-1], each.shape[-1]) for each in (position_bias, sinks)
    )
    for cut in each_of(cuts, key):
        heads = of_heads(cut, n_repeats)
        bias_of_cut, sink_of_cut = (None if each is None else each[heads] for each in (bias, sink))
        write_scores(scores[heads], query[heads], key[cut], bias_of_cut, sink_of_cut, plan)
    kernel = None if mask is None else saturated_mask(kernel_mask(scores, mask), scores)
    weights, p = forward(plan.backend, scores, kernel, rng, plan.softmax, may_overwrite=plan.on_cpu)
    del scores
    if len(cuts) == 1:
        output = torch.bmm(folded(weights, n_key_heads)[..., weights.shape[-1] - n_keys :], value.flatten(0, 1))
        # Not a view: callers may write to the output in place.
        return torch.ops.aten._unsafe_view(output, (*query.shape[:3], value.shape[3])), weights, p
    # As models lay it out next, (batch, Q, heads, width): the transpose back costs them no copy.
    output = empty_output(query, value)
    for cut in each_of(cuts, key):
        heads = of_heads(cut, n_repeats)
        values = value[cut]
        rows = folded(weights[heads], values.shape[1])[..., weights.shape[-1] - n_keys :]
        output[heads] = torch.bmm(rows, values.flatten(0, 1)).view(output[heads].shape)
    return output, weights, p


class Gradients(NamedTuple):
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    sinks: Tensor | None
    """One value for each row of scores, not yet summed."""
    bias: Tensor | None


class Wanted(NamedTuple):
    """Which gradients are wanted."""

    query: bool
    key: bool
    value: bool
    sinks: bool
    bias_shape: tuple[int, ...] | None
    """Shape of the mask or position bias whose gradient is wanted, sinks' column included; None: no gradient."""


def gradients(operands: BackwardOperands, wants: Wanted, plan: Plan) -> Gradients:
    """The wanted gradients, shaped like their tensors; see Gradients.sinks and Wanted.bias_shape."""
    doutput, dweights, query, key, value, p = operands
    given = doutput if doutput is not None else dweights
    assert given is not None
    writes = have_storage(given)
    if not writes:
        plan = plan._replace(backend="reference")
    # A bias's gradient sums over batches and heads.
    cuts = _cuts(query, key, p.shape[-1], plan.on_cpu) if writes and wants.bias_shape is None else [EVERYTHING]
    if len(cuts) == 1:
        return gradients_of_cut(operands, None, wants, plan)
    n_repeats = query.shape[1] // key.shape[1]
    found = Gradients(
        torch.empty_like(query) if wants.query else None,
        torch.empty_like(key) if wants.key else None,
        torch.empty_like(value) if wants.value and doutput is not None else None,
        p.new_empty(*p.shape[:-1], 1) if wants.sinks else None,
        None,
    )
    buffer = torch.empty_like(p[of_heads(cuts[0], n_repeats)])
    for cut in each_of(cuts, key):
        heads = of_heads(cut, n_repeats)
        do, dw = (None if each is None else each[heads] for each in (doutput, dweights))
        of_cut = BackwardOperands(do, dw, query[heads], key[cut], value[cut], p[heads])
        room = buffer[: of_cut.p.shape[0], : of_cut.p.shape[1]]
        pieces = gradients_of_cut(of_cut, room, wants, plan)
        for whole, place, piece in zip(found, (heads, cut, cut, heads), pieces, strict=False):
            if whole is not None and piece is not None:
                whole[place] = piece
    return found


def gradients_of_cut(operands: BackwardOperands, buffer: Tensor | None, wants: Wanted, plan: Plan) -> Gradients:
    """The gradients of some batches and heads. buffer: shaped like p, is written over."""
    doutput, dweights, query, key, value, p = operands
    n_key_heads, first = key.shape[1], p.shape[-1] - key.shape[2]
    k, v = key.flatten(0, 1), value.flatten(0, 1)
    dvalue = None
    dy = dweights
    wants_scores = wants.query or wants.key or wants.sinks
    if doutput is not None:
        do = folded(doutput, n_key_heads)
        if wants.value:
            scale = dropout_scale(plan.softmax.dropout_p)
            # A set sign bit says dropped; what it leaves is P, and scale * P was multiplied with the values.
            weights = p
            if plan.softmax.dropout_p > 0.0:
                weights = torch.clamp_min(p, 0.0, out=buffer)
                buffer = weights if have_storage(do) else None
            dvalue = _product(_of_keys(folded(weights, n_key_heads), first).transpose(1, 2), do, scale).view(
                value.shape
            )
            del weights
        if wants_scores or wants.bias_shape is not None:
            dy = _gradient_of_weights(do, v, p.shape, dweights, buffer)
    del buffer
    if dy is None or not (wants_scores or wants.bias_shape is not None):
        return Gradients(None, None, dvalue, None, None)
    ds, dbias = backward(
        plan.backend,
        dy,
        p,
        wants.bias_shape,
        plan.softmax,
        wants_scores,
        may_overwrite=plan.on_cpu and dy is not dweights,
    )
    del dy
    dquery = dkey = dsinks = None
    if ds is not None:
        if wants.sinks:
            dsinks = ds[..., :1]
        if plan.has_softcap:
            tanh = torch.empty_like(ds)
            write_scores(tanh, query, key, None, None, plan)
            ds = torch.ops.aten.tanh_backward.grad_input(ds, tanh, grad_input=tanh)
        rows = _of_keys(folded(ds, n_key_heads), first)
        if wants.query:
            dquery = _product(rows, k, plan.alpha).view(query.shape)
        if wants.key:
            dkey = _product(rows.transpose(1, 2), folded(query, n_key_heads), plan.alpha).view(key.shape)
    return Gradients(dquery, dkey, dvalue, dsinks, dbias)


def _of_keys(rows: Tensor, first: int) -> Tensor:
    """Without the columns of sinks. Not by indexing, which aliases a tensor whole: vmap has no rule for that."""
    return rows.narrow(-1, first, rows.shape[-1] - first)


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
    _of_keys(dy.view(do.shape[0], do.shape[1], shape[-1]), shape[-1] - n_keys).baddbmm_(do, v.transpose(1, 2))
    return dy
