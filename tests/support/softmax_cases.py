"""Softmax in float64, and in torch's own dtypes: what tests compare with. Modules that call SDPA."""

from __future__ import annotations

from typing import Any

import torch
from onetrip import ops
from onetrip.reference.philox import dropout_scale
from pairwise import short as short
from patching_cases import written
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as attend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RNG = (1234, 8)


def unfused(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    dropout_p: float = 0.0,
    rng: tuple[int, int] = RNG,
) -> Tensor:
    """What one writes in PyTorch, in the dtype of scores, with onetrip's mask of what is dropped."""
    values = scores * scale
    if mask is not None:
        values = values.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else values + mask.to(values.dtype)
    if causal:
        n_queries, n_keys = values.shape[-2:]
        visible = torch.ones(n_queries, n_keys, dtype=torch.bool, device=values.device).tril(n_keys - n_queries)
        values = values.masked_fill(~visible, -torch.inf)
    p = torch.softmax(values, -1)
    all_masked = (values == -torch.inf).all(-1, keepdim=True)
    p = torch.where(all_masked, torch.zeros_like(p), p)
    if dropout_p > 0.0:
        keep = ops.dropout_keep_mask(tuple(scores.shape), dropout_p, rng, scores.device)
        p = torch.where(keep, p * dropout_scale(dropout_p), 0.0)
    return p.to(scores.dtype)


def exact(scores: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """The same in float64."""
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    return unfused(scores.double(), wide, **options)


def masks(shape: tuple[int, ...], device: str) -> dict[str, Tensor | None]:
    """Masks of every kind and broadcast for scores of shape (batch, heads, queries, keys)."""
    batch, heads, queries, keys = shape

    def lengths(n: int) -> Tensor:
        return torch.randint(1, keys + 1, (n, 1, 1, 1), device=device)

    padding = torch.arange(keys, device=device) < lengths(batch)
    return {
        "none": None,
        "padding-bool": padding,
        "padding-finfo.min": torch.where(padding, 0.0, torch.finfo(torch.float32).min),
        "bias-per-head": torch.randn(1, heads, queries, keys, device=device),
        "bias-transposed": torch.randn(heads, keys, queries, device=device).transpose(1, 2),
        "bias-bf16": torch.randn(batch, 1, queries, keys, device=device).bfloat16(),
        "bias-keys": torch.randn(keys, device=device),
        "bias-queries": torch.randn(queries, 1, device=device),
        "bias-expanded": torch.randn(batch, 1, 1, keys, device=device).expand(shape),
        "bias-scalar": torch.tensor(0.5, device=device),
    }


MASKS = tuple(masks((2, 3, 5, 7), "cpu"))


N_TOKENS, WIDTH, N_HEADS = 12, 32, 4


class Block(nn.Module):
    """q, k and v of one tensor, and SDPA: the first statements and the last ones of all forwards here."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.p, self.bias = p, nn.Parameter(torch.randn(1, N_HEADS, N_TOKENS, N_TOKENS))
        self.added = torch.zeros(1, 1, N_TOKENS, N_TOKENS).masked_fill(~keep(), -torch.inf)

    def heads(self, x: Tensor, n: int = N_HEADS) -> Tensor:
        return x.unflatten(-1, (N_HEADS, -1)).transpose(1, 2)[:, :n]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        p = self.p if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return self.out(y.transpose(1, 2).flatten(2))


class Dropped(Block):
    """With the probability as an attribute in the call."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, self.p if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


def keep() -> Tensor:
    """A bool mask that hides the last keys of the first example."""
    mask = torch.ones(2, 1, N_TOKENS, N_TOKENS, dtype=torch.bool)
    mask[0, ..., -4:] = False
    return mask


def x_of(dtype: torch.dtype = torch.float32, n_tokens: int = N_TOKENS) -> Tensor:
    return torch.randn(2, n_tokens, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def calling(expression: str, before: str = "") -> Any:
    """A block whose SDPA is this expression."""
    body = f"""
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        {before}
        y = {expression}
        return self.out(y.transpose(1, 2).flatten(2))
    """
    names = {"functional": functional, "torch": torch, "attend": attend, "keep": keep}
    return written(Block, body, names, "x, mask=None")
