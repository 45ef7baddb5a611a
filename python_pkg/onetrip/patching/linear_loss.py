"""The loss over the vocabulary: of a model's logits (watched_logits.py), or without them.

Pattern linear_cross_entropy: a model's output layer and its cross-entropy are one call. While a model computes its loss
in training, its output layer returns DeferredLogits instead of a tensor: the layer and the hidden states. Views and
slices of positions are applied to the hidden states; casts, a constant for each class (BART), a factor (Cohere) and a
soft cap (Gemma 2) are remembered; and functional.cross_entropy(logits, labels) becomes
ops.linear_cross_entropy(hidden, weight, labels). Any other use computes the logits and goes on with them: a model whose
loss is another one computes what it did.
"""

from __future__ import annotations

import inspect
import math
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from .. import ops
from ..ops.common.backends import KERNEL_DTYPES
from . import calls
from .calls import is_plain, original_class
from .classes import Rewrite, plain_forward
from .linear.biased_logits import is_exact
from .linear.tied_embedding import linear, weight_of
from .verify import check_function, kind_of
from .watched_logits import PATTERN as CROSS_ENTROPY
from .watched_logits import LossCall, WatchedLogits, is_watchable, loss_call, loss_options, plain_outputs, with_graph

PATTERN = "linear_cross_entropy"

Steps = tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]
"""(function, further arguments), applied to the logits one after another."""
_VIEWS = (Tensor.view, Tensor.reshape, Tensor.contiguous, operator.getitem)
"""Steps that choose or move values: what moves positions is done to the hidden states at once."""


class _Source:
    """An output layer and its input: what logits are computed from, once, for all that is made of them."""

    def __init__(self, head: Any, hidden: Tensor, dtype: torch.dtype) -> None:
        """dtype: of the logits."""
        self.head, self.hidden, self.dtype = head, hidden, dtype
        self.logits: Tensor | None = None
        self.made: list[weakref.ref[DeferredLogits]] = []
        self.versions = self._versions()
        device = hidden.device.type
        is_autocasting = calls.is_autocasting(hidden)
        self.autocast = (device, dtype if is_autocasting else None, is_autocasting)

    def _versions(self) -> tuple[int, ...]:
        return tuple(x._version for x in (self.hidden, *self.head.parameters()))

    @property
    def is_pending(self) -> bool:
        """Whether the logits were not computed, and nothing that they are made of has changed."""
        return self.logits is None and self.versions == self._versions()

    def compute(self) -> Tensor:
        """The logits, with their graph, under the autocast of the forward. First computes what was made of them, too:
        an edit in place then changes their views, and no copy of them."""
        if self.logits is None:
            if not self.is_pending:
                raise RuntimeError(
                    "outputs.logits: the output layer or its input changed since the forward pass: read the logits "
                    "before the optimizer's step (they are computed when used: pattern linear_cross_entropy)"
                )
            token = loss_call.set(None)
            device, dtype, is_autocasting = self.autocast
            try:
                with with_graph(), torch.autocast(device, dtype, enabled=is_autocasting):
                    self.logits = self.head(self.hidden)
            finally:
                loss_call.reset(token)
            for reference in self.made:
                if (deferred := reference()) is not None:
                    deferred.tensor()
        return self.logits


class DeferredLogits:
    """The logits of an output layer, not computed. Whatever is done with them computes them, but for the loss."""

    def __init__(
        self,
        source: _Source,
        hidden: Tensor,
        dtype: torch.dtype,
        steps: Steps = (),
        base: DeferredLogits | None = None,
    ) -> None:
        """base: what the last of the steps is applied to; None for the source's logits."""
        self._source, self._hidden, self.dtype, self._steps, self._base = source, hidden, dtype, steps, base
        self._tensor: Tensor | None = None
        source.made.append(weakref.ref(self))

    def _then(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        dtype: torch.dtype | None = None,
        hidden: Callable[[], Tensor] | None = None,
    ) -> Any:
        """One more step. hidden: makes the hidden states at its positions, where it moves them."""
        if self._source.logits is not None:
            return function(self.tensor(), *arguments)
        at = self._hidden if hidden is None else hidden()
        return DeferredLogits(self._source, at, dtype or self.dtype, (*self._steps, (function, arguments)), self)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._source.head.out_features))

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    requires_grad = True

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def float(self, **kwargs: Any) -> Any:
        return self.tensor().float(**kwargs) if kwargs else self._then(Tensor.float, dtype=torch.float32)

    def tanh(self) -> Any:
        return self._then(torch.tanh)

    def __mul__(self, other: Any) -> Any:
        return self._scaled(operator.mul, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._scaled(operator.truediv, other)

    def _scaled(self, function: Callable[..., Any], other: Any) -> Any:
        is_number = isinstance(other, (int, float)) and other > 0
        return self._then(function, other) if is_number else function(self.tensor(), _computed(other))

    def __add__(self, other: Any) -> Any:
        """A constant for each class is part of the bias."""
        is_constant = (
            isinstance(other, Tensor) and not other.requires_grad and other.dtype in (self.dtype, torch.float32)
        )
        if is_constant and other.dim() <= self.dim() and other.numel() == self.shape[-1] == other.shape[-1]:
            return self._then(operator.add, other, dtype=torch.promote_types(self.dtype, other.dtype))
        return self.tensor() + _computed(other)

    def contiguous(self, **kwargs: Any) -> Any:
        return self.tensor().contiguous(**kwargs) if kwargs else self._then(Tensor.contiguous)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing to do on the same device; a wider dtype is that of the loss."""
        if not kwargs and args == (self.device,):
            return self
        return self.float() if not kwargs and args == (torch.float32,) else self.tensor().to(*args, **kwargs)

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        """The positions in another shape."""
        return self._reshaped(Tensor.view, shape, kwargs)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        return self._reshaped(Tensor.reshape, shape, kwargs)

    def _reshaped(self, function: Callable[..., Any], shape: Any, kwargs: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
        is_of_positions = len(sizes) > 0 and sizes[-1] == self.shape[-1] and all(isinstance(n, int) for n in sizes)
        if kwargs or not is_of_positions:
            return function(self.tensor(), *shape, **kwargs)
        return self._then(function, *sizes, hidden=lambda: self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))

    def __getitem__(self, index: Any) -> Any:
        """Positions; the classes stay whole."""
        parts = index if isinstance(index, tuple) else (index,)
        n_given = sum(part is not Ellipsis for part in parts)
        is_basic = all(part is Ellipsis or isinstance(part, (int, slice)) for part in parts)
        reaches_classes = any(part is Ellipsis for part in parts) or n_given == len(self.shape)
        if not is_basic or (reaches_classes and parts[-1] not in (Ellipsis, slice(None))):
            return self.tensor()[index]
        return self._then(operator.getitem, index, hidden=lambda: self._hidden[index])

    def tensor(self) -> Tensor:
        """The logits. Raises RuntimeError where the output layer was changed since the forward pass, and in the forward
        of an autograd.Function."""
        _check_graph()
        if self._tensor is None:
            logits = self._source.compute()
        if self._tensor is None:  # compute() calls this for all that are alive
            if self._base is not None:
                function, arguments = self._steps[-1]
                with with_graph():
                    logits = function(self._base.tensor(), *arguments)
            self._tensor, self._base = logits, None
        return self._tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the logits."""
        return self.tensor().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}: computed when used)"

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check_graph()
        if func is functional.cross_entropy:
            loss = _loss(*args, **(kwargs or {}))
            if loss is not None:
                return loss
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        args, kwargs = pytree.tree_map_only(DeferredLogits, DeferredLogits.tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_in_function() -> bool:
    """Whether the forward of an autograd.Function runs: that switches forward-mode AD off, which torch.no_grad() does
    not."""
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def _is_in_reentrant_backward() -> bool:
    """Whether a reentrant checkpoint runs the model again: to what it returned it gives gradients as to tensors."""
    return torch._C._current_graph_task_id() != -1 and not calls.has_saved_tensor_hooks()


def _check_graph() -> None:
    """Raise RuntimeError in the forward of an autograd.Function: only tensors among its arguments get gradients."""
    if _is_in_function():
        raise RuntimeError(
            "linear_cross_entropy: an autograd.Function (torch.utils.checkpoint with use_reentrant=True is one) got "
            "logits that are computed when used, and would lose their gradient: give it logits.tensor(), or patch the "
            'model with the pattern "cross_entropy" instead'
        )


def _computed(value: Any) -> Any:
    return value.tensor() if isinstance(value, DeferredLogits) else value


def _operator(name: str) -> Any:
    def method(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*map(_computed, args))

    return method


for _name in (
    *("sub", "pow", "matmul", "mod", "floordiv", "radd", "rsub", "rtruediv", "rpow", "rmatmul", "rfloordiv", "rmod"),
    *("iadd", "isub", "imul", "itruediv", "neg", "pos", "abs", "round", "invert", "and", "or", "xor"),
    *("lt", "le", "gt", "ge", "eq", "ne", "iter", "float", "int", "bool", "array", "setitem"),
):
    setattr(DeferredLogits, f"__{_name}__", _operator(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def _chain(steps: Steps) -> tuple[Tensor | None, float, float | None] | None:
    """(constant, scale, softcap) of steps that are softcap * tanh(scale * logits / softcap), or scale * logits, of
    logits that a constant was added to, as ops.linear_cross_entropy computes them; None for other steps."""
    constant, scale, has_tanh, factor = None, 1.0, False, 1.0
    for function, arguments in steps:
        if function is operator.add and constant is None and not has_tanh and factor == 1.0:
            constant = arguments[0]
        elif function in (operator.mul, operator.truediv):
            factor = function(factor, arguments[0])
        elif function is torch.tanh and not has_tanh:
            has_tanh, scale, factor = True, factor, 1.0
        elif function is not Tensor.float and function not in _VIEWS:
            return None
    scale *= factor
    return constant, 1.0 if math.isclose(scale, 1.0, rel_tol=1e-12) else scale, factor if has_tanh else None


def _loss(logits: Any, *arguments: Any, **keywords: Any) -> Tensor | None:
    """functional.cross_entropy of DeferredLogits; None where it must be computed from the logits."""
    options = loss_options(*arguments, **keywords)
    if options is None or not isinstance(logits, DeferredLogits) or not logits._source.is_pending:
        return None  # computed logits may have been changed in place
    head, hidden, labels = logits._source.head, logits._hidden, options["labels"]
    is_rows = logits.dim() == 2 and labels.shape == logits.shape[:1]
    if not is_rows or labels.device != hidden.device or not is_plain(head, nn.Linear):
        return None
    bias, chain = head.bias, _chain(logits._steps)
    if chain is None:
        return None
    constant, scale, softcap = chain
    if scale != 1.0 and (bias is not None or constant is not None):
        return None
    hidden = hidden if scale == 1.0 else hidden * scale
    if constant is not None:
        dtype = logits._source.dtype
        if constant.dtype != dtype and not (calls.is_autocasting(hidden) and is_exact(constant, dtype)):
            return None
        bias = constant.reshape(-1) if bias is None else bias + constant.reshape(-1)
    loss = ops.linear_cross_entropy(hidden, weight_of(head), bias=bias, softcap=softcap, **options)
    if (call := loss_call.get()) is not None:
        call.is_fused = True
    return loss if calls.is_autocasting(hidden) else loss.to(logits.dtype)  # autocast computes losses in float32


def computes_loss(model: nn.Module, labels_at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of the model computes a loss to be trained with. labels_at: position among the arguments."""
    if torch.compiler.is_compiling() or not model.training or not torch.is_grad_enabled():
        return False
    labels = kwargs.get("labels", args[labels_at] if len(args) > labels_at else None)
    return labels is not None and not getattr(model, "_is_replica", False)  # DataParallel gathers tensors


@contextmanager
def computing_loss(model: Any, keeps_logits: bool) -> Iterator[None]:
    """In this block, the model's output layer returns WatchedLogits (keeps_logits) or DeferredLogits."""
    call, outer = LossCall(model.get_output_embeddings(), keeps_logits), loss_call.get()
    token = loss_call.set(call)
    try:
        yield
    finally:
        loss_call.reset(token)
        if outer is not None:  # a model in a model, which both have labels
            outer.is_fused |= call.is_fused
        (calls.count_fused if call.is_fused else calls.count_fallback)(model)


def head_output(head: Any, hidden: Any, bias: Tensor | None = None) -> Any:
    """What the output layer returns. bias: as linear's."""
    call: Any = None if torch.compiler.is_compiling() else loss_call.get()
    if call is None or head is not call.head:
        return linear(head, hidden, bias)  # evaluation, or no loss
    if call.keeps_logits:
        logits = linear(head, hidden, bias)
        watched = is_watchable(logits) and is_plain(head, nn.Linear)
        (calls.count_fused if watched else calls.count_fallback)(head)
        return WatchedLogits.of(logits) if watched else logits
    is_autocasting = calls.is_autocasting(hidden)
    is_fusable = is_plain(head, nn.Linear) and hidden.dtype in KERNEL_DTYPES and hidden.dim() > 1 and hidden.numel() > 0
    is_fusable = is_fusable and (is_autocasting or hidden.dtype == head.weight.dtype)
    is_fusable = is_fusable and not (_is_in_function() or _is_in_reentrant_backward())
    if not is_fusable or calls.is_distributed(hidden) or calls.is_distributed(head.weight):
        calls.count_fallback(head)
        return linear(head, hidden, bias)
    calls.count_fused(head)
    dtype = torch.get_autocast_dtype(hidden.device.type) if is_autocasting else hidden.dtype
    deferred = DeferredLogits(_Source(head, hidden, dtype), hidden, dtype)
    return deferred if bias is None else deferred + bias


_MODEL = """\
def forward(self, *args, **kwargs):
    if not computes_loss_(self, labels_at_, args, kwargs):
        return original(self, *args, **kwargs)
    with computing_loss_(self, keeps_logits_):
        outputs = original(self, *args, **kwargs)
    return plain_outputs_(outputs) if keeps_logits_ else outputs
"""
_HEAD = """\
def forward(self, input, bias=None):
    return head_output_(self, input, bias)
"""


@dataclass(frozen=True)
class VocabularyLoss:
    """A model that computes a loss, or its output layer, as a site."""

    labels_at: int | None
    """Position of labels among the arguments of the model's forward; None for the output layer."""
    pattern: str
    """PATTERN or CROSS_ENTROPY."""
    detail = ""

    def rewrite(self, cls: type) -> Rewrite:
        """The forward in which the logits are deferred or watched."""
        if self.labels_at is None:
            return Rewrite(self.pattern, around=_HEAD, constants=(("head_output_", head_output),))
        names = (
            *(("computes_loss_", computes_loss), ("labels_at_", self.labels_at), ("computing_loss_", computing_loss)),
            *(("plain_outputs_", plain_outputs), ("keeps_logits_", self.pattern == CROSS_ENTROPY)),
        )
        return Rewrite(self.pattern, around=_MODEL, constants=names)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a small layer's loss and gradients are those of its logits."""
        device, dtype = kind_of(module)
        labels = torch.tensor([0, 10, -100, 3, 3, -100, 5], device=device)

        def fused(hidden: Tensor, weight: Tensor) -> Tensor:
            if self.pattern == PATTERN:
                return ops.linear_cross_entropy(hidden, weight, labels).to(hidden.dtype)
            return functional.cross_entropy(WatchedLogits.of(functional.linear(hidden, weight)), labels)

        def unfused(hidden: Tensor, weight: Tensor) -> Tensor:
            return functional.cross_entropy(functional.linear(hidden, weight), labels)

        check_function(fused, unfused, {"hidden": (7, 8), "weight": (11, 8)}, device, dtype)


def output_layer(module: Any) -> nn.Module | None:
    """The plain nn.Linear that a model calls its output embeddings; None for modules that have none, or no loss."""
    if not callable(getattr(type(module), "get_output_embeddings", None)) or labels_position(module) is None:
        return None
    try:
        head = module.get_output_embeddings()
    except Exception:  # a model without an output layer
        return None
    is_linear = isinstance(head, nn.Module) and original_class(type(head)) is nn.Linear
    return head if is_linear and any(each is head for each in module.modules()) else None


def labels_position(module: nn.Module) -> int | None:
    """Position of labels among the arguments of the module's forward; None where it takes none."""
    names = list(inspect.signature(plain_forward(original_class(type(module)))).parameters)
    return names.index("labels") - 1 if "labels" in names else None
