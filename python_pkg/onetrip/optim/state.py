"""The state of a parameter: how it is made, read, and taken from checkpoints.

A 32-bit state has torch.optim.Adam's keys with torch's meaning:

    step               float32, 0-dimensional, on the parameter's device
    exp_avg            float32, contiguous, shaped like the parameter's local part
    exp_avg_sq         the same

An 8-bit state has other keys, so that torch.optim raises KeyError instead of reading codes as moments:

    n_steps            as step
    exp_avg_codes      uint8, contiguous, shaped like the parameter's local part
    exp_avg_scale      [n_blocks] float32, one scale for each BLOCK elements
    exp_avg_sq_codes   uint8: codes of the square root of the second moment
    exp_avg_sq_scale   [n_blocks] float32: scales of the square root

Either has, where master weights of 24 or 32 bits are kept:

    master_residual    int8 or int16, contiguous, shaped like the parameter's local part (reference/rounding.py)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.adam import BLOCK, ZERO_CODE, dequantize, quantize
from ..reference.rounding import RESIDUAL_DTYPES, RESIDUALS
from . import sharding

State = dict[str, Tensor]
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # and whether the map of its codes is signed
_KEYS_32BIT = ("step", "exp_avg", "exp_avg_sq")
_KEYS_8BIT = ("n_steps", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scale", "exp_avg_sq_scale")
RESIDUAL = "master_residual"


class Fields(NamedTuple):
    """The tensors of a state; the moments are uint8 codes where there are scales."""

    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None
    exp_avg_sq_scale: Tensor | None
    residual: Tensor | None


def uses_8bit(group: Mapping[str, Any], p: Tensor) -> bool:
    """Whether a parameter of this group gets an 8-bit state at its first step."""
    return group["optim_bits"] == 8 and p.numel() >= group["min_8bit_numel"]


def has_codes(state: Mapping[str, object]) -> bool:
    return "exp_avg_codes" in state


def keys_of(state: Mapping[str, object]) -> tuple[str, ...]:
    """The keys that a state of its kind must have, in the order of Fields."""
    return (_KEYS_8BIT if has_codes(state) else _KEYS_32BIT) + ((RESIDUAL,) if RESIDUAL in state else ())


def fields(state: State) -> Fields:
    step, m, v, *scales = [state[key] for key in (_KEYS_8BIT if has_codes(state) else _KEYS_32BIT)]
    m_scale, v_scale = scales or (None, None)
    return Fields(step, m, v, m_scale, v_scale, state.get(RESIDUAL))


def check_state(where: str, p: Tensor, state: State) -> None:
    """Raises ValueError where a step could not use it: a user may have changed it since it was made."""
    if set(state) != set(keys_of(state)) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{where} must have the tensors that a step made, and nothing else, got {list(state)}")
    part = sharding.local(p)
    for key, value in state.items():
        dtypes: tuple[torch.dtype, ...] = (torch.uint8,) if key.endswith("_codes") else (torch.float32,)
        dtypes = tuple(RESIDUALS.values()) if key == RESIDUAL else dtypes
        shape = tuple(part.shape)
        if key.endswith("_scale"):
            shape = (sharding.n_blocks(part.numel(), sharding.first_element(p) or 0),)
        elif key in ("step", "n_steps"):
            shape = ()
        if (
            value.dtype not in dtypes
            or tuple(value.shape) != shape
            or value.device != part.device
            or not value.is_contiguous()
        ):
            wanted = f"{' or '.join(str(dtype)[6:] for dtype in dtypes)} of shape {shape}"
            raise ValueError(
                f"{where}: {key} must be {wanted}, contiguous on {part.device}, got {describe(value)}, strides "
                f"{value.stride()} on {value.device}; write new values with copy_, or delete this state to start anew"
            )


def new_state(p: Tensor, is_8bit: bool) -> State:
    """The state of a parameter that has not taken a step, without residual."""
    part = sharding.local(p)
    step = torch.zeros((), dtype=torch.float32, device=part.device)
    if not is_8bit:
        moments = [torch.zeros(part.shape, dtype=torch.float32, device=part.device) for _ in _MOMENTS]
        return dict(zip(_KEYS_32BIT, (step, *moments), strict=True))
    codes = [
        torch.full(part.shape, ZERO_CODE if signed else 0, dtype=torch.uint8, device=part.device)
        for _, signed in _MOMENTS
    ]
    n_blocks = sharding.n_blocks(part.numel(), sharding.first_element(p) or 0)
    scales = [torch.zeros(n_blocks, dtype=torch.float32, device=part.device) for _ in _MOMENTS]
    return dict(zip(_KEYS_8BIT, (step, *codes, *scales), strict=True))


def fitted(p: Tensor, state: State, master_weight_bits: int | None) -> State:
    """The state with the residual that a parameter of its dtype and group has: 0 where it has none so far."""
    has_residual = RESIDUAL in state
    if p.dtype.itemsize != 2:
        return {key: value for key, value in state.items() if key != RESIDUAL} if has_residual else state
    if has_residual or master_weight_bits is None:
        return state
    part = sharding.local(p)
    dtype = RESIDUAL_DTYPES[master_weight_bits]
    return state | {RESIDUAL: torch.zeros(part.shape, dtype=dtype, device=part.device)}


def runs(p: Tensor, part: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """[begin, end) of elements and [begin, end) of scales of the runs of this rank's part that are quantised apart."""
    done = 0
    for begin, end in sharding.parts(part.numel(), sharding.first_element(p) or 0):
        count = (end - begin + BLOCK - 1) // BLOCK
        yield begin, end, done, done + count
        done += count


def dequantized(p: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """(first, second moment), new float32 tensors shaped like p's local part."""
    if not has_codes(state):
        return state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    moments = []
    for key, signed in _MOMENTS:
        codes, scale = state[f"{key}_codes"], state[f"{key}_scale"]
        found = [dequantize(codes.view(-1)[a:b], scale[c:d], signed) for a, b, c, d in runs(p, codes)]
        values = torch.cat(found).view(codes.shape) if found else torch.zeros_like(codes, dtype=torch.float32)
        moments.append(values if signed else values * values)
    return moments[0], moments[1]


def for_torch(p: Tensor, state: State) -> State:
    """A new state for torch.optim.Adam: float32 moments with p's strides, the step on the CPU, no residual."""
    part = sharding.local(p)
    moments = [torch.empty_like(part, dtype=torch.float32).copy_(values) for values in dequantized(p, state)]
    return dict(zip(_KEYS_32BIT, (fields(state).step.cpu().clone(), *moments), strict=True))


def quantized(p: Tensor, state: State) -> State:
    """The 8-bit state for a 32-bit one."""
    step, exp_avg, exp_avg_sq, _, _, residual = fields(state)
    new = new_state(p, is_8bit=True) | {"n_steps": step}
    if residual is not None:
        new[RESIDUAL] = residual
    for (key, signed), values in zip(_MOMENTS, (exp_avg, exp_avg_sq.sqrt()), strict=True):
        codes, flat = new[f"{key}_codes"], values.reshape(-1)
        for a, b, c, d in runs(p, codes):
            codes.view(-1)[a:b], new[f"{key}_scale"][c:d] = quantize(flat[a:b], signed)
    return new


def describe(value: object) -> str:
    if isinstance(value, Tensor):
        kind = ", sharded" if sharding.is_sharded(value) else ""
        return f"{str(value.dtype)[6:]} of shape {tuple(value.shape)}{kind}"
    return f"{value!r}" if isinstance(value, (int, float)) else type(value).__name__


def _steps(where: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise ValueError(f"{where} must be one number >= 0, got {describe(value)}")
    return float(value)


def checked(where: str, p: Tensor, entry: object, group: Mapping[str, Any] | None) -> State:
    """A checkpoint's state of parameter p, copied to its device, every value's shape, dtype and range checked.

    where: for messages. group: of a state that another class has written: float32 moments become 8-bit ones where the
    group has such.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a dict, got {type(entry).__name__}")
    keys = keys_of(entry)
    if set(entry) != set(keys):
        raise ValueError(f"{where} must have {sorted(keys)}, got {sorted(map(str, entry))}")
    step = _steps(f"{where}: {keys[0]}", entry[keys[0]])
    state = {keys[0]: torch.tensor(step, dtype=torch.float32, device=sharding.local(p).device)}
    for moment, signed in _MOMENTS:
        if has_codes(entry):
            key, of_scale = f"{moment}_codes", f"{moment}_scale"
            codes = _moment(f"{where}: {key}", p, entry[key], torch.uint8)
            state[of_scale], state[key] = _scale(f"{where}: {of_scale}", p, entry[of_scale], codes, signed)
            continue
        state[moment] = _moment(f"{where}: {moment}", p, entry[moment], torch.float32)
        if not signed and bool((state[moment] < 0.0).any()):
            raise ValueError(f"{where}: {moment} must be >= 0, got negative values")
    if RESIDUAL in entry:
        residual = entry[RESIDUAL]
        if isinstance(residual, Tensor) and residual.dtype == torch.int8 and residual.shape == (*p.shape, 2):
            residual = sharding.from_bytes(residual)
        dtype = residual.dtype if isinstance(residual, Tensor) else None
        if dtype is None or dtype not in RESIDUALS.values():
            raise ValueError(f"{where}: {RESIDUAL} must be int8 or int16, got {describe(residual)}")
        state[RESIDUAL] = _moment(f"{where}: {RESIDUAL}", p, residual, dtype)
    state = fitted(p, state, None)
    return quantized(p, state) if group is not None and uses_8bit(group, p) and not has_codes(state) else state


def _moment(where: str, p: Tensor, value: object, dtype: torch.dtype) -> Tensor:
    """A contiguous copy of this rank's part. dtype: an integer's, or float32, which any floating-point tensor is cast
    to."""
    if not isinstance(value, Tensor) or not (
        value.dtype is dtype or (dtype.is_floating_point and value.is_floating_point())
    ):
        kind = "a floating-point tensor" if dtype.is_floating_point else f"{str(dtype)[6:]} codes"
        raise ValueError(f"{where} must be {kind}, got {describe(value)}")
    mine = sharding.local_of_saved(p, value)
    if mine is None:
        raise ValueError(f"{where} must be shaped like its parameter, {tuple(p.shape)}, got {describe(value)}")
    part = sharding.local(p)
    return torch.empty(part.shape, dtype=dtype, device=part.device).copy_(mine)


def _scale(where: str, p: Tensor, value: object, codes: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """This rank's scales, copied, and codes."""
    found = None
    if isinstance(value, Tensor) and value.dtype is torch.float32:
        found = sharding.from_saved_scale(p, value.to(codes.device), codes, signed)
    if found is None:
        wanted = f"{sharding.n_blocks(p.numel(), 0)} float32 scales"
        if sharding.is_sharded(p):
            wanted += " of a parameter that is sharded like this one"
        raise ValueError(f"{where} must be {wanted}, got {describe(value)}")
    if bool((found[0] < 0.0).any()):
        raise ValueError(f"{where} must be >= 0, got negative scales")
    return found[0].clone(), found[1]
