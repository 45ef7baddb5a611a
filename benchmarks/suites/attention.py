"""Attention built on the softmax family, beside eager, torch.compile and every backend of SDPA, by sequence length."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from onetrip.cpu_advice import multiplies_bfloat16_in_vectors
from onetrip.ops.attention import attention
from torch import Tensor

from ..measure.cases import Case, Dropout, Named, Operator, Outputs, dtypes, matrices
from ..measure.providers import form
from ..measure.side_by_side import measure as measure

WIDTH = 64
"""Columns of a head."""
HEADS = {64: 768, 256: 192, 1024: 24, 4096: 2, 16384: 1}
"""Sequence length: batch x heads. The scores of one head of 16,384 tokens are 1 GiB in float32."""
QUICK_LENGTHS = (64, 1024)


def _operator(length: int, dropout_p: float, twin: Operator | None = None) -> Operator:
    scale = WIDTH**-0.5

    def heads(rows: Tensor) -> Tensor:
        return rows.view(-1, 1, length, WIDTH)

    def formula(dropout: Dropout, query: Tensor, key: Tensor, value: Tensor) -> Outputs:
        weights = torch.softmax(torch.matmul(heads(query), heads(key).transpose(2, 3)) * scale, dim=-1)
        if dropout_p > 0.0:
            weights = dropout(weights)
        return torch.matmul(weights, heads(value)).view(query.shape)

    def fused(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
        output, _ = attention(
            heads(query), heads(key), heads(value), scale=scale, dropout_p=dropout_p, need_weights=False
        )
        return output.view(query.shape)

    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
        output = F.scaled_dot_product_attention(heads(query), heads(key), heads(value), dropout_p=dropout_p)
        return output.reshape(query.shape)

    def flash_attn(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Outputs:
        batch_first = [rows.view(-1, length, 1, rows.shape[-1]) for rows in (query, key, value)]
        return attend(*batch_first, dropout_p=dropout_p).reshape(query.shape)

    return Operator(
        f"attention-L{length}-p{dropout_p:g}",
        ("query", "key", "value"),
        (),
        formula,
        fused,
        matrices(4, 8),  # q, k, v, output; and their gradients
        dropout_p,
        between=lambda n_rows, n_cols: 3 * n_rows * length,  # weights, their gradient, that of the scores
        twin=twin,
        others={"sdpa": lambda: sdpa, **form("flash-attn", "flash_attn_func", flash_attn)},
    )


def cases(quick: bool = False) -> list[Case]:
    found = []
    for dtype in dtypes(quick):
        for length in QUICK_LENGTHS if quick else HEADS:
            plain = _operator(length, 0.0)
            for operator in (plain, _operator(length, 0.1, twin=plain)):
                found.append(Case(operator, HEADS[length] * length, WIDTH, dtype, full=True))
    return found


def unavailable(case: Named, device: torch.device) -> str:
    """Why the grid leaves a case out on this device; empty where it does not. Flash kernels have no float32."""
    if not isinstance(case, Case) or case.dtype == torch.float32 or device.type == "cuda":
        return ""
    multiplied = case.dtype == torch.bfloat16 and multiplies_bfloat16_in_vectors()
    return "" if multiplied else "for a GPU; elsewhere with --dtype bf16"
