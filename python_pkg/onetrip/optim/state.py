"""The state of a parameter, and how it is made, read and taken from checkpoints.

step               float32, 0-dimensional, on the parameter's device
exp_avg            shaped like the parameter's local part, contiguous: uint8 codes, or float32
exp_avg_sq         the same; codes are of its square root
exp_avg_scale      [blocks] float32, a scale for each 128 elements; of 8-bit states only
exp_avg_sq_scale   the same, for the square root
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..reference.adam import ZERO_CODE, dequantize, quantize
from . import sharding

State = dict[str, Tensor]
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # and whether the map of its codes is signed
_SCALES = {"exp_avg_scale", "exp_avg_sq_scale"}


def new_state(p: Tensor, is_8bit: bool) -> State:
    """Of a parameter that has not taken a step."""
    part = sharding.local(p)
    state = {"step": torch.zeros((), dtype=torch.float32, device=part.device)}
    for key, signed in _MOMENTS:
        if is_8bit:
            blocks = sharding.n_blocks(part.numel(), sharding.first_element(p) or 0)
            zero = ZERO_CODE if signed else 0
            state[key] = torch.full(part.shape, zero, dtype=torch.uint8, device=part.device)
            state[f"{key}_scale"] = torch.zeros(blocks, dtype=torch.float32, device=part.device)
        else:
            state[key] = torch.zeros(part.shape, dtype=torch.float32, device=part.device)
    return state


def _parts(p: Tensor, state: State) -> Iterator[tuple[int, int, int, int]]:
    """[begin, end) of elements and [begin, end) of scales of this rank's parts."""
    done = 0
    for begin, end in sharding.parts(state["exp_avg"].numel(), sharding.first_element(p) or 0):
        count = (end - begin + 127) // 128
        yield begin, end, done, done + count
        done += count


def dequantized(p: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """(first, second moment), float32, shaped like p's local part."""
    moments = []
    for key, signed in _MOMENTS:
        values = state[key]
        if values.dtype is torch.uint8:
            flat, scale = values.view(-1), state[f"{key}_scale"]
            runs = [dequantize(flat[a:b], scale[c:d], signed) for a, b, c, d in _parts(p, state)]
            values = torch.cat(runs).view(values.shape) if runs else torch.zeros_like(values, dtype=torch.float32)
            values = values if signed else values * values
        else:
            values = values.clone()
        moments.append(values)
    return moments[0], moments[1]


def quantized(p: Tensor, step: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> State:
    """8-bit state from float32 moments of p's local part."""
    state = new_state(p, is_8bit=True) | {"step": step}
    for (key, signed), values in zip(_MOMENTS, (exp_avg, exp_avg_sq.sqrt()), strict=True):
        flat = values.reshape(-1)
        for a, b, c, d in _parts(p, state):
            state[key].view(-1)[a:b], state[f"{key}_scale"][c:d] = quantize(flat[a:b], signed)
    return state


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]} of shape {tuple(value.shape)}"
    return f"{value!r}" if isinstance(value, (int, float)) else type(value).__name__


def _steps(where: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise ValueError(f"{where}: step must be one number >= 0, got {_describe(value)}")
    return float(value)


def checked(where: str, p: Tensor, entry: object, quantize_floats: bool) -> State:
    """A checkpoint's state of parameter p, copied to its device, every value's shape, dtype and range checked.

    where: for messages. quantize_floats: float32 moments (of torch.optim) become 8-bit ones.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a dict, got {type(entry).__name__}")
    if "max_exp_avg_sq" in entry:
        raise ValueError(f"{where} must be of Adam without amsgrad, got max_exp_avg_sq")
    exp_avg = entry.get("exp_avg")
    is_8bit = isinstance(exp_avg, Tensor) and exp_avg.dtype is torch.uint8
    wanted = {"step", "exp_avg", "exp_avg_sq"} | (_SCALES if is_8bit else set())
    if set(entry) != wanted:
        raise ValueError(f"{where} must have {sorted(wanted)}, got {sorted(map(str, entry))}")
    part = sharding.local(p)
    state = {"step": torch.tensor(_steps(where, entry["step"]), dtype=torch.float32, device=part.device)}
    for key, signed in _MOMENTS:
        state[key] = _moment(f"{where}: {key}", p, entry[key], is_8bit)
        if is_8bit:
            scale, state[key] = _scale(f"{where}: {key}_scale", p, entry[f"{key}_scale"], state[key], signed)
            state[f"{key}_scale"] = scale
        elif not signed and bool((state[key] < 0.0).any()):
            raise ValueError(f"{where}: {key} must be >= 0, got negative values")
    if quantize_floats and not is_8bit:
        return quantized(p, state["step"], state["exp_avg"], state["exp_avg_sq"])
    return state


def _moment(where: str, p: Tensor, value: object, is_8bit: bool) -> Tensor:
    """A copy of this rank's part, contiguous, uint8 or float32."""
    if not isinstance(value, Tensor) or not (value.dtype is torch.uint8 if is_8bit else value.is_floating_point()):
        kind = "uint8 codes" if is_8bit else "a floating-point tensor"
        raise ValueError(f"{where} must be {kind}, got {_describe(value)}")
    mine = sharding.local_of_saved(p, value)
    if mine is None:
        raise ValueError(f"{where} must be shaped like its parameter, {tuple(p.shape)}, got {_describe(value)}")
    part = sharding.local(p)
    dtype = torch.uint8 if is_8bit else torch.float32
    return torch.empty(part.shape, dtype=dtype, device=part.device).copy_(mine)


def _scale(where: str, p: Tensor, value: object, codes: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """This rank's scales, copied, and codes."""
    found = None
    if isinstance(value, Tensor) and value.dtype is torch.float32:
        found = sharding.from_saved_scale(p, value.to(codes.device), codes, signed)
    if found is None:
        raise ValueError(f"{where} must be {sharding.n_blocks(p.numel(), 0)} float32 scales, got {_describe(value)}")
    if bool((found[0] < 0.0).any()):
        raise ValueError(f"{where} must be >= 0, got negative scales")
    return found[0].clone(), found[1]


_BNB_WRAPPER = "__bnb_optimizer_quant_state__"


def from_bitsandbytes(where: str, p: Tensor, entry: object) -> dict[str, Any]:
    """bitsandbytes' state of a parameter (state1, state2 and for 8 bits absmax1, qmap1, absmax2, qmap2) as one of
    torch.optim.Adam: float32 moments, on the state's device.

    Its 8-bit values are qmap[code] * absmax of their block, in blocks of 256 elements (2048 in old versions); the
    second moment is stored itself, not its square root.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a dict, got {type(entry).__name__}")
    inner = entry.get(_BNB_WRAPPER, {})
    if not isinstance(inner, Mapping):
        raise ValueError(f"{where}: {_BNB_WRAPPER} must be a dict, got {type(inner).__name__}")
    entry = {key: value for key, value in entry.items() if key != _BNB_WRAPPER} | dict(inner)
    moments: dict[str, Any] = {"step": entry.get("step")}
    for number, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
        codes = entry.get(f"state{number}")
        if not isinstance(codes, Tensor) or codes.numel() != p.numel():
            raise ValueError(
                f"{where}: state{number} must have the parameter's {p.numel()} elements, got {_describe(codes)}"
            )
        if codes.is_floating_point():
            moments[key] = codes.to(torch.float32).view(p.shape)
            continue
        qmap, absmax = entry.get(f"qmap{number}"), entry.get(f"absmax{number}")
        if codes.dtype is not torch.uint8 or not isinstance(qmap, Tensor) or tuple(qmap.shape) != (256,):
            raise ValueError(
                f"{where}: state{number} must be uint8 codes with a qmap{number} of 256 values, got {_describe(codes)} "
                f"and {_describe(qmap)}"
            )
        sizes = {-(-codes.numel() // block): block for block in (2048, 256)}
        if not isinstance(absmax, Tensor) or absmax.numel() not in sizes:
            raise ValueError(
                f"{where}: absmax{number} must have one scale for each 256 or 2048 elements, got {_describe(absmax)}; "
                "states with one scale for the whole tensor (block_wise=False) cannot be read"
            )
        scale = absmax.to(torch.float32).reshape(-1).repeat_interleave(sizes[absmax.numel()])[: codes.numel()]
        moments[key] = (qmap.to(torch.float32)[codes.reshape(-1).long()] * scale).view(p.shape)
    return moments
