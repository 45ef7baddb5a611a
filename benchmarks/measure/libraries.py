"""What other libraries have for the operators of the suites, each imported only where it is about to run.

A form takes the inputs of the operator by name, as its formula does. Where a library lacks a part of an operator (a
bias before dropout, the dropout after a softmax), that part is plain PyTorch, as its users would write it. All of these
are for CUDA; a form that is wrong on the inputs at hand gets no number, like any other provider.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Callable[..., Any]
Forms = Mapping[str, Callable[[], Form]]

MODULES = {
    "liger": "liger_kernel.transformers.functional",
    "apex": "apex.normalization.fused_layer_norm",
    "flash-attn": "flash_attn",
    "quack": "quack",
    "transformer-engine": "transformer_engine.pytorch",
}
"""Provider -> the module whose import shows that it works here."""
DISTRIBUTIONS = ("liger-kernel", "apex", "flash-attn", "quack-kernels", "transformer-engine", "bitsandbytes", "torchao")
"""What pip calls them, the optimizers' included."""
TITLES = {
    "liger": "Liger-Kernel",
    "apex": "apex",
    "flash-attn": "flash-attn",
    "quack": "QuACK",
    "transformer-engine": "TransformerEngine",
}


def unavailable(name: str, device: torch.device) -> str:
    """Why a library cannot run on the device; empty where it can. Imports it only where the device would do."""
    root = MODULES[name].partition(".")[0]
    if importlib.util.find_spec(root) is None:
        return "not installed"
    if device.type != "cuda":
        return "needs CUDA"
    try:
        importlib.import_module(MODULES[name])
    except Exception as error:  # a broken installation raises anything
        return f"{MODULES[name]} cannot be imported ({type(error).__name__}: {error})".splitlines()[0]
    return ""


def versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    found = {}
    for distribution in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[distribution] = importlib.metadata.version(distribution)
    return found


def _from(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _liger_layer_norm(eps: float) -> Form:
    function = _from(MODULES["liger"], "liger_layer_norm")
    return lambda x, weight, norm_bias: function(x, weight, norm_bias, eps)


def _liger_rms_norm(eps: float) -> Form:
    """in_place off: its backward would write into the gradient that it is given."""
    function = _from(MODULES["liger"], "liger_rms_norm")
    return lambda x, weight: function(x, weight, eps, in_place=False)


def _liger_add_rms_norm(eps: float) -> Form:
    function = _from(MODULES["liger"], "liger_fused_add_rms_norm")
    return lambda x, residual, weight: function(x, residual, weight, eps, in_place=False)


def _liger_softmax() -> Form:
    function = _from(MODULES["liger"], "liger_softmax")
    return lambda scores: function(scores)


def _apex_layer_norm(eps: float) -> Form:
    function = _from(MODULES["apex"], "fused_layer_norm_affine")
    return lambda x, weight, norm_bias: function(x, weight, norm_bias, (x.shape[-1],), eps)


def _apex_rms_norm(eps: float) -> Form:
    function = _from(MODULES["apex"], "fused_rms_norm_affine")
    return lambda x, weight: function(x, weight, (x.shape[-1],), eps)


def _apex_scale_mask_softmax(scale: float, heads: Callable[[Tensor], Tensor], dropout_p: float) -> Form:
    """Its mask is boolean, True where a key is hidden, and spans the queries: made once, outside the timed calls."""
    function = _from("apex.transformer.functional.fused_softmax", "scaled_masked_softmax")
    hidden: dict[int, tuple[Tensor, Tensor]] = {}

    def form(scores: Tensor, mask: Tensor) -> Tensor:
        four = heads(scores)
        if id(mask) not in hidden:  # the additive mask is kept beside, so that its id stays its own
            hidden[id(mask)] = mask, (mask != 0).expand(-1, 1, *four.shape[2:]).contiguous()
        y = function(four, hidden[id(mask)][1], scale).view(scores.shape)
        return F.dropout(y, dropout_p) if dropout_p > 0.0 else y

    return form


def _flash_attn_norm(eps: float, is_rms_norm: bool, dropout_p: float, prenorm: bool) -> Form:
    """Its Triton kernel, which is in every wheel; the older CUDA one is a package of its own."""
    function = _from("flash_attn.ops.triton.layer_norm", "layer_norm_fn")

    def form(
        x: Tensor,
        weight: Tensor,
        norm_bias: Tensor | None = None,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Any:
        return function(
            x if bias is None else x + bias,
            weight,
            norm_bias,
            residual=residual,
            eps=eps,
            dropout_p=dropout_p,
            prenorm=prenorm,
            is_rms_norm=is_rms_norm,
        )

    return form


def _flash_attn_attention(length: int, dropout_p: float) -> Form:
    function = _from("flash_attn", "flash_attn_func")

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch_first = [rows.view(-1, length, 1, rows.shape[-1]) for rows in (query, key, value)]
        return function(*batch_first, dropout_p=dropout_p).reshape(query.shape)

    return form


def _quack_rms_norm(eps: float) -> Form:
    function = _from("quack", "rmsnorm")
    return lambda x, weight: function(x, weight, eps=eps)


def _quack_add_rms_norm(eps: float) -> Form:
    function = _from("quack", "rmsnorm")
    return lambda x, residual, weight: function(x, weight, residual=residual, eps=eps, prenorm=True)


def _quack_softmax() -> Form:
    function = _from("quack", "softmax")
    return lambda scores: function(scores)


def _transformer_engine(module_name: str, eps: float) -> Form:
    """Its modules, with the weights of the case in place of their own parameters."""
    make = _from(MODULES["transformer-engine"], module_name)
    modules: dict[tuple[int, torch.dtype], torch.nn.Module] = {}

    def form(x: Tensor, weight: Tensor, norm_bias: Tensor | None = None) -> Tensor:
        key = x.shape[-1], x.dtype
        if key not in modules:
            modules[key] = make(x.shape[-1], eps=eps, device=x.device, dtype=x.dtype)
        parameters = modules[key]._parameters
        parameters["weight"] = weight
        if norm_bias is not None:
            parameters["bias"] = norm_bias
        return modules[key](x)

    return form


SOFTMAX: Forms = {"liger": _liger_softmax, "quack": _quack_softmax}


def scale_mask_softmax(scale: float, heads: Callable[[Tensor], Tensor], dropout_p: float) -> Forms:
    """heads(scores): as (batch, heads, queries, keys)."""
    return {"apex": lambda: _apex_scale_mask_softmax(scale, heads, dropout_p)}


def row_norm(norm: str | None, eps: float, *, residual: bool, dropout_p: float, return_residual: bool) -> Forms:
    """norm: "layer", "rms" or None. A bias before dropout may be there or not. QuACK's LayerNorm has no backward."""
    if norm is None:
        return {}
    forms: dict[str, Callable[[], Form]] = {
        "flash-attn": lambda: _flash_attn_norm(eps, norm == "rms", dropout_p, return_residual)
    }
    if residual:
        if norm == "rms" and return_residual and dropout_p == 0.0:
            forms |= {"liger": lambda: _liger_add_rms_norm(eps), "quack": lambda: _quack_add_rms_norm(eps)}
    elif norm == "layer":
        forms |= {
            "liger": lambda: _liger_layer_norm(eps),
            "apex": lambda: _apex_layer_norm(eps),
            "transformer-engine": lambda: _transformer_engine("LayerNorm", eps),
        }
    else:
        forms |= {
            "liger": lambda: _liger_rms_norm(eps),
            "apex": lambda: _apex_rms_norm(eps),
            "quack": lambda: _quack_rms_norm(eps),
            "transformer-engine": lambda: _transformer_engine("RMSNorm", eps),
        }
    return forms


def attention(length: int, dropout_p: float) -> Forms:
    return {"flash-attn": lambda: _flash_attn_attention(length, dropout_p)}
