"""Parameters that are DTensors (FSDP2, tensor parallelism): which part of the whole a rank holds, and states of that
part as DTensors that torch.distributed.checkpoint saves and reshards.

Blocks of 128 elements are counted in the whole parameter, so that a step does not depend on the number of ranks but
for the blocks that a border between two ranks cuts: each side has a scale of its own. Scales are saved by rows of the
first dimension, [rows, most blocks that a row touches], and so follow their rows to any number of ranks; a block whose
rows then disagree gets the largest scale of them, its codes rounded anew.

That needs parameters sharded along the first dimension, in contiguous ranges of rows. Those sharded otherwise count
blocks in their local part, and load at the same sharding only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..reference.adam import BLOCK, code_map, encode


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor; without importing torch.distributed.tensor, which nobody has used so far if it is
    not loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory; a plain tensor itself."""
    if not is_sharded(tensor):
        return tensor
    part = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part


def like_param(grad: Tensor, p: Tensor) -> Tensor:
    """A gradient of a sharded parameter, placed as the parameter is; collective only where it is not."""
    if is_sharded(grad) and (grad.device_mesh != p.device_mesh or grad.placements != p.placements):  # type: ignore[attr-defined]
        return grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return grad


def sum_over_ranks(params: Sequence[Tensor], values: Tensor) -> Tensor:
    """The sum of values, [len(params)]: over the ranks that share a parameter, replicas counted once. 0-d."""
    of_sharding: dict[Any, list[Tensor]] = {}
    for p, value in zip(params, values.unbind(), strict=True):
        key = None
        if is_sharded(p):
            placements = enumerate(p.placements)  # type: ignore[attr-defined]
            key = (p.device_mesh, *(i for i, placement in placements if not placement.is_replicate()))  # type: ignore[attr-defined]
        of_sharding.setdefault(key, []).append(value)
    sums = []
    for key, of_one in of_sharding.items():
        sums.append(torch.stack(of_one).sum())
        if key is not None:
            mesh, *dims = key
            for dim in dims:
                torch.distributed.all_reduce(sums[-1], group=mesh.get_group(dim))
    return torch.stack(sums).sum()


def first_element(p: Tensor) -> int | None:
    """Where in the contiguous order of the whole parameter this rank's part begins; None where the part is no
    contiguous range of it."""
    if not is_sharded(p):
        return 0
    if any(not placement.is_replicate() and getattr(placement, "dim", None) != 0 for placement in p.placements):  # type: ignore[attr-defined]
        return None
    if p.dim() == 0 or p.numel() == 0:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    if tuple(shape) != tuple(local(p).shape):
        return None
    return offset[0] * (p.numel() // p.shape[0]) if shape[0] else 0


def parts(numel: int, first: int) -> list[tuple[int, int]]:
    """[begin, end) of the at most two parts of a range of elements that starts at element `first` of a parameter: up
    to the end of the block that it starts in, and the rest."""
    head = min(-first % BLOCK, numel)
    return [part for part in ((0, head), (head, numel)) if part[0] < part[1]]


def n_blocks(numel: int, first: int) -> int:
    return sum((end - begin + BLOCK - 1) // BLOCK for begin, end in parts(numel, first))


def _row_length(p: Tensor) -> int:
    return max(1, p.numel() // p.shape[0]) if p.dim() and p.shape[0] else 1


def scale_columns(row_length: int) -> int:
    """The most blocks that a row can touch."""
    return (BLOCK - math.gcd(row_length, BLOCK) + row_length + BLOCK - 1) // BLOCK


def _entries(first_row: int, n_rows: int, row_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row: the local block of each entry [n_rows, columns], and whether the row touches it."""
    starts = torch.arange(first_row, first_row + n_rows, device=device)[:, None] * row_length
    blocks = starts // BLOCK + torch.arange(scale_columns(row_length), device=device)
    return blocks - first_row * row_length // BLOCK, blocks * BLOCK < starts + row_length


def rows_of_scales(scale: Tensor, first_row: int, n_rows: int, row_length: int) -> Tensor:
    """[n_rows, columns]: for each row the scales of the blocks it touches, zeros after them."""
    if row_length % BLOCK == 0:
        return scale.view(n_rows, row_length // BLOCK)
    if scale.numel() == 0:
        return scale.new_zeros(n_rows, scale_columns(row_length))
    blocks, touched = _entries(first_row, n_rows, row_length, scale.device)
    return torch.where(touched, scale[blocks.clamp(max=scale.numel() - 1)], 0.0)


def scales_of_rows(rows: Tensor, codes: Tensor, first_row: int, row_length: int, signed: bool) -> tuple[Tensor, Tensor]:
    """(scales of the local blocks, codes) from rows of scales and the rows' codes [n_rows * row_length].

    Where all rows of a block agree, both are what they were, bit for bit. Elsewhere the block was cut by a border
    between ranks: the largest scale counts, and the codes of the rows with another are rounded anew.
    """
    n_rows = rows.shape[0]
    if row_length % BLOCK == 0 or codes.numel() == 0:
        return rows.reshape(-1) if codes.numel() else rows.new_zeros(0), codes
    blocks, touched = _entries(first_row, n_rows, row_length, rows.device)
    scale = rows.new_zeros(n_blocks(codes.numel(), first_row * row_length))
    scale.scatter_reduce_(0, blocks[touched], rows[touched], "amax")
    differs = torch.zeros_like(scale, dtype=torch.bool)
    differs[blocks[touched][rows[touched] != scale[blocks[touched]]]] = True
    if not bool(differs.any()):
        return scale, codes
    begin = first_row * row_length
    mixed = differs.nonzero().view(-1, 1)
    elements = (begin // BLOCK + mixed) * BLOCK + torch.arange(BLOCK, device=rows.device) - begin  # [n_mixed, 128]
    inside = (elements >= 0) & (elements < codes.numel())
    elements = elements.clamp(0, codes.numel() - 1)
    row = elements // row_length
    values = torch.tensor(code_map(signed), device=codes.device)[codes[elements].long()]
    values = torch.where(inside, values * rows[row, (mixed - blocks[row, 0]).clamp(0, rows.shape[1] - 1)], 0.0)
    codes = codes.clone()
    codes[elements[inside]] = encode(values, scale[differs], signed)[inside]
    return scale, codes


def _largest_local_numel(p: Any) -> int:
    shape = list(p.shape)
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return math.prod(shape)


def random_bits(p: Any, key: int) -> tuple[int, int]:
    """(key, index of the first element) of this rank's part. A part that is no contiguous range of the whole has a key
    of its own; replicas have the same."""
    first = first_element(p)
    if first is not None:
        return key, first
    part = 0
    for dim, placement in enumerate(p.placements):
        if not placement.is_replicate():
            part = part * p.device_mesh.size(dim) + p.device_mesh.get_local_rank(dim)
    return key + ((part + 1) << 32), 0


def random_bits_of_run(key: int, first: int, begin: int) -> tuple[int, int]:
    """Those of a run of the part, from its element `begin` on. Kernels count from a multiple of BLOCK: a run that
    starts inside a block has another key, since the rank before has the block's first bits."""
    inside = (first + begin) % BLOCK
    return (key | 1 << 62, first + begin - inside) if inside else (key, first + begin)


def dtensor(part: Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> Tensor:
    """The DTensor of this shape of which `part` is this rank's, contiguous part."""
    from torch.distributed.tensor import DTensor

    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def from_bytes(value: Tensor) -> Tensor:
    """The int16 tensor of which to_bytes made pairs of int8."""
    if not is_sharded(value):
        return value.contiguous().view(torch.int16).squeeze(-1)
    part = local(value).view(torch.int16).squeeze(-1)
    return dtensor(part, value.device_mesh, value.placements, tuple(value.shape[:-1]))  # type: ignore[attr-defined]


def to_bytes(value: Tensor) -> Tensor:
    """int16 as pairs of int8 in a last dimension, sharing memory: the collectives of NCCL and gloo have no int16."""
    return value.unsqueeze(-1).view(torch.int8)


def to_saved(p: Any, entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank's state of a parameter as state_dict holds it: DTensors where it is sharded."""
    if not is_sharded(p):
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return {key: to_bytes(value) if value.dtype == torch.int16 else value for key, value in entry.items()}
        return entry
    from torch.distributed.tensor import Replicate, Shard

    def wrap(part: Tensor, placements: Any, shape: tuple[int, ...]) -> Tensor:
        return dtensor(part, p.device_mesh, placements, shape)

    first, row_length = first_element(p), _row_length(p)
    saved: dict[str, Tensor] = {}
    for key, value in entry.items():
        if key in ("step", "n_steps"):
            saved[key] = value
        elif value.dtype == torch.int16:
            saved[key] = wrap(to_bytes(value), p.placements, (*p.shape, 2))
        elif not key.endswith("_scale"):
            saved[key] = wrap(value, p.placements, p.shape)
        elif first is not None and p.dim():
            rows = rows_of_scales(value, first // row_length, local(p).shape[0], row_length)
            saved[key] = wrap(rows, p.placements, (p.shape[0], scale_columns(row_length)))
        else:
            sharding = [placement.is_shard() for placement in p.placements]
            columns = (_largest_local_numel(p) + BLOCK - 1) // BLOCK
            row = torch.nn.functional.pad(value, (0, columns - value.numel())).view(1, columns)
            n_rows = math.prod(size for size, cut in zip(p.device_mesh.shape, sharding, strict=True) if cut)
            placements = [Shard(0) if cut else Replicate() for cut in sharding]
            saved[key] = wrap(row, placements, (n_rows, columns))
    return saved


def from_saved_scale(p: Tensor, value: Tensor, codes: Tensor, signed: bool) -> tuple[Tensor, Tensor] | None:
    """(scales, codes) of this rank from a scale as to_saved made it, or the flat [n_blocks] of a plain parameter,
    each whole or as a DTensor. codes: this rank's, contiguous. None where the shape is another parameter's."""
    first, row_length = first_element(p), _row_length(p)
    count = n_blocks(codes.numel(), first or 0)
    if not is_sharded(p) and tuple(value.shape) == (count,):
        return value, codes
    if first is None or p.dim() == 0:
        if is_sharded(value) and local(value).dim() == 2 and local(value).shape[1] >= count:
            return local(value)[0, :count].contiguous(), codes
        return None
    if is_sharded(value) and not is_sharded(p):
        return None
    if tuple(value.shape) == (p.shape[0], scale_columns(row_length)):
        first_row, n_rows = first // row_length, local(p).shape[0]
        rows = local(value) if is_sharded(value) else value[first_row : first_row + n_rows]
        if rows.shape[0] != n_rows:
            return None
        scale, new_codes = scales_of_rows(rows, codes.view(-1), first_row, row_length, signed)
        return scale, new_codes.view(codes.shape)
    if tuple(value.shape) == (n_blocks(p.numel(), 0),):
        whole = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
        return whole[first // BLOCK : first // BLOCK + count], codes
    return None


def local_of_saved(p: Tensor, value: Tensor) -> Tensor | None:
    """This rank's part of a moment saved whole or as a DTensor; None where it is not shaped or placed like p."""
    if tuple(value.shape) != tuple(p.shape):
        return None
    if is_sharded(value):
        part = local(value)
        return part if is_sharded(p) and part.shape == local(p).shape else None
    if not is_sharded(p):
        return value
    first, row_length = first_element(p), _row_length(p)
    if first is None or p.dim() == 0:
        return value if local(p).shape == p.shape else None
    first_row = first // row_length
    return value[first_row : first_row + local(p).shape[0]]
