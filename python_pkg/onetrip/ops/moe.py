"""Mixtures of experts: rows of tokens to the order of experts, and the weighted sum of what comes back.

Source: Shazeer et al. 2017, Outrageously Large Neural Networks. Calls take the same paths as those of rotary.py:
moe_autograd.py has the eager and the traced one; transforms compose torch's own operators.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..reference import moe as reference
from .common.backends import KERNEL_DTYPES, check_composed, choose
from .common.checks import DTYPES, check_device, check_int64, check_rows
from .common.tracing import path_of, reject_onnx_export
from .moe_autograd import apply_combine, apply_dispatch, combine, dispatch


def moe_combine(
    y: Tensor, places: Tensor, weights: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """out[t] = sum of weights[t, j] * y[places[t, j]] over j: what the experts return for token t, added up.

    y: (n_tokens * k, n_cols), rows in the order of experts; float32, float16, bfloat16 or float64. places: (n_tokens,
    k) int64, which names every row of y once: the inverse of the permutation that sorts the tokens' choices by expert.
    weights: (n_tokens, k), of any of these dtypes; None for 1.

    Returns (n_tokens, n_cols), of dtype; None for the common dtype of y and weights, which the unfused expression has.
    Products and sums are float32 (float64 for float64), in the order of j, and rounded once. Backward reads y and the
    gradient once, and writes the gradient of y once; without weights it is moe_dispatch. Saves y, places and weights;
    without weights places only. Gradients cannot be differentiated again. Deterministic. Raises ValueError or
    TypeError for wrong arguments. Places out of range raise IndexError or RuntimeError on a CPU; on a GPU they count as
    NaN, and rows of y that no place names have no defined gradient.
    """
    function = "moe_combine"
    check_rows(function, "y", y)
    _check_places(function, places, y, "y")
    if y.shape[0] != places.shape[0] * places.shape[1]:
        rows = places.shape[0] * places.shape[1]
        raise ValueError(f"{function}: y must have {rows} rows, one for each of places, got {y.shape[0]}")
    if weights is not None:
        check_rows(function, "weights", weights)
        if weights.shape != places.shape:
            shape = tuple(places.shape)
            raise ValueError(f"{function}: weights must have the shape of places, {shape}, got {tuple(weights.shape)}")
        check_device(function, "weights", weights, y, "y")
    if dtype is None:
        dtype = y.dtype if weights is None else torch.promote_types(y.dtype, weights.dtype)
    elif not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise TypeError(f"{function}: dtype must be float32, float16, bfloat16 or float64, got {dtype!r}")
    path = path_of(y, places, weights)
    if path == "composed":
        check_composed(function, y.device, "moe")
        return reference.combine(y, places, weights, dtype)
    if path == "traced":
        reject_onnx_export()
        return cast(Tensor, torch.ops.onetrip.moe_combine(y, places, weights, dtype))
    dtypes = {y.dtype, dtype} if weights is None else {y.dtype, weights.dtype, dtype}
    backend = choose(function, y.device, dtypes <= KERNEL_DTYPES, "moe")
    if torch.is_grad_enabled() and (y.requires_grad or (weights is not None and weights.requires_grad)):
        return cast(Tensor, apply_combine(y, places, weights, dtype, backend))
    return combine(backend, y, places, weights, dtype)


def moe_dispatch(x: Tensor, places: Tensor) -> Tensor:
    """The rows of x in the order of experts: row places[t, j] of the result is x[t].

    x: (n_tokens, n_cols), float32, float16, bfloat16 or float64. places: (n_tokens, k) int64, which names every row of
    the result once. Returns (n_tokens * k, n_cols), of x's dtype. Backward is moe_combine without weights: a sum in
    float32 in the order of j, no atomics. Saves places. Rows that no place names are undefined. Otherwise as
    moe_combine.
    """
    function = "moe_dispatch"
    check_rows(function, "x", x)
    _check_places(function, places, x, "x")
    if x.shape[0] != places.shape[0]:
        raise ValueError(f"{function}: x must have {places.shape[0]} rows, as places has, got {x.shape[0]}")
    path = path_of(x, places)
    if path == "composed":
        check_composed(function, x.device, "moe")
        return reference.dispatch(x, places)
    if path == "traced":
        reject_onnx_export()
        return cast(Tensor, torch.ops.onetrip.moe_dispatch(x, places))
    backend = choose(function, x.device, x.dtype in KERNEL_DTYPES, "moe")
    if torch.is_grad_enabled() and x.requires_grad:
        return cast(Tensor, apply_dispatch(x, places, backend))
    return dispatch(backend, x, places)


def _check_places(function: str, places: Tensor, rows: Tensor, argument: str) -> None:
    check_int64(function, "places", places)
    if places.dim() != 2 or places.shape[1] == 0:
        raise ValueError(f"{function}: places must have shape (n_tokens, k), got {tuple(places.shape)}")
    check_device(function, "places", places, rows, argument)
    if rows.dim() != 2:
        raise ValueError(f"{function}: {argument} must have shape (rows, n_cols), got {tuple(rows.shape)}")
