"""Adam in Triton: `step` over the AdamTables of onetrip.ops.adam, as every backend has it.

The kernels are in adam_kernels.py; here are their tables of codes, the sizes of tiles and the launches: one for each
param group, which counts its steps, then one for each combination of dtypes.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton.language as tl

from ..reference.adam import Group, code_map, thresholds
from ..reference.rounding import Rounding
from . import adam_kernels as kernels
from .launch import Launch, cdiv, on_device_of
from .tiles import MAX_REGISTERS

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_COUNTERS = 128
"""Counters of a program that prepares scalars."""
_NUM_WARPS = 1
"""A row of a tile, a block of 128, then lies in one warp: no maximum and no scale crosses shared memory."""
_PARTS = 4
"""Programs of a chunk: a million parameters are a thousand programs, for the 132 multiprocessors of an H100."""


class AdamTile(NamedTuple):
    rows: int
    """Blocks of 128."""
    max_registers: int
    """A lane."""


# Multiples of 8, the least that spill nothing on sm_80 to sm_120. In 80 registers an int8 residual, which is rounded
# once more than an int16 one, spills 16 bytes on sm_120, and stochastic rounding, with the words and keys of Philox, 24
# to 56 bytes everywhere.
_MAX_REGISTERS_OF_TWO_BLOCKS = {
    Rounding.NEAREST: 80,
    Rounding.RESIDUAL_8: 88,
    Rounding.RESIDUAL_16: 80,
    Rounding.STOCHASTIC: 96,
}
_MAX_REGISTERS_OF_ROUNDING = 72
"""Of a block with float32 states, not rounded to nearest: in 64, 8 to 16 bytes spill on sm_100 and sm_120."""


def tile(param_dtype: torch.dtype, is_8bit: bool, rounding: Rounding) -> AdamTile:
    """One store of 16 bytes a lane: 4 float32 numbers, a block a warp, in 64 registers; or 8 numbers of 16 bits, two
    blocks, in 80. The former lets half of the threads of sm_80 to sm_100 be resident, the latter 39% of them, with
    twice the elements on their way. Other roundings take up to 96 registers: 33% of the threads.
    """
    if is_8bit and param_dtype.itemsize == 2:
        return AdamTile(2, _MAX_REGISTERS_OF_TWO_BLOCKS[rounding])
    return AdamTile(1, MAX_REGISTERS if rounding == Rounding.NEAREST else _MAX_REGISTERS_OF_ROUNDING)


# How many of the upper bits of a float32 choose the bucket of a code table: 9, and as many of the fraction as it takes
# for no bucket to meet two thresholds. They are closest, relative to their size, at 1: 1/71 and 1/142.
_SIGNED_SHIFT, _UNSIGNED_SHIFT = 17, 16


class CodeTable(NamedTuple):
    """Codes of float32 magnitudes x: of bits = those of x, (entries[(bits >> shift) - first] + low bits) >> shift.

    A bucket of numbers with the same upper bits meets at most one threshold. Its entry is the code of its least number,
    shifted, and where it meets a threshold, what carries into the code from there on. Below the table codes are 0.
    """

    shift: int
    first: int
    entries: Tensor
    """int32."""


def code_table(signed: bool) -> CodeTable:
    """On the CPU."""
    shift = _SIGNED_SHIFT if signed else _UNSIGNED_SHIFT
    limits = torch.tensor(thresholds(signed), dtype=torch.float32, device="cpu")
    limit_bits = limits.view(torch.int32)
    one = torch.ones((), dtype=torch.float32, device="cpu").view(torch.int32)
    first, last = (int(bits) >> shift for bits in (limit_bits[0], one))
    least = torch.arange(first, last + 1, dtype=torch.int32, device="cpu") << shift
    code = torch.bucketize(least.view(torch.float32), limits, right=True)
    code_after = torch.bucketize((least + ((1 << shift) - 1)).view(torch.float32), limits, right=True)
    carries_from = limit_bits[code.clamp(max=limits.numel() - 1)] - least
    carry = torch.where(code_after > code, (1 << shift) - carries_from, 0)
    return CodeTable(shift, first, ((code << shift) + carry).to(torch.int32))


@functools.cache
def _tables(device: torch.device) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    """The step kernel's arguments for 8-bit states: its tables and their constants. The first call on a device copies
    20 kB there and waits for it, so it must not be under the capture of a graph: nor may the compilation that comes
    with a first launch."""
    tables = {name: code_table(signed) for name, signed in _SIGNS}
    tensors = [torch.tensor(code_map(signed), dtype=torch.float32, device="cpu") for _, signed in _SIGNS]
    tensors += [table.entries for table in tables.values()]
    constants = {}
    for name, table in tables.items():
        numbers = {"SHIFT": table.shift, "FIRST": table.first, "COUNT": table.entries.numel()}
        constants |= {f"{name}_{what}": number for what, number in numbers.items()}
    return tuple([tensor.to(device) for tensor in tensors]), constants


_SIGNS = (("SIGNED", True), ("UNSIGNED", False))
_NO_TABLES = (None,) * 4, {f"{name}_{what}": 0 for name, _ in _SIGNS for what in ("SHIFT", "FIRST", "COUNT")}


def _bits(value: float) -> int:
    """Bits of a float64, as int64."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf


@functools.lru_cache(maxsize=256)
def _moments(beta1: float, beta2: float) -> dict[str, Any]:
    """The prepare kernel's arguments that follow from the betas. Its sum is largest_update's of the reference."""
    sum_per_step, sum_factor, log_ratio = 0.0, -1.0, -math.inf
    if beta1 != 0.0 and beta2 == 0.0:
        sum_per_step, sum_factor, log_ratio = math.inf, 0.0, 0.0
    elif beta1 != 0.0:
        ratio = beta1 * beta1 / beta2
        sum_per_step, sum_factor, log_ratio = 1.0, 0.0, 0.0
        if abs(1.0 - ratio) >= 1e-9:
            sum_per_step, sum_factor, log_ratio = 0.0, 1.0 / (ratio - 1.0), _log(ratio)
    return {
        "one_minus_beta1": 1.0 - beta1,
        "beta2": float(beta2),
        "one_minus_beta2": 1.0 - beta2,
        "log_beta1": _bits(_log(beta1)),
        "log_beta2": _bits(_log(beta2)),
        "log_ratio": _bits(log_ratio),
        "sum_factor": _bits(sum_factor),
        "sum_per_step": _bits(sum_per_step),
        "largest_factor": _bits((1.0 - beta1) / math.sqrt(1.0 - beta2)),
    }


def _prepare(table: Any, index: int, group: Group, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    lr_ptr = group.lr if isinstance(group.lr, Tensor) and group.lr.device == table.device else None
    launch = Launch(
        kernels._adam_prepare_kernel,
        (cdiv(len(table.counters), _COUNTERS),),
        n_counters=len(table.counters),
        group=index,
        grad_sign=-1.0 if group.maximize else 1.0,
        l2=0.0 if group.decoupled else float(group.weight_decay),
        eps=float(group.eps),
        lr=0 if lr_ptr is not None else _bits(float(group.lr)),
        weight_decay=_bits(group.weight_decay if group.decoupled else 0.0),
        **_moments(group.beta1, group.beta2),
        COUNT=_COUNTERS,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )
    launch(table.counters, table.scalars, lr_ptr, grad_scale, found_inf)


def step(table: Any, groups: Sequence[Group], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """reference.adam.step for the slots and gradients of these AdamTables (onetrip.ops.adam).

    Launches and does not wait. grad_scale, found_inf: one number each, on the table's device.
    """
    with on_device_of(table.scalars):
        for index, group in enumerate(groups):
            _prepare(table, index, group, grad_scale, found_inf)
        for param_dtype, grad_dtype, is_8bit, rounding, first_chunk, n_chunks in table.kinds:
            rows, max_registers = tile(param_dtype, is_8bit, rounding)
            tables, constants = _tables(table.device) if is_8bit else _NO_TABLES
            launch = Launch(
                kernels._adam_step_kernel,
                (n_chunks * _PARTS,),
                first_chunk=first_chunk,
                PARAM_DTYPE=_DTYPES[param_dtype],
                GRAD_DTYPE=_DTYPES[grad_dtype],
                IS_8BIT=is_8bit,
                ROUNDING=int(rounding),
                **constants,
                BLOCK_ROWS=rows,
                PARTS=_PARTS,
                num_warps=_NUM_WARPS,
                maxnreg=max_registers,
                enable_fp_fusion=False,
            )
            launch(table.tensors, table.chunks, table.scalars, *tables)
