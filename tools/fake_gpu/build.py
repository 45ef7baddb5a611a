"""Builds a CUDA device for torch's CPU build, in the CPU's memory (torch_device.cpp), and the native library with its
CUDA kernels on the simulator of tools/gpusim. Triton runs what it compiles for sm_90 on the emulator of tools/sass."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..gpusim import harness
from ..gpusim.harness import RUNTIME, compiled, simulator_sources
from ..sass.cuda_compile import CSRC, ROOT, SIMULATOR, simulator_flags
from ..sass.emulator import BUILD, compiled_once, digest_of, python_flags

FAKE_GPU = Path(__file__).resolve().parent


def missing_tool() -> str | None:
    """Why the fake GPU cannot be built here, or None."""
    if torch.version.cuda is not None:
        return "torch is built with CUDA"
    return harness.missing_tool()


def _native_library(folder: Path) -> Path:
    sources = [CSRC / "bindings.cpp", *sorted((CSRC / "cuda").glob("*.cu")), *sorted((CSRC / "cpu").glob("*.cpp"))]
    sources += [*(SIMULATOR / f"{name}.cpp" for name in RUNTIME), FAKE_GPU / "native_runtime.cpp"]
    flags = [*simulator_flags(), *python_flags(), "-fopenmp", "-fvisibility=hidden", "-DONETRIP_WITH_CUDA"]
    flags += ["-DONETRIP_LEVEL=baseline", '-DONETRIP_CUDA_ARCHS_BUILT="7.0 8.0 9.0"']
    headers = [*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh"), *simulator_sources()]

    def object_of(source: Path) -> Path:
        """Not optimised where little runs: the kernels of the CPU, and bindings.cpp."""
        level = "-O0" if source.parent in (CSRC, CSRC / "cpu") else "-O1"
        return compiled(source, [*flags, level], headers)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(object_of, sources))
    return compiled_once(folder / "_native.so", ["g++", "-shared", "-fopenmp", *map(str, objects), "-ldl", "-o"])


def _torch_device(folder: Path) -> Path:
    of_torch = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O1", "-w", *python_flags()]
    flags += [f"-isystem{of_torch / 'include' / name}" for name in ("", "torch/csrc/api/include")]
    libraries = [f"-L{of_torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{of_torch / 'lib'}"]
    device = compiled(FAKE_GPU / "torch_device.cpp", [*flags, f"-DTORCH={torch.__version__}"], FAKE_GPU.glob("*.h"))
    return compiled_once(folder / "torch_device.so", ["g++", "-shared", str(device), *libraries, "-o"])


def build() -> Path:
    """Compiles the device of torch and the native library, under build/ by the hash of their sources. Returns their
    folder."""
    sources = [*CSRC.rglob("*.*"), *simulator_sources(), *FAKE_GPU.glob("*.*")]
    folder = BUILD / f"fake_gpu-{digest_of([torch.__version__], sources)}"
    _torch_device(folder)
    _native_library(folder)
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
