"""Counts what the CUDA kernels' machine code takes, run on the CPU (machine.h): python -m
tools.sass.count_instructions writes benchmarks/results/sm_90.json and the table of docs/tuning.md. Needs nvcc.

Of bfloat16: float32's bytes are twice as many, and memory is the limit everywhere. Instructions are those of warps,
times 32, over the elements: idle lanes are counted in. Where a kernel's threads go from row to row, or from chunk to
chunk, the difference between a call and one of half the size is counted: what each further element takes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from onetrip.environment import header
from onetrip.reference.rounding import Rounding

from tools.gpusim import row_norm as cudasim_row_norm
from tools.gpusim import softmax as cudasim_softmax
from tools.gpusim.adam import Parameter, Step
from tools.gpusim.harness import Case
from tools.sass import cuda_compile
from tools.sass.machine_code import WARPS_FORWARD, machine_code

ROOT = Path(__file__).resolve().parents[2]
ARCH = 90
RECORDED = ROOT / "benchmarks" / "results" / f"sm_{ARCH}.json"
PAGE = ROOT / "docs" / "tuning.md"
BEGIN, END = "<!-- instructions: from the record -->\n", "<!-- end -->\n"

PIPES = {
    "FMA": r"FADD|FMUL|FFMA|IMAD|IDP|HFMA2|HADD2",
    "ALU": r"IADD3|LOP3|SHF|PRMT|LEA|[IF]SETP|F?SEL|FMNMX|MOV|VIADD\w*|VIMNMX3?|P2R|R2P|PLOP3|F2FP|I2FP|IABS|FCHK",
    "memory": r"LD\w*|ST\w*|SHFL|REDUX|S2U?R|SYNCS|R2UR|VOTEU?",
    "uniform": r"U\w+",
}
"""Pattern of each pipe's opcodes, up to their first dot; all others are control, or approximations."""
SECTOR_BYTES, WARP = 32, 32
ISSUED, COPY_BYTES = 132 * 4 * 32 * 1.8e9, 4.3e12
"""An H200's: instructions of threads a second, and bytes of a copy."""


class Counted(NamedTuple):
    family: str
    operator: str
    direction: str
    n_cols: int | None
    least_bytes: float
    """An element."""
    n_elements: int
    case: Case
    before: Case | None = None
    """A case without these elements, to be taken away."""


DTYPE = torch.bfloat16
ROW_NORM = {
    # what -> (fields of the call, tensors that forward and backward must move)
    "LayerNorm": ({}, 2, 3),
    "RMSNorm": ({"norm": cudasim_row_norm.NORM_RMS, "norm_bias": False}, 2, 3),
    "bias + residual + LayerNorm": ({"residual": True, "bias": True, "store_z": True}, 4, 4),
    "LayerNorm, float32 parameters": ({"parameter_dtype": torch.float32}, 2, 3),
    "bias + dropout + residual + LayerNorm": (
        {"residual": True, "bias": True, "store_z": True, "dropout_p": 0.1},
        4,
        4,
    ),
}
SOFTMAX = {
    "softmax": ({}, 2, 3),
    "softmax, causal": ({"causal": True}, 2, 3),
    "softmax, mask": ({"mask": torch.float32, "mask_has": (False, False, False, True)}, 2, 3),
    "softmax, dropout": ({"dropout_p": 0.1}, 3, 3),
}
ADAM = {
    # what -> (how parameters are rounded, bytes of their residuals)
    "AdamW8bit": (Rounding.NEAREST, 0),
    "AdamW8bit, masters of 24 bits": (Rounding.RESIDUAL_8, 1),
    "AdamW8bit, masters of 32 bits": (Rounding.RESIDUAL_16, 2),
    "AdamW8bit, stochastic rounding": (Rounding.STOCHASTIC, 0),
}
WIDTHS = {"LayerNorm": (256, 512, 768, 1024, 4096, 8192, 16384), "softmax": (256, 512, 1024, 4096, 16384)}
FEWER = (512, 1024, 4096)


def _row_norm_cases() -> Iterator[Counted]:
    for name, (fields, n_forward, n_backward) in ROW_NORM.items():
        for n_cols in WIDTHS.get(name, FEWER):
            n_rows = max(2**21 // n_cols, 64)
            given = {"parameter_dtype": DTYPE, "orders": (WARPS_FORWARD,), **fields}
            call = cudasim_row_norm.Call(name, n_rows, n_cols, (DTYPE, DTYPE), **given)
            few, half = (replace(call, n_rows=n_rows // part) for part in (8, 2))
            least_bytes, numel = DTYPE.itemsize * n_forward, few.n_rows * n_cols
            yield Counted("row_norm", name, "forward", n_cols, least_bytes, numel, few.forward_case())
            least_bytes, numel = DTYPE.itemsize * n_backward, half.n_rows * n_cols
            both = call.backward_case(), half.backward_case()
            yield Counted("row_norm", name, "backward", n_cols, least_bytes, numel, *both)


def _softmax_cases() -> Iterator[Counted]:
    for name, (fields, n_forward, n_backward) in SOFTMAX.items():
        for n_cols in WIDTHS.get(name, FEWER):
            given = {"store_p": "dropout_p" in fields, "orders": (WARPS_FORWARD,), **fields}
            call = cudasim_softmax.Call(name, (2, 1, max(2**17 // n_cols, 4)), n_cols, DTYPE, **given)
            for case, n_tensors in ((call.forward_case(), n_forward), (call.backward_case(), n_backward)):
                least_bytes, numel = DTYPE.itemsize * n_tensors, call.n_rows * n_cols
                yield Counted("softmax", name, case.direction, n_cols, least_bytes, numel, case)


def _adam_cases() -> Iterator[Counted]:
    for name, (rounding, residual_bytes) in ADAM.items():
        numel = 2**20 if rounding is Rounding.NEAREST else 2**18
        parameters = (
            Parameter(n, param=DTYPE, grad=DTYPE, is_8bit=True, rounding=rounding) for n in (2 * numel, numel)
        )
        whole, half = (Step([p], orders=(WARPS_FORWARD,), clips=False).case() for p in parameters)
        least_bytes = 3 * DTYPE.itemsize + 4 + 16 / 128 + 2 * residual_bytes
        yield Counted("adam", name, "step", None, least_bytes, numel, whole, half)


def cases() -> Iterator[Counted]:
    yield from _row_norm_cases()
    yield from _softmax_cases()
    yield from _adam_cases()


def _pipe(opcode: str) -> str:
    base = opcode.partition(".")[0]
    return next((pipe for pipe, names in PIPES.items() if re.fullmatch(names, base)), "other")


def sector_shares(taken: dict[str, Any]) -> dict[str, float]:
    """Bytes of the sectors that a warp's vectors touch, over those that they ask for: 1 where all sectors are whole."""
    return {
        kind: round(SECTOR_BYTES * vectors["sectors"] / vectors["bytes"], 3)
        for kind, vectors in taken["vectors"].items()
    }


def count(counted: Counted, folder: Path, arch: int = ARCH) -> dict[str, Any]:
    code = machine_code(counted.family, DTYPE, arch)
    taken = [code.run([case], folder)[1][0] for case in (counted.case, counted.before) if case is not None]

    def per_element(value) -> float:
        difference = value(taken[0]) - (value(taken[1]) if len(taken) > 1 else 0)
        return round(difference / counted.n_elements, 3)

    def instructions(pipe: str):
        return lambda t: WARP * sum(n for opcode, n in t["instructions"].items() if pipe in ("", _pipe(opcode)))

    return {
        "operator": counted.operator,
        "direction": counted.direction,
        "n_cols": counted.n_cols,
        "least_bytes": counted.least_bytes,
        "instructions": per_element(instructions("")),
        "pipes": {pipe: per_element(instructions(pipe)) for pipe in (*PIPES, "other")},
        "loaded_bytes": per_element(lambda t: SECTOR_BYTES * t["loaded"]),
        "stored_bytes": per_element(lambda t: SECTOR_BYTES * t["stored"]),
        "sectors": sector_shares(taken[0]),
        "shared_cycles": per_element(lambda t: WARP * t["shared_cycles"]),
        "shared_least": per_element(lambda t: WARP * t["shared_least"]),
    }


def limit(row: dict[str, Any]) -> float:
    """Instructions an element that an H200 has time for while it copies as many bytes."""
    return row["least_bytes"] / COPY_BYTES * ISSUED


def table(record: dict[str, Any]) -> str:
    columns = ["kernel, bfloat16", "columns", "least bytes", "time for", "instructions", "FMA", "ALU"]
    columns.append("cycles of shared memory; without conflicts")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in record["kernels"]:
        pipes = row["pipes"]
        n_cols = f"{row['n_cols']:,}" if row["n_cols"] else ""
        lines.append(
            f"| {row['operator']} {row['direction']} | {n_cols} | {row['least_bytes']:.3g} "
            f"| {limit(row):.0f} | {row['instructions']:.1f} | {pipes['FMA']:.1f} | {pipes['ALU']:.1f} "
            f"| {row['shared_cycles']:.1f}; {row['shared_least']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def render(page: str, record: dict[str, Any]) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table(record) + END + rest.partition(END)[2]


def nvcc_version() -> str:
    nvcc = cuda_compile.nvcc_path()
    assert nvcc is not None
    return subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[-2]


def main() -> int:
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        for counted in cases():
            kernels.append(count(counted, Path(folder)))
            print(kernels[-1], flush=True)
    record = {
        **header(torch.device("cpu")),
        "nvcc": nvcc_version(),
        "architecture": f"sm_{ARCH}",
        "dtype": "bfloat16",
        "kernels": kernels,
    }
    RECORDED.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(render(PAGE.read_text(), record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
