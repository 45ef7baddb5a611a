"""Patched classes: a module is patched by swapping its class for a cached subclass with a rewritten forward.

The instance is left as it was, so that undoing needs only the class, and isinstance, state_dict keys, parameter groups
and policies that look classes up by name keep working. copy.deepcopy gives a patched module; pickle (and torch.save)
gives a module of the original class, which loads where onetrip is not installed.
"""

from __future__ import annotations

import copy
import copyreg
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import ops
from . import calls

GLOBAL_NAMES: dict[str, Any] = {
    "Tensor": Tensor,
    "partial": partial,
    "dropout": functional.dropout,
    "finfo": torch.finfo,
    "float32": torch.float32,
    "layer_norm": ops.layer_norm,
    "rms_norm": ops.rms_norm,
    "bias_dropout_residual": ops.bias_dropout_residual,
    "bias_dropout_residual_norm": ops.bias_dropout_residual_norm,
    "count_fused": calls.count_fused,
    "count_fallback": calls.count_fallback,
    "is_plain": calls.is_plain,
    "linear_parts": calls.linear_parts,
    "is_distributed": calls.is_distributed,
    "is_fusable": calls.is_fusable,
    "is_autocasting": calls.is_autocasting,
}
"""What the source of a rewritten forward may name, beside its own constants and `original`."""


def define(original: Any, source: str, names: Mapping[str, Any], name: str, pattern: str) -> Callable[..., Any]:
    """The function `name` that the source defines, as if written in the module of the original function.

    names: what the source may use beside that module's globals, which are looked up there at each call.
    """
    lines = "".join(f"    {line}\n" for line in source.splitlines())
    code = f"def make({', '.join(names)}):\n{lines}    return {name}\n"
    filename = f"<onetrip {pattern} of {original.__module__}.{original.__qualname__} {crc32(code.encode()):08x}>"
    scope: dict[str, Any] = {}
    exec(compile(code, filename, "exec"), original.__globals__, scope)
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    made: Callable[..., Any] = scope["make"](**names)
    made.__module__, made.__qualname__ = original.__module__, original.__qualname__
    return made


@dataclass(frozen=True)
class Rewrite:
    """A forward that takes the place of another."""

    pattern: str
    """Name of the pattern, as patch_model's patterns."""
    source: str
    """`def forward(self, ...)`, with the parameter names of the original."""
    constants: tuple[tuple[str, Any], ...] = ()
    """Names that the source uses, with their (hashable) values: mostly types that children must have."""
    absorbed: tuple[str, ...] = ()
    """Children that the source reads the parts of instead of calling them."""
    in_module: bool = False
    """Whether the source is the original's own, changed: it names the globals of the original's module, beside the
    constants."""

    def compile(self, original: Any, replaced: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """The forward as a function. replaced: other values for names in the source (verification pins the rng)."""
        forward: Callable[..., Any]
        if self.in_module:
            names = {**dict(self.constants), **(replaced or {})}
            forward = define(original.forward, self.source, names, "forward", self.pattern)
            return forward
        digest = crc32(self.source.encode())
        filename = f"<onetrip {self.pattern} of {original.__module__}.{original.__qualname__} {digest:08x}>"
        names = {**GLOBAL_NAMES, **dict(self.constants), "original": original.forward, **(replaced or {})}
        exec(compile(self.source, filename, "exec"), names)
        # Tracebacks and debuggers show the source, as they would for code from a file.
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        forward = names["forward"]
        # On the function only: with a __name__ among its globals, torch.compile would look them up in that module.
        forward.__module__ = original.__module__
        forward.__qualname__ = f"{original.__qualname__}.forward"
        return forward


_patched_classes: dict[tuple[type, Rewrite], type] = {}


def patched_class(original: Any, rewrite: Rewrite) -> type:
    """The subclass of original whose forward is rewrite; one for each pair in the process."""
    key = (original, rewrite)
    if key not in _patched_classes:
        _patched_classes[key] = subclass(original, rewrite, rewrite.compile(original))
    return _patched_classes[key]


def subclass(original: Any, rewrite: Rewrite, forward: Callable[..., Any]) -> type:
    """A subclass of original that goes by its name, with this forward."""

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = original.__reduce_ex__(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        if reduced[1] == (cls,):  # by copyreg.__newobj__, which insists on the instance's own class
            return (copyreg._reconstructor, (original, object, None), *reduced[2:])  # type: ignore[attr-defined]
        arguments = tuple(original if argument is cls else argument for argument in reduced[1])
        return (reduced[0], arguments, *reduced[2:])

    def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        inherited = getattr(original, "__deepcopy__", None)
        if inherited is not None:
            clone = inherited(self, memo)
        else:
            rebuild, arguments, state = reduce_ex(self, 2)[:3]
            clone = rebuild(*arguments)
            memo[id(self)] = clone
            clone.__setstate__(copy.deepcopy(state, memo))
        set_class(clone, cls)
        return clone

    def refuse_script(self: nn.Module) -> nn.Module:
        raise RuntimeError(
            f"torch.jit.script: {original.__name__} is patched by onetrip (pattern {rewrite.pattern}), and TorchScript "
            "cannot compile fused forwards: call onetrip.unpatch_model(model) first, or use torch.jit.trace"
        )

    cls: type = type(original)(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": reduce_ex,
            "__deepcopy__": deep_copy,
            "__prepare_scriptable__": refuse_script,  # torch.jit.script asks every module for it first
            "forward": forward,
            "_onetrip_original": original,
            "_onetrip_rewrite": rewrite,
        },
    )
    cls._onetrip_class = cls  # type: ignore[attr-defined]  # says that the above is its own, not inherited
    return cls


def is_patched(module: nn.Module) -> bool:
    """Whether the module's class is one of ours."""
    return getattr(type(module), "_onetrip_class", None) is type(module)


def is_stacked(module: nn.Module) -> bool:
    """Whether the module was patched and then given a class on top (parametrize, fully_shard)."""
    return not is_patched(module) and hasattr(type(module), "_onetrip_original")


def rewrite_of(module: nn.Module) -> Rewrite:
    """The rewrite of a patched module."""
    rewrite: Rewrite = type(module).__dict__["_onetrip_rewrite"]
    return rewrite


def set_class(module: nn.Module, cls: type) -> None:
    """Swap the class and nothing else."""
    object.__setattr__(module, "__class__", cls)


def restore_class(module: nn.Module) -> None:
    """Undo a swap. Bound forwards that a hook stored on the instance meanwhile (accelerate) are bound anew."""
    patched = type(module)
    original = calls.original_class(patched)
    set_class(module, original)
    for name in ("forward", "_old_forward"):
        bound = module.__dict__.get(name)
        if isinstance(bound, MethodType) and bound.__func__ is patched.__dict__["forward"]:
            module.__dict__[name] = MethodType(original.forward, module)
