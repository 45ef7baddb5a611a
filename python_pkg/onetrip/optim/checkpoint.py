"""An optimizer's state_dict as one safetensors file: 8 bytes with the header's length, a JSON header, the tensors.

The header's metadata has the param_groups as JSON, and the SHA-256 of the whole file with zeros in its own place.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {torch.uint8: "U8", torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES |= {torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL"}
_NO_SUM = "0" * 64
_FORMAT = "onetrip.optim 1"


def _bytes(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    return (
        memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        if tensor.nbytes
        else memoryview(b"")
    )


def _json(where: str, value: object) -> object:
    """The value, which JSON holds as it is, but that a tuple comes back as a list."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_json(f"{where}[{i}]", inner) for i, inner in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json(f"{where}[{key!r}]", inner) for key, inner in value.items()}
    got = "a dict whose keys are no strings" if isinstance(value, dict) else type(value).__name__
    raise TypeError(
        f"save_safetensors: {where} must be a Tensor, a number, a string, or lists or dicts of those, got {got}"
    )


def _named_tensors(state_dict: dict[str, Any]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Flat tensors, and the groups without theirs."""
    tensors = {f"state.{i}.{key}": value for i, state in state_dict["state"].items() for key, value in state.items()}
    groups = []
    for i, group in enumerate(state_dict["param_groups"]):
        rest = {}
        for key, value in group.items():
            where = f"param_groups[{i}][{key!r}]"
            if not isinstance(key, str):
                raise TypeError(f"save_safetensors: keys of param_groups[{i}] must be strings, got {key!r}")
            if not isinstance(value, Tensor):
                rest[key] = _json(where, value)
            elif value.dtype in _DTYPES and value.layout == torch.strided:
                tensors[f"param_groups.{i}.{key}"] = value
            else:
                wanted = ", ".join(str(dtype)[6:] for dtype in _DTYPES)
                got = str(value.dtype)[6:] if value.layout == torch.strided else value.layout
                raise TypeError(f"save_safetensors: {where} must be a dense tensor of {wanted}, got {got}")
        groups.append(rest)
    return tensors, groups


def save(state_dict: dict[str, Any], path: Path) -> None:
    """Written beside its place, flushed to the disk, then moved there in one step."""
    tensors, groups = _named_tensors(state_dict)
    header: dict[str, Any] = {
        "__metadata__": {"format": _FORMAT, "param_groups": json.dumps(groups), "sha256": _NO_SUM}
    }
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    length = len(text).to_bytes(8, "little")
    digest = hashlib.sha256(length + text)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(length + text)
            for tensor in tensors.values():
                on_host = tensor.detach().cpu().contiguous()
                digest.update(_bytes(on_host))
                file.write(_bytes(on_host))
            file.seek(8)
            file.write(text.replace(_NO_SUM.encode(), digest.hexdigest().encode()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, survives a loss of power
    finally:
        os.close(folder)


def _read(file: Any, count: int) -> bytearray:
    data = bytearray(count)
    if file.readinto(data) != count:
        raise ValueError("it ends too early")
    return data


def load(path: Path) -> dict[str, Any]:
    """The state_dict of a file that save wrote; ValueError where it is another kind of file or a byte is wrong."""
    if path.is_dir():
        raise ValueError(f"load_safetensors: path must be a file, got the folder {path}; torch.distributed.checkpoint")
    try:
        with open(path, "rb") as file:
            return _parsed(file, path.stat().st_size)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"load_safetensors: {path} must be a whole file of save_safetensors, got a damaged or foreign one: {error}"
        ) from error


def _parsed(file: Any, size: int) -> dict[str, Any]:
    length = bytes(_read(file, 8))
    if length.startswith(b"PK\3\4"):
        raise ValueError("one of torch.save; call load_state_dict(torch.load(path, weights_only=True))")
    n_header = int.from_bytes(length, "little")
    if n_header > size - 8:
        raise ValueError("it ends too early")
    text = bytes(_read(file, n_header))
    header = json.loads(text)
    metadata = header.pop("__metadata__", {})
    if "sha256" not in metadata:
        raise ValueError("a model's weights, perhaps: safetensors.torch.load_file reads those")
    checksum = metadata["sha256"]
    if metadata["format"] != _FORMAT or not re.fullmatch("[0-9a-f]{64}", checksum):
        raise ValueError(f"its format must be {_FORMAT!r}")
    digest = hashlib.sha256(length + text.replace(checksum.encode(), _NO_SUM.encode()))
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    tensors = {}
    at = 0
    for name, about in header.items():
        begin, end = about["data_offsets"]
        if begin != at or not begin <= end <= size:
            raise ValueError("its tensors must follow each other")
        data, at = _read(file, end - begin), end
        digest.update(data)
        dtype = dtypes[about["dtype"]]
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
        tensors[name] = flat.view(about["shape"])
    if file.read(1) or digest.hexdigest() != checksum:
        raise ValueError("its checksum is another")
    state: dict[int, dict[str, Tensor]] = {}
    groups = json.loads(metadata["param_groups"])
    for name, tensor in tensors.items():
        kind, index, key = name.split(".", 2)
        (state.setdefault(int(index), {}) if kind == "state" else groups[int(index)])[key] = tensor
    return {"state": state, "param_groups": groups}
