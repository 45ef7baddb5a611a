"""Slices of a packed projection, taken by one split: backward writes their gradients side by side, once.

    qkv = self.qkv_proj(x)           qkv = self.qkv_proj(x)
    q = qkv[..., :n]           ->    q, k, v = packed_slices_(self, self.qkv_proj, qkv, n, m)      (Phi-3)
    k = qkv[..., n:m]
    v = qkv[..., m:]

Of each slice, autograd writes a gradient of the whole width, zero at the other columns, and then adds them up.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .. import calls
from ..forward import Forward, assigned_name, places, writes_to_tensors
from ..rewriting import InForward, Rewriting
from ..verify import check_function, kind_of

PATTERN = "packed_slices"


class Packed(NamedTuple):
    """Consecutive statements `name = x[..., a:b]` that take all columns of a layer's result, in their order, which
    nothing else reads."""

    path: str
    """Of the layer."""
    statements: tuple[ast.Assign, ...]


def read_packed_slices(forward: Forward) -> list[Packed]:
    """Those of a forward that writes to no tensor: of an unsafe split, autograd does not know that its parts share
    memory."""
    if writes_to_tensors(forward.tree):
        return []
    names = [node.id for node in ast.walk(forward.tree) if isinstance(node, ast.Name)]
    blocks = {id(place.block): place.block for place in places(forward.tree.body)}
    return [
        Packed(path, statements)
        for block in blocks.values()
        for name, path, statements in _runs(forward, block)
        if names.count(name) == 1 + len(statements) and _is_whole(statements)
    ]


def _runs(forward: Forward, block: list[ast.stmt]) -> Iterator[tuple[str, str, tuple[ast.Assign, ...]]]:
    """(name of a child's result, the child's path, consecutive statements that take slices of it)."""
    for position, statement in enumerate(block):
        name = assigned_name(statement)
        called = forward.called(statement.value) if isinstance(statement, ast.Assign) and name else None
        if called is None:
            continue
        taken = [each if _slice(each, name) else None for each in block[position + 1 :]]
        first = next((i for i, each in enumerate(taken) if each is not None), len(taken))
        last = next((i for i in range(first, len(taken)) if taken[i] is None), len(taken))
        yield name, called[0], tuple(taken[first:last])  # type: ignore[arg-type]


def _slice(statement: ast.stmt, name: str) -> ast.Slice | None:
    """a:b of `target = name[..., a:b]`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name()],
            value=ast.Subscript(
                value=ast.Name(id=read), slice=ast.Tuple(elts=[ast.Constant(value=value), ast.Slice(step=None) as part])
            ),
        ) if read == name and value is ...:
            return part
    return None


def _bounds(statement: ast.Assign) -> tuple[ast.expr | None, ast.expr | None]:
    part: ast.Slice = statement.value.slice.elts[1]  # type: ignore[attr-defined]
    return part.lower, part.upper


def _is_whole(statements: tuple[ast.Assign, ...]) -> bool:
    """Whether each slice begins where the one before ends; where that is, no call says, nor a name that they bind."""
    bounds = [_bounds(each) for each in statements]
    starts, ends = ([*map(_text, each)] for each in zip(*bounds, strict=True)) if bounds else ([], [])
    nodes = [node for pair in bounds for bound in pair if bound is not None for node in ast.walk(bound)]
    targets = {assigned_name(each) for each in statements}
    is_plain = not any(isinstance(node, (ast.Call, ast.NamedExpr)) for node in nodes)
    keeps_bounds = targets.isdisjoint(node.id for node in nodes if isinstance(node, ast.Name))
    is_chain = ["", *ends] == [*starts, ""] and "" not in ends[:-1]
    return len(targets) == len(statements) > 1 and is_chain and is_plain and keeps_bounds


def _text(bound: ast.expr | None) -> str:
    return "" if bound is None else ast.unparse(bound)


class PackedSlices(InForward):
    """A module that takes slices of packed projections, as a site."""

    patterns, is_minor = (PATTERN,), True
    read = staticmethod(read_packed_slices)

    def put(self, rewriting: Rewriting) -> None:
        """One split in place of the slices."""
        rewriting.constants["packed_slices_"] = packed_slices
        for packed in self.chosen:
            first, *others = packed.statements
            ends = [rewriting.copy_of(each).value.slice.elts[1].upper for each in packed.statements[:-1]]
            copied = rewriting.copy_of(first)
            read = copied.value.value
            copied.targets = [ast.Tuple([rewriting.copy_of(each).targets[0] for each in packed.statements])]
            copied.value = rewriting.call("packed_slices_", rewriting.attribute(packed.path), read, *ends)
            rewriting.remove(*others)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless three slices have the values and gradients that they have apart."""
        device, dtype = kind_of(module)

        def fused(x: Tensor) -> Any:
            return packed_slices(module, nn.Linear(1, 1), x, 3, 5)

        check_function(fused, lambda x: _apart(x, (3, 5)), {"x": (2, 4, 9)}, device, dtype)


def packed_slices(module: nn.Module, dense: Any, x: Any, *bounds: Any) -> Any:
    """x[..., :b], x[..., b:c], ..., x[..., d:] of the bounds b, c, ..., d. dense: the layer that made x, whose hooks
    may keep it."""
    if not calls.is_plain(dense, nn.Linear) or not has_gradient(x) or not all(type(bound) is int for bound in bounds):
        return _apart(x, bounds)
    sizes = [stop - start for start, stop in pairwise((0, *bounds, x.shape[-1]))]
    if min(sizes) < 1:
        return _apart(x, bounds)
    calls.count_fused(module)
    return torch.unsafe_split_with_sizes(x, sizes, dim=-1)


def has_gradient(x: Any) -> bool:
    """Whether autograd will write a gradient of x, in calls that no compiler or transform follows."""
    return not calls.is_followed() and type(x) in (Tensor, FakeTensor) and x.requires_grad


def _apart(x: Any, bounds: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x[..., start:stop] for start, stop in pairwise((None, *bounds, None)))
