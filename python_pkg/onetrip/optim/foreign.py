"""Optimizer states of other libraries: whose they are, and those of bitsandbytes as torch.optim's."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from . import sharding
from .state import describe

IMPORTED = ("lr", "betas", "eps", "weight_decay")
"""What groups of other classes' states must have."""
_BNB_WRAPPER = "__bnb_optimizer_quant_state__"


def check_is_state_dict(where: str, argument: str, value: object) -> None:
    """A dict with state and param_groups."""
    if isinstance(value, Mapping) and {"state", "param_groups"} <= set(value):
        if not isinstance(value["state"], Mapping):
            raise ValueError(f"{where}: state must be a dict, got {type(value['state']).__name__}")
        return
    got, hint = type(value).__name__, ""
    if isinstance(value, Mapping):
        got = str(sorted(map(str, value))[:8])
        if value and all(isinstance(inner, Tensor) for inner in value.values()):
            hint = "; it looks like a model's state_dict"
    elif isinstance(value, (str, bytes, PathLike)):
        hint = "; load_safetensors reads files of save_safetensors, torch.load those of torch.save"
    raise ValueError(f"{where}: {argument} must have state and param_groups, got {got}{hint}")


def check_is_complete(where: str, state_dict: Mapping[str, Any]) -> None:
    """Raises ValueError where it has fewer states than state_dict() wrote. For a dict before hooks, which may load what
    they want."""
    states, n_states = state_dict.get("state"), state_dict.get("n_states", 0)
    if not isinstance(n_states, int):
        raise ValueError(f"{where}: n_states must be an int, got {n_states!r}")
    if isinstance(states, Mapping) and (found := sum(entry not in (None, {}) for entry in states.values())) < n_states:
        raise ValueError(
            f"{where}: state must have the {n_states} entries that it was saved with, got {found}; to load only these, "
            "delete n_states"
        )


def is_of_bitsandbytes(states: Mapping[Any, Any]) -> bool:
    """By the keys of its entries. False where there are none."""
    return any(isinstance(entry, Mapping) and (_BNB_WRAPPER in entry or "state1" in entry) for entry in states.values())


def from_bitsandbytes(where: str, params: list[Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    """bitsandbytes' state_dict of an optimizer of these parameters as one of torch.optim.AdamW."""
    check_is_state_dict(where, "state", state)
    if any(state["state"].values()) and not is_of_bitsandbytes(state["state"]):
        raise ValueError(f"{where}: state must be bitsandbytes', got another optimizer's; call load_state_dict")
    try:
        keys = [key for group in state["param_groups"] for key in group["params"]]
        saved = {key: state["state"].get(key) for key in keys}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where}: state must be a state_dict of an optimizer, got a damaged one") from error
    if len(keys) != len(params) or any(sharding.is_sharded(p) for p in params):
        kind = f"{len(keys)} parameters" if len(keys) != len(params) else "sharded parameters"
        raise ValueError(f"{where}: state must be of this optimizer's {len(params)} whole parameters, got {kind}")
    groups = []
    for group in state["param_groups"]:
        kept = {key: group[key] for key in ("params", *IMPORTED, "initial_lr") if key in group}
        if isinstance(kept.get("betas"), (tuple, list)):
            kept["betas"] = tuple(kept["betas"])[:2]  # a third is of AdEMAMix
        kept["decoupled_weight_decay"] = True
        groups.append(kept)
    moments = {
        key: _moments(f"{where}: state of parameter {key}", p, saved[key])
        for key, p in zip(keys, params, strict=True)
        if saved[key]
    }
    return {"state": moments, "param_groups": groups}


def _moments(where: str, p: Tensor, entry: object) -> dict[str, Any]:
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
                f"{where}: state{number} must have the parameter's {p.numel()} elements, got {describe(codes)}"
            )
        if codes.is_floating_point():
            moments[key] = codes.to(torch.float32).view(p.shape)
            continue
        qmap, absmax = entry.get(f"qmap{number}"), entry.get(f"absmax{number}")
        if codes.dtype is not torch.uint8 or not isinstance(qmap, Tensor) or tuple(qmap.shape) != (256,):
            raise ValueError(
                f"{where}: state{number} must be uint8 codes with a qmap{number} of 256 values, got {describe(codes)} "
                f"and {describe(qmap)}"
            )
        sizes = {-(-codes.numel() // block): block for block in (2048, 256)}
        if not isinstance(absmax, Tensor) or absmax.numel() not in sizes:
            raise ValueError(
                f"{where}: absmax{number} must have one scale for each 256 or 2048 elements, got {describe(absmax)}; "
                "states with one scale for the whole tensor (block_wise=False) cannot be read"
            )
        scale = absmax.to(torch.float32).reshape(-1).repeat_interleave(sizes[absmax.numel()])[: codes.numel()]
        moments[key] = (qmap.to(torch.float32)[codes.reshape(-1).long()] * scale).view(p.shape)
    return moments
