"""Patched classes: a module is patched by swapping its class for a cached subclass with a rewritten forward.

The instance does not change, so undoing restores the class only; isinstance, state_dict keys, parameter groups and
policies that look up classes by name keep working. copy.deepcopy returns a patched module. pickle and torch.save store
the original class, so the result loads where onetrip is not installed.
"""

from __future__ import annotations

import ast
import copy
import copyreg
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..ops.row_norm import norm_of_sum
from . import calls
from .report import Unsuitable
from .source import bare, define, definition, own_names, own_variables, parse

GLOBAL_NAMES: dict[str, Any] = {
    "Tensor": Tensor,
    "finfo": torch.finfo,
    "float32": torch.float32,
    "layer_norm": ops.layer_norm,
    "rms_norm": ops.rms_norm,
    "norm_of_sum": norm_of_sum,
    "count_fused": calls.count_fused,
    "count_fallback": calls.count_fallback,
    "is_distributed": calls.is_distributed,
    "is_autocasting": calls.is_autocasting,
}
"""Names that the source of a rewritten forward can use, besides its own constants and `original`."""


@dataclass(frozen=True)
class Rewrite:
    """The methods that replace those of a class."""

    pattern: str
    """A name of patch_model's patterns."""
    sources: tuple[tuple[str, str], ...] = ()
    """(name, source) of methods: the original's, modified. Names in a source are globals of the original's module, or
    constants."""
    around: str = ""
    """`def forward(self, ...)`, which may call the forward, that in sources or else the original, as `original`; empty
    for none."""
    constants: tuple[tuple[str, Any], ...] = ()
    """Names in the sources with their (hashable) values: mostly the types that children must have. Variables that the
    sources add are None here."""
    absorbed: tuple[str, ...] = ()
    """Children whose parameters the sources read instead of calling them."""
    functions: tuple[tuple[Any, str], ...] = ()
    """(function, source) of functions that the forward calls rewritten."""
    detail: str = ""
    """PatchedSite.detail of its sites."""

    @property
    def forward(self) -> str:
        """The source of the forward; empty where it is the original's."""
        return dict(self.sources).get("forward", "")

    @property
    def replaced(self) -> dict[str, str]:
        """Name of a method -> source of what replaces it; of a forward, what is around another one only where that is
        the original's."""
        return ({"forward": self.around} if self.around else {}) | dict(self.sources)

    def taken_names(self, original: Any) -> set[str]:
        """Names that this adds to the class's own methods, and that they use for something else."""
        own = (own_variables(method_of(original, name)) for name, _ in self.sources)
        taken = set().union(*own) & dict(self.constants).keys()
        if self.around:  # it has the forward's parameters
            parameters = inspect.signature(original.forward).parameters.keys()
            taken |= parameters & (dict(self.constants).keys() | GLOBAL_NAMES.keys())
        return taken

    def methods(self, original: Any, replaced: Mapping[str, Any] | None = None) -> dict[str, Callable[..., Any]]:
        """The methods of the patched class, by name. replaced: other values for constants; verification has some."""
        names = {**dict(self.constants), **(replaced or {})}
        made = {
            name: define(method_of(original, name), source, names, "forward", self.pattern)
            for name, source in self.sources
        }
        if "forward" in made:
            made["forward"] = rewrapped(plain_forward(original), made["forward"])
        if self.around:
            inner = made.get("forward", original.forward)
            names = {**GLOBAL_NAMES, "original": inner, **names}
            made["forward"] = forward = define(inner, self.around, names, "forward", self.pattern)
            forward.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]  # Trainer reads it
        return made


def method_of(cls: Any, name: str) -> Any:
    """The method that a rewrite of this name replaces, None if there is none: of a forward in decorators' wrappers, the
    function in them."""
    if name != "forward":
        return getattr(cls, name, None)
    forward = plain_forward(cls)
    while (inner := wrapped(forward)) is not None:
        forward = inner
    return forward


def calls_super(cls: Any) -> bool:
    """Whether a class's forward may call what it overrides."""
    forward = method_of(cls, "forward")
    return isinstance(forward, FunctionType) and "super" in own_names(forward)


def wrapped(function: Any) -> Any:
    """The plain function inside a decorator's wrapper that keeps it in one cell, and not as an attribute; None if there
    is none. transformers' wrapper of a function that a package may replace keeps it in two."""
    inner = getattr(function, "__wrapped__", None)
    if not isinstance(function, FunctionType) or not isinstance(inner, FunctionType):
        return None
    n_cells = sum(value is inner for value in contents(function))
    is_hubs = function.__globals__.get("__name__") == "transformers.integrations.hub_kernels"
    return inner if (n_cells == 1 or (is_hubs and n_cells)) and vars(function).keys() == {"__wrapped__"} else None


def contents(function: Any) -> list[Any]:
    """What the cells of a function hold."""
    return [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]


def plain_function(called: Any) -> Any:
    """The function in the module that the package kernels makes of a decorated one, as long as no kernel takes its
    place; anything else as it is."""
    if not isinstance(called, nn.Module) or not hasattr(type(called), "kernel_layer_name") or "forward" in vars(called):
        return called
    found = contents(type(called).forward)
    return found[0] if len(found) == 1 and isinstance(found[0], FunctionType) else called


def rewrapped(wrapper: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same wrappers around another function; the function itself where there is no wrapper."""
    inner = wrapped(wrapper)
    if inner is None:
        return function
    function = rewrapped(inner, function)
    closure = tuple(CellType(function) if _holds(cell, inner) else cell for cell in wrapper.__closure__)
    made = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, closure)
    made.__kwdefaults__ = wrapper.__kwdefaults__
    return update_wrapper(made, function)


_PASSING_ON: tuple[type[ast.AST], ...] = (
    *(ast.Assign, ast.Expr, ast.If, ast.Raise, ast.Return, ast.expr, ast.expr_context, ast.boolop, ast.operator),
    *(ast.unaryop, ast.cmpop, ast.comprehension, ast.keyword),
)
"""What the body of a wrapper may be made of: no context (no_grad, autocast), no other function."""


def returns_as_is(wrapper: Any) -> bool:
    """Whether all that wrappers do with the function in them is to return what it returns, as transformers'
    deprecate_kwarg does; so that a part of its work may be left to the caller."""
    inner = wrapped(wrapper)
    if inner is None:
        return True
    cells = zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True)
    names = {name for name, cell in cells if _holds(cell, inner)}
    tree = definition(wrapper.__code__)
    if tree is None or wrapper.__code__.co_flags & inspect.CO_GENERATOR:
        return False
    nodes = [node for statement in tree.body for node in ast.walk(statement)]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id in names]
    returned = [getattr(node.value, "func", None) for node in nodes if isinstance(node, ast.Return)]
    named = [node.value for node in nodes if isinstance(node, ast.Attribute)]  # func.__name__
    is_only_returned = all(each in uses for each in returned) and all(each in returned + named for each in uses)
    return is_only_returned and all(isinstance(node, _PASSING_ON) for node in nodes) and returns_as_is(inner)


def _holds(cell: CellType, value: Any) -> bool:
    return not _is_empty(cell) and cell.cell_contents is value


def _is_empty(cell: CellType) -> bool:
    return cell == CellType()


def plain_forward(cls: Any) -> Any:
    """The forward that a class defines, without the wrapper of transformers' GradientCheckpointingLayer, which a
    subclass with a new forward gets again."""
    forward: Any = getattr(cls, "forward", None)
    while getattr(getattr(forward, "__code__", None), "co_name", "") == "forward_with_checkpointing":
        forward = forward.__wrapped__
    return forward


_patched_classes: dict[tuple[Any, ...], type] = {}


def patched_class(original: Any, rewrite: Rewrite) -> type:
    """The subclass of original with the rewritten forward; one in the process, also of the methods that it replaces:
    a class may get others (Liger's are set on the class)."""
    key = (original, rewrite, *(getattr(original, name, None) for name in rewrite.replaced))
    if key not in _patched_classes:
        _patched_classes[key] = subclass(original, rewrite, rewrite.methods(original))
    return _patched_classes[key]


class _Unnoticed(nn.Module):
    """A first base, whose __init_subclass__ runs in place of the class's own: that may add the subclass to a registry,
    or raise for a class that is final."""

    def __init_subclass__(cls) -> None:
        pass


def subclass(original: Any, rewrite: Rewrite, methods: Mapping[str, Callable[..., Any]]) -> type:
    """A subclass of original with these methods and the same name."""

    @contextmanager
    def as_original(self: nn.Module) -> Iterator[None]:
        set_class(self, original)
        try:
            yield
        finally:
            set_class(self, cls)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        with as_original(self):
            reduced: Any = self.__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[1] == (original,):  # copyreg.__newobj__ requires the instance's class
            return (copyreg._reconstructor, (original, object, None), *reduced[2:])  # type: ignore[attr-defined]
        return reduced

    def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        with as_original(self):
            clone = copy.deepcopy(self, memo)
        set_class(clone, cls)
        return clone

    def reject_script(self: nn.Module) -> nn.Module:
        raise RuntimeError(
            f"torch.jit.script: {original.__name__} is patched by onetrip (pattern {rewrite.pattern}), and TorchScript "
            "cannot compile fused forwards: call onetrip.unpatch_model(model) first, or use torch.jit.trace"
        )

    cls: Any = type(original)(
        original.__name__,
        (_Unnoticed, original),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": reduce_ex,
            "__prepare_scriptable__": reject_script,  # torch.jit.script calls it on every module first
            **methods,
            "_onetrip_original": original,
            "_onetrip_rewrite": rewrite,
        },
    )
    cls.__bases__ = (original,)
    of_transformers = (each for each in original.__mro__ if each.__module__.partition(".")[0] == "transformers")
    hooks = (vars(each).get("__init_subclass__") for each in of_transformers)
    if (hook := next(filter(None, hooks), None)) is not None:  # wraps the forward for checkpointing
        hook.__func__(cls)
    # By type: where an instance is asked, PEFT's wrappers pass the question on to the model in them.
    copy._deepcopy_dispatch[cls] = deep_copy  # type: ignore[attr-defined]
    cls._onetrip_class = cls  # distinguishes cls from classes that inherit from it
    return cls


def is_patched(module: nn.Module) -> bool:
    """Whether the module's class is a patched class."""
    return getattr(type(module), "_onetrip_class", None) is type(module)


def is_stacked(module: nn.Module) -> bool:
    """Whether another class was put on top of the patched one (by parametrize or fully_shard)."""
    return was_patched(module) and not is_patched(module)


def was_patched(module: nn.Module) -> bool:
    """Whether it is patched or stacked."""
    return hasattr(type(module), "_onetrip_original")


def patched_class_of(module: Any) -> Any:
    """The class that patch_model gave a patched or stacked module."""
    return type(module)._onetrip_class


def rewrite_of(module: nn.Module) -> Rewrite:
    """The rewrite of a patched or stacked module."""
    rewrite: Rewrite = patched_class_of(module)._onetrip_rewrite
    return rewrite


def forward_diff(patched: type) -> str:
    """The rewritten methods and functions of a patched class against the original's, as unified diffs without
    comments."""
    original, rewrite = calls.original_class(patched), patched.__dict__["_onetrip_rewrite"]
    lines: list[str] = []
    methods = ((method_of(original, name), after) for name, after in rewrite.replaced.items())
    for function, after in (*methods, *rewrite.functions):
        tree = parse(function, may_call_super=True)
        before = "" if isinstance(tree, Unsuitable) else ast.unparse(bare(tree))
        lines += difflib.unified_diff(before.splitlines(), after.splitlines(), "original", "fused", lineterm="")
    return "\n".join(lines)


def set_class(module: nn.Module, cls: type) -> None:
    """Change the module's class and nothing else."""
    object.__setattr__(module, "__class__", cls)


def restore_class(module: nn.Module) -> None:
    """Restore the original class. Rebinds forwards that accelerate (a hook, autocast) stored on the instance; what its
    autocast wraps stays, until accelerate unwraps the model."""
    patched = type(module)
    original = calls.original_class(patched)
    set_class(module, original)
    for name in ("forward", "_old_forward", "_original_forward"):
        bound = module.__dict__.get(name)
        if isinstance(bound, MethodType) and bound.__func__ is patched.__dict__.get("forward"):
            module.__dict__[name] = MethodType(original.forward, module)
