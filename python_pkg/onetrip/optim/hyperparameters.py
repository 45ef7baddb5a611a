"""Options of param groups: checked when they change, made plain Python numbers for any reader of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.common.checks import check_number
from ..reference.adam import Group
from ..reference.rounding import RESIDUAL_DTYPES

_KEYS = (
    "betas",
    "eps",
    "weight_decay",
    "optim_bits",
    "min_8bit_numel",
    "maximize",
    "capturable",
    "master_weight_bits",
    "bf16_stochastic_round",
)


def plain(value: Any) -> Any:
    """The Python number of a NumPy scalar (schedulers and configurations write such), anything else as it is."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _check_range(function: str, argument: str, value: object, below: float = float("inf")) -> None:
    """A number in [0, below)."""
    if isinstance(value, bool):
        raise TypeError(f"{function}: {argument} must be a number, got bool")
    check_number(function, argument, value)
    if not 0.0 <= value < below:  # type: ignore[operator]
        wanted = ">= 0 and finite" if below == float("inf") else f"in [0, {below:g})"
        raise ValueError(f"{function}: {argument} must be {wanted}, got {value}")


def _check_lr(function: str, lr: object, may_wait: bool) -> None:
    """may_wait: a tensor on a device is read, which waits for the device."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.is_floating_point():
            kind = f"{str(lr.dtype)[6:]} of shape {tuple(lr.shape)}"
            raise ValueError(f"{function}: lr must be a number or a floating-point Tensor of one element, got {kind}")
        if lr.device.type != "cpu" and not may_wait:
            return
        lr = lr.item()
    _check_range(function, "lr", lr)


def check_group(function: str, group: dict[str, Any], may_wait: bool) -> None:
    """Raises where a number is wrong; writes NumPy scalars back into the group as Python numbers."""
    for key in ("lr", *_KEYS[1:]):
        if type(group[key]) not in (float, int, bool):
            group[key] = plain(group[key])
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{function}: betas must be two numbers, got {betas!r}")
    if type(betas) is list or type(betas[0]) is not float or type(betas[1]) is not float:
        group["betas"] = betas = tuple(map(plain, betas))
    _check_lr(function, group["lr"], may_wait)
    for i, beta in enumerate(betas):
        _check_range(function, f"betas[{i}]", beta, 1.0)
    _check_range(function, "eps", group["eps"])
    _check_range(function, "weight_decay", group["weight_decay"])
    if type(group["optim_bits"]) is not int or group["optim_bits"] not in (8, 32):
        raise ValueError(f"{function}: optim_bits must be 8 or 32, got {group['optim_bits']!r}")
    if type(group["min_8bit_numel"]) is not int or group["min_8bit_numel"] < 0:
        raise ValueError(f"{function}: min_8bit_numel must be an integer >= 0, got {group['min_8bit_numel']!r}")
    bits = group["master_weight_bits"]
    if bits is not None and (type(bits) is not int or bits not in RESIDUAL_DTYPES):
        raise ValueError(f"{function}: master_weight_bits must be 24, 32 or None, got {bits!r}")
    for flag in ("maximize", "capturable", "bf16_stochastic_round"):
        if not isinstance(group[flag], bool):
            raise TypeError(f"{function}: {flag} must be a bool, got {type(group[flag]).__name__}")
    if bits is not None and group["bf16_stochastic_round"]:
        raise ValueError(
            f"{function}: bf16_stochastic_round must be False where there are master weights, got "
            f"master_weight_bits={bits}"
        )


def checked_max_grad_norm(function: str, max_grad_norm: Any) -> float | None:
    """A number greater than 0, inf included, or None."""
    if max_grad_norm is None:
        return None
    number = plain(max_grad_norm)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{function}: max_grad_norm must be a number or None, got {type(number).__name__}")
    if not number > 0.0:
        raise ValueError(f"{function}: max_grad_norm must be greater than 0, got {number}")
    return float(number)


def number_on(device: torch.device, number: Any) -> Tensor:
    """A GradScaler's tensor, or what a user has set, as one float32 on the device."""
    if not isinstance(number, Tensor):
        number = torch.tensor(number, dtype=torch.float32, device="cpu")
    if number.numel() != 1:
        raise ValueError(f"step: grad_scale and found_inf must have one element, got shape {tuple(number.shape)}")
    return number.to(device, torch.float32, non_blocking=True)


class Options:
    """The options of all param groups, as a step takes them."""

    def __init__(self, function: str, decoupled: bool) -> None:
        """function: for messages. decoupled: the kind of weight decay."""
        self._function, self._decoupled = function, decoupled
        self._seen: list[tuple[Any, ...]] = []
        self._groups: list[Group] = []

    def read(self, param_groups: list[dict[str, Any]]) -> list[Group]:
        """Raises ValueError or TypeError for a wrong option. Only what has changed since the last call is checked."""
        try:
            seen = [_settings(group) for group in param_groups]
        except KeyError as error:
            i = next(i for i, group in enumerate(param_groups) if error.args[0] not in group)
            raise ValueError(f"{self._function}: param_groups[{i}] must have {error}") from None
        if seen != self._seen:
            for group in param_groups:
                check_group(self._function, group, may_wait=False)
            self._seen = [_settings(group) for group in param_groups]
            self._groups = [self._group(group) for group in param_groups]
        return self._groups

    def _group(self, group: Mapping[str, Any]) -> Group:
        lr = group["lr"]
        lr = float(lr) if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr
        beta1, beta2 = group["betas"]
        return Group(lr, beta1, beta2, group["eps"], group["weight_decay"], self._decoupled, group["maximize"])


def _settings(group: Mapping[str, Any]) -> tuple[Any, ...]:
    lr = group["lr"]
    if isinstance(lr, Tensor):  # one on a GPU is not read; its id stands for it, as long as its Group keeps it alive
        lr = lr.item() if lr.device.type == "cpu" and lr.numel() == 1 else ("id", id(lr))
    values = (lr, *[group[key] for key in _KEYS])
    return values + tuple(map(type, values))  # 8.0 == 8
