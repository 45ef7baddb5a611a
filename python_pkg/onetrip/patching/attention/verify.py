"""Verification of attention: a fused function against the eager one, both called with a clone of the module.

The code around the call stays the model's own, so only the two functions are compared: outputs, weights and every
gradient, sinks included, for the masks, biases, caps and dropout that the function supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...ops.attention import attention
from ..clones import clone
from ..verify import RNG, MaskedDropout, check_function, kind_of, reject_fallback
from .eager import EagerFunction

_BATCH, _N_QUERIES, _N_KEYS, _WIDTH = 2, 5, 7, 8  # heads: multiples of 3, so that every size differs
_SOFTCAP, _DROPOUT_P = 2.0, 0.25


def verify_attention(module: nn.Module, found: EagerFunction) -> None:
    """Raise VerificationError unless the fused function computes the same as the original for this module."""
    fused = found.compile({"count_fallback_": reject_fallback, "attention_": partial(attention, rng=RNG)})
    for case in _cases(found):
        _compare(module, found, fused, case)


def verify_mask(module: nn.Module, found: EagerFunction, ours: Callable[..., Any]) -> None:
    """Raise VerificationError unless the function computes the same as the original with a bool mask."""
    _compare(module, found, ours, {"mask": "bool"})


def verify_sdpa(module: nn.Module, ours: Callable[..., Any], kinds: Iterable[str | None]) -> None:
    """Raise VerificationError unless a function of SDPA's arguments computes what SDPA does. kinds: of masks."""
    device, dtype = kind_of(module)
    shapes = {name: (_BATCH, 3, n, _WIDTH) for name, n in (("query", _N_QUERIES), ("key", _N_KEYS), ("value", _N_KEYS))}
    for kind in kinds:

        def called(function: Any, *tensors: Tensor, kind: str | None = kind) -> Any:
            return function(*tensors, _mask(kind, tensors[0], blind_query=False), 0.0, kind == "causal", scale=0.5)

        unfused = partial(called, functional.scaled_dot_product_attention)
        check_function(partial(called, ours), unfused, shapes, device, dtype, f" with mask {kind}")


def _compare(module: nn.Module, found: EagerFunction, ours: Callable[..., Any], case: dict[str, Any]) -> None:
    device, dtype = kind_of(module)
    mode = ", ".join(f"{name} {value}" for name, value in case.items() if value not in (None, 0.0))
    mode, inputs = f" with {mode}" if mode else "", _shapes(module, found, case)

    def make(to: torch.dtype | None) -> nn.Module:
        return clone(module, to or dtype).train()

    fused, unfused = (partial(_called, each, found, case, list(inputs)) for each in (ours, found.function))
    check_function(fused, unfused, inputs, device, dtype, mode, make)


def _cases(found: EagerFunction) -> Iterator[dict[str, Any]]:
    masks = ["added"] if "mask" in found.layers else []
    masks += ["bool", "causal"] if found.is_sdpa else []
    dropouts = [0.0] if found.is_sdpa else [0.0, _DROPOUT_P]  # MaskedDropout does not reach the one in SDPA
    for mask, dropout in product(masks if found.needs_mask else [None, *masks], dropouts):
        yield {"mask": mask, "dropout": dropout}
    if "softcap" in found.layers:
        yield {"softcap": _SOFTCAP}
    if "bias" in found.layers:
        for mask in masks:
            yield {"position_bias": True, "mask": mask}
    if found.takes_sinks:
        yield {"sinks": True, "dropout": _DROPOUT_P}


def _shapes(module: nn.Module, found: EagerFunction, case: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that need gradients."""
    groups = int(getattr(module, "num_key_value_groups", 1))
    sinks = getattr(module, "sinks", None)
    n_heads = sinks.numel() if found.has_sinks and isinstance(sinks, Tensor) else 3 * groups
    n_queries = _N_KEYS if case.get("mask") == "causal" else _N_QUERIES
    shapes: dict[str, tuple[int, ...]] = {
        "query": (_BATCH, n_heads, n_queries, _WIDTH),
        "key": (_BATCH, n_heads // groups, _N_KEYS, _WIDTH),
        "value": (_BATCH, n_heads // groups, _N_KEYS, _WIDTH),
    }
    if case.get("position_bias"):
        shapes["position_bias"] = (1, n_heads, n_queries, _N_KEYS)
    if case.get("sinks"):
        shapes["sinks"] = (_BATCH, n_heads, n_queries, 1)
    return shapes


def _mask(kind: str | None, query: Tensor, blind_query: bool) -> Tensor | None:
    """A padding mask. blind_query: one query has no key at all, as with padding on the left."""
    if kind in (None, "causal"):
        return None
    keep = torch.ones(_BATCH, 1, query.shape[2], _N_KEYS, dtype=torch.bool, device=query.device)
    keep[0, :, :, -2:] = False
    keep[1, :, 0] &= not blind_query
    if kind == "bool":
        return keep
    # float64's minimum overflows in eager functions whose softmax is float32.
    lowest = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)
    return torch.zeros_like(keep, dtype=query.dtype).masked_fill(~keep, lowest)


def _called(
    function: Any, found: EagerFunction, case: dict[str, Any], names: list[str], module: nn.Module, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """The output and, where the function returns them, the weights. names: of the tensors."""
    query, key, value = tensors[:3]
    more = dict(zip(names[3:], tensors[3:], strict=True))
    options: dict[str, Any] = {"scaling": 0.5, "dropout": case.get("dropout", 0.0), **more}
    if "softcap" in case:
        options["softcap"] = case["softcap"]
    if case.get("mask") == "causal":
        options["is_causal"] = True
    # torch's SDPA on the CPU computes wrong gradients for a query without keys.
    mask = _mask(case.get("mask"), query, blind_query=not found.is_sdpa or "position_bias" in more)
    is_own = not found.takes_sinks and isinstance(getattr(module, "sinks", None), Tensor)
    n_sinks = int(found.has_sinks and (is_own or "sinks" in more))
    with MaskedDropout(columns_before=n_sinks):
        output, weights = function(module, query, key, value, mask, **options)
    return (output,) if weights is None else (output, weights)
