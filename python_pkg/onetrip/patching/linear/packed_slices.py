"""Slices of a packed projection, taken by one split: backward writes their gradients side by side, once.

    q = qkv[..., :n]             q = (packed_0_ := packed_slices_(self, qkv, n, m))[0]
    k = qkv[..., n:m]     ->     k = packed_0_[1]                                          (Phi-3)
    v = qkv[..., m:]             v = packed_0_[2]

Of each slice, autograd writes a gradient of the whole width, zero at the other columns, and then adds them up.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .. import calls
from ..classes import Rewrite
from ..forward import Forward, Place, assigned_name, evaluated, may_change, n_reads, places, writes_to_tensors
from ..rewriting import Rewriting
from ..verify import check_function, kind_of

PATTERN = "packed_slices"


@dataclass(frozen=True)
class Packed:
    """A name of which only slices are read, that together are all of its last dimension."""

    slices: tuple[ast.Subscript, ...]
    """From the first column on."""
    name: ast.expr
    bounds: tuple[ast.expr, ...]
    """Where each slice but the last one ends."""


def read_packed_slices(forward: Forward) -> tuple[Packed, ...]:
    """Those of a forward that writes to no tensor: slices by a split are no views of it for autograd."""
    if writes_to_tensors(forward.tree):
        return ()
    starts = ((place, node) for place in places(forward.tree.body) for node in _slices_in(place.statement))
    found = (_packed(forward, place, node) for place, node in starts)
    return tuple(each for each in found if each is not None)


def _slices_in(statement: ast.stmt) -> list[ast.Subscript]:
    """The slices that a statement takes whenever it runs; none of one that holds others."""
    if hasattr(statement, "body"):
        return []
    return [node for node in evaluated(statement) if _is_slice(node)]  # type: ignore[misc]


def _is_slice(node: ast.AST) -> bool:
    """Whether it is x[..., a:b] of a name."""
    match node:
        case ast.Subscript(
            value=ast.Name(),
            slice=ast.Tuple(elts=[ast.Constant(value=value), ast.Slice(step=None)]),
            ctx=ast.Load(),
        ):
            return value is ...
    return False


def _packed(forward: Forward, place: Place, first: ast.Subscript) -> Packed | None:
    """The slices of which `first`, in the place's statement, is the first one that is evaluated."""
    name: str = first.value.id  # type: ignore[attr-defined]
    found: list[ast.Subscript] = []
    for position in range(place.position, len(place.block)):
        statement = place.block[position]
        here = [node for node in _slices_in(statement) if node.value.id == name]  # type: ignore[attr-defined]
        found += here
        if len(here) != n_reads(statement, name) or found[:1] != [first]:
            return None
        if here and (packed := _in_order(found)) is not None:
            later = range(position + 1, len(place.block))
            rebound = next((i for i in later if assigned_name(place.block[i]) == name), position)
            until = Place(place.block, rebound, place.in_loop)
            names = {node.id for bound in packed.bounds for node in ast.walk(bound) if isinstance(node, ast.Name)}
            steps = place.block[place.position : position]
            is_same = not any(may_change(step, each) for step in steps for each in (name, *names))
            return packed if is_same and forward.is_read_only_at(name, until, position, len(here)) else None
    return None


def _in_order(found: list[ast.Subscript]) -> Packed | None:
    """The slices from the first column on, if they are all of them, and each begins where the one before it ends."""
    by_start = {_text(_part(node).lower): node for node in found}
    ordered: list[ast.Subscript] = []
    at: str | None = ""
    while at in by_start:
        ordered.append(by_start.pop(at))
        at = _text(_part(ordered[-1]).upper) or None
    bounds = tuple(_part(node).upper for node in ordered[:-1])
    is_whole = at is None and len(ordered) == len(found) > 1
    is_pure = not any(isinstance(node, (ast.Call, ast.NamedExpr)) for bound in bounds for node in ast.walk(bound))  # type: ignore[arg-type]
    return Packed(tuple(ordered), ordered[0].value, bounds) if is_whole and is_pure else None  # type: ignore[arg-type]


def _part(node: ast.Subscript) -> ast.Slice:
    part: ast.Slice = node.slice.elts[1]  # type: ignore[attr-defined]
    return part


def _text(bound: ast.expr | None) -> str:
    return "" if bound is None else ast.unparse(bound)


@dataclass(frozen=True)
class PackedSlices:
    """A module that takes slices of packed projections, as a site."""

    forward: Forward
    found: tuple[Packed, ...]
    pattern = PATTERN
    detail = ""

    def rewrite(self, cls: type) -> Rewrite:
        """The forward with one split in place of its slices."""
        rewriting = Rewriting(self.forward)
        for index, packed in enumerate(self.found):
            parts = f"packed_{index}_"
            first = min(packed.slices, key=lambda node: (node.lineno, node.col_offset))
            for i, node in enumerate(packed.slices):
                value: ast.expr = ast.Name(parts)
                if node is first:
                    given = [ast.Name(rewriting.own), *(rewriting.copies[id(x)] for x in (packed.name, *packed.bounds))]
                    value = ast.NamedExpr(ast.Name(parts), ast.Call(ast.Name("packed_slices_"), given, []))
                rewriting.put(node, ast.Subscript(value, ast.Constant(i)))
        rewriting.constants["packed_slices_"] = packed_slices
        return rewriting.rewrite(PATTERN)

    def verify(self, module: nn.Module, rewrite: Rewrite) -> None:
        """Raise VerificationError unless three slices have the values and gradients that they have apart."""
        device, dtype = kind_of(module)

        def fused(x: Tensor) -> Any:
            return packed_slices(module, x, 3, 5)

        check_function(fused, lambda x: _apart(x, (3, 5)), {"x": (2, 4, 9)}, device, dtype)


def packed_slices(module: nn.Module, x: Any, *bounds: Any) -> Any:
    """x[..., :b], x[..., b:c], ..., x[..., d:] of the bounds b, c, ..., d."""
    has_gradient = type(x) in (Tensor, FakeTensor) and x.requires_grad
    if not has_gradient or not all(type(bound) is int for bound in bounds):
        return _apart(x, bounds)
    sizes = [stop - start for start, stop in pairwise((0, *bounds, x.shape[-1]))]
    if min(sizes) < 1:
        return _apart(x, bounds)
    calls.count_fused(module)
    return torch.unsafe_split_with_sizes(x, sizes, dim=-1)


def _apart(x: Any, bounds: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x[..., start:stop] for start, stop in pairwise((None, *bounds, None)))
