"""One added mask for all layers that call SDPA with the same bool mask.

Of a bool mask SDPA makes one of 0 and -inf in the dtype of the scores, in each layer again, and keeps it for backward:
2 bytes x batch x queries x keys a layer in half precision. Here the first layer makes it and the others get it, as long
as the bool mask lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.common.native import current_stream
from ...ops.common.tracing import have_storage, is_jit_tracing, is_transformed
from .. import calls

PATTERN = "attention_mask"

_State = tuple[int, torch.dtype, int]
"""(version of the bool mask, dtype of the added one, the GPU's current stream)."""


class _Added(NamedTuple):
    mask: weakref.ref[Tensor]
    state: _State
    added: Tensor


_known: dict[int, _Added] = {}
"""By id(bool mask)."""


@cache
def with_one_mask(sdpa: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' sdpa function, called with an added mask in place of a bool one. Cached: modules share patched
    classes."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        # A position bias is combined with a bool mask in another way. One query has a mask of its own in each step.
        if attention_mask is not None and kwargs.get("position_bias") is None and _is_shareable(attention_mask, query):
            calls.count_fused(module)
            attention_mask = _added(attention_mask, query)
        return sdpa(module, query, key, value, attention_mask, **kwargs)

    return attention


def _is_shareable(mask: Tensor, query: Tensor) -> bool:
    if torch.compiler.is_compiling() or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2] == 1:
        return False
    if is_jit_tracing() or is_transformed() or calls.is_distributed(mask) or mask.device != query.device:
        return False
    # Edits of inference tensors are not counted, and autograd saves none.
    if mask.is_inference() or torch.is_inference_mode_enabled():
        return False
    # A graph that is captured would keep what a mask was before.
    return not (mask.is_cuda and have_storage(mask) and torch.cuda.is_current_stream_capturing())


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """0 where the bool mask is True, else -inf, in the dtype in which SDPA runs."""
    dtype = torch.get_autocast_dtype(query.device.type) if calls.is_autocasting(query) else query.dtype
    stream = current_stream(mask.device.index) if mask.is_cuda and have_storage(mask) else 0
    key, state = id(mask), (mask._version, dtype, stream)
    known = _known.get(key)
    if known is None or known.mask() is not mask or known.state != state:
        added = torch.full(mask.shape, -torch.inf, dtype=dtype, device=mask.device).masked_fill_(mask, 0.0)
        known = _known[key] = _Added(weakref.ref(mask, lambda _: _known.pop(key, None)), state, added)
    return known.added
