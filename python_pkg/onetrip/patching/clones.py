"""Clones of modules. Probes and verification run them, so that the modules themselves do not change."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .calls import original_class

M = TypeVar("M", bound=nn.Module)
_MODULE_STATE = ("_parameters", "_buffers", "_modules")


def clone(module: M, dtype: torch.dtype | None = None, kept: Collection[str] = ()) -> M:
    """A module of the original class. Running it forward and backward changes nothing of the given one.

    Parameters are detached aliases (converted, where dtype is given); buffers and other state are copies; hooks are
    left out. Children that are plain torch modules, and those named in kept, are cloned too. Any other child may hold
    state that no copy separates (bitsandbytes repacks a weight at its first call): a StandIn takes its place.
    """
    return _clone(module, dtype, kept, {})


def _clone(module: M, dtype: torch.dtype | None, kept: Collection[str], memo: dict[int, Any]) -> M:
    if id(module) in memo:
        return memo[id(module)]
    cls = original_class(type(module))
    copied = memo[id(module)] = cls.__new__(cls)
    state = own_state(module)
    state["_parameters"] = {name: _alias(parameter, dtype, memo) for name, parameter in module._parameters.items()}
    state["_buffers"] = {
        name: None if buffer is None else _converted(buffer.detach().clone(), dtype)
        for name, buffer in module._buffers.items()
    }
    state["_modules"] = {
        name: child
        if child is None
        else _clone(child, dtype, (), memo)
        if name in kept or all(map(is_plain_torch, child.modules()))
        else memo.setdefault(id(child), StandIn(width_of(child, "out_features")))
        for name, child in module._modules.items()
    }
    copied.__dict__.update(state)
    return copied


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _alias(parameter: Tensor | None, dtype: torch.dtype | None, memo: dict[int, Any]) -> Tensor | None:
    if parameter is None:
        return None
    if id(parameter) not in memo:
        memo[id(parameter)] = nn.Parameter(_converted(parameter.detach(), dtype), parameter.is_floating_point())
    return memo[id(parameter)]


def own_state(module: nn.Module) -> dict[str, Any]:
    """Copies of a module's attributes, apart from parameters, buffers and children. Hooks are left out."""
    return {
        name: type(value)() if "hooks" in name and hasattr(value, "clear") else own_copy(value)
        for name, value in vars(module).items()
        if name not in _MODULE_STATE
    }


def own_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of an attribute, recursively, so that a forward can change it in place.

    Shares modules, functions, and objects that cannot be copied (locks, process groups).
    """
    memo = {} if memo is None else memo
    if callable(value) or isinstance(value, (int, float, str)) or value is None:
        return value
    if id(value) not in memo:
        if isinstance(value, Tensor):
            return memo.setdefault(id(value), value.detach().clone())
        if type(value) is tuple:
            return tuple(own_copy(each, memo) for each in value)
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


def is_plain_torch(module: nn.Module) -> bool:
    """Whether the module's class is torch.nn's own and its tensors are plain: its forward changes no Python state."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return (
        original_class(type(module)).__module__.startswith("torch.nn.modules.")
        and "forward" not in vars(module)
        and all(type(tensor) in (Tensor, nn.Parameter, type(None)) for tensor in tensors)
    )


class StandIn(nn.Module):
    """Replaces a child: a sum of random linear maps of its inputs, the same in every clone, without state."""

    def __init__(self, width: int | None) -> None:
        """width: the output's last dimension; None for that of the first input."""
        super().__init__()
        self.width = width

    def forward(self, *inputs: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        width = self.width or inputs[0].shape[-1]
        total = None
        for x in inputs:
            weight = torch.randn(width, x.shape[-1], generator=generator, device="cpu") / x.shape[-1] ** 0.5
            product = nn.functional.linear(x, weight.to(x.device, x.dtype))
            total = product if total is None else total + product
        assert total is not None
        return total


def width_of(child: nn.Module | None, attribute: str) -> int | None:
    """in_features or out_features of the child, or of the first or last module in it that has a width."""
    widths = []
    for each in child.modules() if child is not None else ():
        features = getattr(each, attribute, None)
        vectors = [p for p in each._parameters.values() if p is not None and p.dim() == 1]
        if isinstance(features, int):
            widths.append(features)
        elif not each._modules and vectors:
            widths.append(vectors[0].shape[0])
    if not widths:
        return None
    is_own = isinstance(getattr(child, attribute, None), int)
    return widths[0 if is_own or attribute == "in_features" else -1]
