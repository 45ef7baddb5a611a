"""What reads a tensor of a forward: under autocast, what matrix products alone read may be rounded before."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch.nn import functional

from ..forward import Forward
from ..source import first_match, resolve
from .interface import attention_functions

_VIEWS = ("transpose", "view", "reshape", "permute", "unsqueeze", "expand", "contiguous")
_PRODUCTS = (torch.matmul, torch.bmm, functional.scaled_dot_product_attention)
_CASTS = ("X.to(T.dtype)", "X.type(T.dtype)", "X.type_as(T)")


def changes_autocast(tree: ast.AST) -> bool:
    """Whether part of a function may run under another autocast than the rest."""
    names = (getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree))
    return any("autocast" in name for name in names if isinstance(name, str))


def nodes_after(tree: ast.AST, statement: ast.stmt) -> list[Any]:
    """The nodes of a function that stand behind the statement."""
    end = (statement.end_lineno, statement.end_col_offset)
    nodes: list[Any] = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    return [node for node in nodes if (node.lineno, node.col_offset) >= end]


def caches_beside_products(
    forward: Forward, statement: ast.stmt, *assigned: str, may_be_returned: bool = False
) -> frozenset[str] | None:
    """The parameters that are caches, where after the statement, which assigns these names, they, views and casts of
    them and what is joined to them are read by matrix products, attention functions of transformers' interface and
    caches alone; None where something else reads them, or under another autocast. may_be_returned: as weights beside
    an output, too.
    """
    if changes_autocast(forward.tree):
        return None
    names = [*assigned]
    caches: set[str] = set()
    nodes = nodes_after(forward.tree, statement)
    parents = {id(child): node for node in ast.walk(forward.tree) for child in ast.iter_child_nodes(node)}
    functions = attention_functions(forward)
    parameters = {each.arg for each in forward.tree.args.args[1:] + forward.tree.args.kwonlyargs}

    def is_known(node: ast.AST) -> bool:
        parent: Any = parents[id(node)]
        match parent:
            case ast.Attribute(attr=name):
                method: Any = parents[id(parent)]
                is_call = isinstance(method, ast.Call) and method.func is parent
                is_same = is_call and (name in _VIEWS or first_match(_CASTS, method) is not None)
                return name in ("shape", "size") or (is_same and is_known(method))
            case ast.Subscript(value=value):
                return value is node and is_known(parent)
            case ast.BinOp(op=ast.MatMult()):
                return True
            case ast.Tuple(elts=[first, *_]) if may_be_returned and (first is not node or is_appended(parent)):
                return is_returned(parent)
            case ast.Tuple() | ast.List() | ast.keyword():
                return is_known(parent)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple()):
                names.extend({each.id for each in targets if isinstance(each, ast.Name)} - set(names))
                return all(isinstance(each, ast.Name) for each in targets)
            case ast.Assign(targets=[ast.Name(id=name) | ast.Tuple(elts=[ast.Name(id=name), ast.Name()])]):
                names.extend({name} - set(names))  # of two, the cache's keys
                return True
            case ast.Call(func=ast.Name(id=name)) if name in functions:
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id=cache), attr="update"), args=[first, _, *_]):
                caches.add(cache)
                return cache in parameters and first is node and is_known(parent)
            case ast.Call(func=function):
                resolved = resolve(function, forward.globals)
                return any(resolved is each for each in _PRODUCTS) or (resolved is torch.cat and is_known(parent))
        return False

    def is_appended(node: ast.AST) -> bool:
        parent = parents[id(node)]
        return isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add) and parent.right is node

    def is_returned(node: ast.AST) -> bool:
        """Whether it is part of what the forward returns, and of nothing else."""
        parent = parents[id(node)]
        match parent:
            case ast.Return() | ast.Subscript(slice=ast.Constant(value=0)):  # the output
                return True
            case ast.IfExp() | ast.BinOp(op=ast.Add()):
                return is_returned(parent)
            case ast.Assign(targets=[ast.Name(id=name)]):
                later = [each for each in nodes_after(forward.tree, parent) if isinstance(each, ast.Name)]
                return all(is_returned(each) for each in later if each.id == name and isinstance(each.ctx, ast.Load))
        return False

    reads = [node for node in nodes if isinstance(node, ast.Name)]
    are_known = all(  # names grows as it goes
        is_known(node)
        for name in names
        for node in reads
        if node.id == name and (not isinstance(node.ctx, ast.Store) or isinstance(parents[id(node)], ast.AugAssign))
    )
    return frozenset(caches) if are_known else None
