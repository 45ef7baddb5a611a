"""Machine code of a family's CUDA kernels, and cases that run it beside the source: see machine.h."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.gpusim import harness
from tools.gpusim.harness import BUILD, ROOT, TYPES, Case, assert_same_bits, build, type_list
from tools.sass import cuda_compile

WARPS_FORWARD, WARPS_REVERSE, WARPS_RANDOM = 10, 11, 12
"""Orders in which the driver runs machine code: which warp goes on, each as far as it can alone."""


ARCHITECTURES = (70, 75, 80, 90)
"""That the emulator knows."""


def _has_nvcc(arch: int) -> bool:
    return arch >= 75  # CUDA 13 has dropped Volta


def missing_tool(arch: int) -> str | None:
    """Why machine code cannot be run here, or None."""
    if _has_nvcc(arch) and cuda_compile.nvcc_path() is None:
        return "no nvcc"
    if not _has_nvcc(arch) and not cuda_compile.nvrtc_available():
        return "NVIDIA's pip packages of the [test-cuda] extra are missing"
    if cuda_compile.disassembler(arch) is None:
        return f"no nvdisasm that knows sm_{arch}"
    return harness.missing_tool()


def _on_card(case: Case, arch: int) -> Case:
    """The case, as a GPU of this architecture launches it."""
    multiprocessor = cuda_compile.MULTIPROCESSORS[arch]
    GPU = {
        "shared_limit": multiprocessor.block_bytes,
        "reserved_shared": multiprocessor.reserved_bytes,
        "clusters": int(arch >= 90),
        "copies": int(arch >= 80),
    }
    return replace(case, numbers={**case.numbers, **GPU})


@dataclass(frozen=True)
class MachineCode:
    arch: int
    driver: Path
    cubin: Path
    disassembly: Path

    def run(
        self, cases: Sequence[Case], folder: Path, error_ulps: int = 0
    ) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
        """(The outputs of each case, what each run of machine code took: machine.h's Counts). error_ulps: by which
        every result of the unit that approximates (MUFU) is moved."""
        counts = folder / "counts.jsonl"
        prelude = [f"machine {self.cubin} {self.disassembly} {counts}", f"error {error_ulps}"]
        launched = [_on_card(case, self.arch) for case in cases]
        outputs = harness.run(self.driver, launched, folder, prelude)
        return outputs, [json.loads(line) for line in counts.read_text().splitlines()]

    def outputs(self, cases: Sequence[Case], folder: Path) -> list[dict[str, Tensor]]:
        """What the machine code makes of the cases: the same bits as their source, but that a NaN may be another."""
        both = [replace(case, orders=orders) for case in cases for orders in ((0,), (WARPS_FORWARD, WARPS_RANDOM))]
        found, _ = self.run(both, folder)
        for case, of_source, of_machine in zip(cases, found[::2], found[1::2], strict=True):
            for name, tensor in of_machine.items():
                assert_same_bits(f"{case.direction}: {name}", tensor, of_source[name])
        return found[1::2]


def compiled_together(family: str, dtype: torch.dtype) -> list[list[torch.dtype]]:
    """The dtypes of the driver that the simulator's own tests build, for one dtype."""
    if family == "adam":
        return [[dtype, grad] for grad in (torch.float32, torch.float16, torch.bfloat16)]
    return [[dtype] * (1 if family == "softmax" else 2)]


def machine_code(
    family: str, types: Iterable[Sequence[torch.dtype]], arch: int = 90, csrc: Path = ROOT / "csrc"
) -> MachineCode:
    """The kernels of a family for these dtypes, and the driver that runs them (harness.build), under build/ by
    the hash of their sources. csrc: of the kernels; the driver is that of the right sources."""
    types = [list(dtypes) for dtypes in types]
    driver, disassembler = build(family, types), cuda_compile.disassembler(arch)
    compiler = cuda_compile.nvcc_path() if _has_nvcc(arch) else cuda_compile.ptxas_path()
    assert compiler is not None and disassembler is not None
    source = f'#define {TYPES[family]}(F) {type_list(types)}\n#include "{family}.cu"\n'
    versions = [subprocess.check_output([tool, "--version"]) for tool in (compiler, disassembler)]
    digest = hashlib.sha256(f"{versions} {source}".encode())
    for path in sorted([Path(cuda_compile.__file__), *csrc.rglob("*.h"), *csrc.rglob("*.cu*")]):
        digest.update(path.name.encode() + path.read_bytes())
    folder = BUILD / f"sm_{arch}-{digest.hexdigest()[:16]}"
    code = MachineCode(arch, driver, folder / "kernels.cubin", folder / "kernels.sass")
    if not code.disassembly.exists():
        unfinished = folder.with_suffix(f".{os.getpid()}")
        unfinished.mkdir(parents=True, exist_ok=True)
        cubin = unfinished / code.cubin.name
        if _has_nvcc(arch):
            compiled = cubin.with_suffix(".cu")
            compiled.write_text(source)
            options = [*cuda_compile.NVCC_FLAGS, "-cubin", f"-I{csrc / 'cuda'}"]
        else:
            compiled = cubin.with_suffix(".ptx")
            compiled.write_text(cuda_compile.ptx_by_nvrtc(source, arch, csrc / "cuda"))
            options = ["-O3"]
        subprocess.run([compiler, *options, f"-arch=sm_{arch}", "-o", str(cubin), str(compiled)], check=True)
        text = subprocess.run([disassembler, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
        (unfinished / code.disassembly.name).write_text(text)
        with suppress(OSError):  # another process was quicker
            unfinished.rename(folder)
    return code
