"""Heads as views: what attention functions read by its strides is not copied for them.

    q = self.q_proj(x).view(shape).transpose(1, 2).contiguous()      (Whisper)
    y, _ = attention_interface(self, q, k, v, ...)

In training q, k and v stay views of what the linear layers made. SDPA then lays out its result and their gradients as
the layers read them next, which are three more copies that nobody makes.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import calls
from ..classes import Rewrite
from ..forward import Forward, assigned_name
from ..rewriting import Rewriting
from ..source import calls_in
from ..verify import VerificationError, kind_of, undisturbed
from .interface import is_question

PATTERN = "attention_heads"

_SHAPES = frozenset({"shape", "device", "dtype"})


def read_heads(forward: Forward) -> tuple[ast.Call, ...]:
    """The calls of `contiguous` whose results only attention functions and caches read."""
    tree = forward.tree
    functions = set()
    for statement in ast.walk(tree):
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if any(is_question(node, forward.globals) for node in ast.walk(value)):
                functions.add(name)
    known = {
        id(argument)
        for call in calls_in(tree)
        if (isinstance(call.func, ast.Name) and call.func.id in functions)
        or (isinstance(call.func, ast.Attribute) and call.func.attr == "update")
        for argument in call.args
    }
    known |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _SHAPES}
    found: dict[str, list[ast.Call]] = {}
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign) and (name := assigned_name(statement)):
            match statement.value:
                case (
                    ast.Call(
                        func=ast.Attribute(
                            value=ast.Call(func=ast.Attribute(value=viewed, attr="transpose")), attr="contiguous"
                        ),
                        args=[],
                        keywords=[],
                    ) as call
                ) if _is_own(forward, viewed):
                    found.setdefault(name, []).append(call)
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    others = {node.id for node in reads if id(node) not in known}
    return tuple(call for name, same in found.items() if name not in others for call in same)


def _is_own(forward: Forward, expression: ast.expr) -> bool:
    """Whether it is a view of what a child has returned, which has no other name."""
    match expression:
        case ast.Call(func=ast.Attribute(value=inner, attr="view" | "reshape")):
            return _is_own(forward, inner)
        case ast.BinOp():
            return True
        case ast.Call(func=function):
            return forward.child(function) != ""
    return False


@dataclass(frozen=True)
class Heads:
    """A module that copies what its attention function reads, as a site."""

    forward: Forward
    found: tuple[ast.Call, ...]
    pattern = PATTERN
    detail = ""

    def rewrite(self, cls: type) -> Rewrite:
        """The forward with heads in place of `contiguous`."""
        rewriting = Rewriting(self.forward)
        for call in self.found:
            copied = rewriting.copies[id(call)]
            copied.func, copied.args = ast.Name("heads_"), [ast.Name(rewriting.own), copied.func.value]
        rewriting.constants["heads_"] = heads
        return rewriting.rewrite(PATTERN)

    def verify(self, module: nn.Module, rewrite: Rewrite) -> None:
        """Raise VerificationError unless SDPA computes the same of views."""
        device, dtype = kind_of(module)
        with undisturbed(device):
            x = torch.randn(3, 2, 5, 4, 8, device=device).to(dtype).transpose(2, 3)
            views, copies = (functional.scaled_dot_product_attention(*each) for each in (x, x.contiguous()))
            if not torch.allclose(views, copies, rtol=1e-2, atol=1e-2):
                raise VerificationError("SDPA computes something else of views")


def heads(module: nn.Module, x: Tensor) -> Tensor:
    """x in training; x.contiguous() otherwise: a cache may keep it."""
    if not torch.is_grad_enabled() or not x.requires_grad:
        return x.contiguous()
    calls.count_fused(module)
    return x
