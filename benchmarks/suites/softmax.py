"""The softmax family: attention weights of a batch of heads, and rows of every width."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from onetrip import ops
from torch import Tensor

from ..measure.cases import Case, Dropout, LeastBytes, Operator, Outputs, dtypes, gpu_cases, warm_cases, width_cases
from ..measure.providers import form
from ..measure.side_by_side import measure as measure

HEADS, QUERIES, KEYS = 16, 512, 512
ROWS = 8 * HEADS * QUERIES
SCALE = 0.125
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
QUICK_WIDTHS = (64, 1024, 65536)
WARM_SHAPES = ((2048, 128), (2048, 512), (512, 2048))


def _leading_shape(n_rows: int) -> tuple[int, int, int]:
    """(batch, heads, queries) of scores with so many rows; one head where the rows are not those of whole sequences."""
    batch, rest = divmod(n_rows, HEADS * QUERIES)
    return (1, 1, n_rows) if rest else (batch, HEADS, QUERIES)


def _padding(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """As transformers makes it: 0 where a key is real and the dtype's lowest number where it is padding."""
    batch = _leading_shape(n_rows)[0]
    lengths = torch.linspace(n_cols // 2, n_cols, batch, device=device).long()
    real = torch.arange(n_cols, device=device) < lengths[:, None, None, None]
    return {"mask": torch.where(real, 0.0, torch.finfo(dtype).min).to(dtype)}


def _call(function: Callable[..., Tensor], scores: Tensor) -> Outputs:
    return function(scores)


def _operator(name: str, *, attention: bool, causal: bool = False, dropout_p: float = 0.0) -> Operator:
    def heads(scores: Tensor) -> Tensor:
        return scores.view(*_leading_shape(scores.shape[0]), scores.shape[-1]) if attention else scores

    def formula(dropout: Dropout, scores: Tensor, mask: Tensor | None = None) -> Outputs:
        values = heads(scores)
        if mask is not None:
            values = values * SCALE + mask
        if causal:
            n_queries, n_keys = values.shape[-2:]
            hidden = torch.ones(n_queries, n_keys, dtype=torch.bool, device=values.device).triu(n_keys - n_queries + 1)
            values = values.masked_fill(hidden, -torch.inf)
        y = torch.softmax(values, dim=-1).view(scores.shape)
        return dropout(y) if dropout_p > 0.0 else y

    def fused(scores: Tensor, mask: Tensor | None = None) -> Outputs:
        scale = 1.0 if mask is None else SCALE
        return ops.softmax(heads(scores), mask, scale=scale, causal=causal, dropout_p=dropout_p).view(scores.shape)

    def least_bytes(n_rows: int, n_cols: int, itemsize: int) -> LeastBytes:
        matrix = n_rows * n_cols * itemsize
        # What causality hides is neither read nor kept for backward, and written where it is an output. Not fewer keys
        # than queries.
        seen = matrix if not causal else int(matrix * (1 - (_leading_shape(n_rows)[-1] - 1) / (2 * n_cols)))
        # With dropout the probabilities are written beside the result; backward reads them and dy, and writes dscores.
        return LeastBytes(seen + matrix + (seen if dropout_p > 0.0 else 0), 2 * seen + matrix)

    hidden: dict[int, tuple[Tensor, Tensor]] = {}

    def apex(function: Callable[..., Tensor], scores: Tensor, mask: Tensor) -> Outputs:
        """Its mask is boolean, True where a key is hidden, and spans the queries: made once, not in timed calls."""
        four = heads(scores)
        if id(mask) not in hidden:  # the additive mask is kept beside, so that its id stays its own
            hidden[id(mask)] = mask, (mask != 0).expand(-1, 1, *four.shape[2:]).contiguous()
        y = function(four, hidden[id(mask)][1], SCALE).view(scores.shape)
        return F.dropout(y, dropout_p) if dropout_p > 0.0 else y

    if attention:
        others = form("apex", "scaled_masked_softmax", apex, "apex.transformer.functional.fused_softmax")
    else:
        others = form("liger", "liger_softmax", _call) | form("quack", "softmax", _call)
    return Operator(
        name,
        ("scores",),
        (),
        formula,
        fused,
        least_bytes,
        dropout_p,
        constants=_padding if attention else (lambda *_: {}),
        mask_shows_in="output",
        others={} if causal else others,
    )


SOFTMAX = _operator("softmax", attention=False)
ATTENTION_SOFTMAX = {
    p: _operator(f"scale_mask_softmax_dropout-p{p:g}", attention=True, dropout_p=p) for p in (0.1, 0.0)
}
CAUSAL_SOFTMAX = _operator("scale_mask_causal_softmax_dropout-p0.1", attention=True, causal=True, dropout_p=0.1)


def cases(quick: bool = False) -> list[Case]:
    n_rows = HEADS * QUERIES if quick else ROWS
    found = [Case(op, n_rows, KEYS, dtype, full=True) for dtype in dtypes(quick) for op in ATTENTION_SOFTMAX.values()]
    found += width_cases([SOFTMAX], QUICK_WIDTHS if quick else WIDTHS, quick)
    found += warm_cases([SOFTMAX], WARM_SHAPES, quick)
    if not quick:
        found += gpu_cases([SOFTMAX])
    return found
