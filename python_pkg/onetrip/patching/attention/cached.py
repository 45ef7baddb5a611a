"""Keys and values that an empty cache keeps as they are.

    k, v = past_key_values.update(k, v, self.layer_idx)      (GPT-2, BART, Llama)
    y, _ = attention_interface(self, q, k, v, ...)

In training a decoder makes a DynamicCache, unless use_cache is False. It joins k and v to what it has, which is
nothing, and so copies both. Here the cache of a call with gradients keeps k and v themselves, as transformers 4 did.
SDPA reads them by their strides, and lays out their gradients as the linear layers read them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .. import calls
from ..forward import Forward, places, writes_to_tensors
from ..rewriting import InForward, Rewriting
from ..verify import VerificationError, kind_of
from .interface import attention_functions, reads_strides
from .reads import nodes_after

PATTERN = "key_value_cache"


def read_updates(forward: Forward) -> list[ast.Call]:
    """The updates whose results only attention functions read, and methods of the module (GPT-2's eager attention)."""
    functions = attention_functions(forward)
    if _library() is None or not functions:
        return []
    if writes_to_tensors(forward.tree):  # a cache and what it keeps are one tensor
        return []
    found = []
    for place in places(forward.tree.body):
        match place.statement:
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=key), ast.Name(id=value)])],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(), attr="update"),
                    args=[ast.Name(id=one), ast.Name(id=other), _, *_],
                ) as call,
            ) if (key, value) == (one, other) and _is_for_attention(forward, place.statement, {key, value}, functions):
                found.append(call)
    return found


def _is_for_attention(forward: Forward, update: ast.stmt, names: set[str], functions: Container[str]) -> bool:
    nodes = nodes_after(forward.tree, update)
    read = set()
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        match call.func:
            case ast.Name(id=function):
                is_known = function in functions
            case ast.Attribute(value=ast.Name(id=owner)):
                is_known = owner == forward.self_name
            case _:
                is_known = False
        if is_known:
            read |= {id(argument) for argument in call.args}
    return all(id(node) in read for node in nodes if isinstance(node, ast.Name) and node.id in names)


class CacheUpdates(InForward):
    """A module that gives its keys and values to a cache, as a site. chosen: the updates."""

    patterns, is_minor = (PATTERN,), True
    read = staticmethod(read_updates)

    @staticmethod
    def is_of(module: nn.Module, each: Any, excluded: Container[int]) -> bool:
        return True

    def put(self, rewriting: Rewriting) -> None:
        """updated in place of the cache's method."""
        rewriting.constants["updated_"] = updated
        for call in self.chosen:
            rewriting.put_call(call, "updated_")

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a new cache has small keys and values, and joins others to them."""
        library = _library()
        device, dtype = kind_of(module)
        ours, theirs = library.DynamicCache(), library.DynamicCache()
        (key, value), more = ((torch.full((2, 1, n, 4), n, device=device, dtype=dtype),) * 2 for n in (3, 2))
        kept(ours, key, value, 0)
        theirs.update(key, value, 0)
        if not all(map(torch.equal, ours.update(*more, 0), theirs.update(*more, 0))):
            raise VerificationError("the cache has other keys and values")


def updated(
    module: nn.Module, update: Callable[..., Any], key: Tensor, value: Tensor, index: Any, *args: Any, **options: Any
) -> Any:
    """update(key, value, index, ...), where update is a cache's method."""
    cache = getattr(update, "__self__", None)
    are_plain = all(type(each) in (Tensor, FakeTensor) and each.requires_grad for each in (key, value))
    if not (are_plain and torch.is_grad_enabled() and reads_strides(module) and _is_empty(cache, update, index)):
        return update(key, value, index, *args, **options)
    calls.count_fused(module)
    return kept(cache, key, value, index, *args, **options)


def kept(cache: Any, key: Tensor, value: Tensor, index: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """key and value, which the cache has now."""
    cache.update(*(each.detach()[..., :0, :] for each in (key, value)), index, *args, **options)  # it makes the layer
    layer = cache.layers[index]
    layer.keys, layer.values = key, value
    return key, value


def _is_empty(cache: Any, update: Any, index: Any) -> bool:
    """Whether it is a DynamicCache, with transformers' method, whose layer of plain attention has nothing yet."""
    library = _library()
    if type(cache) is not library.DynamicCache or update.__module__ != library.__name__:
        return False
    if getattr(cache, "offloading", True) or type(index) is not int:  # older ones have no such attribute
        return False
    layers = cache.layers
    cls = type(layers[index]) if index < len(layers) else cache.layer_class_to_replicate
    return cls is library.DynamicLayer and cache.get_seq_length(index) == 0


def _library() -> Any:
    """transformers' module of caches, where a cache is a list of layers."""
    module = sys.modules.get("transformers.cache_utils")
    return module if hasattr(module, "DynamicLayer") else None
