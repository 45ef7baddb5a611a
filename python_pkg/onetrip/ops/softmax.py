"""softmax(scale * scores + mask) with causal option and dropout over the last dimension: one pass over the scores.

Sources: softmax, Bridle 1990; attention weights, Vaswani et al. 2017, section 3.2; dropout, Srivastava et al. 2014 by
Philox4x32 (Salmon et al. 2011). Calls take the same paths as those of row_norm.py: softmax_autograd.py has the
eager and the traced one, softmax_native.py the native launch; transforms compose torch's own operators.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NoReturn, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..reference import softmax as reference
from ..reference.philox import Rng
from ..reference.softmax import Operands, SoftmaxPlan
from .common.backends import KERNEL_DTYPES, check_composed, choose
from .common.checks import (
    DTYPES,
    LARGEST,
    check_bool,
    check_dense,
    check_device,
    check_finite,
    check_probability,
    check_rows,
    raise_unknown,
)
from .common.masks import broadcasts, kernel_mask, mask_layout
from .common.native import EagerCall, as_rows, read
from .common.rng import check_rng, eager_rng, traced_rng
from .common.tracing import is_recorded, path_of, path_of_plain_tensors, reject_onnx_export
from .softmax_autograd import apply, forward
from .softmax_native import eager_call

_MASK_DTYPES = DTYPES | {torch.bool}


def softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    dropout_p: float = 0.0,
    rng: tuple[int, int] | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """dropout(softmax(scale * scores + mask)) over the last dimension: attention weights (Vaswani et al. 2017).

    scores: float32, float16, bfloat16 or float64, rank 1 and up, any strides; for attention (batch, heads, Q, K).
    mask: None; or bool, True keeps a position; or floating, of any of these dtypes, added to scale * scores. Any shape
    that broadcasts to that of scores, any strides: it is read in place. A floating mask may require grad (position
    biases): its gradient is the reduced one, of its own shape.
    scale: finite in float32. causal: query i of Q sees keys 0 ... K - Q + i (none, where that is negative); needs
    rank 2.
    dropout_p: probability of dropping; what is dropped is exactly 0, what is kept is multiplied by 1 / (1 - p).
    p counts as rounded to 1/65536, in both; of p > 0 something is dropped, of p < 1 something kept.
    rng: None draws (seed, offset) from torch's generator; a pair of ints pins the mask (dropout_keep_mask).

    Returns a tensor like scores, contiguous. Everything in between is float32, rounded once. A row whose every position
    is masked, by a bool or by -inf, gives zeros and no gradient; NaN under a bool mask is not seen; other NaN and +inf
    make their row NaN, as in torch, but for what causality hides: that is 0 always, in gradients too, and not looked
    at. A finite floating mask (finfo.min) is an ordinary number.
    Saves one tensor of scores' dtype for backward: the result itself where nothing is dropped; with dropout the
    probabilities before it, whose sign bit, free in what is never negative, says what was dropped.
    Deterministic for a given rng, dmask too. Raises ValueError or TypeError for wrong arguments.
    """
    if unknown:
        raise_unknown("softmax", unknown)
    code = -1  # compilers see only the checks
    if (
        not is_compiling()
        and rng is None
        and type(causal) is bool
        and type(scale) is float
        and -LARGEST <= scale <= LARGEST
        and type(dropout_p) is float
        and 0.0 <= dropout_p <= 1.0
    ):
        code = read.scores(scores, mask, causal)
    if code >= 0:
        path = path_of_plain_tensors()
    else:
        _check(scores, mask, scale, causal, dropout_p, rng)
        path = path_of(scores, mask)
    needs_grad = (path == "traced" and is_recorded()) or (
        torch.is_grad_enabled() and (scores.requires_grad or (mask is not None and mask.requires_grad))
    )
    call = None
    if code < 0 or path != "eager":
        plan = SoftmaxPlan(float(scale), causal, float(dropout_p), needs_grad and dropout_p > 0.0)
    elif mask is None:
        plan, call = _prepare(scale, causal, dropout_p, needs_grad, code)
    else:
        plan, call = _prepare(scale, causal, dropout_p, needs_grad, code, scores.shape, mask.shape, mask.stride())
    if path == "composed":
        check_composed("softmax", scores.device)
        return _composed(scores, mask, traced_rng(rng, dropout_p, scores.device), plan)
    if path == "traced":
        reject_onnx_export()
        y, _ = torch.ops.onetrip.softmax(scores, mask, traced_rng(rng, dropout_p, scores.device), *plan)
        return cast(Tensor, y)
    backend = choose("softmax", scores.device, code >= 0 or scores.dtype in KERNEL_DTYPES)
    used_rng = None if dropout_p == 0.0 else eager_rng(rng, dropout_p, scores.device)
    if call is not None and backend not in ("cpu", "cuda"):
        call = None
    if needs_grad:
        shape = None if mask is None else (mask.shape, mask.dtype)
        rest = None if call is not None else kernel_mask(scores, mask)
        return cast(Tensor, apply(scores, mask, (used_rng, call, plan, backend, shape, rest)))
    if call is not None:
        return cast(Tensor, call((scores, mask), used_rng))
    return forward(backend, scores, kernel_mask(scores, mask), used_rng, plan)[0]


@lru_cache(maxsize=4096)
def _prepare(
    scale: float, causal: bool, dropout_p: float, needs_grad: bool, code: int, *shapes: tuple[int, ...]
) -> tuple[SoftmaxPlan, EagerCall | None]:
    """What eager calls with operands of this code (read.scores) have in common: their plan, and the call of native
    backends where they can read the operands as they are. shapes: as mask_layout's, where there is a mask."""
    plan = SoftmaxPlan(scale, causal, dropout_p, needs_grad and dropout_p > 0.0)
    layout = mask_layout(*shapes) if shapes else None
    is_plain = code % 2 == 1 and (layout is not None or not shapes)
    return plan, eager_call(plan, code, layout) if is_plain else None


def _check(
    scores: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    rng: tuple[int, int] | None,
) -> None:
    function = "softmax"
    check_rows(function, "scores", scores)
    if mask is not None:
        check_dense(function, "mask", mask, _MASK_DTYPES, "bool, float32, float16, bfloat16 or float64")
        if not broadcasts(mask.shape, scores.shape):
            raise ValueError(
                f"{function}: mask must broadcast to the shape of scores, {tuple(scores.shape)}, "
                f"got {tuple(mask.shape)}"
            )
        check_device(function, "mask", mask, scores, "scores")
    check_finite(function, "scale", scale)
    check_bool(function, "causal", causal)
    if causal and scores.dim() < 2:
        raise ValueError(f"{function}: scores must have at least two dimensions with causal, got 1")
    check_probability(function, "dropout_p", dropout_p)
    check_rng(function, rng)


def _composed(scores: Tensor, mask: Tensor | None, rng: Rng | None, plan: SoftmaxPlan) -> Tensor:
    """By torch's own operators, which every transform of torch.func and forward-mode differentiation know."""
    n_queries = scores.shape[-2] if scores.dim() > 1 else 1
    rows = None if mask is None else as_rows(mask.expand(scores.shape))
    operands = Operands(as_rows(scores), rows, None, n_queries)
    y, _ = reference.forward(operands, rng, plan._replace(store_p=False))
    return y.view(scores.shape)
