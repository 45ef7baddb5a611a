"""Parts of a packed projection, taken before its dimensions move: backward writes their gradients once.

    qkv = self.qkv(x).reshape(n, 3, n_heads, -1)
    q, k, v = qkv.permute(1, 0, 2, 3).unbind(0)    ->    q, k, v = parts_(self, qkv, 0).permute(1, 0, 2, 3).unbind(0)

which is qkv.unbind(1): the same views. Of parts of a permuted tensor, autograd writes the gradients in its order, and
copies them into that of the projection (Qwen2-VL; GPT-NeoX splits what it has transposed; SAM permutes, reshapes and
unbinds). Of `qkv[0], qkv[1], qkv[2]` it writes a whole gradient each, and adds them up (BLIP-2).
"""

from __future__ import annotations

import ast
from collections.abc import Container
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import calls
from ..forward import Forward, Place, places, writes_to_tensors
from ..rewriting import InForward, Rewriting
from ..verify import check_function, kind_of
from .packed_slices import PATTERN, has_gradient

_MOVES = ("permute", "transpose")
_TAKES = ("unbind", "chunk", "split")


class _Found(NamedTuple):
    """An expression whose dimensions move before a statement takes all parts of it, which nothing else reads."""

    x: ast.expr
    n_items: int
    """Of a tuple of its items; 0 where a method takes the parts."""


def read_packed_parts(forward: Forward) -> list[_Found]:
    """Those of a forward that writes to no tensor: of an unsafe split, autograd does not know that its parts share
    memory."""
    if writes_to_tensors(forward.tree):
        return []
    return [found for place in places(forward.tree.body) if (found := _found(forward, place)) is not None]


def _found(forward: Forward, place: Place) -> _Found | None:
    match place.statement:
        case ast.Assign(
            targets=[ast.Tuple()], value=ast.Tuple(elts=[ast.Subscript(value=ast.Name() as name), *_] as items)
        ):
            n_items = len(items)
            if [ast.unparse(each) for each in items] != [f"{name.id}[{i}]" for i in range(n_items)]:
                return None
            moved: ast.expr = name
        case ast.Assign(targets=[ast.Tuple()], value=ast.Call(func=ast.Attribute(value=moved, attr=take))) if (
            take in _TAKES
        ):
            n_items = 0
            match moved:
                case ast.Call(func=ast.Attribute(value=inner, attr="reshape"), keywords=[]) if take == "unbind":
                    moved = inner
        case _:
            return None
    if isinstance(moved, ast.Name):
        assigned = forward.assignment_of(moved.id, place, place.position, times=n_items or 1)
        moved = moved if assigned is None else assigned.value
    match moved:
        case ast.Call(func=ast.Attribute(value=x, attr=move), keywords=[]) if move in _MOVES:
            return _Found(x, n_items)
    return None


class PackedParts(InForward):
    """A module that takes parts of a packed projection after its dimensions have moved, as a site."""

    patterns, is_minor = (PATTERN,), True
    read = staticmethod(read_packed_parts)

    @staticmethod
    def is_of(module: nn.Module, each: _Found, excluded: Container[int]) -> bool:
        """Every instance has it."""
        return True

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
            return taken(*(parts(module, x, n_items) for n_items in (3, 0, 0)))

        check_function(fused, lambda x: taken(x, x, x), {"x": (2, 4, 3, 10)}, device, dtype)


def _call(rewriting: Rewriting, found: _Found) -> ast.expr:
    return rewriting.call("parts_", rewriting.visit(rewriting.copy_of(found.x)), ast.Constant(found.n_items))


def parts(module: nn.Module, x: Any, n_items: int) -> Any:
    """x, as what takes its parts (n_items by their indices; 0: by a method) before its dimensions move; x itself where
    that saves nothing."""
    if not has_gradient(x) or not x.is_contiguous():
        return x
    calls.count_fused(module)
    return _Parts(x, n_items)


class _Parts:
    """The parts of a tensor after its dimensions have moved."""

    def __init__(self, x: Tensor, n_items: int) -> None:
        self.x, self.n_items = x, n_items
        self.order = [*range(x.dim())]
        self.shape: tuple[Any, ...] = ()
        """To which the moved tensor is reshaped; empty for none."""
        self.items: list[Tensor] = []

    def permute(self, *dims: Any) -> _Parts:
        self.order = [self.order[dim] for dim in (dims if isinstance(dims[0], int) else dims[0])]
        return self

    def transpose(self, one: int, other: int) -> _Parts:
        self.order[one], self.order[other] = self.order[other], self.order[one]
        return self

    def reshape(self, *shape: Any) -> Any:
        """As long as each part of the first dimension becomes one of the new tensor."""
        sizes = shape if isinstance(shape[0], int) else shape[0]
        if sizes[0] != self.x.shape[self.order[0]]:
            return self.x.permute(self.order).reshape(sizes)
        self.shape = sizes
        return self

    def unbind(self, dim: int = 0) -> list[Tensor]:
        return self._without(dim, self.x.unbind(self.order[dim]))

    def chunk(self, chunks: int, dim: int = 0) -> list[Tensor]:
        return [each.permute(self.order) for each in self.x.chunk(chunks, self.order[dim])]

    def split(self, split_size: Any, dim: int = 0) -> list[Tensor]:
        return [each.permute(self.order) for each in self.x.split(split_size, self.order[dim])]

    def __getitem__(self, index: int) -> Tensor:
        axis = self.order[0]
        if self.x.shape[axis] != self.n_items:
            return self.x.permute(self.order)[index]
        if not self.items:  # which may be written to, as views of several of one function may not
            self.items = self._without(0, [each.squeeze(axis) for each in self.x.unsafe_split(1, axis)])
        return self.items[index]

    def _without(self, dim: int, taken: Any) -> list[Tensor]:
        """What was taken of dimension dim, the others moved."""
        axis = self.order[dim]
        rest = [each - (each > axis) for each in self.order if each != axis]
        moved = taken if rest == sorted(rest) else [each.permute(rest) for each in taken]
        return [each.reshape(self.shape[1:]) for each in moved] if self.shape else moved
