"""Linear layers that read one tensor: their matrix products add up the gradient of it.

    q = self.q(x)           shared_ = SharedInput_()
    k = self.k(x)     ->    q = shared_(self, self.q, x)
    v = self.v(x)           k = shared_(self, self.k, x)
                            v = shared_(self, self.v, x)

A factor of a result is part of the product, where that changes no bit: `self.q(x) * self.scaling` (Whisper, OPT)
becomes shared_.scaled(self, self.q, self.scaling, x).

Which layers read the very same tensor is seen as the model runs (readers); the source only tells which calls may.
Autocast casts the tensor once for all of them, unless it is freed between them (a checkpoint).
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable
from itertools import count

from torch import Tensor, nn
from torch.nn import functional

from ..forward import Forward, linear_at, scaled_calls
from ..rewriting import InForward, Rewriting
from ..verify import check_function, kind_of
from .readers import Readers, SharedInput, linear

PATTERN = "shared_input"


Group = list[tuple[ast.Call, str]]
"""(call, path of the child) of children that may read one tensor."""


def read_shared_inputs(forward: Forward) -> list[Group]:
    """The groups of a forward."""
    scan = _Scan(forward)
    scan.block(forward.tree.body, {})
    return [group for group in scan.readers.values() if len(group) > 1]


class _Scan:
    """Follows which names may stand for one value, statement by statement."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.numbers = count()
        self.readers: dict[int, Group] = {}
        """Number of a value -> calls of a child with it alone."""

    def block(self, body: list[ast.stmt], values: dict[str, frozenset[int]]) -> None:
        """values: name -> numbers of the values that it may have."""
        for statement in body:
            inner = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
            if any(inner):
                for each in inner:
                    self.block(each, dict(values))
            else:
                self.calls(statement, values)
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    values[node.id] = self.new()
            match statement:
                case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=name)):
                    values[target] = self.of(name, values)
                case ast.Assign(
                    targets=[ast.Name(id=target)], value=ast.IfExp(body=ast.Name(id=one), orelse=ast.Name(id=other))
                ):
                    values[target] = self.of(one, values) | self.of(other, values)

    def calls(self, statement: ast.stmt, values: dict[str, frozenset[int]]) -> None:
        for node in ast.walk(statement):
            called = self.forward.called(node) if isinstance(node, ast.Call) else None
            if called is not None and isinstance(called[1], ast.Name):
                for number in self.of(called[1].id, values):
                    self.readers.setdefault(number, []).append((node, called[0]))  # type: ignore[arg-type]

    def of(self, name: str, values: dict[str, frozenset[int]]) -> frozenset[int]:
        return values.setdefault(name, self.new())

    def new(self) -> frozenset[int]:
        return frozenset([next(self.numbers)])


class SharedInputs(InForward):
    """A module whose linear layers may read one tensor, as a site. chosen: their calls."""

    patterns, is_minor = (PATTERN,), True
    read = staticmethod(read_shared_inputs)

    @classmethod
    def choose(cls, module: nn.Module, found: Iterable[Group], excluded: Container[int]) -> tuple[ast.Call, ...]:
        """The calls of linear layers in groups of at least two layers."""
        chosen: list[ast.Call] = []
        for group in found:
            linear = [(call, path) for call, path in group if linear_at(module, path, excluded) is not None]
            if len({path for _, path in linear}) > 1:
                chosen += (call for call, _ in linear if call not in chosen)
        return tuple(chosen)

    def put(self, rewriting: Rewriting) -> None:
        """The linear layers called through a SharedInput, with the factors of their results."""
        scaled = {id(each.call): each for each in scaled_calls(self.forward) if isinstance(each.node.op, ast.Mult)}
        for call in self.chosen:
            if (found := scaled.get(id(call))) is None:
                rewriting.put_call(call, "shared_")
            else:
                rewriting.put_call(call, "shared_.scaled", ast.unparse(found.node.right))
                rewriting.put_part(found.node, call)
                rewriting.remove(*found.statements)
        rewriting.constants["SharedInput_"] = SharedInput
        rewriting.put_first("shared_ = SharedInput_()")

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless three small layers have the outputs and gradients that they have apart."""
        device, dtype = kind_of(module)
        check_function(_shared, _apart, {"x": (2, 5, 8), "q": (8, 8), "k": (4, 8), "v": (4, 8)}, device, dtype)


_SCALES = (0.125, 1.0, 1.0)


def _shared(x: Tensor, *weights: Tensor) -> list[Tensor]:
    readers = Readers(x, x)
    return [linear(x, weight, None, x, readers, scale=scale) for weight, scale in zip(weights, _SCALES, strict=True)]


def _apart(x: Tensor, *weights: Tensor) -> list[Tensor]:
    return [functional.linear(x, weight) * scale for weight, scale in zip(weights, _SCALES, strict=True)]
