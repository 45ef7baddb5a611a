"""Clones of modules. Probes and verification run them, so that the modules themselves do not change."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .calls import original_class

M = TypeVar("M", bound=nn.Module)
_MODULE_STATE = ("_parameters", "_buffers", "_modules")


def clone(module: M, dtype: torch.dtype | None = None) -> M:
    """A module of the original class. Running it forward and backward changes nothing of the given one.

    Parameters are detached aliases (converted, where dtype is given), and random numbers on the CPU in place of those
    on the meta device; buffers and other state are copies; hooks are left out. Only children without parameters of
    torch's own classes (dropouts) are cloned too. Others may be large, or hold state that no copy separates
    (bitsandbytes repacks a weight at its first call): nothing calls them, and _readable takes their place.
    """
    cls = original_class(type(module))
    copied = cls.__new__(cls)
    generator = torch.Generator().manual_seed(0)

    def values(tensor: Tensor) -> Tensor:
        """Of parameters and buffers; the same for every clone."""
        if tensor.is_meta:
            random = torch.randn(tensor.shape, generator=generator, device="cpu")
            tensor = random.to(tensor.dtype) if tensor.is_floating_point() else torch.zeros_like(tensor, device="cpu")
        return tensor.detach() if dtype is None or not tensor.is_floating_point() else tensor.detach().to(dtype)

    state = own_state(module)
    state["_parameters"] = {
        name: None if p is None else nn.Parameter(values(p), p.is_floating_point())
        for name, p in module._parameters.items()
    }
    state["_buffers"] = {
        name: None if buffer is None else values(buffer).clone() for name, buffer in module._buffers.items()
    }
    state["_modules"] = {
        name: None if child is None else clone(child) if _is_stateless(child) else _readable(child)
        for name, child in module._modules.items()
    }
    copied.__dict__.update(state)
    return copied


def _readable(module: nn.Module) -> nn.Module:
    """An nn.Identity with the module's parameters and numbers: an attention may read `self.key.out_features`."""
    found = nn.Identity()
    numbers = {name: value for name, value in vars(module).items() if isinstance(value, (int, float, str))}
    found.__dict__.update(numbers | module._parameters)
    return found


def own_state(module: nn.Module) -> dict[str, Any]:
    """Copies of a module's attributes, apart from parameters, buffers and children. Hooks are left out."""
    return {
        name: type(value)() if "hooks" in name and hasattr(value, "clear") else own_copy(value)
        for name, value in vars(module).items()
        if name not in _MODULE_STATE
    }


def own_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of an attribute, recursively, so that a forward can change it in place.

    Shares modules, functions, tuples of other classes (torch.Size), and objects that cannot be copied (locks, process
    groups).
    """
    memo = {} if memo is None else memo
    if callable(value) or isinstance(value, (int, float, str)) or value is None:
        return value
    if id(value) not in memo:
        if isinstance(value, Tensor):
            return memo.setdefault(id(value), value.detach().clone())
        if isinstance(value, tuple):
            make = tuple if type(value) is tuple else getattr(value, "_make", None)  # of a NamedTuple
            return value if make is None else make(own_copy(each, memo) for each in value)
        try:
            copied = memo[id(value)] = copy.copy(value)
        except Exception:  # raised by its class
            return memo.setdefault(id(value), value)
        if copied is not value:
            for key, each in _contents(copied):
                copied[key] = own_copy(each, memo)
            for name, each in getattr(copied, "__dict__", {}).items():
                copied.__dict__[name] = own_copy(each, memo)
    return memo[id(value)]


def is_same(value: Any, other: Any) -> bool:
    """Whether an attribute and its own_copy have equal contents."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        return torch.equal(value, other)
    if isinstance(value, (int, float, str, set, bytearray)):
        return bool(value == other)
    mine, others = ([*_contents(each), *getattr(each, "__dict__", {}).items()] for each in (value, other))
    return len(mine) == len(others) and all(
        key == other_key and is_same(each, other_each)
        for (key, each), (other_key, other_each) in zip(mine, others, strict=True)
    )


def _contents(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, dict):
        return list(container.items())
    return list(enumerate(container)) if isinstance(container, (list, tuple)) else []


def _is_stateless(module: nn.Module) -> bool:
    is_torch = original_class(type(module)).__module__.startswith("torch.nn.modules.")
    has_tensors = module._parameters or module._buffers or module._modules
    return is_torch and "forward" not in vars(module) and not has_tensors
