"""Logits that a model returns, with their cross-entropy by one operator: pattern cross_entropy.

While a model computes its loss in training, its output layer returns WatchedLogits: a tensor whose conversion to
float32 is put off. functional.cross_entropy of them becomes ops.cross_entropy, which reads the logits in their own
dtype and writes one gradient: no float32 copy, no log-probabilities. Any other function sees plain tensors and computes
what it did. What the model returns are plain tensors.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from .. import ops
from ..ops.common.backends import KERNEL_DTYPES, choose
from . import calls

PATTERN = "cross_entropy"

_MOVES = frozenset(
    (Tensor.view, Tensor.reshape, Tensor.contiguous, Tensor.__getitem__, Tensor.flatten, torch.flatten, Tensor.to)
)
"""Functions that choose or move values: they give the same before a conversion to float32 as after it."""
_ARITHMETIC = frozenset(
    (
        *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.div, Tensor.__truediv__, torch.div),
        *(Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add, Tensor.tanh, torch.tanh),
    )
)
"""Functions between an output layer and its loss: caps, factors, constants. Their results are logits again."""
_LOOKS = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
        *(getattr(Tensor, name).__get__ for name in ("shape", "device", "ndim", "requires_grad")),
    )
)
"""Functions whose answer does not depend on the dtype."""
_HALF = (torch.float16, torch.bfloat16)
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]


@dataclass
class LossCall:
    """One call of a model that computes its loss."""

    head: nn.Module
    keeps_logits: bool
    """Whether the model returns its logits (pattern cross_entropy) or computes them only where they are used."""
    is_fused: bool = False
    """Whether a loss was computed by one operator."""


loss_call: ContextVar[LossCall | None] = ContextVar("loss_call", default=None)


class WatchedLogits(Tensor):
    """Logits on their way to the loss."""

    _plain: Tensor
    _version_when_converted: int | None
    """Of _plain, where these are its values in float32."""

    @classmethod
    def of(cls, plain: Tensor, is_converted: bool = False) -> WatchedLogits:
        # A tensor for whoever asks for one (isinstance, autograd.Function). Of a FakeTensor its shape must do.
        watched = plain.as_subclass(cls) if type(plain) is Tensor else _shape_of(plain).as_subclass(cls)
        watched._plain = plain
        watched._version_when_converted = plain._version if is_converted else None
        return watched

    @property
    def is_converted(self) -> bool:
        """Whether these stand for _plain in float32."""
        return self._version_when_converted is not None

    def plain(self) -> Tensor:
        """The values as a plain tensor."""
        return self._unchanged().float() if self.is_converted else self._plain

    def _unchanged(self) -> Tensor:
        if self.is_converted and self._plain._version != self._version_when_converted:
            raise RuntimeError(
                "cross_entropy: logits were modified in place after their conversion to float32: patch the model "
                'without the pattern "cross_entropy"'
            )
        return self._plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            first = args[0] if args else None
            if type(first) is WatchedLogits and torch.is_grad_enabled():
                if func is functional.cross_entropy:
                    loss = _loss(*args, **kwargs)
                    if loss is not None:
                        return loss
                elif _converts(func, args[1:], kwargs) and first._plain.dtype in _HALF:
                    return cls.of(first._unchanged(), is_converted=True)
                elif func in _MOVES and not kwargs and not _names_dtype(func, args[1:]):
                    return cls.of(func(first._unchanged(), *args[1:]), first.is_converted)
            if type(first) is WatchedLogits and func in _LOOKS:
                return func(first._plain, *args[1:], **kwargs)
            if type(first) is WatchedLogits and func is _DTYPE:
                return torch.float32 if first.is_converted else first._plain.dtype
            result = func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
            if func in _ARITHMETIC and is_watchable(result):
                return cls.of(result)
            # Changed in place: the same logits.
            return first if type(first) is WatchedLogits and result is first._plain else result


def _converts(func: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs:
        return False
    return (func is Tensor.float and not arguments) or (func is Tensor.to and arguments == (torch.float32,))


def _names_dtype(func: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether one of _MOVES changes the dtype too."""
    kinds = (torch.dtype, Tensor) if func is Tensor.to else (torch.dtype,)
    return any(isinstance(value, kinds) for value in arguments)


def _plain(value: Any) -> Any:
    if type(value) is WatchedLogits:
        return value.plain()
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    return value


def plain_outputs(outputs: Any) -> Any:
    """A model's outputs, with plain tensors in place of WatchedLogits."""
    if type(outputs) is WatchedLogits:
        return outputs.plain()
    if type(outputs) in (tuple, list):
        return type(outputs)(map(plain_outputs, outputs))
    if isinstance(outputs, dict):  # transformers' ModelOutput, too
        for name, value in outputs.items():
            plain = plain_outputs(value)
            if plain is not value:
                outputs[name] = plain
    return outputs


def _shape_of(x: Tensor) -> Tensor:
    with _disable_current_modes():
        return torch.empty(x.shape, dtype=x.dtype, device="meta")


def is_watchable(logits: Any) -> bool:
    """Whether an output layer's result may be watched: a tensor that kernels can read, or a fake one."""
    is_tensor = type(logits) is Tensor or isinstance(logits, FakeTensor)
    return is_tensor and logits.dtype in KERNEL_DTYPES and logits.requires_grad and logits.dim() > 1


def _loss(
    logits: WatchedLogits,
    labels: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """functional.cross_entropy; None where torch must compute it."""
    if any(each is not None for each in (weight, size_average, reduce)) or not isinstance(labels, Tensor):
        return None
    rows = logits._unchanged()
    is_rows = rows.dim() == 2 and labels.shape == rows.shape[:1] and labels.dtype == torch.int64
    if not is_rows or labels.device != rows.device or rows.numel() == 0:
        return None
    if choose("cross_entropy", rows.device, True, "cross_entropy") == "reference":
        return None  # nothing to gain
    loss = ops.cross_entropy(
        rows, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    if (call := loss_call.get()) is not None:
        call.is_fused = True
    is_float32 = logits.is_converted or calls.is_autocasting(rows)  # autocast computes losses in float32
    return loss if is_float32 else loss.to(rows.dtype)
