"""Machine code of a family's CUDA kernels, and cases that run it beside the source: see machine.h."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tools.gpusim import harness
from tools.gpusim.harness import TYPES, Case, Outputs, assert_same_outputs, build, type_list
from tools.sass import cuda_compile

WARPS_FORWARD, WARPS_REVERSE, WARPS_RANDOM = 10, 11, 12
"""Orders in which the driver runs machine code: which warp goes on, each as far as it can alone."""


ARCHITECTURES = (70, 75, 80, 90)
"""That the emulator knows."""


def missing_tool(arch: int) -> str | None:
    """Why machine code cannot be run here, or None."""
    if arch >= 75 and cuda_compile.nvcc_path() is None:
        return "no nvcc"
    if reason := cuda_compile.missing_compiler(arch):
        return reason
    if cuda_compile.disassembler(arch) is None:
        return f"no nvdisasm that knows sm_{arch}"
    return harness.missing_tool()


def _on_gpu(case: Case, arch: int) -> Case:
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
    compiled: cuda_compile.Compiled

    def run(
        self, cases: Sequence[Case], folder: Path, error_ulps: int = 0
    ) -> tuple[list[Outputs], list[dict[str, Any]]]:
        """(The outputs of each case, what each run of machine code took: machine.h's Counts). error_ulps: by which
        every result of the unit that approximates (MUFU) is moved."""
        counts = folder / "counts.jsonl"
        prelude = [f"machine {self.compiled.cubin} {self.compiled.disassembly} {counts}", f"error {error_ulps}"]
        launched = [_on_gpu(case, self.arch) for case in cases]
        outputs = harness.run(self.driver, launched, folder, prelude)
        return outputs, [json.loads(line) for line in counts.read_text().splitlines()]

    def outputs(self, cases: Sequence[Case], folder: Path) -> list[Outputs]:
        """What the machine code makes of the cases: the same bits as their source, but that a NaN may be another."""
        both = [replace(case, orders=orders) for case in cases for orders in ((0,), (WARPS_FORWARD, WARPS_RANDOM))]
        found, _ = self.run(both, folder)
        for case, of_source, of_machine in zip(cases, found[::2], found[1::2], strict=True):
            assert_same_outputs(case.direction, of_machine, of_source)
        return found[1::2]


def compiled_together(family: str, dtype: torch.dtype, z_dtype: torch.dtype | None = None) -> list[list[torch.dtype]]:
    """The dtypes of the driver that the simulator's own tests build, for one dtype. z_dtype: of row_norm's z; None:
    the same."""
    if family == "adam":
        return [[dtype, grad] for grad in (torch.float32, torch.float16, torch.bfloat16)]
    return [[dtype]] if family == "softmax" else [[dtype, z_dtype or dtype]]


def machine_code(
    family: str,
    dtype: torch.dtype,
    arch: int = 90,
    csrc: Path | None = None,
    z_dtype: torch.dtype | None = None,
) -> MachineCode:
    """The kernels of a family, and the driver that runs those of the dtype. csrc: of kernels with a bug, which are
    compiled for the dtype alone; the driver is that of the right sources."""
    types = compiled_together(family, dtype, z_dtype)
    if csrc is None:
        kernels = cuda_compile.compiled(family, arch)
    else:
        of_dtype = f'#define {TYPES[family]}(F) {type_list(types)}\n#include "{family}.cu"\n'
        kernels = cuda_compile.compiled(family, arch, csrc, of_dtype)
    return MachineCode(arch, build(family, types), kernels)
