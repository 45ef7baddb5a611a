"""A driver for Triton that runs what it compiles for sm_90 on CPU tensors, by the emulator of machine.h.

install() before anything is launched; tests/conftest.py does where ONETRIP_TRITON_MACHINE is 1. Under AddressSanitizer
(LD_PRELOAD) every access outside of a tensor is found.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from .emulator import EMULATOR, build_machine, made_once, python_flags

BUILD = Path(__file__).resolve().parents[2] / "build" / "triton_machine"
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
SHARED_BYTES = 227 * 1024
ORDER = 0
"""Order of warps: see Program::run()."""


def missing_tool() -> str | None:
    """Why nothing can be run here, or None."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        return f"triton {triton.__version__}: launchers take other arguments before 3.7"
    if shutil.which("g++") is None:
        return "no g++"
    return None if NVDISASM.exists() else "triton's wheel has no nvdisasm"


@functools.cache
def _machine() -> Any:
    """The emulator as a module."""
    library = build_machine("so", "-shared", *python_flags(), str(EMULATOR / "python_module.cpp"))
    spec = importlib.util.spec_from_file_location("machine", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Kernel:
    """A compiled kernel, loaded."""

    def __init__(self, name: str, cubin: bytes, shared_bytes: int) -> None:
        self.name, self.shared_bytes = name, shared_bytes

        def make(folder: Path) -> None:
            folder.mkdir()
            (folder / "cubin").write_bytes(cubin)
            with (folder / "disassembly").open("w") as file:
                # Without the analysis of indirect branches, a fifth of the time: Triton's kernels have none.
                subprocess.run([str(NVDISASM), "-c", "-ndf", str(folder / "cubin")], stdout=file, check=True)

        folder = made_once(BUILD / f"{name}-{hashlib.sha256(cubin).hexdigest()[:16]}", make)
        self._program = _machine().Program(str(folder / "cubin"), str(folder / "disassembly"))

    def run(self, grid: tuple[int, int, int], n_threads: int, parameters: bytes) -> None:
        self._program.run(self.name, grid, n_threads, self.shared_bytes, parameters, ORDER)


_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H", "u32": "I"}
_FORMATS |= {"u64": "Q", "fp16": "e", "fp32": "f", "fp64": "d"}


def pack(types: Sequence[str], arguments: Sequence[Any]) -> bytes:
    """Each parameter at a multiple of its size, as in the constant bank; then Triton's two of its own, null."""
    packed = b""
    for type_, argument in zip([*types, "*", "*"], [*arguments, None, None], strict=True):
        if type_[0] == "*":
            field = struct.pack("Q", argument.data_ptr() if isinstance(argument, torch.Tensor) else argument or 0)
        else:
            if type_ == "fp32":
                argument = ctypes.c_float(argument).value  # a number beyond float32 is infinite, as for the launcher
            field = struct.pack("<" + _FORMATS[type_], argument)
        packed += bytes(-len(packed) % len(field)) + field
    return packed


class Launcher:
    """Launches one kernel. Constexprs are no parameters."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._types = list(src.signature.values())
        assert metadata.num_ctas == 1, "clusters are not set up"
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0, "no memory to scratch in"

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        kernel: Kernel,
        packed_metadata: tuple[int, ...],
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        *arguments: Any,
    ) -> None:
        given = [(t, a) for t, a in zip(self._types, arguments, strict=True) if t != "constexpr"]
        driver = triton.runtime.driver.active
        for _, tensor in given:
            assert not isinstance(tensor, torch.Tensor) or tensor.device.type == driver.device.type, tensor.device
        num_warps = packed_metadata[0]
        parameters = pack([t for t, _ in given], [a for _, a in given])
        if not driver.captures(work := lambda: kernel.run((grid_x, grid_y, grid_z), 32 * num_warps, parameters)):
            work()


class Utils:
    """What Triton asks of a device."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, cubin: bytes, shared_bytes: int, device: int) -> tuple[Any, ...]:
        """(module, function, registers, spills, most threads of a block)"""
        kernel = Kernel(name, cubin, shared_bytes)
        return kernel, kernel, 0, 0, 1024


class Driver(DriverBase):
    def __init__(self, device: torch.device, captures: Callable[[Callable[[], None]], bool]) -> None:
        super().__init__()
        self.utils = Utils()
        self.launcher_cls = Launcher
        self.device, self.captures = device, captures

    @classmethod
    def is_active(cls) -> bool:
        return missing_tool() is None

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return self.device

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("there is nothing to time")


def install() -> None:
    """From now on Triton's kernels take CPU tensors."""
    import onetrip.kernels

    os.environ.pop("LD_PRELOAD", None)  # AddressSanitizer, for this process: ptxas and nvdisasm are faster without
    install_on(torch.device("cpu"), lambda work: False)
    elsewhere = onetrip.kernels.unavailable_reason
    onetrip.kernels.unavailable_reason = lambda device: "" if device.type == "cpu" else elsewhere(device)


def install_on(device: torch.device, captures: Callable[[Callable[[], None]], bool]) -> None:
    """From now on Triton's kernels take tensors of that device, in this process's memory. captures: of a launch's work,
    whether a graph is captured that keeps it for later."""
    triton.runtime.driver.set_active(Driver(device, captures))
