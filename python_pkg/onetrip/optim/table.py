"""The step table: parameters, gradients and states of one device as rows of addresses, which one launch reads.

`prepare` is the one place that asks whether anything has changed since the last step. It sees a parameter or gradient
or tensor of a state with another dtype, shape, strides or storage, and another tensor in a state. It costs under a
microsecond a parameter.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.adam import CHUNK, AdamTables, Kind, launch, sum_of_squares, sums_of_squares
from ..ops.common.backends import KERNEL_DTYPES, native
from ..reference.adam import Group, Slot
from . import sharding
from .state import State, check_state, fields, runs

_N_SCALARS = 12  # floats of struct AdamScalars
_GRAD, _NUMEL, _COUNTER = 1, 6, 7  # columns of AdamTensor in csrc/launch.h

_CAPTURED: list[tuple[Tensor, ...]] = []
"""What CUDA graphs read and write at every replay. No one knows when the last replay is, so it is kept for good."""


class Member(NamedTuple):
    """A parameter that steps, its state, the index of its group, and its name in messages."""

    param: Tensor
    state: State
    group: int
    name: str
    random_bits: tuple[int, int] | None = None
    """(key, index of its part's first element), where bfloat16 is rounded stochastically."""


class _Source(NamedTuple):
    """Where the slots of a member come from."""

    part: Tensor  # the parameter, or this rank's part of it
    work: Tensor  # contiguous: part, or a copy of it
    runs: list[tuple[int, int]]  # of its elements, a slot each; none where the parameter is the slot


@cache
def _native_look() -> Any:
    """A TensorLook (csrc/tensor_look.h), None without the native library."""
    library = native()
    return None if library is None else library.tensor_look(Tensor, torch.nn.Parameter)


def _look(tensors: list[Any]) -> tuple[bytes, bytes]:
    """(layouts, addresses) of tensors, 8 bytes for each, 0 for None. Equal layouts mean the same dtype, device, shape
    and strides. Raises RuntimeError or NotImplementedError for tensors that are not dense."""
    reader = _native_look()
    if reader is not None and (found := reader(tensors)) is not None:
        return found
    layouts = [
        0 if t is None else hash((t.dtype, t.device, t.shape, t.stride(), t.is_neg(), t._is_zerotensor()))
        for t in tensors
    ]
    return array("q", layouts).tobytes(), _addresses(tensors)


def _of(members: list[int], seen: tuple[bytes, bytes]) -> list[list[int]]:
    """What _look saw of these tensors."""
    numbers = [memoryview(each).cast("q") for each in seen]
    return [[each[i] for i in members] for each in numbers]


def _addresses(tensors: Iterable[Any]) -> bytes:
    return array("q", [0 if t is None else t.data_ptr() for t in tensors]).tobytes()


def _same_values(states: list[State], values: list[Tensor]) -> bool:
    if (library := native()) is not None:
        return bool(library.same_values(states, values))
    found = list(chain.from_iterable([state.values() for state in states]))
    return len(found) == len(values) and all(map(is_, found, values))


def _on_host(numbers: Sequence[Any]) -> Tensor:
    """int64, whatever torch.set_default_device says."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def increment_versions(params: Sequence[Tensor]) -> None:
    """Tells autograd that they were written to, as each in-place operation of torch does: a backward through what was
    computed from them before then raises. Inference tensors have no version."""
    try:
        torch.autograd.graph.increment_version(params)
    except (TypeError, RuntimeError):  # an older torch takes them one by one
        for p in params:
            if not p.is_inference():
                torch.autograd.graph.increment_version(p)


def _is_plain(tensor: Tensor) -> bool:
    return not sharding.is_sharded(tensor) and tensor.is_contiguous() and not tensor.is_neg()


class StepTable:
    """The step table of these members, all on one device (csrc/launch.h: AdamTensor, AdamChunk, AdamCounter).

    It is built once for all members. A step works on those that have gradients: another choice of them, or other
    dtypes of gradients, sorts the tables anew; other addresses of gradients are written into them.
    """

    def __init__(self, members: Sequence[Member], function: str) -> None:
        """function: for messages. Raises ValueError for a damaged state, and for parameters that share memory."""
        self._function = function
        self._params = [member.param for member in members]
        self._states = [member.state for member in members]
        self._names = [member.name for member in members]
        self._sources, self._slots_of = [], []
        self.slots: list[Slot] = []
        for member in members:
            source, slots = self._source(member)
            self._slots_of.append(range(len(self.slots), len(self.slots) + len(slots)))
            self._sources.append(source)
            self.slots += slots
        parts = [source.part for source in self._sources]
        _check_overlaps(function, parts)
        self.device = parts[0].device
        self._is_plain = not any(source.runs for source in self._sources)
        self._host, self._host_counters = self._rows()
        self._kinds = [(slot.param.dtype, slot.exp_avg_scale is not None, slot.rounding) for slot in self.slots]
        self._parts = _look(parts)
        self._values = [list(state.values()) for state in self._states]
        self._looks = [_look(values) for values in self._values]
        self._select(list(range(len(members))))

    def _source(self, member: Member) -> tuple[_Source, list[Slot]]:
        p, state, group, name, random_bits = member
        part = sharding.local(p)
        check_state(f"{self._function}: state of parameter {name}", p, state)
        step_, m, v, m_scale, v_scale, residual = fields(state)
        if residual is not None or part.dtype != torch.bfloat16:
            random_bits = None
        if part is p and _is_plain(part):
            return _Source(p, p, []), [Slot(p, m, v, m_scale, v_scale, step_, group, residual, random_bits)]
        if torch._debug_has_internal_overlap(part) == 1:
            raise ValueError(f"{self._function}: parameter {name} must not overlap itself, got strides {part.stride()}")
        work = part if _is_plain(part) else torch.empty(part.shape, dtype=part.dtype, device=part.device)
        # An empty part is a slot, too: it counts the steps.
        parts = list(runs(p, part)) or [(0, 0, 0, 0)]
        slots = []
        for begin, end, first_scale, last_scale in parts:
            param, exp_avg, exp_avg_sq = (values.view(-1)[begin:end] for values in (work, m, v))
            of_m, of_v = (None if scale is None else scale[first_scale:last_scale] for scale in (m_scale, v_scale))
            rest = None if residual is None else residual.view(-1)[begin:end]
            of_run = random_bits and sharding.random_bits_of_run(*random_bits, begin)
            slots.append(Slot(param, exp_avg, exp_avg_sq, of_m, of_v, step_, group, rest, of_run))
        return _Source(part, work, [part[:2] for part in parts]), slots

    def _rows(self) -> tuple[Tensor, Tensor]:
        """The slots as rows of AdamTensor and AdamCounter, on the host. Gradients are not known yet."""
        last_slot_of = {id(slot.step): i for i, slot in enumerate(self.slots)}
        index = {identity: i for i, identity in enumerate(last_slot_of)}
        tensors = [
            (
                slot.param.data_ptr(),
                0,
                slot.exp_avg.data_ptr(),
                slot.exp_avg_sq.data_ptr(),
                0 if slot.exp_avg_scale is None else slot.exp_avg_scale.data_ptr(),
                0 if slot.exp_avg_sq_scale is None else slot.exp_avg_sq_scale.data_ptr(),
                slot.param.numel(),
                index[id(slot.step)],
                *_rounding_numbers(slot),
            )
            for slot in self.slots
        ]
        counters = [(self.slots[i].step.data_ptr(), self.slots[i].group) for i in last_slot_of.values()]
        return _on_host(tensors), _on_host(counters)

    def _select(self, members: list[int]) -> None:
        """Makes these members the ones that step; the tables for them follow with their gradients."""
        self._members = members
        self._selects_all = len(members) == len(self._params)
        self._selected_params = [self._params[i] for i in members]
        self._selected_states = [self._states[i] for i in members]
        self._selected_values = list(chain.from_iterable(self._values[i] for i in members))
        self._selected_look = tuple(map(b"".join, zip(*(self._looks[i] for i in members), strict=True)))
        self._copied = [s for s in (self._sources[i] for i in members) if s.work is not s.part]
        rows = [slot for i in members for slot in self._slots_of[i]]
        self._selected_slots, self._selected_kinds = [self.slots[i] for i in rows], [self._kinds[i] for i in rows]
        self._tensors = self._host[rows]
        counters, self._tensors[:, _COUNTER] = self._tensors[:, _COUNTER].unique(return_inverse=True)
        self._spare: Tensor | None = None  # pinned, for the next capture of a CUDA graph
        on_device = self._to_device(self._host_counters[counters])
        self.tables = AdamTables(
            device=self.device,
            tensors=on_device,
            chunks=on_device,
            kinds=(),
            counters=on_device,
            scalars=torch.empty(len(counters), _N_SCALARS, dtype=torch.float32, device=self.device),
        )
        self._grad_dtypes: list[torch.dtype] = []
        self._ready_layouts = self._grad_addresses = b""

    def prepare(self, grads: list[Any] | None = None) -> bool:
        """Brings the tables up to date with the members' gradients, None for members that do not step now.

        grads: the parameters' own by default. False: a member or its state has changed, and a new table is needed.
        Raises for wrong gradients, before anything has changed.
        """
        grads, parts, (layouts, addresses) = self._seen(grads)
        if not layouts or layouts != self._ready_layouts:
            return self._prepare_anew(grads, parts, layouts)
        if not self._same_members(parts):
            return False
        if self._selects_all:
            self._slot_grads = grads
        else:
            self._slot_grads = [grad for grad in grads if grad is not None]
            addresses = _addresses(self._slot_grads)
        self._point_at(addresses)
        return True

    def _seen(self, grads: list[Any] | None) -> tuple[list[Any], tuple[bytes, bytes], tuple[bytes, bytes]]:
        """(gradients, what is seen of the members' parts, what is seen of the gradients: nothing where they have to be
        checked one by one)."""
        if grads is None and self._is_plain and (reader := _native_look()) is not None:
            found = reader.with_grads(self._params)
            if found is not None:
                return found
        if grads is None:
            grads = [p.grad for p in self._params]
        if not self._is_plain:
            return grads, _look(list(map(sharding.local, self._params))), (b"", b"")
        of_grads = b"", b""
        with suppress(RuntimeError, NotImplementedError):  # sparse
            of_grads = _look(grads)
        return grads, _look(self._params), of_grads

    def _prepare_anew(self, grads: list[Any], parts: tuple[bytes, bytes], layouts: bytes) -> bool:
        """prepare for other members than before, or for gradients that have to be checked one by one."""
        present = [i for i, grad in enumerate(grads) if grad is not None]
        if not present:
            self._slot_grads = []
            return True
        if present != self._members:
            self._select(present)
        if not self._same_members(parts):
            return False
        self._slot_grads = list(chain.from_iterable(self._checked(i, grads[i]) for i in present))
        dtypes = [grad.dtype for grad in self._slot_grads]
        if dtypes != self._grad_dtypes:
            self._sort(dtypes)
        self._point_at(_addresses(self._slot_grads))
        # Where they are the members' own, those with the same layouts need no such check.
        given = [grads[i] for i in present]
        as_given = self._is_plain and all(map(is_, given, self._slot_grads))
        self._ready_layouts = layouts if as_given else b""
        return True

    def _same_members(self, parts: tuple[bytes, bytes]) -> bool:
        """parts: what is seen of the members' parts."""
        return (
            (parts == self._parts or _of(self._members, parts) == _of(self._members, self._parts))
            and _same_values(self._selected_states, self._selected_values)
            and _look(self._selected_values) == self._selected_look
        )

    def _checked(self, i: int, grad: Tensor) -> Iterable[Tensor]:
        """The gradients of a member's slots: contiguous; copies where they have to be."""
        source, p = self._sources[i], self._params[i]
        if p is not source.part:
            grad = sharding.local(sharding.like_param(grad, p))
        which = f"{self._function}: the gradient of parameter {self._names[i]}"
        if grad.layout != torch.strided or grad.is_nested:
            raise RuntimeError(f"{which} must be dense, got {grad.layout}; nn.Embedding makes dense ones by default")
        if grad.dtype not in KERNEL_DTYPES:
            raise TypeError(f"{which} must be float32, float16 or bfloat16, got {str(grad.dtype)[6:]}")
        if grad.shape != source.part.shape:
            raise ValueError(f"{which} must have its shape, {tuple(source.part.shape)}, got {tuple(grad.shape)}")
        if grad.device != source.part.device:
            raise ValueError(f"{which} must be on its device, {source.part.device}, got {grad.device}")
        if grad._is_zerotensor():  # torch has given it no memory: a derivative of a constant
            grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
        grad = grad.contiguous().resolve_neg()
        return [grad.view(-1)[begin:end] for begin, end in source.runs] or [grad]

    def _sort(self, grad_dtypes: list[torch.dtype]) -> None:
        """The chunks of each kind, next to each other."""
        rows_of: dict[Any, list[int]] = {}
        for row, kind in enumerate(zip(self._selected_kinds, grad_dtypes, strict=True)):
            rows_of.setdefault(kind, []).append(row)
        chunks, kinds, n_before = [], [], 0
        for ((param_dtype, is_8bit, rounding), grad_dtype), rows in rows_of.items():
            n_chunks = (self._tensors[rows, _NUMEL] + CHUNK - 1) // CHUNK
            first = torch.arange(int(n_chunks.sum()), device="cpu") - (n_chunks.cumsum(0) - n_chunks).repeat_interleave(
                n_chunks
            )
            chunks.append(torch.stack((_on_host(rows).repeat_interleave(n_chunks), first * CHUNK), dim=1))
            if n_of_kind := len(first):
                kinds.append(Kind(param_dtype, grad_dtype, is_8bit, rounding, n_before, n_of_kind))
                n_before += n_of_kind
        self.tables = self.tables._replace(chunks=self._to_device(torch.cat(chunks)), kinds=tuple(kinds))
        self._grad_dtypes = grad_dtypes

    def _point_at(self, addresses: bytes) -> None:
        """addresses: of the slots' gradients."""
        if addresses != self._grad_addresses:
            self._tensors[:, _GRAD] = torch.frombuffer(bytearray(addresses), dtype=torch.int64)
            self.tables = self.tables._replace(tensors=self._to_device(self._tensors))
            self._grad_addresses = addresses

    def _to_device(self, table: Tensor) -> Tensor:
        """In stream order, without waiting: from a pinned copy of its own, which torch keeps until it has been read."""
        if self.device.type != "cuda":
            return table.to(self.device)
        is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing and table is self._tensors and self._spare is not None:
            # torch 2.6 and 2.7 cannot allocate pinned memory under a capture. It changes the addresses of gradients,
            # and nothing else; where more has changed, torch raises.
            pinned, self._spare = self._spare.copy_(table), None
        else:
            pinned = table.pin_memory()
        if is_capturing:
            _CAPTURED.append((pinned,))
        elif table is self._tensors and self._spare is None:
            self._spare = torch.empty_like(table, pin_memory=True)
        return pinned.to(self.device, non_blocking=True)

    def sum_of_squares(self) -> Tensor:
        """Of all elements of the prepared gradients, whole ones where parameters are sharded: float64, 0-d."""
        if not self._slot_grads:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        if self._is_plain:
            return sum_of_squares(self.tables, self._slot_grads)
        params = [self._params[i] for i in self._members for _ in self._slots_of[i]]
        return sharding.sum_over_ranks(params, sums_of_squares(self.tables, self._slot_grads))

    def launch(
        self, groups: Sequence[Group], grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """reference.adam.step for what was prepared, on the backend in use."""
        if not self._slot_grads:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            _CAPTURED.append(tuple(value for value in self.tables if isinstance(value, Tensor)))
        for source in self._copied:
            source.work.copy_(source.part)
        launch(self.tables, self._selected_slots, self._slot_grads, groups, grad_scale, found_inf)
        for source in self._copied:
            source.part.copy_(source.work)
        increment_versions(self._selected_params)
        self._slot_grads = []  # a gradient lives no longer than its parameter's .grad


def _rounding_numbers(slot: Slot) -> tuple[int, int]:
    """residual and key of AdamTensor."""
    if slot.residual is not None:
        return slot.residual.data_ptr(), 0
    key, first = slot.random_bits or (0, 0)
    return first, key


def _check_overlaps(function: str, parts: Sequence[Tensor]) -> None:
    """Raises ValueError where two parameters share memory: one update would be lost. Two whose elements alternate
    (columns of one matrix) share none: each element is looked at where the memory that parameters span overlaps."""
    groups: list[list[Tensor]] = []
    end = 0
    for part in sorted((part for part in parts if part.numel()), key=Tensor.data_ptr):
        if part.data_ptr() >= end:
            groups.append([])
        groups[-1].append(part)
        end = max(end, _end(part))
    if any(len(group) > 1 and _share_an_element(group) for group in groups):
        raise ValueError(f"{function}: parameters must not share memory, got two that do")


def _end(part: Tensor) -> int:
    """The address after its last element."""
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part.data_ptr() + (last + 1) * part.element_size()


def _share_an_element(parts: list[Tensor]) -> bool:
    """parts: by their addresses. Takes a byte of host memory for each element of the span that they lie in."""
    begin, unit = parts[0].data_ptr(), min(part.element_size() for part in parts)
    is_taken = torch.zeros((max(map(_end, parts)) - begin) // unit, dtype=torch.bool, device="cpu")
    for part in parts:
        units = part.element_size() // unit
        strides = [*(stride * units for stride in part.stride()), 1]
        mine = is_taken.as_strided((*part.shape, units), strides, (part.data_ptr() - begin) // unit)
        if mine.any():
            return True
        mine.fill_(True)
    return False


def step_tables(function: str, members: Iterable[Member]) -> list[StepTable]:
    """A table for each device. A parameter that is listed twice steps once."""
    of_device: dict[torch.device, list[Member]] = {}
    seen: set[int] = set()
    for member in members:
        if id(member.param) not in seen:
            seen.add(id(member.param))
            of_device.setdefault(sharding.local(member.param).device, []).append(member)
    return [StepTable(of_one, function) for of_one in of_device.values()]
