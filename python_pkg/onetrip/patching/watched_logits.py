"""Logits that a model returns, with their cross-entropy by one operator: pattern cross_entropy.

While a model computes its loss in training, its output layer returns WatchedLogits: a tensor whose soft cap (Gemma 2)
and conversion to float32 are put off. functional.cross_entropy of them becomes ops.cross_entropy, which reads the
logits in their own dtype and writes one gradient: no float32 copy, no log-probabilities, no pass for the cap. Any other
function sees plain tensors and computes what it did. What the model returns are plain tensors, capped in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
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
_STEPS = {
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), "div"),
    **dict.fromkeys((Tensor.tanh, torch.tanh), "tanh"),
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), "mul"),
}
"""The steps of a soft cap, cap * tanh(logits / cap)."""
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


class _Later:
    """What was done to logits, put off until something else than the loss asks for its values. Views share it."""

    def __init__(
        self, logits: WatchedLogits, function: Callable[[Tensor], Tensor], name: str, cap: float | None
    ) -> None:
        """name: "float32", "softcap", or a part of that: "div" by the cap, "tanh". cap: of the logits as the loss reads
        them."""
        self.logits, self.function, self.name, self.cap = logits, function, name, cap
        self.version = logits._rows._version
        self.result: Tensor | None = None

    @property
    def is_of_loss(self) -> bool:
        """Whether the loss can do it: it was not done, and is whole."""
        before = self.logits._later
        return self.result is None and self.name not in ("div", "tanh") and (before is None or before.is_of_loss)

    def values(self) -> Tensor:
        if self.result is None:
            self.check()
            logits = self.logits.plain()
            with with_graph():
                self.result = self.function(logits)
        return self.result

    def check(self) -> None:
        if self.logits._rows._version != self.version:
            raise RuntimeError(
                "cross_entropy: logits were modified in place after their conversion to float32 or their soft cap: "
                'patch the model without the pattern "cross_entropy"'
            )


_View = tuple[Any, tuple[Any, ...]]
"""(one of _VIEWS, its further arguments)."""


class WatchedLogits(Tensor):
    """Logits on their way to the loss."""

    _rows: Tensor
    """The logits in their own dtype, without what was put off."""
    _later: _Later | None
    """That, of which these are the result."""
    _views: tuple[_View, ...]
    """What was done since."""
    _made: Tensor | None
    """The result of both, once something has asked for it."""

    @classmethod
    def of(cls, rows: Tensor, later: _Later | None = None, views: tuple[_View, ...] = ()) -> WatchedLogits:
        # A tensor for isinstance and autograd.Function. Of a FakeTensor: a meta tensor of its shape.
        watched = rows.as_subclass(cls) if type(rows) is Tensor else _shape_of(rows).as_subclass(cls)
        watched._rows, watched._later, watched._views, watched._made = rows, later, views, None
        return watched

    def plain(self) -> Tensor:
        """The values as a plain tensor."""
        if self._later is None:
            return self._rows
        if self._made is None:
            values = self._later.values()
            with with_graph():
                for function, arguments in self._views:
                    values = function(values, *arguments)
            self._made = values
        return self._made

    def read(self) -> tuple[Tensor, float | None]:
        """(what the loss is computed of, its soft cap): in the logits' own dtype, unless later values exist."""
        if self._later is None or not self._later.is_of_loss:
            return self.plain(), None
        self._later.check()
        return self._rows, self._later.cap

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            first: Any = args[0] if args and type(args[0]) is WatchedLogits else None
            if first is not None:
                if func in _METADATA:
                    return func(first._rows, *args[1:], **kwargs)
                if func == _DTYPE:
                    return torch.float32 if first._is_float32 else first._rows.dtype
                if torch.is_grad_enabled():
                    is_loss = func is functional.cross_entropy
                    found = _loss(*args, **kwargs) if is_loss else first._put_off(func, args[1:], kwargs)
                    if found is not None:
                        return found
            result = func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
            if func in _ARITHMETIC and is_watchable(result):
                return cls.of(result)
            # Changed in place: the same logits.
            return first if first is not None and first._later is None and result is first._rows else result

    @property
    def _is_float32(self) -> bool:
        return self._later is not None and self._later.name == "float32"

    def _put_off(self, func: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> WatchedLogits | None:
        """The logits in float32, with a soft cap, or at other places; None for other functions, or where later values
        exist."""
        later = self._later
        if kwargs or (later is not None and later.result is not None):
            return None
        if func in _STEPS and (step := self._step(func, arguments)) is not None:
            return step
        to_float32 = func is Tensor.to and len(arguments) == 1 and arguments[0] is torch.float32
        to_float32 = to_float32 or (func is Tensor.float and not arguments)
        if to_float32 and (self._is_float32 or self._rows.dtype is torch.float32):
            return self
        names_dtype = (torch.dtype, Tensor) if func is Tensor.to else torch.dtype
        moves = func in _VIEWS and not any(isinstance(value, names_dtype) for value in arguments)
        if not (to_float32 or moves):
            return None
        if later is not None and not later.is_of_loss:  # a part of a soft cap
            return self.of(self.plain())._put_off(func, arguments, kwargs)
        if moves and later is None:
            return self.of(func(self._rows, *arguments))
        if moves:  # a view of what comes later: of a slice, that may be a copy
            rows = (Tensor.reshape if func is Tensor.view else func)(self._rows, *arguments)
            return self.of(rows, later, (*self._views, (func, arguments)))
        if self._rows.dtype not in HALF:
            return None
        return self.of(self._rows, _Later(self, Tensor.float, "float32", None if later is None else later.cap))

    def _step(self, func: Any, arguments: tuple[Any, ...]) -> WatchedLogits | None:
        """The logits after one step of cap * tanh(logits / cap); None for others."""
        later, made = self._later, None
        match _STEPS[func], arguments:
            case "div", (int() | float() as cap,) if later is None and cap > 0:
                made = _Later(self, lambda rows: func(rows, cap), "div", float(cap))
            case "tanh", () if later is not None and later.name == "div":
                divided = later.function
                made = _Later(later.logits, lambda rows: func(divided(rows)), "tanh", later.cap)
            case "mul", (int() | float() as cap,) if later is not None and later.name == "tanh" and cap == later.cap:
                made = _Later(later.logits, partial(ops.softcap, cap=cap), "softcap", later.cap)
        return None if made is None or self._views else self.of(self._rows, made)


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
    is_float32 = logits._is_float32 or calls.is_autocasting(rows)  # autocast computes losses in float32
    return loss if is_float32 else loss.to(rows.dtype)
