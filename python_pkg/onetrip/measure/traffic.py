"""Bytes that operators read and write in memory, counted from their operands: no clock, no GPU, no data needed.

An operator reads each tensor operand once and writes each output once. Exceptions:
- Views and allocations move nothing. An expanded operand counts the elements that it has in memory.
- In-place operators read and write their operand; those that overwrite it (copy_, fill_, out=) only write it.
- Lookups (embedding, gather) read as much of their table as they return.
- A linear cross-entropy is its matrix products and the passes over its logits, of every row, ignored or not.
Caches are not modelled: it is what a kernel must move if everything between two operators goes through memory.
Operators that stay in Python outside of torch's dispatcher are not seen; onetrip's are, a dispatch mode makes them
visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..ops.common.products import widens
from ..ops.common.tracing import times
from ..ops.cross_entropy_linear import Linear
from ..reference.cross_entropy import CrossEntropyPlan

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PRODUCT, ATTENTION, LOSS, OUTSIDE = "product", "attention", "loss", "outside"
"""Kinds of operators. Outside: neither a matrix product, nor a fused attention kernel, nor the loss."""

_PRODUCTS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_scaled_mm", "_grouped_mm"),
        *("convolution", "convolution_backward"),
    }
)
_ATTENTION_NAMES = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention", "_cudnn_attention")
_LOSS_NAMES = ("_log_softmax", "nll_loss", "cross_entropy", "linear_cross_entropy", "linear_logprobs")

_LINEAR_LOSS = "onetrip::linear_cross_entropy"

_ALLOCATIONS = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"])
# Operands of these give a shape and a dtype; their elements are not read.
_LIKE = frozenset(
    {
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full"),
    }
)
_OVERWRITES = frozenset(["copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"])
_LOOKUPS = frozenset(["embedding", "index_select", "gather", "index", "take", "nll_loss_forward", "nll_loss2d_forward"])
_ROW_SUMS = frozenset(["index_add_", "scatter_add_"])  # as many of the table's elements as are added
# nll_loss_backward takes the log-probabilities for their shape.
_UNREAD = {"nll_loss_backward": (1,), "nll_loss2d_backward": (1,), "bernoulli": ()}


@dataclass
class OperatorTraffic:
    """All calls of one operator in one phase."""

    phase: str
    name: str
    """As the dispatcher knows it: "aten::add", "onetrip::row_norm"."""
    kind: str
    calls: int = 0
    read: int = 0
    written: int = 0
    flops: int = 0
    """FLOPs of products and attention kernels; 0 of everything else."""

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def is_outside(self) -> bool:
        """Whether Traffic.outside counts it."""
        return self.kind in (OUTSIDE, LOSS) and self.phase != OPTIMIZER


@dataclass
class Traffic:
    """What the operators of a run moved."""

    operators: dict[tuple[str, str], OperatorTraffic] = field(default_factory=dict)
    """By (phase, name)."""

    def bytes(self, kind: str | None = None, phase: str | None = None) -> int:
        """Bytes read and written, of one kind or phase where given."""
        return sum(each.bytes for each in self._of(kind, phase))

    def outside(self) -> int:
        """Bytes of forward and backward outside products and attention kernels; the loss is part of it."""
        return sum(each.bytes for each in self.operators.values() if each.is_outside)

    def flops(self) -> int:
        return sum(each.flops for each in self.operators.values())

    def by_operator(self, *, outside: bool = False) -> dict[str, int]:
        """Bytes by name, of all phases together; largest first. outside: those of outside() alone."""
        totals: Counter[str] = Counter()
        for each in self.operators.values():
            if not outside or each.is_outside:
                totals[each.name] += each.bytes
        return dict((+totals).most_common())

    def to_dict(self) -> dict[str, Any]:
        largest_first = sorted(self.operators.values(), key=lambda each: -each.bytes)
        return {
            "outside": self.outside(),
            "loss": self.bytes(LOSS),
            "optimizer": self.bytes(phase=OPTIMIZER),
            "products": self.bytes(PRODUCT),
            "attention": self.bytes(ATTENTION),
            "flops": self.flops(),
            "operators": [asdict(each) for each in largest_first if each.bytes],
        }

    def add(self, phase: str, name: str, kind: str, read: int, written: int, flops: int = 0) -> None:
        counted = self.operators.setdefault((phase, name), OperatorTraffic(phase, name, kind))
        counted.calls += times()
        counted.read += times() * read
        counted.written += times() * written
        counted.flops += times() * flops

    def _of(self, kind: str | None = None, phase: str | None = None) -> Iterator[OperatorTraffic]:
        for each in self.operators.values():
            if kind in (None, each.kind) and phase in (None, each.phase):
                yield each


def traffic(run: Callable[[], object]) -> Traffic:
    """Counts the operators that run calls, backward included."""
    with TrafficMode() as mode:
        run()
    return mode.traffic


class TrafficMode(TorchDispatchMode):
    """Counts inside its with block, into `traffic`. Calls of a backward pass are counted as BACKWARD."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()
        self._phase: str | None = None

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Inside the with block calls are counted as OPTIMIZER."""
        self._phase = OPTIMIZER
        try:
            yield
        finally:
            self._phase = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        read, written = _operands_before(func, args, kwargs)
        result = func(*args, **kwargs)
        if name.startswith(_LINEAR_LOSS):
            for part, kind, counted in _linear_loss(func, args):
                self.traffic.add(self._current_phase(), part, kind, *counted)
            return result
        n_read, n_written = _bytes_moved(name.split("::")[-1], read, written, result)
        if n_read or n_written:
            phase = self._current_phase()
            self.traffic.add(phase, name, kind_of(name), n_read, n_written, _flops(func, args, kwargs, result))
        return result

    def _current_phase(self) -> str:
        return self._phase or (BACKWARD if torch._C._current_graph_task_id() != -1 else FORWARD)


def kind_of(name: str) -> str:
    """The kind of an operator by its name, with or without its namespace."""
    name = name.split("::")[-1]
    if name.removesuffix("_") in _PRODUCTS:  # baddbmm_: in place
        return PRODUCT
    if name.startswith(_ATTENTION_NAMES):
        return ATTENTION
    return LOSS if name.startswith(_LOSS_NAMES) else OUTSIDE


def memory_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's elements in memory: those of an expanded dimension once."""
    n = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        n *= size if stride != 0 else min(size, 1)
    return min(n, tensor.untyped_storage().nbytes())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _operands_before(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """(Tensors that the operator reads, tensors that it writes in place)."""
    name = func._schema.name.split("::")[-1]
    read: list[Tensor] = []
    written: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written += tensors
        is_out = is_written and (argument.kwarg_only or name in _OVERWRITES)
        if not is_out and name not in _LIKE and i not in _UNREAD.get(name, ()):
            read += tensors
    return read, written


def _bytes_moved(name: str, read: list[Tensor], written: list[Tensor], result: Any) -> tuple[int, int]:
    """(Bytes read, bytes written) by a call that has these operands and has returned this."""
    if name in _ALLOCATIONS:
        return 0, 0
    known = {tensor.untyped_storage()._cdata for tensor in (*read, *written)}
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    new = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
    if not new and not written:
        return 0, 0  # a view
    n_written = sum(memory_bytes(tensor) for tensor in _distinct([*written, *new]))
    if name in _ROW_SUMS:
        table, *others = read
        n_added = max(leaf.numel() for leaf in others) * table.element_size()
        n_touched = min(memory_bytes(table), n_added)
        return n_touched + sum(map(memory_bytes, _distinct(others))), n_touched
    if name in _LOOKUPS and read:
        table, *others = read
        n_looked_up = max((leaf.numel() for leaf in (*outputs, *others)), default=0) * table.element_size()
        return min(memory_bytes(table), n_looked_up) + sum(map(memory_bytes, _distinct(others))), n_written
    return sum(memory_bytes(tensor) for tensor in _distinct(read)), n_written


def _linear_loss(func: Any, args: Any) -> Iterator[tuple[str, str, tuple[int, int, int]]]:
    """(name, kind, (bytes read, bytes written, flops)) of a linear cross-entropy's products, and of the rest.

    Chunk by chunk, a product makes logits, the kernel reads them and writes their gradient over them, and two products
    read that. Weight's gradient in half precision is summed in float32 if there are several chunks; on a GPU by the
    products themselves.
    """
    call = dict(zip((each.name for each in func._schema.arguments), args, strict=True))
    (n_classes, n_hidden), n_rows, size = call["weight"].shape, call["labels"].numel(), call["hidden"].element_size()
    wide = n_classes * n_hidden * call["weight"].element_size()  # float32 beside half-precision hidden: autocast's
    backend = "triton" if call["weight"].is_cuda else "cpu"
    tensors = call["hidden"], call["weight"], call["bias"], call["labels"]
    linear = Linear(*tensors, CrossEntropyPlan(), backend, call["chunk_rows"], None)
    weight, hidden, logits = (n * size for n in (n_classes * n_hidden, n_rows * n_hidden, n_rows * n_classes))
    wants_hidden, wants_weight, wants_bias = call.get("wants", (False, False, False))
    wants_any = wants_hidden or wants_weight or wants_bias
    n_chunks = -(-n_rows // linear.rows_at_once(wants_weight))
    read, written = n_chunks * weight + hidden, logits
    rest_read, rest_written = logits * (1 + wants_bias), logits * wants_any
    is_cast = wide > weight
    if is_cast:
        rest_read, rest_written = rest_read + wide, rest_written + weight
    if wants_hidden:
        read, written = read + n_chunks * weight + logits, written + hidden
    if wants_weight:
        read, written = read + hidden + logits, written + n_chunks * weight
        sums = 4 * n_classes * n_hidden
        if size >= 4 or (n_chunks == 1 and not is_cast):
            read += (n_chunks - 1) * weight
        elif widens(call["hidden"], torch.float32):
            read, written = read + (n_chunks - 1) * sums, written + n_chunks * (sums - weight)
            if not is_cast:
                rest_read, rest_written = rest_read + sums, rest_written + weight
        else:
            rest_written += wide
            if n_chunks > 1:
                rest_read, rest_written = rest_read + n_chunks * (weight + sums), rest_written + n_chunks * sums
    n_products = 1 + wants_hidden + wants_weight
    name = func._schema.name
    yield f"{name} (products)", PRODUCT, (read, written, 2 * n_products * n_rows * n_classes * n_hidden)
    yield name, LOSS, (rest_read, rest_written, 0)


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({_place(tensor): tensor for tensor in tensors}.values())


_CPU_FLASH: dict[str, tuple[Callable[..., int], int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
"""Operators that torch's registry lacks: what counts them, from the shapes of so many arguments."""


def _with_heads_of_query(args: Any) -> Any:
    """The shapes instead of tensors of (batch, heads, length, width). torch 2.9 counts no groups of heads."""

    def has_heads(each: Any) -> bool:
        return isinstance(each, Tensor) and each.dim() == 4

    n_heads = max(each.shape[1] for each in args if has_heads(each))
    return [torch.Size((each.shape[0], n_heads, *each.shape[2:])) if has_heads(each) else each for each in args]


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    if "scaled_dot_product" in func._schema.name:
        args = _with_heads_of_query(args)
    if known := _CPU_FLASH.get(func._schema.name):
        count_shapes, n_arguments = known
        return count_shapes(*args[:n_arguments])
    count: Any = flop_registry.get(func._overloadpacket)
    if "dtype" in func._overloadname:  # torch's formulas do not know these overloads' out_dtype
        args = tuple(each for each in args if not isinstance(each, torch.dtype))
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))
