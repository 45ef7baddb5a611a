"""Cross-entropy of hidden @ weight.T + bias, some rows at a time: their logits never exist all at once.

A chunk is one matrix product into a buffer that all chunks share; the row kernel turns the logits there into their
gradient, and two products take that to the gradients of hidden and weight. The method: Liger-Kernel, Hsu et al. 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from ..reference import accumulator_dtype
from ..reference.cross_entropy import NO_INDEX, CrossEntropyPlan, RowStatistics, values
from . import cross_entropy_native
from .common.backends import formulas
from .common.products import add_product_, widens_now

_CHUNK_BYTES = 64 << 20
_CHUNK_BYTES_WITH_SUMS = 16 << 20  # of bfloat16 on a CPU, where this is _CHUNK_ROWS or more
_CHUNK_ROWS = 256  # fewer, and passes over the gradient of weight take longer than what they add
_CPU_PRODUCT_BYTES = 2 << 20  # of a half-precision product that is added to float32 sums; elsewhere a chunk's

Wants = tuple[bool, bool, bool]
"""Whether the gradients of hidden, weight and bias are wanted."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of hidden, weight and bias, in their dtypes; what is not wanted is None."""


def dtypes_of(weight: Tensor, bias: Tensor | None) -> tuple[torch.dtype, torch.dtype]:
    return weight.dtype, (weight if bias is None else bias).dtype


def row_functions(backend: str) -> Any:
    """The module with forward, backward and forward_backward_ of rows, as in reference.cross_entropy."""
    return cross_entropy_native if backend == "cpu" else formulas(backend, "cross_entropy")


class Slice(NamedTuple):
    """The classes whose weight this rank of a process group has: those from first on."""

    group: dist.ProcessGroup
    n_ranks: int
    first: int
    most: int
    """Classes of each rank but the last, which may have fewer."""
    n_classes: int
    """Classes of all ranks."""


class _Columns(NamedTuple):
    """Where the labels of rows are in a slice. Each [n_rows]."""

    column: Tensor
    """The label's column; 0 where it is in another slice."""
    is_here: Tensor
    is_ignored: Tensor
    labels: Tensor
    """As the row functions take them: column, NO_INDEX where ignored, -1 where the label is no class."""


class _SlicedRows:
    """The row functions where logits are those of this rank's classes, and labels number the classes of all ranks.

    Ranks exchange, in one all-gather, the statistics of each row in their classes and its label's value. All compute
    the same loss from them, and each its part of the gradient from the statistics of whole rows. Megatron-LM (Shoeybi
    et al. 2019) takes three all-reduces for this.
    """

    def __init__(self, functions: Any, part: Slice) -> None:
        self.functions, self.part = functions, part

    def forward(
        self, logits: Tensor, labels: Tensor, plan: CrossEntropyPlan, wants_entropy: bool = False
    ) -> RowStatistics:
        """wants_entropy: must be False."""
        assert not wants_entropy
        columns = self._columns(labels, logits.shape[1], plan.ignore_index)
        return self._exchange(logits, columns, _label_values(logits, columns, plan), plan)

    def forward_backward_(
        self, logits: Tensor, labels: Tensor, weights: Tensor, entropy_weights: Tensor | None, plan: CrossEntropyPlan
    ) -> Tensor:
        """entropy_weights: must be None."""
        assert entropy_weights is None
        columns = self._columns(labels, logits.shape[1], plan.ignore_index)
        t = _label_values(logits, columns, plan)
        loss, stats, _ = self._exchange(logits, columns, t, plan)
        n_classes = self.part.n_classes
        smoothing = plan.label_smoothing * logits.shape[1] / n_classes
        sliced = plan._replace(ignore_index=NO_INDEX, label_smoothing=smoothing)
        self.functions.backward_(logits, columns.labels, stats, weights, sliced)
        # The kernel takes this column as the label's in every row, and its smoothing as that of whole rows: replaced.
        largest, log_sum = stats.unbind(1)
        of_p = 1.0 + 2.0 * plan.lse_square_scale * (largest + log_sum)
        g = of_p * torch.exp((t - largest) - log_sum) - plan.label_smoothing / n_classes
        g = weights * (g - (1.0 - plan.label_smoothing) * columns.is_here)
        if plan.softcap:
            g = g * (1.0 - (t / plan.softcap) ** 2)
        g = g.masked_fill(columns.is_ignored, 0.0).to(logits.dtype)
        logits.scatter_(1, columns.column[:, None], g[:, None])
        return loss

    def _columns(self, labels: Tensor, n_cols: int, ignore_index: int) -> _Columns:
        is_ignored = labels == ignore_index
        column = labels - self.part.first
        is_here = (column >= 0) & (column < n_cols) & ~is_ignored
        column = column.masked_fill(~is_here, 0)
        is_wrong = (labels < 0) | (labels >= self.part.n_classes)
        return _Columns(column, is_here, is_ignored, column.masked_fill(is_wrong, -1).masked_fill(is_ignored, NO_INDEX))

    def _exchange(self, logits: Tensor, columns: _Columns, t: Tensor, plan: CrossEntropyPlan) -> RowStatistics:
        """Loss and stats of whole rows. t: _label_values."""
        smoothing = plan.label_smoothing
        # With label_smoothing 1 the loss of a slice is its log_sum - mean(t - largest).
        sliced = plan._replace(ignore_index=NO_INDEX, label_smoothing=float(smoothing > 0.0), lse_square_scale=0.0)
        loss, stats, _ = self.functions.forward(logits, columns.labels, sliced)
        mine = [*stats.unbind(1), t.masked_fill(~columns.is_here, 0.0)]
        if smoothing:
            mine.append(stats[:, 1] - loss)
        found = torch.stack(mine)
        of_ranks = found.new_empty((self.part.n_ranks, *found.shape))
        dist.all_gather(list(of_ranks.unbind(0)), found, group=self.part.group)
        tops, log_sums, label_values, *means_below = of_ranks.unbind(1)
        t_label, largest = label_values.sum(0), tops.amax(0)
        log_sum = torch.logsumexp(tops - largest.masked_fill(largest == -torch.inf, 0.0) + log_sums, 0)
        lse = largest + log_sum
        loss = (1.0 - smoothing) * (log_sum - (t_label - largest)) + plan.lse_square_scale * lse * lse
        if smoothing:
            firsts = torch.arange(0, self.part.n_classes, self.part.most, device=logits.device)
            shares = (self.part.n_classes - firsts).clamp(max=self.part.most)[:, None].to(loss.dtype)
            below = (shares / self.part.n_classes * (means_below[0] + (tops - largest))).sum(0)
            loss = loss + smoothing * (log_sum - below)
        return RowStatistics(loss.masked_fill(columns.is_ignored, 0.0), torch.stack([largest, log_sum], 1), None)


def _label_values(logits: Tensor, columns: _Columns, plan: CrossEntropyPlan) -> Tensor:
    return values(logits.gather(1, columns.column[:, None]), plan)[:, 0]


class Linear(NamedTuple):
    """The operands of one call."""

    hidden: Tensor
    """[n_rows, n_hidden]"""
    weight: Tensor
    """[n_classes, n_hidden], of hidden's dtype, as bias: see of."""
    bias: Tensor | None
    labels: Tensor
    """[n_rows] int64."""
    plan: CrossEntropyPlan
    backend: str
    chunk_rows: int
    """Rows whose logits exist at once; 0: see rows_at_once."""
    n_kept: int | None
    """Rows whose label is not ignored; None where that is not known on the host."""
    part: Slice | None = None
    """What weight and bias are a slice of; labels number the classes of all."""
    dtypes: tuple[torch.dtype, torch.dtype] | None = None
    """Of the gradients of weight and bias: see dtypes_of; None for hidden's."""

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *others: Any) -> Linear:
        """weight and bias may be of other dtypes than hidden, as autocast leaves them, and so are their gradients.
        labels: of any stride, whatever hooks on saved tensors made of them."""
        others = labels.contiguous(), *others
        if weight.dtype == hidden.dtype and (bias is None or bias.dtype == hidden.dtype):
            return cls(hidden, weight, bias, *others)
        cast = None if bias is None else bias.to(hidden.dtype)
        return cls(hidden, weight.to(hidden.dtype), cast, *others)._replace(dtypes=dtypes_of(weight, bias))

    def kept_index(self) -> Tensor | None:
        """The rows that take part, [n_kept] int64; None where all do, or their number is not known on the host."""
        if self.n_kept is None or self.n_kept == self.labels.numel():
            return None
        return (self.labels != self.plan.ignore_index).nonzero()[:, 0]

    @property
    def rows(self) -> Any:
        functions = row_functions(self.backend)
        return functions if self.part is None else _SlicedRows(functions, self.part)

    def rows_at_once(self, wants_weight: bool = False) -> int:
        """chunk_rows, or as many as have logits of about 64 MB. Of bfloat16 on a CPU, where that would be most of the
        peak, as many as the sums of the products need to be fast, of 16 to 64 MB. The same on every rank.

        In half precision by Triton, with the gradient of weight wanted, more where that costs no memory: the peak is
        when float32 sums of that gradient are rounded, three times weight's bytes. So a chunk's logits have weight's
        bytes, and up to twice as many rows are one chunk, which needs no sums. With chunks of 64 MB and products of
        2 MB an H200 took three times as long as unfused.
        """
        if self.chunk_rows:
            return self.chunk_rows
        n_rows, n_hidden = self.hidden.shape
        row_bytes = (self.weight.shape[0] if self.part is None else self.part.most) * self.hidden.element_size()
        most = max(1, _CHUNK_BYTES // row_bytes)
        if self.hidden.dtype == torch.bfloat16 and self.hidden.device.type == "cpu":
            return min(most, max(_CHUNK_ROWS, _CHUNK_BYTES_WITH_SUMS // row_bytes))
        if self.backend == "triton" and self.hidden.element_size() == 2 and wants_weight:
            return max(most, n_rows if n_rows <= 2 * n_hidden else n_hidden)
        return most


def _logits(call: Linear, hidden: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        return linear(hidden, call.weight, call.bias)
    if call.bias is None:
        return torch.mm(hidden, call.weight.t(), out=out)
    return torch.addmm(call.bias, hidden, call.weight.t(), out=out)


def kept_rows(tensor: Tensor, index: Tensor | None) -> Tensor:
    """index: Linear.kept_index."""
    return tensor if index is None else tensor.index_select(0, index)


class _Chunk(NamedTuple):
    rows: slice
    """Range among the rows that are kept."""
    hidden: Tensor
    labels: Tensor
    logits: Tensor
    """Contiguous, to be overwritten; the next chunk has the same memory."""


def _part(tensor: Tensor, rows: slice) -> Tensor:
    return tensor if rows.stop - rows.start == tensor.shape[0] else tensor[rows]


class _Kept:
    """The rows that take part: those whose label is not ignored, where their number is known. On a GPU all of them: it
    would have to come to the host, and the kernel gives ignored rows zeros."""

    def __init__(self, call: Linear, wants_weight: bool = False) -> None:
        self.call = call
        self.index = call.kept_index()
        self.labels = kept_rows(call.labels, self.index)
        self.n_rows = self.labels.numel()
        self.n_chunks = -(-self.n_rows // call.rows_at_once(wants_weight))

    def take(self, tensor: Tensor, rows: slice) -> Tensor:
        return _part(tensor, rows) if self.index is None else tensor.index_select(0, _part(self.index, rows))

    def put(self, into: Tensor, rows: slice, values: Tensor) -> None:
        if self.index is None:
            into[rows] = values
        else:
            into.index_copy_(0, self.index[rows], values)

    def for_each_chunk(self, do: Callable[[_Chunk], None]) -> None:
        """No logits are left after the last one: not in a loop's variable either."""
        call = self.call
        if self.n_rows == 0:
            return
        size = -(-self.n_rows // self.n_chunks)
        buffer = call.hidden.new_empty((size, call.weight.shape[0]))
        for first in range(0, self.n_rows, size):
            rows = slice(first, min(first + size, self.n_rows))
            hidden, logits = self.take(call.hidden, rows), _part(buffer, slice(0, rows.stop - first))
            _logits(call, hidden, logits)
            do(_Chunk(rows, hidden, _part(self.labels, rows), logits))


class _Sums:
    """The gradients, chunk by chunk. Those of weight and bias are summed in float32 (float64); that of weight is one
    product, and needs no sum, where there is one chunk. A native sum of bfloat16 has two parts (add_to_sums): the
    gradient itself, and what is missing from it, half the bytes of a float32. scale: what the gradients of weight and
    bias are multiplied by, before they are rounded."""

    def __init__(self, kept: _Kept, wants: Wants, scale: float = 1.0) -> None:
        hidden, weight, bias = kept.call.hidden, kept.call.weight, kept.call.bias
        sums = accumulator_dtype(weight.dtype)
        self.dtypes = kept.call.dtypes or dtypes_of(weight, bias)
        is_wide = self.dtypes[0] == sums and widens_now(hidden, sums)  # by the product itself
        self.kept, self.scale, self.is_first = kept, scale, True
        self.dhidden = self.dweight = self.dbias = None
        self.rest: Tensor | None = None
        self.is_in_parts = weight.dtype == torch.bfloat16 and kept.call.backend == "cpu"
        if wants[0]:
            make = torch.empty if kept.index is None else torch.zeros
            self.dhidden = make(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        if wants[1]:
            dtype = sums if is_wide or (kept.n_chunks > 1 and not self.is_in_parts) else weight.dtype
            self.dweight = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        if wants[2] and bias is not None:
            self.dbias = torch.zeros(bias.shape, dtype=sums, device=bias.device)

    def add(self, chunk: _Chunk) -> None:
        """chunk.logits: their gradient by now."""
        dlogits = chunk.logits
        if self.dhidden is not None:
            if self.kept.index is None:
                torch.mm(dlogits, self.kept.call.weight, out=_part(self.dhidden, chunk.rows))
            else:
                self.kept.put(self.dhidden, chunk.rows, dlogits @ self.kept.call.weight)
        if self.dweight is not None:
            is_one_operator = self.dweight.dtype == dlogits.dtype or widens_now(dlogits, self.dweight.dtype)
            if is_one_operator and (self.is_first or not self.is_in_parts):
                add_product_(self.dweight, dlogits.t(), chunk.hidden, alpha=self.scale, is_first=self.is_first)
            else:
                self._add_products(self.dweight, chunk)
        if self.dbias is not None:
            self.dbias.add_(dlogits.sum(dim=0, dtype=self.dbias.dtype), alpha=self.scale)
        self.is_first = False

    def _add_products(self, dweight: Tensor, chunk: _Chunk) -> None:
        """The product for some classes at a time."""
        n_classes, n_hidden = dweight.shape
        most = _CPU_PRODUCT_BYTES if dweight.device.type == "cpu" else _CHUNK_BYTES
        size = min(n_classes, max(1, most // (n_hidden * chunk.hidden.element_size())))
        buffer = chunk.hidden.new_empty((size, n_hidden))
        has_no_rest = self.rest is None
        if self.is_in_parts and self.rest is None:
            self.rest = torch.empty(dweight.shape, dtype=torch.int16, device="cpu")
        for first in range(0, n_classes, size):
            classes = slice(first, min(first + size, n_classes))
            columns, product = chunk.logits[:, classes], _part(buffer, slice(0, classes.stop - first))
            product.addmm_(columns.t(), chunk.hidden, beta=0, alpha=self.scale)
            if self.rest is not None:
                cross_entropy_native.add_to_sums(dweight[classes], self.rest[classes], product, has_no_rest)
            elif self.is_first:
                dweight[classes] = product
            else:
                dweight[classes].add_(product)

    def result(self) -> Gradients:
        part = self.kept.call.part
        if part is not None and self.dhidden is not None:
            dist.all_reduce(self.dhidden, group=part.group)
        if self.dweight is not None and self.is_first:
            self.dweight.zero_()
        return (
            self.dhidden,
            None if self.dweight is None else self.dweight.to(self.dtypes[0]),
            None if self.dbias is None else self.dbias.to(self.dtypes[1]),
        )


def mean_weight(labels: Tensor, n_kept: int | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """One over the number of rows that are not ignored; 1 where all are, so that their mean is 0."""
    if n_kept is not None:
        return torch.full((), 1.0 / max(n_kept, 1), dtype=dtype, device=labels.device)
    return (labels != ignore_index).sum().clamp_min(1).to(dtype).reciprocal()


def is_one_chunk(call: Linear) -> bool:
    """Whether the rows that are kept are at most one chunk of the native kernel. Not of float16, see reduced."""
    return (
        call.backend == "cpu"
        and call.part is None
        and call.n_kept is not None
        and call.n_kept <= call.rows_at_once()
        and call.hidden.dtype != torch.float16
    )


def keeps_dlogits(call: Linear, wants: Wants) -> bool:
    """Whether the gradient of the logits is kept until backward, and the products with it left to that: it is one
    chunk, and takes no more memory than the gradients of hidden and weight, beside which hidden is kept for a second
    backward."""
    if not is_one_chunk(call):
        return False
    n_rows, n_hidden = call.hidden.shape
    n_classes = call.weight.shape[0]
    assert call.n_kept is not None
    n_dlogits, n_gradients = call.n_kept * n_classes, (wants[0] * n_rows + wants[1] * n_classes) * n_hidden
    return n_dlogits <= n_gradients + (not wants[1]) * n_rows * n_hidden


def total_and_dlogits(
    call: Linear, index: Tensor | None, is_mean: bool, wants_dlogits: bool = True
) -> tuple[Tensor, Tensor]:
    """(sum or mean of the rows' losses, its gradient by the logits; without that, the logits), where is_one_chunk.
    index: kept_index; the logits are those of these rows."""
    logits = _logits(call, kept_rows(call.hidden, index))
    if not call.n_kept:
        return torch.zeros((), dtype=accumulator_dtype(logits.dtype), device="cpu"), logits
    operands = (logits, kept_rows(call.labels, index), call.plan, logits.shape[0] if is_mean else 1)
    if wants_dlogits:
        return cross_entropy_native.total_and_gradient_(*operands), logits
    return cross_entropy_native.total(*operands)[0], logits


def products(
    dlogits: Tensor, index: Tensor | None, hidden: Tensor | None, weight: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype], n_rows: int, wants: Wants,
) -> Gradients:  # fmt: skip
    """The gradients from that of the logits. index: as in total_and_dlogits. hidden: may be None where the gradient of
    weight is not wanted. n_rows: of hidden."""
    dhidden = dweight = None
    if wants[0]:
        dhidden = dlogits @ weight.to(dlogits.dtype)
        if index is not None:
            dhidden = dhidden.new_zeros(n_rows, dhidden.shape[1]).index_copy_(0, index, dhidden)
    if wants[1]:
        assert hidden is not None
        dweight = (dlogits.t() @ kept_rows(hidden, index)).to(dtypes[0])
    dbias = dlogits.sum(dim=0, dtype=accumulator_dtype(dlogits.dtype)).to(dtypes[1]) if wants[2] else None
    return dhidden, dweight, dbias


def reduced(call: Linear, is_mean: bool, wants: Wants) -> tuple[Tensor, Gradients, Tensor]:
    """(sum or mean of the rows' losses, its gradients, [2] factors that these are still to be multiplied by: that of
    hidden's, and that of weight's and bias's).

    The factors are 1, but for float16. There a row's share of a mean may underflow before the factor of a loss scaler
    comes, and a sum over rows may overflow: each row has the weight 1, and sums over rows are scaled to the middle of
    both, about 1 / sqrt(n_rows)."""
    kept = _Kept(call, wants[1])
    dtype = accumulator_dtype(call.hidden.dtype)
    if is_mean:
        weight = mean_weight(call.labels, call.n_kept, call.plan.ignore_index, dtype)
    else:
        weight = torch.ones((), dtype=dtype, device=call.hidden.device)
    total = torch.zeros_like(weight)
    row_weight, factors, scale = weight, weight.new_ones(2), 1.0
    if call.hidden.dtype == torch.float16:
        scale = 2.0 ** -(kept.n_rows.bit_length() // 2)
        row_weight, factors = torch.ones_like(weight), torch.stack((weight, weight / scale))
    row_weight = row_weight.view(1)
    sums = _Sums(kept, wants, scale)

    def add(chunk: _Chunk) -> None:
        if any(wants):
            loss = call.rows.forward_backward_(chunk.logits, chunk.labels, row_weight, None, call.plan)
            sums.add(chunk)
        else:
            loss = call.rows.forward(chunk.logits, chunk.labels, call.plan).loss
        total.add_(loss.sum())

    kept.for_each_chunk(add)
    return total * weight, sums.result(), factors


def multiply_(gradients: Gradients, dloss: Tensor, factors: Tensor, backend: str) -> None:
    """Multiply the gradients of reduced by the gradient of its loss, and by the factors. What is multiplied by 1 is not
    touched; a GPU finds that out without the host."""
    products = dloss * factors
    on_cpu = products.device.type == "cpu" and backend != "triton"
    of_each = products.tolist() if on_cpu else products.split(1)
    for gradient, factor in zip(gradients, (*of_each, of_each[1]), strict=True):
        if gradient is None or (on_cpu and factor == 1.0):
            continue
        if backend == "triton":
            formulas(backend, "cross_entropy").multiply_(gradient, factor)
        else:
            gradient.mul_(factor)


def multiplied(gradients: Gradients, dloss: Tensor, factors: Tensor) -> Gradients:
    """As multiply_, by operators that can be traced and batched, and not in place."""
    if not any(gradient is not None and gradient.dtype == torch.float16 for gradient in gradients):  # factors are 1
        return tuple(None if gradient is None else gradient * dloss for gradient in gradients)  # type: ignore[return-value]
    of_hidden, of_sums = dloss * factors[:1], dloss * factors[1:]  # [1]: they take part in the promotion to float32
    dhidden, dweight, dbias = gradients
    return (
        None if dhidden is None else (dhidden * of_hidden).to(dhidden.dtype),
        None if dweight is None else (dweight * of_sums).to(dweight.dtype),
        None if dbias is None else (dbias * of_sums).to(dbias.dtype),
    )


def by_row(call: Linear, wants_entropy: bool, sign: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """(sign, 1 or -1, times the [n_rows] losses, entropies where wanted), float32 (float64); 0 in ignored rows."""
    is_one_chunk = call.n_kept == call.labels.numel() and 0 < call.n_kept <= call.rows_at_once()
    if is_one_chunk and call.backend == "cpu" and call.part is None:
        loss, entropy = cross_entropy_native.losses(_logits(call, call.hidden), call.labels, call.plan, wants_entropy)
        return loss if sign == 1.0 else loss.neg_(), entropy
    kept = _Kept(call)
    loss = call.hidden.new_zeros(call.labels.shape, dtype=accumulator_dtype(call.hidden.dtype))
    entropy = torch.zeros_like(loss) if wants_entropy else None

    def put(chunk: _Chunk) -> None:
        found = call.rows.forward(chunk.logits, chunk.labels, call.plan, wants_entropy)
        kept.put(loss, chunk.rows, found.loss)
        if entropy is not None:
            kept.put(entropy, chunk.rows, found.entropy)

    kept.for_each_chunk(put)
    return loss.mul_(sign), entropy


def by_row_backward(call: Linear, dloss: Tensor, dentropy: Tensor | None, wants: Wants) -> Gradients:
    """The gradients of by_row; the chunks are computed again. dloss: [n_rows] or [1], contiguous."""
    kept = _Kept(call, wants[1])
    sums = _Sums(kept, wants)

    def add(chunk: _Chunk) -> None:
        weights = dloss if dloss.numel() == 1 else kept.take(dloss, chunk.rows)
        entropy_weights = None if dentropy is None else kept.take(dentropy, chunk.rows)
        call.rows.forward_backward_(chunk.logits, chunk.labels, weights, entropy_weights, call.plan)
        sums.add(chunk)

    kept.for_each_chunk(add)
    return sums.result()
