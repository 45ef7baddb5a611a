"""Parts of a packed projection, taken before its dimensions move: backward writes their gradients once.

    qkv = self.qkv(x).reshape(n, 3, n_heads, -1)
    q, k, v = qkv.permute(1, 0, 2, 3).unbind(0)    ->    q, k, v = parts_(self, qkv, 0).permute(1, 0, 2, 3).unbind(0)

which is qkv.unbind(1): the same views. Autograd writes the gradients of a permuted tensor's parts in its order, then
copies them into the projection's (Qwen2-VL; GPT-NeoX splits what it has transposed; SAM permutes, reshapes and
unbinds). For items, `qkv[0], qkv[1], qkv[2]`, it writes a whole gradient each, and adds them up (BLIP-2).
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import calls
from ..forward import Forward, Place, linear_at, places, writes_to_tensors
from ..rewriting import InForward, Rewriting
from ..verify import check_function, kind_of
from .packed_slices import PATTERN, has_gradient

_TAKES = ("unbind", "chunk", "split")


class _Found(NamedTuple):
    """An expression whose dimensions move before a statement takes all parts of the moved tensor, which nothing else
    reads."""

    x: ast.expr
    n_items: int = 0
    """How many items, `p[0], p[1], ...`, the statement takes; 0 where unbind, chunk or split takes the parts."""
    path: str = ""
    """The layer whose result x is, where items are taken."""


def read_packed_parts(forward: Forward) -> list[_Found]:
    """Those of a forward that writes to no tensor."""
    if writes_to_tensors(forward.tree):
        return []
    return [found for place in places(forward.tree.body) if (found := _found(forward, place)) is not None]


def _found(forward: Forward, place: Place) -> _Found | None:
    match place.statement:
        case ast.Assign(
            targets=[ast.Tuple()], value=ast.Tuple(elts=[ast.Subscript(value=ast.Name() as p), *_] as items)
        ):
            assigned = forward.assignment_of(p.id, place, place.position, times=len(items))
            if assigned is None or [ast.unparse(each) for each in items] != [f"{p.id}[{i}]" for i in range(len(items))]:
                return None
            x, position = _moved(assigned.value), place.block.index(assigned)
            path = "" if x is None else _layer_of(forward, x, place, position)
            return _Found(x, len(items), path) if x is not None and path else None
        case ast.Assign(targets=[ast.Tuple()], value=ast.Call(func=ast.Attribute(value=p, attr=take)) as taken) if (
            take in _TAKES
        ):
            match p:
                case ast.Call(func=ast.Attribute(value=inner, attr="reshape"), keywords=[]) if take == "unbind":
                    if ast.unparse(taken)[len(ast.unparse(taken.func)) :] not in ("()", "(0)", "(dim=0)"):
                        return None
                    p = inner
            if isinstance(p, ast.Name):
                assigned = forward.assignment_of(p.id, place, place.position)
                p = p if assigned is None else assigned.value
            x = _moved(p)
            return None if x is None else _Found(x)
    return None


def _moved(expression: ast.expr) -> ast.expr | None:
    """x of x.permute(...) or x.transpose(...)."""
    match expression:
        case ast.Call(func=ast.Attribute(value=x, attr="permute" | "transpose"), keywords=[]):
            return x
    return None


def _layer_of(forward: Forward, x: ast.expr, place: Place, position: int) -> str:
    """The path of the child whose result, reshaped, x is, where nothing else reads that; else empty. position: of the
    statement that reads x."""
    match x:
        case ast.Call(func=ast.Attribute(value=inner, attr="view" | "reshape")):
            return _layer_of(forward, inner, place, position)
        case ast.Name():
            value, statements = forward.value_of(x, place, position) or (x, ())
            return _layer_of(forward, value, place, position - 1) if statements else ""
    called = forward.called(x)
    return "" if called is None else called[0]


class PackedParts(InForward):
    """A module that takes parts of a packed projection after its dimensions have moved, as a site."""

    patterns, is_minor = (PATTERN,), True
    read = staticmethod(read_packed_parts)

    @staticmethod
    def is_of(module: nn.Module, each: _Found, excluded: Container[int]) -> bool:
        """Every instance has it; where items are taken, of a linear layer."""
        return not each.path or linear_at(module, each.path, excluded) is not None

    def put(self, rewriting: Rewriting) -> None:
        """The expressions as what takes parts before dimensions move."""
        rewriting.constants["parts_"] = parts
        for found in self.chosen:
            rewriting.replace(found.x, partial(_call, rewriting, found))

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless parts have the values and gradients that those of the moved tensor have."""
        device, dtype = kind_of(module)

        def taken(items: Any, heads: Any, columns: Any) -> list[Tensor]:
            items, heads = items.permute(2, 0, 3, 1), heads.permute(2, 0, 3, 1).reshape(3, 20, 4)
            return [items[0], items[1], items[2], *heads.unbind(0), *columns.transpose(1, -1).split(2, 1)]

        def fused(x: Tensor) -> list[Tensor]:
            return taken(*(_Parts(x, n_items) for n_items in (3, 0, 0)))

        check_function(fused, lambda x: taken(x, x, x), {"x": (2, 4, 3, 10)}, device, dtype)


def _call(rewriting: Rewriting, found: _Found) -> ast.expr:
    layer = [rewriting.attribute(found.path)] if found.path else []
    return rewriting.call("parts_", rewriting.visit(rewriting.copy_of(found.x)), ast.Constant(found.n_items), *layer)


def parts(module: nn.Module, x: Any, n_items: int, layer: Any = None) -> Any:
    """x, as what takes its parts before its dimensions move; x itself where that saves nothing. n_items, layer: whose
    hooks may keep x: see _Found."""
    if not has_gradient(x) or not x.is_contiguous() or x.numel() < calls.SMALLEST:
        return x
    if n_items and not calls.is_plain(layer, nn.Linear):
        return x
    calls.count_fused(module)
    return _Parts(x, n_items)


def _given(numbers: tuple[Any, ...]) -> Any:
    """Given one by one, or as a sequence."""
    return numbers[0] if len(numbers) == 1 and isinstance(numbers[0], (tuple, list)) else numbers


class _Parts:
    """The parts of a tensor after its dimensions have moved."""

    def __init__(self, x: Tensor, n_items: int) -> None:
        self.x, self.n_items = x, n_items
        self.order = [*range(x.dim())]
        self.shape: tuple[Any, ...] = ()
        """To which the moved tensor is reshaped; empty for none."""
        self.items: list[Tensor] = []

    def permute(self, *dims: Any) -> _Parts:
        self.order = [self.order[dim] for dim in _given(dims)]
        return self

    def transpose(self, one: int, other: int) -> _Parts:
        self.order[one], self.order[other] = self.order[other], self.order[one]
        return self

    def reshape(self, *shape: Any) -> Any:
        """As long as each part of the first dimension becomes one of the new tensor."""
        sizes = _given(shape)
        if sizes[0] != self.x.shape[self.order[0]]:
            return self.x.permute(self.order).reshape(sizes)
        self.shape = sizes
        return self

    def unbind(self, dim: int = 0) -> list[Tensor]:
        return self._without(dim, self.x.unbind(self.order[dim]))

    def chunk(self, chunks: int, dim: int = 0) -> list[Tensor]:
        return self._moved(self.x.chunk(chunks, self.order[dim]))

    def split(self, split_size: Any, dim: int = 0) -> list[Tensor]:
        return self._moved(self.x.split(split_size, self.order[dim]))

    def _moved(self, taken: Iterable[Tensor]) -> list[Tensor]:
        return [each.permute(self.order) for each in taken]

    def __getitem__(self, index: int) -> Tensor:
        axis = self.order[0]
        if self.x.shape[axis] != self.n_items:
            return self.x.permute(self.order)[index]
        if not self.items:  # unsafe_split: its parts may be written to, those of unbind may not
            self.items = self._without(0, [each.squeeze(axis) for each in self.x.unsafe_split(1, axis)])
        return self.items[index]

    def _without(self, dim: int, taken: Any) -> list[Tensor]:
        """What was taken of dimension dim, the others moved."""
        axis = self.order[dim]
        rest = [each - (each > axis) for each in self.order if each != axis]
        moved = taken if rest == sorted(rest) else [each.permute(rest) for each in taken]
        return [each.reshape(self.shape[1:]) for each in moved] if self.shape else moved
