"""One step of Adam over any number of parameters, on the backend in use."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import adam as reference
from ..reference.adam import Group, Slot
from ..reference.rounding import Rounding
from .common.backends import choose, native
from .common.native import DTYPE_CODE, raise_error, where

CHUNK = 4096
"""Elements of a chunk: kAdamChunk in csrc/launch.h, which also says in what order a table must have them."""


class Kind(NamedTuple):
    """Chunks of tensors with the same dtypes: one kernel launch. struct AdamKind of csrc/launch.h."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_8bit: bool
    rounding: Rounding
    first_chunk: int
    n_chunks: int


class AdamTables(NamedTuple):
    """What kernels read for the slots of one device (csrc/launch.h): int64 tensors on it, one row for each struct."""

    device: torch.device
    kinds: tuple[Kind, ...]
    tensors: Tensor
    """[n_slots, 10] AdamTensor."""
    chunks: Tensor
    """[n_chunks, 2] AdamChunk."""
    counters: Tensor
    """[n_counters, 2] AdamCounter."""
    scalars: Tensor
    """[n_counters, 12] float32: AdamScalars, written by the step."""


def _number(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """A learning rate on a device stays there, for the kernel to read."""
    if not isinstance(lr, Tensor):
        return lr
    return float(lr) if lr.device.type == "cpu" else lr.to(device, torch.float32, non_blocking=True)


def _kind_numbers(tables: AdamTables) -> list[tuple[int, ...]]:
    return [(DTYPE_CODE[kind.param_dtype], DTYPE_CODE[kind.grad_dtype], *kind[2:]) for kind in tables.kinds]


def sums_of_squares(tables: AdamTables, grads: list[Tensor]) -> Tensor:
    """Of the elements of each slot's gradient: [n_slots] float64. tables must describe these gradients."""
    if choose("adam", tables.device, True) != "cpu":
        # Not by chunks: index_add_ has no fixed order on a GPU.
        return torch.stack(torch._foreach_norm(grads, 2.0, torch.float64)).square()
    sums = torch.zeros(len(grads), dtype=torch.float64, device="cpu")
    return sums.index_add_(0, tables.chunks[:, 0], _squares_of_chunks(tables))


def sum_of_squares(tables: AdamTables, grads: list[Tensor]) -> Tensor:
    """Of all elements of the gradients: 0-d float64. tables must describe these gradients."""
    if choose("adam", tables.device, True) == "cuda":
        return _squares_of_chunks(tables).sum()
    return sums_of_squares(tables, grads).sum()  # a sum of many chunks would depend on a CPU's threads


def _squares_of_chunks(tables: AdamTables) -> Tensor:
    """[n_chunks] float64, by the native library."""
    sums = torch.empty(len(tables.chunks), dtype=torch.float64, device=tables.device)
    code = native().adam_squares(
        *where(sums), tables.tensors.data_ptr(), tables.chunks.data_ptr(), _kind_numbers(tables), sums.data_ptr()
    )
    if code:
        raise_error("sum of squares", sums, code)
    return sums


def launch(
    tables: AdamTables,
    slots: Sequence[Slot],
    grads: Sequence[Tensor],
    groups: Sequence[Group],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """reference.adam.step(slots, grads, ...) on the backend in use; tables: of the slots and gradients."""
    device = tables.device
    if any(isinstance(group.lr, Tensor) for group in groups):
        groups = [group._replace(lr=_number(group.lr, device)) for group in groups]
    backend = choose("adam", device, True)
    if backend == "reference":
        reference.step(slots, grads, groups, grad_scale, found_inf)
        return
    if backend == "triton":
        importlib.import_module("onetrip.kernels.adam").step(tables, groups, grad_scale, found_inf)
        return
    index, stream = where(tables.scalars)
    code = native().adam_step(
        index,
        stream,
        tables.tensors.data_ptr(),
        tables.chunks.data_ptr(),
        _kind_numbers(tables),
        tables.counters.data_ptr(),
        len(tables.counters),
        [
            (0.0, *group[1:], group.lr.data_ptr()) if isinstance(group.lr, Tensor) else (float(group.lr), *group[1:], 0)
            for group in groups
        ],
        tables.scalars.data_ptr(),
        0 if grad_scale is None else grad_scale.data_ptr(),
        0 if found_inf is None else found_inf.data_ptr(),
    )
    if code:
        raise_error("adam step", tables.scalars, code)
