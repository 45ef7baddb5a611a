"""Heads as views: what attention functions read by its strides is not copied for them.

    q = self.q_proj(x).view(shape).transpose(1, 2).contiguous()      (Whisper)
    y, _ = attention_interface(self, q, k, v, ...)

In training q, k and v stay views of what the linear layers made. SDPA then lays out its result and their gradients as
the layers read them next, which saves three more copies.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import calls
from ..classes import Rewrite
from ..forward import Forward, linear_at, places, writes_to_tensors
from ..rewriting import Rewriting
from ..source import calls_in, first_match
from ..verify import VerificationError, kind_of, undisturbed
from .interface import attention_functions, is_of_transformers

PATTERN = "attention_heads"

_SHAPES = frozenset({"shape", "device", "dtype"})


@dataclass(frozen=True, eq=False)
class FoundHeads:
    """What a forward copies for its attention function."""

    copies: tuple[tuple[ast.Call, str], ...]
    """(`x.contiguous()`, path of the linear layer that x is a view of)."""
    questions: tuple[ast.expr, ...]
    """The expressions that give the function."""


def read_heads(forward: Forward) -> FoundHeads | None:
    """The copies of what only attention functions and caches read."""
    tree = forward.tree
    if writes_to_tensors(tree):  # a view and what it is of are one tensor
        return None
    functions = attention_functions(forward)
    copies: dict[str, list[tuple[ast.Call, str]]] = {}
    known: set[int] = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _SHAPES
    }
    for statement in ast.walk(tree):
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                if (copy := _copy(forward, value)) is not None:
                    copies.setdefault(name, []).append(copy)
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=one), ast.Name(id=other)])],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id=cache), attr="update"),
                    args=[ast.Name(id=key) as first, ast.Name(id=value_name) as second, *_],
                ),
            ) if (one, other) == (key, value_name) and cache != forward.self_name:
                known |= {id(first), id(second)}
    for call in calls_in(tree):
        if isinstance(call.func, ast.Name) and call.func.id in functions and _is_laid_out_anew(tree, call):
            known |= {id(argument) for argument in call.args}
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    others = {node.id for node in reads if id(node) not in known}
    found = tuple(copy for name, same in copies.items() if name not in others for copy in same)
    return FoundHeads(found, tuple(node for nodes in functions.values() for node in nodes)) if found else None


def _copy(forward: Forward, expression: ast.expr) -> tuple[ast.Call, str] | None:
    """`self.path(x).view(...).transpose(1, 2).contiguous()`, and its path. The layer's result may be scaled."""
    copied = first_match(("X.transpose(1, 2).contiguous()",), expression)
    match None if copied is None else copied[1]["X"]:
        case ast.Call(func=ast.Attribute(value=made, attr="view")):
            if isinstance(made, ast.BinOp) and isinstance(made.op, ast.Mult):
                made = made.left
            called = forward.called(made)
            return None if called is None else (expression, called[0])  # type: ignore[return-value]
    return None


def _is_laid_out_anew(tree: ast.FunctionDef, call: ast.Call) -> bool:
    """Whether the first result of the call is only given to `reshape`, in the statement after it: no code writes to
    what SDPA keeps."""
    for place in places(tree.body):
        match place.statement, place.following[:1]:
            case (
                ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=result), *_])], value=value),
                [ast.Assign(targets=[ast.Name(id=again)], value=ast.Call(func=ast.Attribute() as method))],
            ) if value is call and result == again:
                inner: ast.expr = method
                while isinstance(inner, ast.Attribute) and inner.attr in ("reshape", "contiguous"):
                    inner = inner.value.func if isinstance(inner.value, ast.Call) else inner.value
                return isinstance(inner, ast.Name) and inner.id == result
    return False


def choose_heads(module: nn.Module, found: FoundHeads | None, excluded: Container[int]) -> FoundHeads | None:
    """Those that a plain nn.Linear makes."""
    if found is None:
        return None
    copies = tuple(copy for copy in found.copies if linear_at(module, copy[1], excluded) is not None)
    return FoundHeads(copies, found.questions) if copies else None


@dataclass(frozen=True)
class Heads:
    """A module that copies what its attention function reads, as a site."""

    forward: Forward
    found: FoundHeads
    pattern = PATTERN
    detail = ""

    def rewrite(self, cls: type) -> Rewrite:
        """The forward with heads in place of `contiguous`."""
        rewriting = Rewriting(self.forward)
        for call, _ in self.found.copies:
            copied = rewriting.copy_of(call)
            copied.func, copied.args = ast.Name("heads_"), [ast.Name(rewriting.own), copied.func.value]
        for question in self.found.questions:
            rewriting.put_around(question, "reading_views_")
        rewriting.constants |= {"heads_": heads, "reading_views_": reading_views}
        return rewriting.rewrite(PATTERN)

    def verify(self, module: nn.Module, rewrite: Rewrite) -> None:
        """Raise VerificationError unless SDPA computes the same of small views on the module's device."""
        device, dtype = kind_of(module)
        with undisturbed(device):
            x = torch.randn(3, 2, 5, 4, 8, device=device).to(dtype).transpose(2, 3)
            views, copies = (functional.scaled_dot_product_attention(*each) for each in (x, x.contiguous()))
            if not torch.allclose(views, copies, rtol=1e-2, atol=1e-2):
                raise VerificationError("SDPA computes something else of views")


def heads(module: nn.Module, x: Tensor) -> Tensor:
    """x where it requires grad; else x.contiguous(): a cache may keep it."""
    if not x.requires_grad:
        return x.contiguous()
    calls.count_fused(module)
    return x


def reading_views(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function; of a user's own, which may need rows one after another, one that copies."""
    if is_of_transformers(function):
        return function

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        return function(module, query.contiguous(), key.contiguous(), value.contiguous(), *args, **options)

    return attention
