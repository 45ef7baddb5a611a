"""How much of transformers' attention patch_model can read.

Every class and function of transformers.models is looked at, no model is built. What cannot be read is named with the
reason that patch_model's report would give. A module that can be read is still verified when its model is patched.
"""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from onetrip.patching.attention import SoftmaxRegions, read_attention
from onetrip.patching.attention.eager import EagerFunction, read_eager_function
from onetrip.patching.attention.interface import read_interface
from onetrip.patching.report import Unsuitable

EAGER = "eager_attention_forward"


def modeling_files() -> list[Path]:
    import transformers

    return sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))


def _modules(files: list[Path], not_imported: dict[str, str]) -> Iterator[tuple[str, ModuleType]]:
    """(folder, module) of each; why one cannot be imported here goes to not_imported."""
    for file in files:
        name = f"transformers.models.{file.parent.name}.{file.stem}"
        try:
            yield file.parent.name, importlib.import_module(name)
        except Exception as error:
            not_imported[name.rpartition(".")[2]] = f"{type(error).__name__}: {error}".splitlines()[0]


def survey(files: list[Path]) -> dict[str, Any]:
    """What the files define: eager attention functions, and classes that compute a softmax with dropout themselves."""
    functions: dict[str, Any] = {}
    regions: dict[str, set[str]] = defaultdict(set)
    refused: dict[str, dict[str, str]] = {"eager_functions": {}, "own_softmax": {}}
    not_imported: dict[str, str] = {}
    for folder, module in _modules(files, not_imported):
        function = vars(module).get(EAGER)
        if inspect.isfunction(function) and function.__module__ == module.__name__:
            functions[module.__name__.rpartition(".")[2]] = found = read_eager_function(function)
            if isinstance(found, Unsuitable):
                refused["eager_functions"][f"{module.__name__.rpartition('.')[2]}.{EAGER}"] = found.detail
        for cls in vars(module).values():
            if not (inspect.isclass(cls) and issubclass(cls, torch.nn.Module) and cls.__module__ == module.__name__):
                continue
            if read_interface(cls) is not None:
                continue
            reading = read_attention(cls)
            if isinstance(reading, SoftmaxRegions):
                regions["read"].add(folder)
            elif isinstance(reading, Unsuitable):
                regions["refused"].add(folder)
                refused["own_softmax"][f"{module.__name__.rpartition('.')[2]}.{cls.__name__}"] = reading.detail
    return {
        "modeling_files": len(files),
        "not_imported": not_imported,
        "eager_functions": len(functions),
        "eager_functions_read": sum(isinstance(found, EagerFunction) for found in functions.values()),
        "own_softmax_folders": len(regions["read"] | regions["refused"]),
        "own_softmax_folders_read": len(regions["read"]),
        "refused": refused,
    }
