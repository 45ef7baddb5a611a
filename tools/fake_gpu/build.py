"""Builds a CUDA device for torch's CPU build, in the CPU's memory (torch_device.cpp), and the native library with its
CUDA kernels on the simulator of tools/gpusim. Triton runs what it compiles for sm_90 on the emulator of tools/sass."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pybind11
import torch

from ..gpusim import harness
from ..gpusim.harness import BUILD, ROOT, SIMULATOR, simulator_sources

FAKE_GPU = Path(__file__).resolve().parent


def missing_tool() -> str | None:
    """Why the fake GPU cannot be built here, or None."""
    if torch.version.cuda is not None:
        return "torch is built with CUDA"
    return harness.missing_tool()


def _native_sources() -> list[Path]:
    csrc = ROOT / "csrc"
    sources = [csrc / "bindings.cpp", *sorted((csrc / "cuda").glob("*.cu")), *sorted((csrc / "cpu").glob("*.cpp"))]
    return [*sources, SIMULATOR / "cudasim.cpp", FAKE_GPU / "native_runtime.cpp"]


def build() -> Path:
    """Compiles the device of torch and the native library, under build/ by the hash of their sources. Returns their
    folder."""
    of_torch = Path(torch.__file__).parent
    python = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    cuda = [f"-isystem{folder}" for folder in harness.cuda_includes() or ()]
    common = ["-O1", "-fPIC", "-w", *python, f"-I{SIMULATOR}", f"-I{ROOT / 'csrc'}"]
    torch_includes = [f"-isystem{of_torch / 'include' / name}" for name in ("", "torch/csrc/api/include")]
    torch_flags = ["-std=c++20", *common, *torch_includes]
    torch_libraries = [f"-L{of_torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{of_torch / 'lib'}"]
    native_flags = [
        *("-std=c++17", *common, *cuda, "-fopenmp", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off"),
        *(
            "-DONETRIP_CUDASIM",
            "-DONETRIP_WITH_CUDA",
            "-DONETRIP_LEVEL=baseline",
            '-DONETRIP_CUDA_ARCHS_BUILT="7.0 8.0 9.0"',
        ),
    ]
    digest = hashlib.sha256("\0".join([torch.__version__, *torch_flags, *native_flags]).encode())
    for path in sorted([*(ROOT / "csrc").rglob("*.*"), *simulator_sources(), *FAKE_GPU.glob("*.cpp")]):
        digest.update(path.name.encode() + path.read_bytes())
    folder = BUILD / f"fake_gpu-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as temporary:
        unfinished = Path(temporary) / "fake_gpu"
        unfinished.mkdir()
        objects = [(source, unfinished / f"{source.name}.o") for source in _native_sources()]
        commands = [["g++", *native_flags, "-x", "c++", "-c", str(source), "-o", str(out)] for source, out in objects]
        device = ["-shared", str(FAKE_GPU / "torch_device.cpp"), "-o", str(unfinished / "torch_device.so")]
        commands.append(["g++", *torch_flags, *device, *torch_libraries])
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda command: subprocess.run(command, check=True), commands))
        library = ["-shared", "-fopenmp", *(str(out) for _, out in objects), "-ldl"]
        subprocess.run(["g++", *library, "-o", str(unfinished / "_native.so")], check=True)
        with suppress(OSError):  # another process was faster
            unfinished.rename(folder)
    return folder


def environment(capability: int = 9) -> dict[str, str]:
    """Variables of a process, and those that it starts, in which torch sees a GPU of major compute capability 7 (as a
    V100), 8 (as an A100) or 9 (as an H100)."""
    path = [str(FAKE_GPU / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Workers that compile for Inductor would be processes of their own.
    return {
        "ONETRIP_FAKE_GPU": str(build()),
        "ONETRIP_FAKE_GPU_CAPABILITY": str(capability),
        "PYTHONPATH": os.pathsep.join(path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_CACHE_DIR": str(ROOT / "build" / "triton_machine" / "cache"),
    }
