"""The moe family: the rows of a mixture of experts, in the order of experts and back, by number of experts a token."""

from __future__ import annotations

import torch
from onetrip import ops
from torch import Tensor

from ..measure.cases import LARGE_ELEMENTS, Case, Dropout, LeastBytes, Operator, Outputs, dtypes
from ..measure.side_by_side import measure as measure

SHAPE = (4096, 1024)
LARGE = (LARGE_ELEMENTS // 4096, 4096)


def _routing(n_tokens: int, k: int, device: torch.device) -> dict[str, Tensor]:
    """perm: the choices of all tokens by expert, one of 64 each. places: [n_tokens, k], where each choice is in it."""
    generator = torch.Generator().manual_seed(0)
    perm = torch.sort(torch.randint(64, (n_tokens * k,), generator=generator)).indices.to(device)
    return {"perm": perm, "places": torch.argsort(perm).view(-1, k)}


def _combine(k: int) -> Operator:
    """n_rows: of y, those of all experts."""

    def formula(dropout: Dropout, y: Tensor, weights: Tensor, perm: Tensor, places: Tensor) -> Outputs:
        weighted = (y * weights.view(-1)[perm].unsqueeze(-1))[places.view(-1)]
        return weighted.view(-1, k, y.shape[1]).sum(dim=1)

    def fused(y: Tensor, weights: Tensor, perm: Tensor, places: Tensor) -> Outputs:
        return ops.moe_combine(y, places, weights)

    def least_bytes(n_rows: int, n_cols: int, itemsize: int) -> LeastBytes:
        # Read y and write a row a token; backward reads y and that gradient and writes y's. Places and weights beside.
        forward = (n_rows + n_rows // k) * n_cols * itemsize + n_rows * (8 + itemsize)
        return LeastBytes(forward, forward + n_rows * (n_cols + 1) * itemsize)

    return Operator(
        f"moe_combine-k{k}",
        ("y",),
        (),
        formula,
        fused,
        least_bytes,
        constants=lambda n_rows, n_cols, dtype, device: _routing(n_rows // k, k, device),
        weights=lambda n_rows, n_cols: {"weights": (n_rows // k, k)},
        between=lambda n_rows, n_cols: 2 * n_rows * n_cols,
        family="moe",
    )


def _dispatch(k: int) -> Operator:
    """n_rows: of x, one a token."""

    def formula(dropout: Dropout, x: Tensor, perm: Tensor, places: Tensor) -> Outputs:
        return x[perm // k]

    def fused(x: Tensor, perm: Tensor, places: Tensor) -> Outputs:
        return ops.moe_dispatch(x, places)

    def least_bytes(n_rows: int, n_cols: int, itemsize: int) -> LeastBytes:
        # Read x and write k rows a token; backward the other way round. Places beside them.
        moved = n_rows * (1 + k) * n_cols * itemsize + 8 * n_rows * k
        return LeastBytes(moved, moved)

    return Operator(
        f"moe_dispatch-k{k}",
        ("x",),
        (),
        formula,
        fused,
        least_bytes,
        constants=lambda n_rows, n_cols, dtype, device: _routing(n_rows, k, device),
        between=lambda n_rows, n_cols: n_rows * k * n_cols,
        family="moe",
    )


COMBINE, DISPATCH = ([make(k) for k in (2, 8)] for make in (_combine, _dispatch))


def cases(quick: bool = False) -> list[Case]:
    found = []
    for dtype in dtypes(quick):
        found += [Case(op, *SHAPE, dtype, full=True) for op in COMBINE]
        found += [Case(op, 1024, SHAPE[1], dtype, full=not quick) for op in DISPATCH]
    if torch.cuda.is_available():
        found += [Case(op, *LARGE, torch.bfloat16, full=True) for op in COMBINE]
        found += [Case(op, LARGE[0] // 8, LARGE[1], torch.bfloat16, full=True) for op in DISPATCH]
    return found
