"""Python imports this first where its folder is on PYTHONPATH (environment() of build.py): from then on torch, as
soon as it is imported, sees the fake GPU, and Triton's kernels run on it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

FOLDER = Path(os.environ["ONETRIP_FAKE_GPU"])
ROOT = Path(__file__).resolve().parents[3]


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _AroundImport(importlib.abc.MetaPathFinder):
    """Calls before(), imports the module as ever, calls after()."""

    def __init__(self, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.name, self.before, self.after = name, before, after
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self.before()
            run(module)
            self.after()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _load_device() -> None:
    # torch asks once, when it is imported, which devices there are. The native library looks for a function of it.
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    sys.modules["torch_device"] = load("torch_device", FOLDER / "torch_device.so")
    sys.setdlopenflags(flags)
    sys.modules["onetrip._native"] = load("onetrip._native", FOLDER / "_native.so")


def _install_in_torch() -> None:
    load("onetrip_torch_cuda", Path(__file__).with_name("torch_cuda.py")).install()  # type: ignore[attr-defined]


def _install_in_triton() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" or os.environ["ONETRIP_FAKE_GPU_CAPABILITY"] != "9":
        return  # the emulator's Triton compiles for sm_90
    import torch
    import torch_device

    sys.path.append(str(ROOT))
    from tools.sass import triton_machine

    if not triton_machine.missing_tool():
        triton_machine.install_on(torch.device("cuda", 0), torch_device.captures)


if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    _AroundImport("torch", _load_device, _install_in_torch)
    _AroundImport("triton", lambda: None, _install_in_triton)
