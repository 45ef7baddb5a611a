"""LayerNorm, RMSNorm, and bias + dropout + residual with or without a norm: one family of kernels.

z = residual + dropout(x + bias);  y = norm(z) * weight + norm_bias. Sources: layer norm, Ba, Kiros & Hinton 2016;
RMS norm, Zhang & Sennrich 2019; dropout, Srivastava et al. 2014 by Philox4x32-10 (Salmon et al. 2011).

Eager calls go straight to an autograd.Function around the kernel launch; traced calls (torch.compile, fake tensors,
dispatch modes) go through the torch.library operators of row_norm_library.py, which run the same kernels. Under
torch.func's transforms and forward-mode differentiation the formulas are composed of torch's operators instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..reference import row_norm as reference
from ..reference.philox import Rng
from ..reference.row_norm import NORM_LAYER, NORM_NONE, NORM_RMS, Backward, Forward, GradDtypes, RowNormPlan
from . import native
from .backends import KERNEL_DTYPES, choose
from .checks import DTYPES, check_eps, check_like, check_number, check_parameter, check_probability, check_rows
from .rng import check_rng, draw_rng, draw_rng_tensor

_NO_GRADS: GradDtypes = (None, None, None, None, None)
Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None, torch.dtype | None, torch.dtype | None]
"""Of x, residual, bias, weight, norm_bias."""

_HALF = (torch.float16, torch.bfloat16)
_ANY_RNG = (0, 0)  # p = 1 drops all, whatever is drawn: the generator is left where it is


def forward(
    backend: str,
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
) -> Forward:
    """reference.row_norm.forward on any backend, for x of any rank, strides and size; y and z are shaped like x."""
    if x.numel() == 0:
        n_rows, acc = x.shape[:-1].numel(), torch.float64 if plan.z_dtype == torch.float64 else torch.float32
        return (
            x.new_empty(x.shape, dtype=plan.y_dtype) if plan.norm else None,
            x.new_empty(x.shape, dtype=plan.z_dtype) if plan.store_z else None,
            x.new_zeros(n_rows, dtype=acc) if has_mean(plan) else None,
            x.new_zeros(n_rows, dtype=acc) if plan.store_stats else None,
        )
    if backend in ("cpu", "cuda"):
        return native.row_norm_forward(x, residual, bias, weight, norm_bias, rng, plan)
    module = reference if backend == "reference" else importlib.import_module("onetrip.kernels.row_norm")
    n_cols = x.shape[-1]
    y, z, mean, rstd = module.forward(
        _two_dimensional(x, n_cols),
        None if residual is None else _two_dimensional(residual, n_cols),
        _vector(bias),
        _vector(weight),
        _vector(norm_bias),
        rng,
        plan,
    )
    return None if y is None else y.view(x.shape), None if z is None else z.view(x.shape), mean, rstd


def backward(
    backend: str,
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
    grad_dtypes: GradDtypes,
) -> Backward:
    """reference.row_norm.backward on any backend, for any rank, strides and size. One of dy and dz must be given."""
    given = cast(Tensor, dy if dy is not None else dz)
    shape, n_cols = given.shape, given.shape[-1]
    if given.numel() == 0:
        sizes = (shape, shape, (n_cols,), (n_cols,), (n_cols,))
        return cast(
            Backward,
            tuple(
                None if dtype is None else given.new_zeros(size, dtype=dtype)
                for size, dtype in zip(sizes, grad_dtypes, strict=True)
            ),
        )
    if backend in ("cpu", "cuda"):
        return native.row_norm_backward(dy, dz, z, mean, rstd, weight, rng, plan, grad_dtypes)
    module = reference if backend == "reference" else importlib.import_module("onetrip.kernels.row_norm")
    dx, dresidual, dbias, dweight, dnorm_bias = module.backward(
        None if dy is None else _two_dimensional(dy, n_cols),
        None if dz is None else _two_dimensional(dz, n_cols),
        None if z is None or dy is None else _two_dimensional(z, n_cols),
        mean,
        rstd,
        _vector(weight),
        rng,
        plan,
        grad_dtypes,
    )
    return (
        None if dx is None else dx.view(shape),
        None if dresidual is None else dresidual.view(shape),
        dbias,
        dweight,
        dnorm_bias,
    )


def has_mean(plan: RowNormPlan) -> bool:
    """Whether the forward pass stores the rows' means."""
    return plan.store_stats and plan.norm == NORM_LAYER and not plan.center_z


def _two_dimensional(tensor: Tensor, n_cols: int) -> Tensor:
    tensor = tensor.reshape(-1, n_cols).resolve_neg()  # a lazy negation does not show in the memory
    return tensor if n_cols == 1 or tensor.stride(1) == 1 else tensor.contiguous()


def _vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous().resolve_neg()


def input_gradients(
    compute: Callable[..., Backward],
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
    grad_dtypes: GradDtypes,
) -> Backward:
    """The gradients by compute(dy, ..., grad_dtypes), less what needs no kernel: what equals dz or another one is not
    computed."""
    if dy is None and dz is None:
        return None, None, None, None, None
    x_dtype, residual_dtype, bias_dtype, weight_dtype, norm_bias_dtype = grad_dtypes
    if dy is None:
        weight_dtype = norm_bias_dtype = None
    dx_is_g, g = plan.dropout_p == 0.0, dz if dy is None else None
    # The residual's gradient is g; so is x's where nothing is dropped. What is g already, or twice the same, is not
    # computed.
    kernel_x = None if dx_is_g and g is not None else x_dtype
    kernel_residual = None if g is not None else residual_dtype
    shared = dx_is_g and x_dtype is not None and kernel_residual == x_dtype
    if shared:
        kernel_residual = None
    wanted = (kernel_x, kernel_residual, bias_dtype, weight_dtype, norm_bias_dtype)
    dx = dresidual = dbias = dweight = dnorm_bias = None
    if wanted != _NO_GRADS:
        dx, dresidual, dbias, dweight, dnorm_bias = compute(dy, dz, z, mean, rstd, weight, rng, plan, wanted)
    if shared:
        dresidual = dx
    if g is not None:
        dresidual = None if residual_dtype is None else g.to(residual_dtype)
        if dx_is_g:
            dx = None if x_dtype is None else g.to(x_dtype)
    return dx, dresidual, dbias, dweight, dnorm_bias


class _RowNorm(torch.autograd.Function):
    """The eager path. Saves z (or x, where they are the same) and one or two float32 numbers a row; never a mask."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        bias: Tensor | None,
        weight: Tensor | None,
        norm_bias: Tensor | None,
        call: tuple[Rng | None, RowNormPlan, str, Dtypes, bool],
    ) -> Any:
        rng, plan, backend, _, return_z = call
        y, z, mean, rstd = forward(backend, x, residual, bias, weight, norm_bias, rng, plan)
        if return_z:
            ctx.set_materialize_grads(False)
        rng_tensor = rng if isinstance(rng, Tensor) else None
        if plan.norm:
            ctx.save_for_backward(x if z is None else z, mean, rstd, weight, rng_tensor)
        elif rng_tensor is not None:
            ctx.save_for_backward(None, None, None, None, rng_tensor)
        ctx.call = call if rng_tensor is None else (None, *call[1:])
        return (y, z) if return_z else y if plan.norm else z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # Raised here and not at the second differentiation: once_differentiable hangs its error on a node that leads
        # to no input, and torch.autograd.grad leaves such a node, and with it the whole term, out.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "onetrip: gradients of row_norm operators cannot be differentiated again (create_graph=True); "
                "use torch's own operators there (onetrip.unpatch_model)"
            )
        rng, plan, backend, dtypes, _ = ctx.call
        z, mean, rstd, weight, rng_tensor = ctx.saved_tensors or (None, None, None, None, None)
        if not plan.norm:
            dy, dz = None, grads[0]
        else:
            dy, dz = grads[0], grads[1] if len(grads) > 1 else None
        wanted = cast(
            GradDtypes,
            tuple(dtype if needed else None for dtype, needed in zip(dtypes, ctx.needs_input_grad, strict=False)),
        )
        rng = rng_tensor if rng is None else rng
        return (
            *input_gradients(
                # Batched gradients (is_grads_batched, vectorised jacobians) have no storage that a kernel could read.
                partial(backward, backend if _have_storage(dy, dz) else "reference"),
                *(dy, dz, z, mean, rstd, weight, rng, plan, wanted),
            ),
            None,
        )


# Function.apply less its Python half, which looks for functorch transforms (3 of 8 microseconds): _is_traced looks too.
_apply = super(torch.autograd.Function, _RowNorm).apply


def dtypes_of(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


_PLAIN_TYPES = (Tensor, torch.nn.Parameter, type(None))


def _all_fit(
    x: Tensor, residual: Tensor | None, bias: Tensor | None, weight: Tensor | None, norm_bias: Tensor | None
) -> bool:
    """Whether all checks of tensors would pass, at a third of their price; what is wrong is for them to find out."""
    try:
        shape, device = x.shape, x.device
        columns = shape[-1:]
        if not (columns and x.dtype in DTYPES and x.layout is torch.strided) or x.is_nested:
            return False
        if residual is not None and not (
            residual.dtype in DTYPES
            and residual.layout is torch.strided
            and residual.shape == shape
            and residual.device == device
        ):
            return False
        for vector in (bias, weight, norm_bias):
            if vector is not None and not (
                vector.dtype in DTYPES
                and vector.layout is torch.strided
                and vector.shape == columns
                and vector.device == device
            ):
                return False
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one without a shape
        return False
    return True


def _is_traced(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the call must be visible to torch's dispatcher: compilers, fake, meta and wrapped tensors (in any role:
    a kernel given the address of one would read null), dispatch modes."""
    if torch.compiler.is_compiling() or x.is_meta or type(x) not in _PLAIN_TYPES:
        return True
    for tensor in others:
        if type(tensor) not in _PLAIN_TYPES:
            return True
    return is_in_torch_dispatch_mode()


def _is_transformed() -> bool:
    """Whether functorch transforms (torch.func) or forward-mode differentiation are in force: no kernel serves them."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _have_storage(*tensors: Tensor | None) -> bool:
    return all(tensor is None or torch._C._has_storage(tensor) for tensor in tensors)


def _composed(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    rng: Rng | None,
    plan: RowNormPlan,
) -> tuple[Tensor | None, Tensor | None]:
    """(y, z) by torch's own operators, which every transform of torch.func and forward-mode differentiation know."""
    rows = None if residual is None else residual.reshape(-1, x.shape[-1])
    plain = plan._replace(store_z=True, center_z=False, store_stats=False)
    y, z, _, _ = reference.forward(x.reshape(-1, x.shape[-1]), rows, bias, weight, norm_bias, rng, plain)
    return None if y is None else y.view(x.shape), None if z is None else z.view(x.shape)


def _make_plan(
    norm: int,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool | Literal["weight"],
    dropout_p: float,
    autocast_to_float32: bool,
    needs_grad: bool,
    return_residual: bool,
    z_is_x: bool,
    x: torch.dtype,
    residual: torch.dtype | None,
    bias: torch.dtype | None,
    weight: torch.dtype | None,
    norm_bias: torch.dtype | None,
) -> tuple[RowNormPlan, Dtypes, bool]:
    """The plan of a call with tensors of these dtypes, the dtypes, and whether kernels compute with all of them.

    Dtypes are those that the unfused expression gives; autocast runs torch's own norms in float32 on CUDA, not on the
    CPU.
    """
    z = x
    for other in (bias, residual):
        z = z if other is None else torch.promote_types(z, other)
    n, y = torch.float32, z
    if norm == NORM_RMS and weight is not None and cast_before_weight:
        n = z
        if cast_before_weight == "weight":
            n = weight if weight in _HALF else torch.promote_types(z, torch.float32)
        y = torch.promote_types(n, weight)
    elif autocast_to_float32 and z in _HALF:
        y = torch.float32
    plan = RowNormPlan(
        norm=norm,
        eps=eps,
        weight_offset=weight_offset,
        dropout_p=dropout_p,
        z_dtype=z,
        n_dtype=n,
        y_dtype=y,
        store_z=norm == NORM_NONE or (not z_is_x and (needs_grad or return_residual)),
        # One float32 number a row less to save. Rounding z - mean to a half type would lose accuracy; float32 does not.
        center_z=norm == NORM_LAYER and not z_is_x and not return_residual and z == torch.float32,
        store_stats=needs_grad and norm != NORM_NONE,
    )
    dtypes = (x, residual, bias, weight, norm_bias)
    return plan, dtypes, all(dtype in KERNEL_DTYPES for dtype in (*dtypes, z, y) if dtype is not None)


_cached_plan = lru_cache(maxsize=4096)(_make_plan)


def row_norm(
    function: str,
    norm: int,
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    *,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    cast_before_weight: bool | Literal["weight"] = False,
    follow_autocast: bool = False,
    dropout_p: float = 0.0,
    return_residual: bool = False,
    rng: tuple[int, int] | None = None,
) -> Any:
    """Every public function of the family: checks, dtypes, backend, autograd. function: its name, for messages."""
    plain_numbers = type(eps) is float and eps >= 0.0 and type(weight_offset) is float
    if not (plain_numbers and rng is None and _all_fit(x, residual, bias, weight, norm_bias)):
        check_rows(function, "x", x)
        if residual is not None:
            check_like(function, "residual", residual, x)
        norm_bias_name = "norm_bias" if function == "bias_dropout_residual_norm" else "bias"
        for name, vector in (("bias", bias), ("weight", weight), (norm_bias_name, norm_bias)):
            if vector is not None:
                check_parameter(function, name, vector, x)
        check_eps(function, eps)
        check_number(function, "weight_offset", weight_offset)
        check_rng(function, rng)

    z_is_x = residual is None and bias is None and dropout_p == 0.0
    needs_grad = torch.is_grad_enabled() and (
        x.requires_grad
        or (residual is not None and residual.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (weight is not None and weight.requires_grad)
        or (norm_bias is not None and norm_bias.requires_grad)
    )
    traced = _is_traced(x, residual, bias, weight, norm_bias)
    plan, dtypes, in_kernel_dtypes = (_make_plan if traced else _cached_plan)(
        norm,
        eps,
        weight_offset,
        cast_before_weight,
        dropout_p,
        follow_autocast and x.is_cuda and torch.is_autocast_enabled("cuda"),
        needs_grad,
        return_residual,
        z_is_x,
        x.dtype,
        None if residual is None else residual.dtype,
        None if bias is None else bias.dtype,
        None if weight is None else weight.dtype,
        None if norm_bias is None else norm_bias.dtype,
    )
    if traced:
        from .row_norm_library import call

        rng_tensor = None
        if dropout_p == 1.0 or (rng is not None and dropout_p > 0.0):
            pair = [_signed(part) for part in rng or _ANY_RNG]
            rng_tensor = torch.tensor(pair, dtype=torch.int64, device=x.device)
        elif dropout_p > 0.0:
            rng_tensor = draw_rng_tensor(x.device)
        y, z = call(x, residual, bias, weight, norm_bias, rng_tensor, plan)
        return (y, x if z_is_x else z) if return_residual else y if norm else z

    transformed = _is_transformed()
    backend = choose(function, x.device, in_kernel_dtypes and not transformed)
    if backend == "cuda":
        x, residual = kernel_pair(x, residual, plan.z_dtype)
    used_rng: Rng | None = rng
    if rng is None and dropout_p > 0.0:
        used_rng = draw_rng(x.device) if dropout_p < 1.0 else _ANY_RNG
    if transformed:
        composed = _composed(x, residual, bias, weight, norm_bias, used_rng, plan)
        if return_residual:
            return composed[0], x if z_is_x else composed[1]
        return composed[0] if norm else composed[1]
    if needs_grad:
        return_z = return_residual and not z_is_x
        outputs = _apply(x, residual, bias, weight, norm_bias, (used_rng, plan, backend, dtypes, return_z))
        if return_residual and z_is_x:
            return outputs, x
        return outputs
    outputs = forward(backend, x, residual, bias, weight, norm_bias, used_rng, plan)
    if return_residual:
        return outputs[0], x if z_is_x else outputs[1]
    return outputs[0] if norm else outputs[1]


def _signed(part: int) -> int:
    return part - 2**64 if part >= 2**63 else part


def kernel_pair(x: Tensor, residual: Tensor | None, z_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """x and residual as the CUDA kernels take them: of one dtype, or a half x beside a float32 residual.

    Any other mix (rare: a half residual beside a float32 x, a float32 bias beside halves) is cast to z's dtype first.
    """
    if residual is not None and x.dtype in _HALF and residual.dtype == torch.float32:
        return x, residual
    return x.to(z_dtype), None if residual is None else residual.to(z_dtype)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba, Kiros & Hinton 2016).

    x: float32, float16, bfloat16 or float64, rank 1 and up, any strides. weight, bias: (n_cols,), any of these dtypes,
    or None.
    Returns a tensor shaped like x, of x's dtype (float32 under CUDA autocast, as F.layer_norm). Statistics are float32.
    Saves x and two float32 numbers a row for backward. Deterministic. Raises ValueError or TypeError for wrong
    arguments.
    """
    return row_norm("layer_norm", NORM_LAYER, x, None, None, weight, bias, eps=eps, follow_autocast=True)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool | Literal["weight"] = False,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension (Zhang & Sennrich 2019).

    x: float32, float16, bfloat16 or float64, rank 1 and up, any strides. weight: (n_cols,), any of these dtypes, or
    None.
    weight_offset: 1 for the (1 + weight) of Gemma.
    cast_before_weight: False rounds once, to x's dtype, after the weight (F.rms_norm, OLMo2, Gemma); True rounds the
    normalised
        value to x's dtype first, and the result has the dtype of weight * that (Llama, Mistral, Qwen); "weight" rounds
        it to the weight's dtype first if that is float16 or bfloat16, else not at all (T5).
    Saves x and one float32 number a row for backward. Deterministic. Raises ValueError or TypeError for wrong
    arguments.
    """
    check_cast("rms_norm", cast_before_weight, "rms")
    return row_norm(
        "rms_norm",
        NORM_RMS,
        x,
        None,
        None,
        weight,
        None,
        eps=eps,
        weight_offset=weight_offset,
        cast_before_weight=cast_before_weight,
    )


def bias_dropout_residual(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    rng: tuple[int, int] | None = None,
) -> Tensor:
    """residual + dropout(x + bias), the end of a transformer sublayer (Vaswani et al. 2017, section 5.4).

    x, residual: one shape, float32, float16, bfloat16 or float64, rank 1 and up, any strides. bias: (n_cols,) or None.
    dropout_p: probability of dropping an element; what is dropped is exactly 0, what is kept is multiplied by 1 / (1 -
    p).
    rng: None draws (seed, offset) from torch's generator of x's device; a pair of ints pins the mask
    (dropout_keep_mask).
    Returns a tensor shaped like x, of the dtype that the unfused expression gives. No mask is stored: backward draws
    it again. Deterministic for a given rng. Raises ValueError or TypeError for wrong arguments.
    """
    check_probability("bias_dropout_residual", "dropout_p", dropout_p)
    if residual is None:
        raise TypeError("bias_dropout_residual: residual must be a Tensor, got NoneType")
    return row_norm("bias_dropout_residual", NORM_NONE, x, residual, bias, None, None, dropout_p=dropout_p, rng=rng)


def bias_dropout_residual_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    norm: Literal["layer", "rms"] = "layer",
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    cast_before_weight: bool | Literal["weight"] = False,
    return_residual: bool = False,
    rng: tuple[int, int] | None = None,
) -> Any:
    """norm(z) * (weight + weight_offset) + norm_bias, z = residual + dropout(x + bias): a sublayer's end in one pass.

    x, residual: one shape, float32, float16, bfloat16 or float64, rank 1 and up, any strides; residual None adds
    nothing.
    weight, norm_bias, bias: (n_cols,) or None. norm: "layer" (as layer_norm) or "rms" (as rms_norm, cast_before_weight
    too).
    dropout_p, rng: as bias_dropout_residual. z is rounded once, to the dtype that the unfused expression gives.
    Returns y, or (y, z) with return_residual. Both are shaped like x; gradients flow through both.
    Saves z and one or two float32 numbers a row for backward, no mask. Deterministic for a given rng.
    Raises ValueError or TypeError for wrong arguments.
    """
    function = "bias_dropout_residual_norm"
    if norm not in ("layer", "rms"):
        raise ValueError(f'{function}: norm must be "layer" or "rms", got {norm!r}')
    check_probability(function, "dropout_p", dropout_p)
    check_cast(function, cast_before_weight, norm)
    return row_norm(
        function,
        NORM_LAYER if norm == "layer" else NORM_RMS,
        x,
        residual,
        bias,
        weight,
        norm_bias,
        eps=eps,
        weight_offset=weight_offset,
        cast_before_weight=cast_before_weight,
        follow_autocast=norm == "layer",
        dropout_p=dropout_p,
        return_residual=return_residual,
        rng=rng,
    )


def check_cast(function: str, cast_before_weight: object, norm: str) -> None:
    if not isinstance(cast_before_weight, (bool, str)) or cast_before_weight not in (False, True, "weight"):
        raise ValueError(f'{function}: cast_before_weight must be False, True or "weight", got {cast_before_weight!r}')
    if norm == "layer" and cast_before_weight:
        raise ValueError(f'{function}: cast_before_weight must be False with norm="layer", got {cast_before_weight!r}')
