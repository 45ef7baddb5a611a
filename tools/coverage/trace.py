"""Traces where a forward adds and normalises: which additions could be fused, and which were not.

Two kinds of opportunity, counted per call:

- add+norm: `a + b` of two floating-point tensors of one shape with at least two dimensions, whose result (or a view
  of all of it) is the first argument of a norm. A sum that two norms read (parallel blocks) counts once. Sums of
  embeddings, and of anything with a parameter or a buffer (positions), do not count: they are no residual sums.
- dropout+add: such an addition of which one operand is the very result of a dropout, other than of embeddings.

A norm is nn.LayerNorm, nn.RMSNorm, or a module without children whose class name has "norm" in it; batch, group and
instance norms are none. The unpatched model's trace is what there is; what the patched model's trace still shows is
what is left. A fused addition is no addition any more: it does not appear. The result of the operator that fuses
dropout with an addition counts as a sum, since its norm may still be called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

from onetrip import ops
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_ADDITIONS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
_OTHER_NORMS = ("batchnorm", "groupnorm", "instancenorm", "weightnorm", "spectralnorm", "normalize", "localresponse")


class Pair(NamedTuple):
    """An opportunity."""

    kind: str
    """add_norm or dropout_add."""
    adder: str
    """Name of the module whose forward adds."""
    other: str
    """Name of the norm, or of the dropout's module (where a functional dropout is called: that module)."""


def is_norm(module: nn.Module) -> bool:
    """Whether the module counts as a norm here."""
    name = type(module).__name__.lower()
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    return "norm" in name and not module._modules and not any(word in name for word in _OTHER_NORMS)


class _Tracer(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.stack: list[str] = [""]
        self.kept: list[Tensor] = []
        """Keeps every tensor of the tables below alive: their keys are ids."""
        self.sums: dict[int, str] = {}
        self.dropped: dict[int, str] = {}
        self.fixed = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.embedded: set[int] = set()
        self.pairs: list[Pair] = []

    def mark(self, table: dict[int, str], tensor: Tensor, value: str) -> None:
        self.kept.append(tensor)
        table[id(tensor)] = value

    def embed(self, tensor: Tensor) -> None:
        self.kept.append(tensor)
        self.embedded.add(id(tensor))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is nn.functional.dropout:
            x = args[0] if args else kwargs["input"]
            if result is x:
                result = x.view_as(x)
            if id(x) in self.embedded:
                self.embed(result)
            else:
                self.mark(self.dropped, result, self.stack[-1])
        elif func is nn.functional.embedding:
            self.embed(result)
        elif getattr(func, "__name__", "") in _ADDITIONS and len(args) == 2 and isinstance(result, Tensor):
            self.added(args[0], args[1], result)
        return result

    def added(self, left: Any, right: Any, result: Tensor) -> None:
        if not (isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape == right.shape):
            return
        if not (left.is_floating_point() and right.is_floating_point() and left.dim() > 1):
            return
        has_fixed = any(id(tensor) in self.fixed for each in (left, right) for tensor in (each, each._base))
        if has_fixed or {id(left), id(right)} <= self.embedded:
            self.embed(result)
            return
        for operand in (left, right):
            if id(operand) in self.dropped:
                self.pairs.append(Pair("dropout_add", self.stack[-1], self.dropped[id(operand)]))
                break
        self.mark(self.sums, result, self.stack[-1])

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module's call begins."""
        self.stack.append(self.names.get(id(module), self.stack[-1]))
        if args and isinstance(args[0], Tensor) and is_norm(module):
            x = args[0]
            for tensor in (x, x._base):
                adder = None if tensor is None else self.sums.pop(id(tensor), None)
                if adder is not None:
                    self.pairs.append(Pair("add_norm", adder, self.stack[-1]))
                    break


def trace(model: nn.Module, forward: Callable[[], Any]) -> list[Pair]:
    """The pairs that forward(), which calls the model, shows. No hooks are used: rewritten forwards heed hooks."""
    tracer = _Tracer(model)
    call, alone = nn.Module.__call__, ops.bias_dropout_residual

    def traced_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tracer.called(self, args)
        try:
            return call(self, *args, **kwargs)
        finally:
            tracer.stack.pop()

    def traced_sum(*args: Any, **kwargs: Any) -> Any:
        result = alone(*args, **kwargs)
        tracer.mark(tracer.sums, result, tracer.stack[-1])
        return result

    call_is_traced = patch.object(nn.Module, "__call__", traced_call)
    with call_is_traced, patch.object(ops, "bias_dropout_residual", traced_sum), tracer:
        forward()
    return tracer.pairs
