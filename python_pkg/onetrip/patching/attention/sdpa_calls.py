"""Forwards that call torch's SDPA themselves, without transformers' attention interface.

    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)

(nanoGPT, timm, open_clip, BERT of transformers 4.) By the rule of interface.py the fused attention takes SDPA's place;
where SDPA stays, layers that are given one bool mask share the added one.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...ops.attention import attention
from .. import calls
from ..forward import Forward
from ..report import Unsuitable
from ..rewriting import InForward, Rewriting
from ..source import calls_in
from . import one_mask
from .eager import PATTERN, fused_sdpa
from .interface import BY_RULE, SDPA_IN_USE, is_slower, may_be_slower
from .verify import verify_sdpa

_SDPA: Any = torch._C._nn.scaled_dot_product_attention
"""torch's own, whatever a library has put in its place in torch.nn.functional."""
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


class Arguments(NamedTuple):
    """Those of SDPA."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False

    def fused(self) -> Tensor | None:
        """The result of the fused attention; None where it does not take them."""
        query, key, value, mask, p, is_causal, scale, enable_gqa = self
        for each in (query, key, value):
            if type(each) not in _PLAIN or each.is_nested or each.dim() != 4 or not each.shape[3]:
                return None
        if mask is not None:
            if type(mask) not in _PLAIN or is_causal or mask.is_inference():
                return None
            if mask.dtype not in (torch.bool, torch.float32, query.dtype, calls.autocast_dtype(query)):
                return None
        is_valid = type(p) in (int, float) and 0.0 <= p <= 1.0 and type(is_causal) is type(enable_gqa) is bool
        if not is_valid or not (enable_gqa or key.shape[1] in (1, query.shape[1])):  # SDPA raises
            return None
        output = fused_sdpa(attention, query, key, value, mask, p, is_causal, scale)
        return None if output is None else _in_sdpas_layout(output, query, p)


def _in_sdpas_layout(output: Tensor, query: Tensor, dropout_p: float) -> Tensor:
    """Views of it must be possible where they are of what SDPA returns."""
    if dropout_p or output.shape[3] != query.shape[3] or query.stride(3) != 1:
        return output.contiguous()
    strides = torch.empty_like(query, device="meta").stride()
    return output if output.stride() == strides else torch.empty_like(query, dtype=output.dtype).copy_(output)


@dataclass(frozen=True)
class Sdpa:
    """SDPA in a rewritten forward."""

    is_replaced: bool | None
    """None: where it is slower."""
    shares_mask: bool

    def __call__(self, module: nn.Module, function: Any, /, *args: Any, **options: Any) -> Any:
        if function is not _SDPA or calls.is_followed():
            return function(*args, **options)
        given = Arguments(*args, **options)
        by_rule = self.is_replaced is None and type(given.query) in _PLAIN
        if self.is_replaced or (by_rule and is_slower(*given[:5])):
            if (output := given.fused()) is not None:
                calls.count_fused(module)
                return output
            calls.count_fallback(module)
        mask, query = given.attn_mask, given.query
        if self.shares_mask and mask is not None and one_mask.is_shareable(mask, *given[:3]):
            if self.is_replaced is False:
                calls.count_fused(module)
            given = given._replace(attn_mask=one_mask.shared_mask(mask, query))
            return function(*given[:6], scale=given.scale, enable_gqa=given.enable_gqa)
        return function(*args, **options)


def read_sdpa_calls(forward: Forward) -> tuple[ast.Call, ...]:
    """The calls of SDPA whose arguments can be told apart."""
    return tuple(
        call
        for call in calls_in(forward.tree)
        if forward.resolved(call.func) is _SDPA
        and len(call.args) <= len(Arguments._fields) - 2  # the last two by name only
        and not any(isinstance(each, ast.Starred) for each in call.args)
        and all(each.arg in Arguments._fields for each in call.keywords)
    )


def _given(found: Iterable[ast.Call], name: str) -> list[ast.expr]:
    """What calls give as an argument, where it is not a constant that stands for nothing."""
    position = Arguments._fields.index(name)
    given = [value for call in found for value in call.args[position : position + 1]]
    given += [each.value for call in found for each in call.keywords if each.arg == name]
    return [each for each in given if not isinstance(each, ast.Constant) or each.value]


@dataclass(frozen=True)
class _Calls(InForward):
    """A module whose forward calls SDPA. chosen: the calls."""

    sdpa: Sdpa

    def put(self, rewriting: Rewriting) -> None:
        """Sdpa in place of SDPA."""
        rewriting.constants["sdpa_"] = self.sdpa
        for call in self.chosen:
            rewriting.put_call(call, "sdpa_")


class SdpaCalls(_Calls):
    """A module in which the fused attention takes SDPA's place."""

    patterns = (PATTERN,)

    @property
    def detail(self) -> str:
        return "" if self.sdpa.is_replaced else BY_RULE

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless the fused attention computes what SDPA does."""
        verify_sdpa(module, _fused, (None, "added", "bool", "causal"))
        if self.sdpa.shares_mask:
            _verify_mask(module)


class SdpaMasks(_Calls):
    """A module in which SDPA stays; its mask is that of the other layers."""

    patterns, is_minor = (one_mask.PATTERN,), True

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless SDPA computes the same as with the bool mask."""
        _verify_mask(module)


def _fused(*args: Any, **options: Any) -> Tensor | None:
    return Arguments(*args, **options).fused()


def _verify_mask(module: nn.Module) -> None:
    verify_sdpa(module, partial(Sdpa(is_replaced=False, shares_mask=True), module, _SDPA), ("bool",))


def sdpa_site(
    module: nn.Module,
    forward: Forward,
    found: tuple[ast.Call, ...],
    replace_sdpa: bool | None,
    wanted: Container[str],
) -> tuple[SdpaCalls | SdpaMasks | None, Unsuitable | None]:
    """(what of a forward's calls of SDPA is a site, why SDPA stays). wanted: patterns."""
    shares_mask = one_mask.PATTERN in wanted and bool(_given(found, "attn_mask"))
    if PATTERN in wanted and (replace_sdpa or may_be_slower(module, forward, _given(found, "dropout_p"))):
        return SdpaCalls(forward, found, Sdpa(replace_sdpa or None, shares_mask and not replace_sdpa)), None
    masks = SdpaMasks(forward, found, Sdpa(is_replaced=False, shares_mask=True)) if shares_mask else None
    return masks, SDPA_IN_USE if PATTERN in wanted else None
