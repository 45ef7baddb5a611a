"""Logits that a model returns, with their cross-entropy by one operator: pattern cross_entropy.

While a model computes its loss in training, its output layer returns WatchedLogits: a tensor whose conversion to
float32 is put off. functional.cross_entropy of them becomes ops.cross_entropy, which reads the logits in their own
dtype and writes one gradient: no float32 copy, no log-probabilities. Any other function sees plain tensors and computes
what it did. What the model returns are plain tensors. The loss of logits with a soft cap
(activations/soft_caps.py) reads them before it: the operator computes the cap in its own pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from .. import ops
from ..ops.common.backends import HALF, KERNEL_DTYPES, choose
from . import calls

PATTERN = "cross_entropy"

_VIEWS = frozenset(
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
_METADATA = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
        *(getattr(Tensor, name).__get__ for name in ("shape", "device", "ndim", "requires_grad", "is_cuda", "is_cpu")),
    )
)
"""Functions that give the same for the values in float32: they make no copy."""
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


@contextmanager
def with_graph() -> Iterator[None]:
    """In this block values have their graph, also where a metric reads them under no_grad or inference_mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


class _Float32:
    """One conversion of logits to float32, put off until something else than the loss asks for it. Views share it."""

    def __init__(self, half: Tensor) -> None:
        self.half, self.version = half, half._version
        self.wide: Tensor | None = None

    def values(self) -> Tensor:
        if self.wide is None:
            self.check()
            with with_graph():
                self.wide = self.half.float()
        return self.wide

    def check(self) -> None:
        if self.half._version != self.version:
            raise RuntimeError(
                "cross_entropy: logits were modified in place after their conversion to float32: patch the model "
                'without the pattern "cross_entropy"'
            )


class _Cap:
    """A soft cap between logits and those that it made. Views share it."""

    def __init__(self, cap: float, uncapped: Tensor, capped: Tensor) -> None:
        self.cap, self.tensors = cap, (uncapped, capped)
        self.versions = self._versions()
        self.is_read = False
        """Whether something else than the loss has the capped values: hooks, or a gradient of them."""

    def _versions(self) -> tuple[int, ...]:
        return tuple(each._version for each in self.tensors)

    @property
    def is_of_loss(self) -> bool:
        """Whether the loss may compute it: nothing was changed in place, and nothing else has the values."""
        return not self.is_read and self.versions == self._versions()


_View = tuple[Any, tuple[Any, ...]]
"""(one of _VIEWS, its further arguments)."""


class WatchedLogits(Tensor):
    """Logits on their way to the loss."""

    _rows: Tensor
    """The logits in their own dtype."""
    _float32: _Float32 | None
    """The conversion that these are the result of."""
    _views: tuple[_View, ...]
    """What was done since the conversion."""
    _made: Tensor | None
    """The result of both, once something has asked for it."""
    _capped: tuple[_Cap, Tensor] | None
    """The soft cap that made _rows, and what it made them of."""

    @classmethod
    def of(
        cls,
        rows: Tensor,
        float32: _Float32 | None = None,
        views: tuple[_View, ...] = (),
        capped: tuple[_Cap, Tensor] | None = None,
    ) -> WatchedLogits:
        # A tensor for isinstance and autograd.Function. Of a FakeTensor: a meta tensor of its shape.
        watched = rows.as_subclass(cls) if type(rows) is Tensor else _shape_of(rows).as_subclass(cls)
        watched._rows, watched._float32, watched._views, watched._made = rows, float32, views, None
        watched._capped = capped
        return watched

    def capped(self, cap: float) -> WatchedLogits:
        """cap * tanh(logits / cap)."""
        rows = self.plain()
        capped = ops.softcap(rows, cap)
        return self.of(capped, capped=(_Cap(cap, rows, capped), rows))

    def plain(self) -> Tensor:
        """The values as a plain tensor."""
        if self._capped is not None:
            self._capped[0].is_read = True
        if self._float32 is None:
            return self._rows
        if self._made is None:
            values = self._float32.values()
            with with_graph():
                for function, arguments in self._views:
                    values = function(values, *arguments)
            self._made = values
        return self._made

    def read(self) -> tuple[Tensor, float | None]:
        """(what the loss is computed of, its soft cap): in the logits' own dtype, unless the float32 values exist."""
        if self._float32 is not None:
            if self._float32.wide is not None:
                return self.plain(), None
            self._float32.check()
        if self._capped is not None and self._capped[0].is_of_loss:
            return self._capped[1], self._capped[0].cap
        return self._rows, None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            first: Any = args[0] if args and type(args[0]) is WatchedLogits else None
            if first is not None:
                if func in _METADATA:
                    return func(first._rows, *args[1:], **kwargs)
                if func == _DTYPE:
                    return first._rows.dtype if first._float32 is None else torch.float32
                if torch.is_grad_enabled():
                    is_loss = func is functional.cross_entropy
                    found = _loss(*args, **kwargs) if is_loss else first._moved(func, args[1:], kwargs)
                    if found is not None:
                        return found
            result = func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
            if func in _ARITHMETIC and is_watchable(result):
                return cls.of(result)
            # Changed in place: the same logits.
            return first if first is not None and first._float32 is None and result is first._rows else result

    def _moved(self, func: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> WatchedLogits | None:
        """The logits in float32, or at other places; None for other functions, or where float32 values exist."""
        if kwargs or (self._float32 is not None and self._float32.wide is not None):
            return None
        to_float32 = func is Tensor.to and len(arguments) == 1 and arguments[0] is torch.float32
        if to_float32 or (func is Tensor.float and not arguments):
            if self._float32 is not None or self._rows.dtype is torch.float32:
                return self
            return self.of(self._rows, _Float32(self._rows), (), self._capped) if self._rows.dtype in HALF else None
        names_dtype = (torch.dtype, Tensor) if func is Tensor.to else torch.dtype
        if func not in _VIEWS or any(isinstance(value, names_dtype) for value in arguments):
            return None
        capped, views = self._capped, self._views
        if self._float32 is not None:
            views = (*views, (func, arguments))
            func = Tensor.reshape if func is Tensor.view else func  # a conversion copies a slice, and may be viewed
        if capped is not None:
            before = capped[1]
            capped = capped[0], (Tensor.reshape if func is Tensor.view else func)(before, *arguments)
        return self.of(func(self._rows, *arguments), self._float32, views, capped)


def _plain(value: Any) -> Any:
    """value with plain tensors in place of WatchedLogits; itself where it has none. Opens tuples and lists."""
    if type(value) is WatchedLogits:
        return value.plain()
    if isinstance(value, (tuple, list)):
        items = [_plain(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def plain_outputs(outputs: Any) -> Any:
    """A model's outputs, with plain tensors in place of WatchedLogits. Opens tuples, lists and dicts, nothing else."""
    if isinstance(outputs, dict):  # transformers' ModelOutput, too
        for name, value in outputs.items():
            plain = plain_outputs(value)
            if plain is not value:
                outputs[name] = plain
        return outputs
    if isinstance(outputs, (tuple, list)):
        for value in outputs:
            plain_outputs(value)  # the dicts in it
    return _plain(outputs)


def _shape_of(x: Tensor) -> Tensor:
    with _disable_current_modes():
        return torch.empty(x.shape, dtype=x.dtype, device="meta")


def is_watchable(logits: Any) -> bool:
    """Whether an output layer's result may be watched: a tensor that kernels can read, or a fake one."""
    is_tensor = type(logits) is Tensor or isinstance(logits, FakeTensor)
    return is_tensor and logits.dtype in KERNEL_DTYPES and logits.requires_grad and logits.dim() > 1


def loss_options(
    labels: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> dict[str, Any] | None:
    """The arguments of functional.cross_entropy, less the logits, as those of ops.cross_entropy; None where only torch
    takes them."""
    if any(each is not None for each in (weight, size_average, reduce)) or not isinstance(labels, Tensor):
        return None
    if labels.dtype != torch.int64:
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return {"labels": labels, **options}


def _loss(logits: WatchedLogits, *arguments: Any, **keywords: Any) -> Tensor | None:
    """functional.cross_entropy; None where torch must compute it."""
    options = loss_options(*arguments, **keywords)
    if options is None:
        return None
    (rows, softcap), labels = logits.read(), options["labels"]
    is_rows = rows.dim() == 2 and labels.shape == rows.shape[:1]
    if not is_rows or labels.device != rows.device or rows.numel() == 0:
        return None
    if choose("cross_entropy", rows.device, True, "cross_entropy") == "reference":
        return None  # nothing to gain
    loss = ops.cross_entropy(rows, softcap=softcap, **options)
    if (call := loss_call.get()) is not None:
        call.is_fused = True
    is_float32 = logits._float32 is not None or calls.is_autocasting(rows)  # autocast computes losses in float32
    return loss if is_float32 else loss.to(rows.dtype)
