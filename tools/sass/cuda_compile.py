"""Compiles a family of CUDA kernels ahead of time, and says what its kernels take of a GPU.

sm_70 is compiled by NVRTC 12.9 (CUDA 13 dropped it), the others by nvcc where there is one, else by NVRTC as well.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from .emulator import EMULATOR, digest_of, made_once

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SIMULATOR = ROOT / "tools" / "gpusim"
BUILD = ROOT / "build" / "cuda_budgets"
NVCC_FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr")


class Multiprocessor(NamedTuple):
    """Limits of the CUDA C++ Programming Guide's table of compute capabilities."""

    threads: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int
    """Bytes of shared memory that the system takes for every block."""
    registers: int = 65536

    @property
    def block_bytes(self) -> int:
        return self.shared_bytes - self.reserved_bytes


KIB = 1024
MULTIPROCESSORS = {
    70: Multiprocessor(2048, 32, 96 * KIB, 0),
    75: Multiprocessor(1024, 16, 64 * KIB, 0),
    80: Multiprocessor(2048, 32, 164 * KIB, KIB),
    90: Multiprocessor(2048, 32, 228 * KIB, KIB),
    100: Multiprocessor(2048, 32, 228 * KIB, KIB),
    120: Multiprocessor(1536, 24, 100 * KIB, KIB),
}
ARCHITECTURES = tuple(MULTIPROCESSORS)
NVRTC_PACKAGES = ("cuda_nvrtc", "cuda_runtime", "cuda_cccl", "cuda_nvcc")
"""Folders of NVIDIA's pip packages: the compiler, and what it includes; ptxas is in the last."""


class Kernel(NamedTuple):
    name: str
    registers: int
    static_bytes: int
    spilled_bytes: int
    wide_loads: int
    wide_stores: int
    loose_operations: int
    """float32 sums and products of the PTX that ptxas may contract, or that are contracted already."""
    loose_products: int
    """The products among these."""


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for root in [] if spec is None else spec.submodule_search_locations or ():
        if (Path(root) / name).is_dir():
            return Path(root) / name
    return None


def _in_toolkit(path: str) -> Path | None:
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and (Path(home) / path).exists():
            return Path(home) / path
    return None


def nvcc_path() -> str | None:
    nvcc = _in_toolkit("bin/nvcc")
    return shutil.which("nvcc") if nvcc is None else str(nvcc)


def cuda_includes() -> list[Path] | None:
    """Folders with the CUDA headers: of a toolkit, else of NVIDIA's pip packages; None where there are none."""
    if header := _in_toolkit("include/cuda_bf16.h"):
        return [header.parent]
    packages = (_package(name) for name in ("cuda_runtime", "cuda_nvcc", "cuda_cccl"))
    folders = [package / "include" for package in packages if package is not None]
    return folders if any((folder / "cuda_bf16.h").exists() for folder in folders) else None


def simulator_flags(csrc: Path = CSRC) -> list[str]:
    """Flags of g++ for sources that include those of csrc/cuda as the simulator's C++."""
    folders = cuda_includes()
    assert folders is not None
    flags = ["-std=c++17", "-fno-strict-aliasing", "-ffp-contract=off", "-w", "-DONETRIP_CUDASIM"]
    flags += [f"-I{folder}" for folder in (SIMULATOR, EMULATOR, csrc)]
    return flags + [f"-isystem{folder}" for folder in folders]


def nvrtc_available() -> bool:
    return all(_package(name) is not None for name in NVRTC_PACKAGES)


def _kernels_launched(family: str) -> list[str]:
    """The kernels that the host code of FAMILY.cu launches, with their template arguments."""
    source = CSRC / "cuda" / f"{family}.cu"
    assembly = _output(["g++", *simulator_flags(), "-S", "-o", "-", "-x", "c++", str(source)])
    kernels = re.findall(rf"^_ZN7onetrip\d+{family}_[a-z_]+_kernelI\w+(?=:)", assembly, re.M)
    return re.findall(r"^void (.*?>)\(", _output(["c++filt", *kernels]), re.M)


def ptx_by_nvrtc(family: str, arch: int) -> str:
    """NVRTC compiles no host code: of FAMILY.cu the headers, and what it launches."""
    source = "".join(re.findall(r'#include "\w+\.cuh"\n', (CSRC / "cuda" / f"{family}.cu").read_text()))
    nvrtc_package, *folders = (_package(name) for name in NVRTC_PACKAGES)
    assert nvrtc_package is not None
    # By its path: cuda-bindings would take the library of the CUDA that torch was built for, and 13 has no sm_70.
    nvrtc = ctypes.CDLL(str(nvrtc_package / "lib" / "libnvrtc.so.12"))

    def texts(*values: str) -> ctypes.Array:
        return (ctypes.c_char_p * len(values))(*map(str.encode, values))

    def text_of(what: str) -> str:
        """What nvrtcGet<what> gives for the program."""
        size = ctypes.c_size_t()
        assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(nvrtc, f"nvrtcGet{what}")(program, buffer) == 0
        return buffer.value.decode()

    # NVRTC has no <cstdint> or <cmath> of its own; its built-in types are enough. 64 bits are a long, as on the host:
    # a kernel's name tells its parameters.
    cstdint = """#pragma once
    typedef unsigned char uint8_t; typedef unsigned short uint16_t;
    typedef signed int int32_t; typedef unsigned int uint32_t;
    typedef short int16_t; typedef long int64_t; typedef unsigned long uint64_t; typedef unsigned long uintptr_t;"""
    cmath = "#define HUGE_VAL __longlong_as_double(0x7FF0000000000000)"
    program = ctypes.c_void_p()
    headers, names = texts(cstdint, cmath), texts("cstdint", "cmath")
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels", 2, headers, names) == 0
    for kernel in _kernels_launched(family):
        assert nvrtc.nvrtcAddNameExpression(program, kernel.encode()) == 0
    options = [f"-arch=compute_{arch}", "-std=c++17", "-default-device", f"-I{CSRC / 'cuda'}"]
    options += [f"-I{package / 'include'}" for package in folders if package is not None]
    status = nvrtc.nvrtcCompileProgram(program, len(options), texts(*options))
    assert status == 0, text_of("ProgramLog")
    return text_of("PTX")


def ptxas_path() -> str | None:
    """Path of the pip packages' ptxas, which knows sm_70."""
    package = _package("cuda_nvcc")
    return None if package is None else str(package / "bin" / "ptxas")


def disassembler(arch: int) -> str | None:
    """An nvdisasm that knows the architecture. The one in triton's wheel has left sm_70 behind."""
    triton = importlib.util.find_spec("triton")
    places = [shutil.which("nvdisasm")]
    if triton is not None and triton.origin is not None:
        places.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"))
    for place in places:
        if place is not None and Path(place).exists():
            usage = subprocess.run([place, "--help"], capture_output=True, text=True).stdout
            if f"'SM{arch}'" in usage:
                return place
    return None


def _entries(ptx: str) -> list[tuple[str, str]]:
    parts = (part.partition("(") for part in ptx.split(".entry ")[1:])
    return [(name, body) for name, _, body in parts]


def _loose_operations(ptx: str) -> dict[str, tuple[int, int]]:
    """Sums and products, and products alone, by kernel."""
    products = r"\s(?:mul(?:\.ftz)?|(?:fma|mad)(?:\.\w+)*)\.f32\s"
    sums = r"\s(?:add|sub)(?:\.ftz)?\.f32\s"
    # What is written as assembly is what was meant.
    written = re.compile(r"// begin inline asm.*?// end inline asm", re.S)
    bodies = {name: written.sub("", body) for name, body in _entries(ptx)}
    counts = {name: [len(re.findall(loose, body)) for loose in (sums, products)] for name, body in bodies.items()}
    return {name: (n_sums + n_products, n_products) for name, (n_sums, n_products) in counts.items()}


def disassembled(machine_code: str) -> list[tuple[str, str]]:
    """Each kernel's mangled name and its instructions, of what a disassembler wrote."""
    parts = (part.partition(",") for part in re.split(r"\.section\s+\.", machine_code)[1:])
    return [(name.removeprefix("text."), body) for name, _, body in parts if name.startswith("text.")]


def _wide_accesses(ptx: str, machine_code: str) -> dict[str, tuple[int, int]]:
    """128-bit loads from (into registers or shared memory) and stores to global memory by kernel: of the machine code,
    else of the PTX."""
    if machine_code:
        bodies = disassembled(machine_code)
        load, store = r"\bLDG(?:STS)?\.E\.(?:\w+\.)*?128\b", r"\bSTG\.E\.(?:\w+\.)*?128\b"
    else:
        bodies = _entries(ptx)
        load, store = (rf"{op}\.global(?:\.nc)?\.v(?:4\.[ubf]32|2\.[ubf]64)" for op in ("ld", "st"))
        load += r"|cp\.async\.cg\.shared\.global [^;]*, 16;"
    return {name: (len(re.findall(load, body)), len(re.findall(store, body))) for name, body in bodies}


class Compiled(NamedTuple):
    """The files of a family's kernels, compiled for one architecture."""

    ptx: Path
    cubin: Path
    disassembly: Path
    """Empty without a disassembler that knows the architecture."""
    report: Path
    """What ptxas -v says."""


def has_nvcc(arch: int) -> bool:
    return arch >= 75 and nvcc_path() is not None


def compiled(family: str, arch: int, csrc: Path = CSRC, source: str | None = None) -> Compiled:
    """The kernels of FAMILY.cu, under build/ by the hash of the sources. source: what is compiled instead of all of
    them."""
    settings = (family, str(arch), str(nvcc_path()), str(source))
    digest = digest_of(settings, [Path(__file__), *csrc.rglob("*.cu*"), *csrc.rglob("*.h")])

    def make(folder: Path) -> None:
        folder.mkdir()
        files = _files(folder)
        if has_nvcc(arch):
            (folder / "kernels.cu").write_text(source or f'#include "{family}.cu"\n')
            front_end = [nvcc_path(), *NVCC_FLAGS, "-ptx", f"-I{csrc / 'cuda'}", f"-arch=sm_{arch}"]
            _output([*front_end, "-o", str(files.ptx), str(folder / "kernels.cu")])
            assembler = [nvcc_path(), "-cubin", "-Xptxas", "-v"]
        else:
            assert csrc == CSRC and source is None
            files.ptx.write_text(ptx_by_nvrtc(family, arch))
            assembler = [ptxas_path(), "-O3", "-v"]
        files.report.write_text(_output([*assembler, f"-arch=sm_{arch}", "-o", str(files.cubin), str(files.ptx)]))
        place = disassembler(arch)
        files.disassembly.write_text("" if place is None else _output([place, "-c", str(files.cubin)]))

    return _files(made_once(BUILD / f"{family}-sm_{arch}-{digest}", make))


def _files(folder: Path) -> Compiled:
    return Compiled(*(folder / f"kernels.{ending}" for ending in ("ptx", "cubin", "sass", "txt")))


def _output(command: list[str | None]) -> str:
    assert command[0] is not None
    result = subprocess.run(command, capture_output=True, text=True)  # type: ignore[arg-type]
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stderr + result.stdout


def _short_name(mangled: str) -> str:
    """forward_kernel<bf16, f32, 32, fast> from the mangled name; -1 threads a row are those of a cluster."""
    found = re.search(r"(row_norm|softmax|adam)_(\w+?_kernel)I(.*?)EEv", mangled)
    assert found is not None, mangled
    flags = ("nearest", "other rounding") if found[1] == "adam" else ("any", "fast")
    types = {"13__nv_bfloat16": "bf16", "6__half": "f16", "f": "f32"}
    words: list[str] = []
    for token in re.findall(r"13__nv_bfloat16|6__half|NS_6AccessE\d|S\d?_|Lin?\d+|Lb[01]|f", found[3]):
        if token.startswith("NS_"):
            words.append(("elements", "vectors", "uniform")[int(token[-1])])
        elif token.startswith("S"):
            words.append(next(word for word in words if word != "f32"))  # the 16-bit type, again
        elif token.startswith("Li"):
            words.append(token[2:].replace("n", "-"))
        elif token.startswith("Lb"):
            words.append(flags[int(token[-1])])
        else:
            words.append(types[token])
    return f"{found[2]}<{', '.join(words)}>"


def measure(family: str, arch: int) -> list[Kernel]:
    """The kernels of csrc/cuda/FAMILY.cu."""
    files = compiled(family, arch)
    ptx = files.ptx.read_text()
    accesses, loose = _wide_accesses(ptx, files.disassembly.read_text()), _loose_operations(ptx)
    reports = re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", files.report.read_text(), re.S)
    kernels = []
    for name, report in reports:
        registers = re.search(r"Used (\d+) registers", report)
        spills = re.findall(r"(\d+) bytes spill", report)
        static = re.search(r"(\d+) bytes smem", report)
        assert registers is not None and spills
        used = int(registers[1]), 0 if static is None else int(static[1]), sum(map(int, spills))
        kernels.append(Kernel(_short_name(name), *used, *accesses[name], *loose[name]))
    return kernels


def missing_compiler(arch: int) -> str | None:
    """Why nothing can be compiled for this architecture, or None."""
    if has_nvcc(arch):
        return None
    if not nvrtc_available():
        return "needs nvcc or NVIDIA's pip packages of the [test-cuda] extra"
    return "no g++" if shutil.which("g++") is None else None


def print_table(arch: int, kernels: list[Kernel]) -> None:
    print(f"\nsm_{arch:<4} {'kernel':46} registers  shared  spilled  128-bit loads  stores")
    for kernel in sorted(kernels):
        counts = f"{kernel.registers:9} {kernel.static_bytes:7} {kernel.spilled_bytes:8} {kernel.wide_loads:14}"
        print(f"        {kernel.name:46} {counts} {kernel.wide_stores:7}")


def cluster_threads(n_cols: int, arch: int, columns: int = 16) -> int | None:
    """Threads of each block of the cluster that takes an aligned row, of so many columns each, by cluster_of_row() of
    csrc/cuda/launch.cuh."""
    warps, most_warps = -(-n_cols // (columns * 32)), 8192 // (columns * 32)
    blocks = 1 << (-(-warps // most_warps) - 1).bit_length()
    if arch < 90 or blocks == 1 or blocks > 8 or (warps <= 2 * most_warps and warps % blocks):
        return None
    return -(-warps // blocks) * 32


def resident_threads(kernel: Kernel, threads: int, dynamic_bytes: int, multiprocessor: Multiprocessor) -> int:
    warp_registers = -(-kernel.registers * 32 // 256) * 256
    shared = kernel.static_bytes + dynamic_bytes + multiprocessor.reserved_bytes
    blocks = min(
        multiprocessor.registers // (warp_registers * (threads // 32)),
        multiprocessor.shared_bytes // max(1, shared),
        multiprocessor.threads // threads,
        multiprocessor.blocks,
    )
    return blocks * threads
