"""Rotary embedding in float64, and operands of every layout: what tests compare with."""

from __future__ import annotations

import torch
from pairwise import short as short
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def turned(x: Tensor, interleaved: bool) -> Tensor:
    """rotate(x), element by element."""
    n = x.shape[-1]
    column = torch.arange(n, device=x.device)
    if interleaved:
        return x[..., column ^ 1] * torch.where(column % 2 == 0, -1.0, 1.0).to(x.dtype)
    return x[..., (column + n // 2) % n] * torch.where(column < n // 2, -1.0, 1.0).to(x.dtype)


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def llama(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """As transformers writes it."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def unfused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """What one writes in PyTorch, in the dtype of q."""
    cos, sin = (table.to(q.dtype).unsqueeze(-3) for table in (cos, sin))
    n = cos.shape[-1]

    def one(x: Tensor) -> Tensor:
        part = x[..., :n]
        return torch.cat([part * cos + turned(part, interleaved) * sin, x[..., n:]], -1)

    return one(q), one(k)


def exact(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """The same in float64."""
    return unfused(*(tensor.double() for tensor in (q, k, cos, sin)), interleaved=interleaved)


def heads(
    batch: int, n_heads: int, positions: int, head_dim: int, dtype: torch.dtype, device: str = "cpu", layout: str = ""
) -> Tensor:
    """(batch, n_heads, positions, head_dim). layout: "transposed", as transformers makes it; "packed": of one
    projection; "columns-apart", "expanded", "padded", "" contiguous."""
    shape = (batch, n_heads, positions, head_dim)
    if layout == "transposed":
        return torch.randn(batch, positions, n_heads, head_dim, device=device).to(dtype).transpose(1, 2)
    if layout == "packed":
        return (
            torch.randn(batch, positions, n_heads, 3 * head_dim, device=device)
            .to(dtype)
            .transpose(1, 2)
            .chunk(3, dim=-1)[1]
        )
    if layout == "columns-apart":
        return torch.randn(*shape[:2], head_dim, positions, device=device).to(dtype).transpose(2, 3)
    if layout == "expanded":
        return torch.randn(batch, 1, positions, head_dim, device=device).to(dtype).expand(shape)
    if layout == "padded":
        return torch.randn(*shape[:3], head_dim + 3, device=device).to(dtype)[..., 1 : head_dim + 1]
    return torch.randn(shape, device=device).to(dtype)


LAYOUTS = ("", "transposed", "packed", "columns-apart", "expanded", "padded")


def tables(
    positions: int, n: int, dtype: torch.dtype, device: str = "cpu", batch: int | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of no rotation: each column has its own numbers, so that a column taken for another one shows."""
    shape = (positions, n) if batch is None else (batch, positions, n)
    return torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype)
