"""What other libraries have for the operators of the suites, each imported only where it is about to run.

A form takes the inputs of the operator by name, as its formula does. Where a library lacks a part of an operator (a
bias before dropout, the dropout after a softmax), that part is plain PyTorch, as its users would write it. All of these
are for CUDA; a form that is wrong on the inputs at hand gets no number, like any other provider.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from onetrip import environment
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
    return {name: version for name, version in environment.packages(*DISTRIBUTIONS).items() if version != "absent"}


def _form(module: str, name: str, call: Form) -> Callable[[], Form]:
    """call(function, **inputs) with the library's function, which is imported where the form is asked for."""
    return lambda: partial(call, getattr(importlib.import_module(module), name))


def _transformer_engine(module_name: str, eps: float) -> Form:
    """Its modules, with the weights of the case in place of their own parameters."""
    make = getattr(importlib.import_module(MODULES["transformer-engine"]), module_name)
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


SOFTMAX: Forms = {
    "liger": _form(MODULES["liger"], "liger_softmax", lambda softmax, scores: softmax(scores)),
    "quack": _form("quack", "softmax", lambda softmax, scores: softmax(scores)),
}


# Liger writes the gradient over the logits that it is given.
CROSS_ENTROPY: Forms = {
    "liger": _form(MODULES["liger"], "liger_cross_entropy", lambda f, logits, labels: f(logits.clone(), labels)),
}


def _chunked(f: Form, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return f(hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions())


LINEAR_CROSS_ENTROPY: Forms = {
    "chunked": _form("torch.nn.functional", "linear_cross_entropy", _chunked),
    "liger": _form(
        MODULES["liger"],
        "liger_fused_linear_cross_entropy",
        lambda f, hidden, weight, labels: f(hidden, weight, labels),
    ),
}


def scale_mask_softmax(scale: float, heads: Callable[[Tensor], Tensor], dropout_p: float) -> Forms:
    """heads(scores): as (batch, heads, queries, keys)."""
    hidden: dict[int, tuple[Tensor, Tensor]] = {}

    def apex(softmax: Form, scores: Tensor, mask: Tensor) -> Tensor:
        """Its mask is boolean, True where a key is hidden, and spans the queries: made once, not in timed calls."""
        four = heads(scores)
        if id(mask) not in hidden:  # the additive mask is kept beside, so that its id stays its own
            hidden[id(mask)] = mask, (mask != 0).expand(-1, 1, *four.shape[2:]).contiguous()
        y = softmax(four, hidden[id(mask)][1], scale).view(scores.shape)
        return F.dropout(y, dropout_p) if dropout_p > 0.0 else y

    return {"apex": _form("apex.transformer.functional.fused_softmax", "scaled_masked_softmax", apex)}


def row_norm(norm: str | None, eps: float, *, residual: bool, dropout_p: float, return_residual: bool) -> Forms:
    """norm: "layer", "rms" or None. A bias before dropout may be there or not. QuACK's LayerNorm has no backward."""
    if norm is None:
        return {}

    def flash_attn(
        norm_fn: Form,
        x: Tensor,
        weight: Tensor,
        norm_bias: Tensor | None = None,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Any:
        options = {"eps": eps, "dropout_p": dropout_p, "prenorm": return_residual, "is_rms_norm": norm == "rms"}
        return norm_fn(x if bias is None else x + bias, weight, norm_bias, residual=residual, **options)

    # flash-attn's Triton kernel is in every wheel; the older CUDA one is a package of its own.
    forms = {"flash-attn": _form("flash_attn.ops.triton.layer_norm", "layer_norm_fn", flash_attn)}
    liger, apex = MODULES["liger"], MODULES["apex"]
    if residual:
        if norm == "rms" and return_residual and dropout_p == 0.0:
            forms["liger"] = _form(
                liger,
                "liger_fused_add_rms_norm",
                lambda f, x, residual, weight: f(x, residual, weight, eps, in_place=False),
            )
            forms["quack"] = _form(
                "quack",
                "rmsnorm",
                lambda f, x, residual, weight: f(x, weight, residual=residual, eps=eps, prenorm=True),
            )
    elif norm == "layer":
        forms["liger"] = _form(liger, "liger_layer_norm", lambda f, x, weight, norm_bias: f(x, weight, norm_bias, eps))
        forms["apex"] = _form(
            apex,
            "fused_layer_norm_affine",
            lambda f, x, weight, norm_bias: f(x, weight, norm_bias, (x.shape[-1],), eps),
        )
        forms["transformer-engine"] = lambda: _transformer_engine("LayerNorm", eps)
    else:
        # in_place off: its backward would write into the gradient that it is given.
        forms["liger"] = _form(liger, "liger_rms_norm", lambda f, x, weight: f(x, weight, eps, in_place=False))
        forms["apex"] = _form(apex, "fused_rms_norm_affine", lambda f, x, weight: f(x, weight, (x.shape[-1],), eps))
        forms["quack"] = _form("quack", "rmsnorm", lambda f, x, weight: f(x, weight, eps=eps))
        forms["transformer-engine"] = lambda: _transformer_engine("RMSNorm", eps)
    return forms


def attention(length: int, dropout_p: float) -> Forms:
    def flash_attn(attend: Form, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch_first = [rows.view(-1, length, 1, rows.shape[-1]) for rows in (query, key, value)]
        return attend(*batch_first, dropout_p=dropout_p).reshape(query.shape)

    return {"flash-attn": _form("flash_attn", "flash_attn_func", flash_attn)}
