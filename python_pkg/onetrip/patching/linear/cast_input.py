"""Casts to the dtype of a linear layer's weight, before the layer reads them.

    h = h.to(self.wo.weight.dtype)     ->      h = cast_input_(self, self.wo, h, self.wo.weight.dtype)
    h = self.wo(h)                             h = self.wo(h)

Under autocast the layer casts back what the cast has widened (T5, whose output projection may stay in float32): the
tensor stays as it is there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import calls
from ..forward import Forward, Place, evaluated, places, writes_to_tensors
from ..rewriting import InForward, Rewriting
from ..verify import VerificationError, kind_of, undisturbed

PATTERN = "cast_input"


class _Cast(NamedTuple):
    """`x.to(self.path.weight.dtype)`, of which only `self.path(...)` reads the result."""

    call: ast.Call
    path: str


def read_casts(forward: Forward) -> list[_Cast]:
    """The casts of a forward that writes to no tensor: what it casts and the cast are one tensor then."""
    if writes_to_tensors(forward.tree):
        return []
    return [each for place in places(forward.tree.body) for each in _casts_at(forward, place)]


def _casts_at(forward: Forward, place: Place) -> Iterator[_Cast]:
    """Those that a place's statement hands to a layer, or leaves, if need be under a condition, to the next one."""
    yield from _casts(forward, place.statement)
    match place.statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            pass
        case ast.If(body=[ast.Assign(targets=[ast.Name(id=name)], value=value)], orelse=[]):
            pass
        case _:
            return
    reader = Place(place.block, place.position + 1, place.in_loop)
    if not place.following or not isinstance(reader.statement, (ast.Assign, ast.Return, ast.Expr)):
        return  # under a condition, in a loop, or with autocast off
    if forward.is_read_only_at(name, reader, reader.position):
        yield from _casts(forward, reader.statement, name, value)


def _casts(forward: Forward, statement: ast.stmt, name: str = "", value: ast.expr | None = None) -> Iterator[_Cast]:
    """`self.path(x.to(self.path.weight.dtype))`. With a name, the layer is given that, and value is the cast."""
    for node in evaluated(statement):
        called = forward.called(node) if isinstance(node, ast.Call) else None
        if called is None or (name and ast.unparse(called[1]) != name):
            continue
        match value if name else called[1]:
            case ast.Call(func=ast.Attribute(attr="to"), args=[dtype], keywords=[]) as cast:
                if ast.unparse(dtype) == f"{forward.self_name}.{called[0]}.weight.dtype":
                    yield _Cast(cast, called[0])


class CastInputs(InForward):
    """A module that casts what its linear layers read, as a site."""

    patterns, is_minor = (PATTERN,), True
    read = staticmethod(read_casts)

    def put(self, rewriting: Rewriting) -> None:
        """cast_input in place of the casts."""
        rewriting.constants["cast_input_"] = cast_input
        for call, path in self.chosen:
            copied = rewriting.copy_of(call)
            rewriting.put_other_call(call, "cast_input_", rewriting.attribute(path), copied.func.value, *copied.args)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a small layer computes the same of what was not cast."""
        device, _ = kind_of(module)
        with undisturbed(device), torch.autocast(device.type, torch.bfloat16):
            dense, x = nn.Linear(8, 6, device=device), torch.randn(4, 8, device=device).bfloat16()
            if not torch.equal(dense(cast_input(module, dense, x, torch.float32)), dense(x.float())):
                raise VerificationError("autocast does not cast back what a linear layer reads")


def is_cast_back(dense: Any, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether dense reads x itself of x.to(dtype), because autocast casts that back."""
    return dtype == torch.float32 and calls.autocast_dtype(x) == x.dtype and calls.is_plain_linear(dense)


def cast_input(module: nn.Module, dense: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype); x itself where dense, which alone reads it, casts that back to x."""
    if torch.compiler.is_compiling() or not is_cast_back(dense, x, dtype):
        return x.to(dtype)
    calls.count_fused(module)
    return x
