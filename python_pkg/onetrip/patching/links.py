"""Run time of rewritten residual sums: one fused call where it fits, and links from a sum to the norm that reads it.

A norm may follow a sum in a branch, after other statements, in a child, or in the next layer. They find each other as
the model runs: a sum remembers which tensor it returned; a patched norm that receives exactly that tensor tells the
sum, and from the next call on the sum computes its result z and y = norm(z) in one kernel. The norm returns that y when
it is called with that very z, unmodified; with anything else it computes as ever. After repeated misses the sum is
unlinked. Backward is one kernel, too, and hooks on z see its whole gradient (ops.row_norm_autograd,
deferred_norm).

There are no links where y could be wrong or cost memory: under torch.compile, torch.jit.trace, torch.func and dispatch
modes, under hooks on saved tensors (non-reentrant checkpoints, save_on_cpu), in inference mode, for small tensors,
between parts of a reentrant checkpoint, and to norms with hooks, wrappers or parameters that are sharded, gathered or
on another device.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .. import ops
from ..ops.common.tracing import is_jit_tracing, is_transformed, watched_as
from ..ops.row_norm import norm_of_sum, sum_before_norm
from ..ops.row_norm_autograd import deferred_norm
from . import calls
from .calls import Branch
from .half_results import half_result
from .linear.readers import read_as_residual, reads

if TYPE_CHECKING:
    from .norms import NormSpec

_State = tuple[int | torch.dtype | None, ...]
_TRIES = 8
"""Results of a sum that no norm receives before the sum stops looking for its norm."""
_MISSES = 3
"""Consecutive results whose y no norm returned before the sum computes without it."""


class _Slot:
    """A linked norm's place for the next y."""

    __slots__ = ("result", "serial", "taken")

    def __init__(self) -> None:
        self.result: tuple[weakref.ref[Tensor], Any, _State, Tensor, int] | None = None
        """(weak reference to z, its grad_fn, what y depends on (_state), y, serial number)."""
        self.serial = self.taken = 0
        """Numbers of the last y that was put here, and of the last one that the norm returned."""

    def put(self, z: Tensor, y: Tensor, state: _State) -> int:
        """Keep y until the norm is called or z dies."""
        self.serial += 1
        self.result = (weakref.ref(z, self._drop), z.grad_fn, state, y, self.serial)
        return self.serial

    def _drop(self, z: weakref.ref[Tensor]) -> None:
        if self.result is not None and self.result[0] is z:
            self.result = None


class _Site:
    """One sum of one module, and the norm it is linked to."""

    __slots__ = ("link", "misses", "serial", "tries")

    def __init__(self) -> None:
        self.link: _Link | None = None
        self.serial = 0
        """Number of the last y; 0 after a call without one."""
        self.tries = self.misses = 0


@dataclass(frozen=True)
class _Link:
    norm: weakref.ref[nn.Module]
    norm_class: type
    spec: NormSpec
    slot: _Slot


_sites: dict[tuple[int, int], _Site] = {}
"""(id(module), index of the sum) -> site. Kept outside the modules, as the counters are."""

_slots: dict[int, _Slot] = {}
"""id(norm) -> slot, of linked norms."""

_recent: dict[int, tuple[weakref.ref[Tensor], int, bool, _Site]] = {}
"""id(z) -> (z, its version, whether it requires grad, its site), for sums that look for their norm."""


def _may_link() -> bool:
    return not (
        calls.has_saved_tensor_hooks()
        or is_jit_tracing()
        or is_transformed()
        or (is_in_torch_dispatch_mode() and watched_as() is None)
    )


def _state(norm: nn.Module, spec: NormSpec, z: Tensor) -> _State:
    """What y = norm(z) depends on, other than values: y is returned only where the norm would compute the same, and on
    the same stream: backward of the norm leaves its gradient for that of the sum."""
    state: list[int | torch.dtype | None] = [z._version, z.requires_grad, torch.is_grad_enabled()]
    state += [calls.autocast_dtype(z), calls.stream_of(z)]
    for vector in _parameters(norm, spec):
        if vector is not None:
            state += [id(vector), vector.requires_grad, 0 if vector.is_inference() else vector._version]
    return tuple(state)


def _parameters(norm: nn.Module, spec: NormSpec) -> tuple[Tensor | None, Tensor | None]:
    """(weight, bias)."""
    return (
        None if spec.weight is None else getattr(norm, spec.weight),
        None if spec.bias is None else getattr(norm, spec.bias),
    )


def _link(site: _Site, norm: nn.Module, spec: NormSpec) -> None:
    slot = _slots.get(id(norm))
    if slot is None:
        slot = _slots[id(norm)] = _Slot()
        calls.forget_with(norm, _slots, id(norm))
    site.link = _Link(weakref.ref(norm), calls.original_class(type(norm)), spec, slot)


def linked_result(norm: nn.Module, x: Tensor, spec: NormSpec) -> Tensor | None:
    """y = norm(x), where the sum that made x has computed it; None where the norm has to.

    Called by every patched norm. Links the norm to the sum that made x, if that sum is looking for its norm.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    if _recent:
        z = _viewed(x)
        found = _recent.pop(id(z), None)
        if found is not None:
            known, version, requires_grad, site = found
            if known() is z and z._version == version and z.requires_grad == requires_grad and _may_link():
                _link(site, norm, spec)
            return None
    slot = _slots.get(id(norm))
    result = None if slot is None else slot.result
    if slot is None or result is None:
        return None
    slot.result = None
    known, node, state, y, serial = result
    z = _viewed(x)
    if known() is z and z.grad_fn is node and _state(norm, spec, z) == state and _may_link():
        slot.taken = serial
        weight, norm_bias = _parameters(norm, spec)
        return deferred_norm(y, x, z, weight, norm_bias)
    return None


def _viewed(x: Tensor) -> Tensor:
    """The tensor that x is all rows of, if x is its view, made in the same graph; else x.

    A view of a view is x: hooks on the tensor between them would not be seen.
    """
    z = x._base
    if z is None or z.numel() != x.numel() or z.shape[-1] != x.shape[-1]:
        return x
    node = x.grad_fn
    if node is not None and node is not z.grad_fn and node.name() == "ViewBackward0":
        node = node.next_functions[0][0]
    # A reentrant checkpoint or an autograd.Function may return a view: x then has another gradient than z.
    return z if node is z.grad_fn and x.is_contiguous() and z.is_contiguous() else x


def _norm_options(norm: nn.Module, spec: NormSpec, z_dtype: torch.dtype, x: Tensor) -> dict[str, Any] | None:
    """Arguments of bias_dropout_residual_norm that make it this norm; None where the norm must be called."""
    if spec.configuration and not calls.has_configuration(norm, spec.configuration):
        return None
    weight, norm_bias = _parameters(norm, spec)
    if spec.unsupported and (z_dtype, None if weight is None else weight.dtype) in spec.unsupported:
        return None
    is_autocasting = torch.is_autocast_enabled(x.device.type)
    if is_autocasting and not spec.autocast:
        return None
    for vector in (weight, norm_bias):
        if vector is not None and (
            (type(vector) is not nn.Parameter and (calls.is_distributed(vector) or calls.is_released(vector)))
            or vector.device != x.device
            or vector.shape != x.shape[-1:]
        ):
            return None
    attribute = spec.eps_attribute  # without the call of eps_value: this runs for every sum
    return {
        "weight": weight,
        "norm_bias": norm_bias,
        "norm": spec.kind,
        "eps": spec.eps_value(norm, z_dtype) if attribute is None else float(getattr(norm, attribute)),
        "weight_offset": spec.weight_offset,
        "cast_before_weight": spec.cast_before_weight,
        "out_dtype": half_result(norm, spec, x, z_dtype) if is_autocasting else None,
    }


@dataclass(frozen=True)
class Sum:
    """One residual sum of a rewritten forward; called in place of `left + right`.

    With a norm it is followed by it, and returns (z, norm(z)), or norm(z) alone. Without, it returns z and, if it may
    link, looks for its norm as the model runs.
    """

    index: int
    """Index among the forward's sums."""
    branch: int | None
    """Which operand (0, 1) may be a Branch; None where both are plain tensors."""
    norm_class: type | None = None
    spec: NormSpec | None = None
    returns_sum: bool = True
    may_link: bool = False
    rng: tuple[int, int] | None = None
    """Pinned by verification."""

    def __call__(self, module: nn.Module, left: Any, right: Any, norm: Any = None) -> Any:
        branch_is_left = self.branch == 0 or (self.branch is None and _is_read(right))
        branch, residual = (left, right) if branch_is_left else (right, left)
        x, bias, p = branch if isinstance(branch, Branch) else (branch, None, 0.0)
        is_sum = _is_sum(x, residual)
        if norm is not None:
            result = self.fused(x, residual, bias, p, norm) if is_sum else None
            if result is not None:
                calls.count_fused(module)
                return result
            z = self._alone(x, residual, bias, p) if is_sum else _unfused(x, residual, bias, p, branch_is_left)
            y = None if is_sum else self._normed(z, norm)
            is_fused = y is not None and bias is None and not p
            (calls.count_fused if is_fused else calls.count_fallback)(module)
            y = norm(z) if y is None else y
            return (z, y) if self.returns_sum else y
        if not is_sum:
            calls.count_fallback(module)
            return _unfused(x, residual, bias, p, branch_is_left)
        if (
            not self.may_link
            or torch.compiler.is_dynamo_compiling()
            or not calls.is_large(x)
            or torch.is_inference_mode_enabled()
        ):
            return self._counted(module, x, residual, bias, p)
        key = (id(module), self.index)
        site = _sites.get(key)
        if site is None:
            site = _sites[key] = _Site()
            calls.forget_with(module, _sites, key)
        if site.link is not None:
            z = self._linked(module, site, site.link, x, residual, bias, p)
            if z is not None:
                return z
        z = self._counted(module, x, residual, bias, p)
        if site.link is None and site.tries < _TRIES and _may_link():
            site.tries += 1
            _recent[id(z)] = (calls.forgetting(z, _recent), z._version, z.requires_grad, site)
        return z

    def _counted(self, module: nn.Module, x: Tensor, residual: Tensor, bias: Tensor | None, p: float) -> Tensor:
        if bias is not None or p:
            calls.count_fused(module)
        return self._alone(x, residual, bias, p)

    def _alone(self, x: Tensor, residual: Tensor, bias: Tensor | None, p: float) -> Tensor:
        """The sum without a norm. Of two tensors it is torch's: nothing to fuse."""
        z: Tensor = self.fused(x, residual, bias, p) if bias is not None or p else residual + x
        return z

    def fused(self, x: Tensor, residual: Tensor, bias: Tensor | None, p: float, norm: Any = None) -> Any:
        """The sum by one operator, without links; None if its norm must be called."""
        if norm is None:
            z = ops.bias_dropout_residual(x, residual, bias, dropout_p=p, rng=self.rng)
            return _read_by(z, residual)
        assert self.spec is not None and self.norm_class is not None
        if not calls.is_plain(norm, self.norm_class):
            return None
        options = _norm_options(norm, self.spec, _sum_dtype(x, residual, bias), x)
        if options is None:
            return None
        result = norm_of_sum(
            x, residual, bias=bias, dropout_p=p, return_residual=self.returns_sum, rng=self.rng, **options
        )
        if self.returns_sum:
            y, z = result
            return _read_by(z, residual), y
        return _read_by(result, residual)

    def _normed(self, z: Any, norm: nn.Module) -> Tensor | None:
        """norm(z) of a sum that was not fused (one that broadcasts); None if the norm must be called."""
        assert self.spec is not None and self.norm_class is not None
        if not (_is_operand(z) and calls.is_plain(norm, self.norm_class)):
            return None
        options = _norm_options(norm, self.spec, z.dtype, z)
        return None if options is None else norm_of_sum(z, None, bias=None, **options)

    def _linked(
        self, module: nn.Module, site: _Site, link: _Link, x: Tensor, residual: Tensor, bias: Tensor | None, p: float
    ) -> Tensor | None:
        """z, with y left for the linked norm; None where the norm must compute."""
        if site.serial:
            site.misses = 0 if link.slot.taken == site.serial else site.misses + 1
            site.serial = 0
        norm = link.norm()
        if norm is None or site.misses >= _MISSES:
            site.link, site.tries = None, _TRIES
            return None
        if not (_may_link() and calls.is_plain(norm, link.norm_class)):
            return None
        if torch.is_grad_enabled() and not (x.requires_grad or residual.requires_grad):
            return None  # z would require grad for the norm's weight
        options = _norm_options(norm, link.spec, _sum_dtype(x, residual, bias), x)
        if options is None:
            return None
        calls.count_fused(module)
        y, z = sum_before_norm(x, residual, bias=bias, dropout_p=p, rng=self.rng, **options)
        site.serial = link.slot.put(z, y, _state(norm, link.spec, z))
        return _read_by(z, residual)


def _read_by(result: Tensor, residual: Tensor) -> Tensor:
    """The result of a sum, which has read the residual."""
    if _is_read(residual):
        read_as_residual(residual, result)
    return result


def _is_read(x: Any) -> bool:
    """Whether linear layers have read the tensor, which may then share their gradient of it."""
    return not torch.compiler.is_dynamo_compiling() and id(x) in reads


def _is_sum(x: Any, residual: Any) -> bool:
    """Whether the operands are floating-point tensors of one shape that the operators take.

    torch's sum of two transposed tensors is transposed, too, and may be viewed as they may."""
    return (
        _is_operand(x)
        and _is_operand(residual)
        and x.shape == residual.shape  # no broadcasting
        and x.device == residual.device
        and (_is_in_order(x) or _is_in_order(residual))
    )


def _is_in_order(x: Tensor) -> bool:
    """Whether no dimension is transposed."""
    return x.is_contiguous() or sorted(x.stride(), reverse=True) == list(x.stride())


def _is_operand(x: Any) -> bool:
    """Whether it is a floating-point tensor that the operators take."""
    return (
        isinstance(x, Tensor)
        and x.is_floating_point()
        and not x.is_meta  # torch has no autocast of meta, and raises when asked
        and x.dim() > 1
        and not x.is_nested
        and (type(x) is Tensor or not calls.is_distributed(x))
    )


def _sum_dtype(x: Tensor, residual: Tensor, bias: Tensor | None) -> torch.dtype:
    dtype = x.dtype if x.dtype == residual.dtype else torch.promote_types(x.dtype, residual.dtype)
    return dtype if bias is None or bias.dtype == dtype else torch.promote_types(dtype, bias.dtype)


def _unfused(x: Any, residual: Any, bias: Any, p: float, x_first: bool) -> Any:
    """The sum by torch's operators, whatever its operands are."""
    if bias is not None:
        x = x + bias
    if p:
        x = functional.dropout(x, p, True)
    return x + residual if x_first else residual + x
