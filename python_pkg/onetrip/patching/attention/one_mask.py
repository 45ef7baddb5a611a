"""One added mask for all layers that call SDPA with the same bool mask.

Of a bool mask SDPA makes one of 0 and -inf in the dtype of the scores, in each layer again, and keeps it for backward:
2 bytes x batch x queries x keys a layer in half precision. Here the first layer makes it, and the others get it as long
as the first one's graph keeps it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ...ops.common.tracing import have_storage, watched_as
from .. import calls

PATTERN = "attention_mask"

_ALIGNMENT = 16
"""Elements of a row: SDPA's kernels for CUDA copy masks whose rows do not begin at a multiple of it."""

_State = tuple[int, torch.dtype, int]
"""(version of the bool mask, dtype of the added one, the GPU's current stream)."""


class _Added(NamedTuple):
    mask: weakref.ref[Tensor]
    state: _State
    rows: weakref.ref[Tensor]
    """The added mask. Kept by graphs alone: between steps a mask may change in ways that its version does not count.
    What SDPA keeps may be a view, whose base this is."""


_known: dict[int, _Added] = {}
"""By id(bool mask)."""


@cache
def with_one_mask(sdpa: Callable[..., Any], is_counted: bool = True) -> Callable[..., Any]:
    """transformers' sdpa function, called with an added mask in place of a bool one. Cached: modules share patched
    classes. is_counted: whether such calls are the site's fused ones."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # A position bias, the fourth of the other arguments, is combined with a bool mask in another way.
        has_bias = len(args) > 3 or kwargs.get("position_bias") is not None
        if attention_mask is not None and not has_bias and is_shareable(attention_mask, query, key, value):
            if is_counted:
                calls.count_fused(module)
            attention_mask = shared_mask(attention_mask, query)
        return sdpa(module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def is_shareable(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether SDPA would keep a mask of its own. One query, a step of generation, has a mask of its own anyway."""
    if calls.is_followed():  # before the shape is read
        return False
    if not torch.is_grad_enabled() or mask.is_inference():
        return False
    if not (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if is_in_torch_dispatch_mode() and watched_as() is None:
        return False
    if calls.has_saved_tensor_hooks():  # they keep something else
        return False
    if type(mask) not in (Tensor, FakeTensor) or mask.is_meta or mask.device != query.device:
        return False
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2] == 1:
        return False
    # A CUDA graph that is captured would keep what a mask was before.
    is_on_gpu = mask.is_cuda and have_storage(mask)
    return not is_on_gpu or not (torch.cuda.is_current_stream_capturing() or _may_be_cudnn(mask.device))


def _may_be_cudnn(device: torch.device) -> bool:
    """Whether SDPA may take cuDNN's kernel, for which torch fills bool masks with another number than -inf."""
    return torch.backends.cuda.cudnn_sdp_enabled() and torch.cuda.get_device_capability(device)[0] >= 9


def shared_mask(mask: Tensor, query: Tensor) -> Tensor:
    """0 where the bool mask is True, else -inf, in the dtype in which SDPA runs."""
    is_cast = calls.is_autocasting(query) and query.dtype != torch.float64
    dtype = torch.get_autocast_dtype(query.device.type) if is_cast else query.dtype
    state, n_keys = (mask._version, dtype, calls.stream_of(mask)), mask.shape[3]
    known = _known.get(id(mask))
    rows = known.rows() if known is not None and known.mask() is mask and known.state == state else None
    if rows is None:
        n_columns = -(-n_keys // _ALIGNMENT) * _ALIGNMENT if mask.is_cuda else n_keys
        rows = torch.full((*mask.shape[:3], n_columns), -torch.inf, dtype=dtype, device=mask.device)
        rows[..., :n_keys].masked_fill_(mask, 0.0)
        _known[id(mask)] = _Added(calls.forgetting(mask, _known), state, weakref.ref(rows))
    return rows if rows.shape[3] == n_keys else rows[..., :n_keys]
