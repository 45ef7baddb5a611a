"""Rotary position embedding of q and k in one pass over both.

Source: Su et al. 2021, RoFormer. Calls take the same paths as those of softmax.py: rotary_autograd.py has the eager and
the traced one, rotary_native.py the native launch; transforms, and gradients of cos or sin, compose torch's own
operators.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..reference import rotary as reference
from ..reference.rotary import Operands, RotaryPlan
from .common.backends import KERNEL_DTYPES, check_composed, choose
from .common.checks import check_device, check_out_dtype, check_rows
from .common.native import read
from .common.tracing import path_of, path_of_plain_tensors, reject_onnx_export
from .rotary_autograd import apply, rotate
from .rotary_native import eager_call

_PLANS = {interleaved: (RotaryPlan(interleaved, False), RotaryPlan(interleaved, True)) for interleaved in (False, True)}
"""Forward's and backward's."""


def rotary_embedding(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """q * cos + rotate(q) * sin, and the same of k: rotary position embedding (Su et al. 2021), in one launch.

    q: (batch, heads, positions, head_dim), any strides; float32, float16, bfloat16 or float64. k: of q's dtype and
    shape, but for the number of heads (grouped attention). cos, sin: (positions, d) or (batch, positions, d), batch may
    be 1; of one dtype, which need not be q's. d is even and at most head_dim; columns of q and k past d are copied.

    rotate(x) of the first d columns is cat(-x[d/2:], x[:d/2]): cos and sin are those of Llama, GPT-NeoX and most
    others, where column i and d/2 + i are of one frequency. interleaved=True: the pairs (x[2i], x[2i + 1]) become
    (-x[2i + 1], x[2i]), and columns 2i and 2i + 1 of cos and sin are of one frequency (freqs.repeat_interleave(2, -1),
    as in Cohere; GLM makes it out of halves: cos[..., :d // 2].repeat_interleave(2, -1)).

    out_dtype: float32, float16 or bfloat16, of the results, rounded once; q's or None for q's.

    Returns (q, k) rotated. Each has the memory layout of its input (strides as torch.empty_like(q) has them: a view
    transposed from (batch, positions, heads, head_dim) gives another one); an input whose last stride is not 1 gives a
    contiguous result. Where q, cos and the results have one dtype, both products and their sum are rounded to it each:
    the bits of the same expression in torch's operators. Where they differ, all is computed in float32 (with a float64
    among them in that) and rounded once: cos.float() gives the bits of models that cast q to float32 first.

    Saves cos and sin only; the backward pass is the transposed rotation of the gradients. It can be differentiated
    again. Where cos or sin requires grad, torch's own operators run; a graph that was recorded without (torch.export)
    raises RuntimeError in backward. Deterministic. Raises ValueError or TypeError for wrong arguments.
    """
    code = -1 if is_compiling() or not isinstance(interleaved, bool) else read.rotary(q, k, cos, sin)
    if code < 0:
        _check(q, k, cos, sin, interleaved)
    plan, of_gradients = _PLANS[interleaved]
    if out_dtype is not None and out_dtype != q.dtype:
        check_out_dtype("rotary_embedding", out_dtype)
        plan = plan._replace(dtype=out_dtype)
        of_gradients = plan.of_gradients(q.dtype)
    needs_grad = torch.is_grad_enabled()
    if needs_grad and (cos.requires_grad or sin.requires_grad):
        return cast("tuple[Tensor, Tensor]", reference.rotate(Operands(q, k, cos, sin), plan))
    path = path_of(q, k, cos, sin) if code < 0 else path_of_plain_tensors()
    if path == "composed":
        check_composed("rotary_embedding", q.device, "rotary")
        return cast("tuple[Tensor, Tensor]", reference.rotate(Operands(q, k, cos, sin), plan))
    if path == "traced":
        reject_onnx_export()
        return cast("tuple[Tensor, Tensor]", torch.ops.onetrip.rotary(q, k, cos, sin, *plan))
    in_kernel_dtypes = code >= 0 or (q.dtype in KERNEL_DTYPES and cos.dtype in KERNEL_DTYPES)
    backend = choose("rotary_embedding", q.device, in_kernel_dtypes, "rotary")
    call = eager_call(plan, code, backend) if code >= 0 else None
    if needs_grad and (q.requires_grad or k.requires_grad):
        if not (q.requires_grad and k.requires_grad):
            call = None
        return cast("tuple[Tensor, Tensor]", apply(q, k, cos, sin, (None, call, plan, of_gradients, backend)))
    if call is not None:
        return cast("tuple[Tensor, Tensor]", call((q, k, cos, sin), None))
    return cast("tuple[Tensor, Tensor]", rotate(backend, q, k, cos, sin, plan))


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    function = "rotary_embedding"
    for argument, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_rows(function, argument, tensor)
        check_device(function, argument, tensor, q, "q")
    if not isinstance(interleaved, bool):
        raise TypeError(f"{function}: interleaved must be a bool, got {interleaved!r}")
    if k.dtype != q.dtype:
        raise TypeError(f"{function}: k must have the dtype of q, {str(q.dtype)[6:]}, got {str(k.dtype)[6:]}")
    if sin.dtype != cos.dtype:
        raise TypeError(f"{function}: sin must have the dtype of cos, {str(cos.dtype)[6:]}, got {str(sin.dtype)[6:]}")
    if q.dim() != 4:
        raise ValueError(f"{function}: q must have shape (batch, heads, positions, head_dim), got {tuple(q.shape)}")
    batch, _, positions, head_dim = q.shape
    if k.dim() != 4 or (k.shape[0], *k.shape[2:]) != (batch, positions, head_dim):
        raise ValueError(
            f"{function}: k must have shape ({batch}, heads, {positions}, {head_dim}), got {tuple(k.shape)}"
        )
    if cos.shape[:-1] not in ((positions,), (batch, positions), (1, positions)):
        raise ValueError(
            f"{function}: cos must have shape ({positions}, d), ({batch}, {positions}, d) or (1, {positions}, d), "
            f"got {tuple(cos.shape)}"
        )
    d = cos.shape[-1]
    if d % 2 or not 0 < d <= head_dim:
        raise ValueError(f"{function}: cos must have an even number of columns, at most {head_dim}, got {d}")
    if sin.shape != cos.shape:
        raise ValueError(f"{function}: sin must have the shape of cos, {tuple(cos.shape)}, got {tuple(sin.shape)}")
