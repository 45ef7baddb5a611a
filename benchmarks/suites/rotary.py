"""The rotary family: position embedding of the heads of q and k, by width of a head, in both layouts of memory."""

from __future__ import annotations

import torch
from onetrip import ops
from torch import Tensor

from ..measure.cases import Case, Dropout, LeastBytes, Operator, Outputs, dtypes, gpu_cases
from ..measure.side_by_side import measure as measure

BATCH, HEADS, POSITIONS = 4, 16, 1024
ROWS = BATCH * HEADS * POSITIONS
WIDTHS = (64, 128, 256)


def _shape(n_rows: int) -> tuple[int, int, int]:
    """(batch, heads, positions) of so many rows; one head where the rows are not those of whole sequences."""
    batch, rest = divmod(n_rows, HEADS * POSITIONS)
    return (1, 1, n_rows) if rest else (batch, HEADS, POSITIONS)


def _tables(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """As Llama makes them: column i and n_cols / 2 + i are of one frequency."""
    frequencies = 10000.0 ** -(torch.arange(0, n_cols, 2, device=device) / n_cols)
    angles = torch.arange(_shape(n_rows)[-1], device=device)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _least_bytes(n_rows: int, n_cols: int, itemsize: int) -> LeastBytes:
    # Two matrices read and two written, and cos and sin of each position read; backward the same of gradients.
    moved = (4 * n_rows + 2 * _shape(n_rows)[-1]) * n_cols * itemsize
    return LeastBytes(moved, moved)


def _operator(name: str, transposed: bool) -> Operator:
    """transposed: q and k lie in memory as (batch, positions, heads, n_cols), as a projection leaves them."""

    def heads(x: Tensor) -> Tensor:
        batch, n_heads, positions = _shape(x.shape[0])
        if transposed:
            return x.view(batch, positions, n_heads, -1).transpose(1, 2)
        return x.view(batch, n_heads, positions, -1)

    def rows(x: Tensor) -> Tensor:
        return (x.transpose(1, 2) if transposed else x).reshape(-1, x.shape[-1])

    def formula(dropout: Dropout, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
        q, k = heads(q), heads(k)
        return rows(q * cos + _turned(q) * sin), rows(k * cos + _turned(k) * sin)

    def fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
        q, k = ops.rotary_embedding(heads(q), heads(k), cos, sin)
        return rows(q), rows(k)

    return Operator(
        name,
        ("q", "k"),
        (),
        formula,
        fused,
        _least_bytes,
        constants=_tables,
        between=lambda n_rows, n_cols: 3 * n_rows * n_cols,
        family="rotary",
    )


ROTARY = _operator("rotary_embedding", transposed=False)
TRANSPOSED = _operator("rotary_embedding-transposed", transposed=True)


def cases(quick: bool = False) -> list[Case]:
    n_rows = ROWS // BATCH if quick else ROWS
    found = [Case(op, n_rows, WIDTHS[0], dtype, full=True) for dtype in dtypes(quick) for op in (ROTARY, TRANSPOSED)]
    if not quick:
        found += [Case(ROTARY, n_rows, width, dtype, full=False) for dtype in dtypes(quick) for width in WIDTHS[1:]]
        found += gpu_cases([ROTARY])
    return found
