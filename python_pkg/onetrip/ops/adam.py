"""One step of Adam over any number of parameters: the tables that kernels read, and the way to a backend."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import adam as reference
from ..reference.adam import Group, Slot
from .backends import choose, native
from .native import DTYPE_CODE, raise_error, where

CHUNK = 4096
"""Elements of a chunk, the work of one CUDA block: kAdamChunk in csrc/launch.h."""
_N_SCALARS = 12  # floats of struct AdamScalars
_PARAM, _GRAD = 0, 1  # columns of the table

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

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self._params = [slot.param for slot in self.slots]
        self.device = self.slots[0].param.device
        self.kinds: tuple[Kind, ...] = ()
        steps = {id(slot.step): i for i, slot in enumerate(self.slots)}  # the last slot of each
        self.n_counters = len(steps)
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
        counters = [(self.slots[i].step.data_ptr(), self.slots[i].group) for i in steps.values()]
        self.counters = self._to_device(self._on_host(counters))
        self.scalars = torch.empty(self.n_counters, _N_SCALARS, dtype=torch.float32, device=self.device)
        self._addresses: tuple[list[int], list[int]] = ([], [])
        self._grad_dtypes: list[torch.dtype] = []
        self.tensors = self.chunks = self.counters

    def _on_host(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64)

    def _to_device(self, table: Tensor) -> Tensor:
        """In stream order, without waiting: from a pinned copy of its own, which torch keeps until it has been read."""
        if self.device.type != "cuda":
            return table.to(self.device)
        pinned = table.pin_memory()
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED.append((pinned,))
        return pinned.to(self.device, non_blocking=True)

    def _sort(self, grad_dtypes: list[torch.dtype]) -> None:
        """The chunks of each kind, next to each other."""
        of_kind: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
        for i, (slot, grad_dtype) in enumerate(zip(self.slots, grad_dtypes, strict=True)):
            if slot.param.numel():
                of_kind.setdefault((slot.param.dtype, grad_dtype, slot.exp_avg_scale is not None), []).append(i)
        order = torch.tensor([i for members in of_kind.values() for i in members], dtype=torch.int64)
        n_chunks = (self._host_tensors[:, 6][order] + CHUNK - 1) // CHUNK
        ends = n_chunks.cumsum(0)
        first = torch.arange(int(n_chunks.sum())) - torch.repeat_interleave(ends - n_chunks, n_chunks)
        self.chunks = self._to_device(
            torch.stack((torch.repeat_interleave(order, n_chunks), first * CHUNK), dim=1).contiguous()
        )
        kinds, n_tensors, begin = [], 0, 0
        for kind, members in of_kind.items():
            n_tensors += len(members)
            end = int(ends[n_tensors - 1])
            kinds.append(Kind(*kind, begin, end - begin))
            begin = end
        self.kinds = tuple(kinds)
        self._grad_dtypes = grad_dtypes

    def refresh(self, grads: Sequence[Tensor], params_stay: bool = False) -> None:
        """Brings the tables up to date with the gradients of this step. params_stay: the caller knows that no
        parameter's storage was replaced since the last call. Raises TypeError for dtypes that kernels do not know."""
        grad_dtypes = [grad.dtype for grad in grads]
        if grad_dtypes != self._grad_dtypes:
            unknown = set(grad_dtypes) - set(DTYPE_CODE)
            if unknown:
                raise TypeError(f"adam: grads must be float32, float16 or bfloat16, got {unknown.pop()}")
            self._sort(grad_dtypes)
        of_params = self._addresses[0] if params_stay else []
        addresses = (of_params or list(map(Tensor.data_ptr, self._params)), list(map(Tensor.data_ptr, grads)))
        if addresses != self._addresses:
            for column in (_PARAM, _GRAD):
                if addresses[column] != self._addresses[column]:
                    self._host_tensors[:, column] = torch.frombuffer(array("q", addresses[column]), dtype=torch.int64)
            self.tensors = self._to_device(self._host_tensors)
            self._addresses = addresses

    def step(
        self,
        grads: Sequence[Tensor],
        groups: Sequence[Group],
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        params_stay: bool = False,
    ) -> None:
        """reference.adam.step for these slots on the backend in use; the same arguments, tensors on this device, and
        refresh's."""
        self.refresh(grads, params_stay)
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
