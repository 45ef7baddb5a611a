"""act(gate) * up, and act(x + bias), with dropout: gated linear units and activations in one pass over their inputs.

Sources: Shazeer 2020 (SwiGLU, GEGLU); Hendrycks & Gimpel 2016 (GELU, SiLU); So et al. 2021 (squared ReLU); OpenAI
2025, gpt-oss (SwiGLU with bounds). Calls take the same paths as those of softmax.py: glu_autograd.py has the
eager and the traced one, glu_native.py the native launch; transforms compose torch's own operators.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..reference import glu as reference
from ..reference.glu import ACTIVATIONS, SOFTCAP, GluPlan, Operands
from ..reference.philox import Rng
from .common.backends import KERNEL_DTYPES, check_composed, choose
from .common.checks import (
    check_bool,
    check_divisor,
    check_finite,
    check_like,
    check_number,
    check_parameter,
    check_probability,
    check_rows,
)
from .common.native import read
from .common.rng import check_rng, eager_rng, traced_rng
from .common.tracing import path_of, path_of_plain_tensors, reject_onnx_export
from .glu_autograd import apply, forward, result_dtype
from .glu_native import eager_call


def glu(
    gate: Tensor,
    up: Tensor,
    activation: str = "silu",
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    dropout_p: float = 0.0,
    rng: tuple[int, int] | None = None,
) -> Tensor:
    """dropout(act(gate) * up), element by element: SwiGLU with silu, GEGLU with gelu or gelu_tanh (Shazeer 2020).

    gate, up: one shape, rank 1 and up; float32, float16, bfloat16 or float64, any strides: halves of one tensor
    (x.chunk(2, -1)) are read in place. activation: "silu", "gelu" (exact, by erf), "gelu_tanh", "relu2" (relu(x)^2),
    "relu" or "quick_gelu" (x sigmoid(1.702 x), CLIP).
    limit, alpha, up_offset: for "silu" only, the SwiGLU of gpt-oss (1.702, 1.0 and limit 7.0;
    OpenAI 2025) and of DeepSeek-V4 (limit alone): dropout(g * sigmoid(alpha * g) * (u + up_offset)), g = min(gate,
    limit), u = clamp(up, -limit, limit). limit None or infinite: no bounds. Gradients as torch.clamp's: 0 beyond the
    bounds, and 1 at them (from torch 2.14 on, clamp's is 0 there). The bounds are float32 numbers here; torch rounds
    them to a 16-bit gate's dtype.
    dropout_p, rng: as bias_dropout_residual. No mask is stored: backward draws it again.

    Returns a tensor of gate's shape, of the dtype that torch's expression has, and of gate's memory layout: strides as
    torch.empty_like(gate) has them; contiguous where gate is expanded. Permuted memory is read in place. It is copied
    where up has another layout, or where a bias or halves are of a dimension that is not the last one in memory.
    Computed in float32 from the inputs as stored, rounded once. NaN and Inf propagate as in torch. Saves gate and up
    only, and computes the activation again in backward. Deterministic for a given rng; arguments are not modified.
    Raises ValueError or TypeError for wrong arguments.
    """
    function = "glu"
    plan = _plan(function, activation, None, dropout_p, rng, False, limit, alpha, up_offset)
    code = -1 if is_compiling() or up is None else read.operands((gate, up, None))
    if code < 0:
        check_rows(function, "gate", gate)
        check_like(function, "up", up, gate, "gate")
    return _call(function, gate, up, None, plan, rng, code)


def glu_packed(
    gate_up: Tensor,
    activation: str = "silu",
    *,
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    dropout_p: float = 0.0,
    rng: tuple[int, int] | None = None,
) -> Tensor:
    """glu of two halves of one tensor, as a packed projection (gate_up_proj) gives them.

    gate_up: (*, 2 * n), any strides: gate is [..., :n] and up [..., n:], the other way round without gate_first. It is
    read in place, and its gradient is written as one tensor: nothing is copied or concatenated.
    interleaved: gate is [..., 0::2] and up [..., 1::2], as in gpt-oss; with "silu" and gate_first only.
    Returns (*, n). The rest is as in glu.
    """
    function = "glu_packed"
    check_bool(function, "gate_first", gate_first)
    check_bool(function, "interleaved", interleaved)
    if interleaved and not (gate_first and activation == "silu"):
        given = f"{activation!r} and gate_first={gate_first}"
        raise ValueError(f"{function}: interleaved needs activation 'silu' and gate_first=True, got {given}")
    plan = _plan(function, activation, gate_first, dropout_p, rng, interleaved, limit, alpha, up_offset)
    code = -1 if is_compiling() else read.operands((gate_up, None, None))
    if code < 0:
        check_rows(function, "gate_up", gate_up)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"{function}: gate_up must have an even last dimension, got {gate_up.shape[-1]}")
    return _call(function, gate_up, None, None, plan, rng, code)


def bias_activation(
    x: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    dropout_p: float = 0.0,
    rng: tuple[int, int] | None = None,
) -> Tensor:
    """dropout(act(x + bias)), the activation of a transformer's MLP; bias None: dropout(act(x)).

    x: (*, n), as gate in glu. bias: (n,), of any of these dtypes.
    Saves x and bias only; of "relu" the result in place of x, and its backward draws no mask. The gradient of the bias
    comes out of the pass that computes that of x, summed in float32 in an order that the sizes alone decide: the same
    bits on every call, whatever the number of threads. The rest is as in glu.
    """
    function = "bias_activation"
    plan = _plan(function, activation, None, dropout_p, rng)
    code = -1 if is_compiling() else read.operands((x, None, bias))
    if code < 0:
        check_rows(function, "x", x)
        if bias is not None:
            check_parameter(function, "bias", bias, x)
    return _call(function, x, None, bias, plan, rng, code)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in one pass: the soft cap of logits and of attention scores (Gemma 2, 2024).

    x: (*, n), as gate in glu. cap: > 0, normal and finite in float32. Saves x only. The rest is as in glu.
    """
    function = "softcap"
    check_divisor(function, "cap", cap)
    code = -1 if is_compiling() else read.operands((x, None, None))
    if code < 0:
        check_rows(function, "x", x)
    plan = (GluPlan if is_compiling() else _make_plan)(SOFTCAP, alpha=float(cap))
    return _call(function, x, None, None, plan, None, code)


_make_plan = lru_cache(maxsize=4096)(GluPlan)


def _plan(
    function: str,
    activation: str,
    gate_first: bool | None,
    dropout_p: float,
    rng: object,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> GluPlan:
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"{function}: activation must be one of {ACTIVATIONS}, got {activation!r}")
    if type(dropout_p) is not float or not 0.0 <= dropout_p <= 1.0 or rng is not None:
        check_probability(function, "dropout_p", dropout_p)
        check_rng(function, rng)
    make = GluPlan if is_compiling() else _make_plan
    if (
        limit is None
        and not interleaved
        and type(alpha) is type(up_offset) is float
        and (alpha, up_offset) == (1.0, 0.0)
    ):
        return make(activation, gate_first, dropout_p)
    check_finite(function, "alpha", alpha)
    check_finite(function, "up_offset", up_offset)
    if limit is not None:
        check_number(function, "limit", limit)
        if not limit > 0.0:
            raise ValueError(f"{function}: limit must be > 0, got {limit}")
        limit = None if limit == math.inf else float(limit)
    if activation != "silu":
        raise ValueError(f"{function}: limit, alpha and up_offset must be left out for {activation!r}, they are silu's")
    return make(activation, gate_first, dropout_p, interleaved, limit, float(alpha), float(up_offset))


def _call(
    function: str,
    gate: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    plan: GluPlan,
    rng: tuple[int, int] | None,
    code: int,
) -> Tensor:
    """code: read.operands; -1 where the operands were checked one by one."""
    checked = code >= 0
    path = path_of_plain_tensors() if checked else path_of(gate, up, bias)
    if path == "composed":
        check_composed(function, gate.device, "glu")
        return _composed(Operands(gate, up, bias), plan, traced_rng(rng, plan.dropout_p, gate.device))
    if path == "traced":
        reject_onnx_export()
        return cast(Tensor, torch.ops.onetrip.glu(gate, up, bias, traced_rng(rng, plan.dropout_p, gate.device), *plan))
    in_kernel_dtypes = checked or result_dtype(gate, up, bias) in KERNEL_DTYPES
    backend = choose(function, gate.device, in_kernel_dtypes, "glu")
    used_rng = None if plan.dropout_p == 0.0 else eager_rng(rng, plan.dropout_p, gate.device)
    call = eager_call(plan, code, backend) if checked else None
    if torch.is_grad_enabled() and (
        gate.requires_grad or (up is not None and up.requires_grad) or (bias is not None and bias.requires_grad)
    ):
        return cast(Tensor, apply(gate, up, bias, (used_rng, call, plan, backend, gate.dtype)))
    if call is not None:
        return cast(Tensor, call((gate, up, bias), used_rng))
    return forward(backend, Operands(gate, up, bias), plan, used_rng)


def _composed(operands: Operands, plan: GluPlan, rng: Rng | None) -> Tensor:
    """By torch's own operators, which every transform of torch.func and forward-mode differentiation know."""
    gate, up, bias = operands
    dtype = result_dtype(*operands)
    return reference.forward(Operands(gate.to(dtype), None if up is None else up.to(dtype), bias), plan, rng)
