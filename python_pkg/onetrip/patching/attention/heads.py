"""Heads as views: what attention functions read by its strides is not copied for them.

    q = self.q_proj(x).view(shape).transpose(1, 2).contiguous()      (Whisper)
    y, _ = attention_interface(self, q, k, v, ...)

In training q, k and v stay views of what the linear layers made. SDPA then lays out its result and their gradients as
the layers read them next, which saves three more copies.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import calls
from ..forward import Forward, places, writes_to_tensors
from ..rewriting import InForward, Rewriting
from ..source import calls_in, first_match
from ..verify import VerificationError, kind_of, undisturbed
from .interface import attention_functions, reads_strides

PATTERN = "attention_heads"

_SHAPES = frozenset({"shape", "device", "dtype"})


class _Copy(NamedTuple):
    """`x.contiguous()`, where x is a view of what the linear layer at the path made."""

    call: ast.Call
    path: str


def read_heads(forward: Forward) -> list[_Copy]:
    """The copies of what only attention functions and caches read."""
    tree = forward.tree
    if writes_to_tensors(tree):  # a view and what it is of are one tensor
        return []
    functions = attention_functions(forward)
    copies: dict[str, list[_Copy]] = {}
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
    return [copy for name, same in copies.items() if name not in others for copy in same]


def _copy(forward: Forward, expression: ast.expr) -> _Copy | None:
    """`self.path(x).view(...).transpose(1, 2).contiguous()`, and its path. The layer's result may be scaled."""
    copied = first_match(("X.transpose(1, 2).contiguous()",), expression)
    match None if copied is None else copied[1]["X"]:
        case ast.Call(func=ast.Attribute(value=made, attr="view")):
            if isinstance(made, ast.BinOp) and isinstance(made.op, ast.Mult):
                made = made.left
            called = forward.called(made)
            return None if called is None else _Copy(expression, called[0])  # type: ignore[arg-type]
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


class Heads(InForward):
    """A module that copies what its attention function reads, as a site."""

    patterns, is_minor = (PATTERN,), True
    read = staticmethod(read_heads)

    def put(self, rewriting: Rewriting) -> None:
        """heads in place of `contiguous`."""
        rewriting.constants["heads_"] = heads
        for call, _ in self.chosen:
            rewriting.put_other_call(call, "heads_", rewriting.copy_of(call).func.value)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless SDPA computes the same of small views on the module's device."""
        device, dtype = kind_of(module)
        with undisturbed(device):
            x = torch.randn(3, 2, 5, 4, 8, device=device).to(dtype).transpose(2, 3)
            views, copies = (functional.scaled_dot_product_attention(*each) for each in (x, x.contiguous()))
            if not torch.allclose(views, copies, rtol=1e-2, atol=1e-2):
                raise VerificationError("SDPA computes something else of views")


def heads(module: nn.Module, x: Tensor) -> Tensor:
    """x where SDPA or FlashAttention reads it and it requires grad; else x.contiguous(): a cache may keep it, and a
    user's own attention function may need rows one after another."""
    if not (x.requires_grad and reads_strides(module)):
        return x.contiguous()
    calls.count_fused(module)
    return x
