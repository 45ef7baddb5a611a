"""One step of Adam over any number of parameters: the tables that kernels read, and the way to a backend."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference import adam as reference
from ..reference.adam import Group, Slot
from .backends import choose, native
from .native import DTYPE_CODE, raise_error, where

CHUNK = 4096
"""Elements of a chunk: kAdamChunk in csrc/launch.h, which also says in what order a table must have them."""
_N_SCALARS = 12  # floats of struct AdamScalars
_PARAM, _GRAD, _NUMEL, _COUNTER = 0, 1, 6, 7  # columns of the table

_CAPTURED: list[tuple[Tensor, ...]] = []
"""What CUDA graphs read and write at every replay. Nobody can say when the last replay was, so it is kept for good."""


class Kind(NamedTuple):
    """Chunks of tensors with the same dtypes: one kernel launch. struct AdamKind of csrc/launch.h."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_8bit: bool
    first_chunk: int
    n_chunks: int


class AdamTable:
    """The slots of one device as tables of addresses (csrc/launch.h: AdamTensor, AdamChunk, AdamCounter).

    Built once. What changes from step to step, the addresses of gradients and of parameters whose storage was
    replaced, is written into the table, which then goes to the device again; a changed gradient dtype sorts it anew.
    """

    def __init__(self, slots: Sequence[Slot], names: Sequence[str] | None = None) -> None:
        """names: of the slots' parameters, for messages; their indices by default."""
        self.slots = tuple(slots)
        self._names = names
        self._params = [slot.param for slot in self.slots]
        self.device = self.slots[0].param.device
        steps = {id(slot.step): i for i, slot in enumerate(self.slots)}  # the last slot of each
        index = {identity: i for i, identity in enumerate(steps)}
        self._host_tensors = self._on_host(
            [
                (
                    0,
                    0,
                    slot.exp_avg.data_ptr(),
                    slot.exp_avg_sq.data_ptr(),
                    0 if slot.exp_avg_scale is None else slot.exp_avg_scale.data_ptr(),
                    0 if slot.exp_avg_sq_scale is None else slot.exp_avg_sq_scale.data_ptr(),
                    slot.param.numel(),
                    index[id(slot.step)],
                )
                for slot in self.slots
            ]
        )
        self._host_counters = self._on_host(
            [(self.slots[i].step.data_ptr(), self.slots[i].group) for i in steps.values()]
        )
        dtypes = sorted({slot.param.dtype for slot in self.slots}, key=str)
        self._kinds = [(dtype, is_8bit) for dtype in dtypes for is_8bit in (False, True)]
        number = {kind: i for i, kind in enumerate(self._kinds)}
        kind_of = [number[slot.param.dtype, slot.exp_avg_scale is not None] for slot in self.slots]
        self._kind_of = torch.tensor(kind_of, dtype=torch.int64)
        self._finish()

    def _finish(self) -> None:
        """What nobody has put on the device yet."""
        self.counters = self._to_device(self._host_counters)
        self.n_counters = len(self._host_counters)
        self.scalars = torch.empty(self.n_counters, _N_SCALARS, dtype=torch.float32, device=self.device)
        self._spare: Tensor | None = None  # for the next capture of a CUDA graph
        self._addresses: tuple[list[int], list[int]] = ([], [])
        self._grad_dtypes: list[torch.dtype] = []
        self.kinds: tuple[Kind, ...] = ()
        self.tensors = self.chunks = self.counters

    def narrowed(self, chosen: Sequence[int]) -> AdamTable:
        """The table of these of its slots, in this order: without a look at a tensor."""
        table, rows = copy(self), torch.tensor(chosen, dtype=torch.int64)
        table.slots = tuple([self.slots[i] for i in chosen])
        table._params = [self._params[i] for i in chosen]
        table._names = None if self._names is None else [self._names[i] for i in chosen]
        table._host_tensors, table._kind_of = self._host_tensors[rows], self._kind_of[rows]
        counters, table._host_tensors[:, _COUNTER] = self._host_tensors[rows, _COUNTER].unique(return_inverse=True)
        table._host_counters = self._host_counters[counters]
        table._finish()
        return table

    def _on_host(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64)

    def _to_device(self, table: Tensor) -> Tensor:
        """In stream order, without waiting: from a pinned copy of its own, which torch keeps until it has been read."""
        if self.device.type != "cuda":
            return table.to(self.device)
        if torch.cuda.is_current_stream_capturing():
            pinned = self._reserved(table)
            _CAPTURED.append((pinned,))
        else:
            pinned = table.pin_memory()
            if table is self._host_tensors and self._spare is None:
                self._spare = torch.empty_like(table, pin_memory=True)
        return pinned.to(self.device, non_blocking=True)

    def _reserved(self, table: Tensor) -> Tensor:
        """A pinned copy in memory from before the capture: torch 2.6 and 2.7 cannot allocate any under it. A capture
        gives gradients new addresses, and nothing else; where more has changed, torch says what it thinks of that."""
        if table is not self._host_tensors or self._spare is None:
            return table.pin_memory()
        pinned, self._spare = self._spare.copy_(table), None
        return pinned

    def _sort(self, grad_dtypes: list[torch.dtype]) -> None:
        """The chunks of each kind, next to each other."""
        of_grads = sorted(set(grad_dtypes), key=str)
        keys = self._kind_of * len(of_grads)
        if len(of_grads) > 1:
            number = {dtype: i for i, dtype in enumerate(of_grads)}
            keys = keys + torch.tensor([number[dtype] for dtype in grad_dtypes], dtype=torch.int64)
        keys[self._host_tensors[:, _NUMEL] == 0] = len(self._kinds) * len(of_grads)  # after all others, and cut off
        keys, order = keys.sort(stable=True)
        keys, n_tensors = keys.unique_consecutive(return_counts=True)
        n_chunks = (self._host_tensors[order, _NUMEL] + CHUNK - 1) // CHUNK
        ends = n_chunks.cumsum(0)
        first = torch.arange(int(n_chunks.sum())) - torch.repeat_interleave(ends - n_chunks, n_chunks)
        self.chunks = self._to_device(
            torch.stack((torch.repeat_interleave(order, n_chunks), first * CHUNK), dim=1).contiguous()
        )
        kinds, begin = [], 0
        for key, last in zip(keys.tolist(), n_tensors.cumsum(0).tolist(), strict=True):
            end = int(ends[last - 1])
            if end > begin:
                kind, of_grad = divmod(key, len(of_grads))
                param_dtype, is_8bit = self._kinds[kind]
                kinds.append(Kind(param_dtype, of_grads[of_grad], is_8bit, begin, end - begin))
            begin = end
        self.kinds = tuple(kinds)
        self._grad_dtypes = grad_dtypes

    def refresh(self, grads: Sequence[Tensor], params_stay: bool = False) -> Sequence[Tensor]:
        """Brings the tables up to date with the gradients of this step. params_stay: the caller knows that no
        parameter's storage was replaced since the last call. Raises TypeError for dtypes that kernels do not know.

        Returns the gradients that the kernel will read, to be kept until it is launched: zeros that torch has not
        given memory to (as derivatives of a constant are) get some."""
        grad_dtypes = [grad.dtype for grad in grads]
        if grad_dtypes != self._grad_dtypes:
            for i, dtype in enumerate(grad_dtypes):
                if dtype not in DTYPE_CODE:
                    name = i if self._names is None else self._names[i]
                    got = str(dtype)[6:]
                    raise TypeError(
                        f"adam: the gradient of parameter {name} must be float32, float16 or bfloat16, got {got}"
                    )
            self._sort(grad_dtypes)
        of_params = self._addresses[0] if params_stay else []
        addresses = (of_params or list(map(Tensor.data_ptr, self._params)), list(map(Tensor.data_ptr, grads)))
        if addresses != self._addresses:
            if 0 in addresses[_GRAD]:
                grads = [torch.zeros_like(g) if g._is_zerotensor() else g for g in grads]
                addresses = (addresses[_PARAM], list(map(Tensor.data_ptr, grads)))
            for column in (_PARAM, _GRAD):
                if addresses[column] != self._addresses[column]:
                    self._host_tensors[:, column] = torch.frombuffer(array("q", addresses[column]), dtype=torch.int64)
            self.tensors = self._to_device(self._host_tensors)
            self._addresses = addresses
        return grads

    def watch(self, params_of_groups: list[list[Tensor]], states: list[dict[str, Tensor]]) -> Any | None:
        """An AdamWatch (csrc/adam_watch.h) of these slots' parameters and states, all kept alive by the caller: it
        writes where gradients lie into the table. None where tensors do not tell the native library what they are
        (torch before 2.10, subclasses)."""
        library = native()
        if library is None:
            return None
        address = self._host_tensors.data_ptr()
        return library.adam_watch(Tensor, torch.nn.Parameter, params_of_groups, states, address)

    def gradients_moved(self) -> None:
        """After the watch has written into the table."""
        self._addresses = ([], [])
        self.tensors = self._to_device(self._host_tensors)

    def step(
        self,
        grads: Sequence[Tensor],
        groups: Sequence[Group],
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        params_stay: bool = False,
        is_fresh: bool = False,
    ) -> None:
        """reference.adam.step for these slots on the backend in use; the same arguments, tensors on this device, and
        refresh's. is_fresh: the table is up to date with them."""
        if not is_fresh:
            grads = self.refresh(grads, params_stay)
        backend = choose("adam", self.device, True)
        if backend == "reference":
            reference.step(self.slots, grads, groups, grad_scale, found_inf)
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            _CAPTURED.append((self.tensors, self.chunks, self.counters, self.scalars))
        if backend == "triton":
            importlib.import_module("onetrip.kernels.adam").step(self, groups, grad_scale, found_inf)
            return
        device, stream = where(self.scalars)
        code = native().adam_step(  # type: ignore[union-attr]
            device,
            stream,
            self.tensors.data_ptr(),
            self.chunks.data_ptr(),
            [(DTYPE_CODE[p], DTYPE_CODE[g], is_8bit, first, n) for p, g, is_8bit, first, n in self.kinds],
            self.counters.data_ptr(),
            self.n_counters,
            [
                (0.0, *group[1:], group.lr.data_ptr())
                if isinstance(group.lr, Tensor) and group.lr.is_cuda
                else (float(group.lr), *group[1:], 0)
                for group in groups
            ],
            self.scalars.data_ptr(),
            0 if grad_scale is None else grad_scale.data_ptr(),
            0 if found_inf is None else found_inf.data_ptr(),
        )
        if code:
            raise_error("adam step", self.scalars, code)
