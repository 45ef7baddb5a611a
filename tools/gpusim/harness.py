"""Builds the CUDA sources as C++ on the simulator of cudasim.h, and runs cases through its driver.

A case is what one launcher call needs: numbers, input tensors, and the shapes and dtypes of its outputs.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from onetrip.reference.philox import dropout_scale, dropout_threshold
from torch import Tensor

from ..sass.cuda_compile import CSRC, SIMULATOR, cuda_includes, simulator_flags
from ..sass.emulator import BUILD, EMULATOR, build_machine, compiled_once, digest_of, made_once

RUNTIME = ("cudasim", "cuda_runtime")
"""Sources that every program on the simulator is linked with."""

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CUDA_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
ORDERS = (0, 3, 4, 5)
"""Thread orders of cudasim.h: all threads in step, and warp by warp forward, in reverse, shuffled."""

Pair = tuple[torch.dtype, torch.dtype]
"""Dtypes of x and z."""

Output = tuple[tuple[int, ...], torch.dtype, int]
"""(shape, dtype, bytes past a 64-byte boundary)"""

RNG = (0x1234_5678_9ABC_DEF0, (7 << 32) + 12)


@dataclass
class Case:
    direction: str
    numbers: dict[str, float] = field(default_factory=dict)
    inputs: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    """name -> (flat tensor, bytes past a 64-byte boundary)."""
    outputs: dict[str, Output] = field(default_factory=dict)
    orders: Sequence[int] = ORDERS


Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class RowsCall:
    """What calls of row_norm and of softmax have in common: rows of n_cols elements, with dropout. Each adds
    forward_case(), backward_case(), check_forward(outputs) and check_backward(outputs)."""

    name: str
    dropout_p: float = field(default=0.0, kw_only=True)
    rng_in_memory: bool = field(default=False, kw_only=True)
    shift: int = field(default=0, kw_only=True)
    """Elements by which every tensor is off a 64-byte boundary."""
    row_padding: int = field(default=0, kw_only=True)
    """Elements between the rows of the inputs."""
    shared_limit: int = field(default=227 * 1024, kw_only=True)
    clusters: bool = field(default=True, kw_only=True)
    """Whether the GPU can launch clusters."""
    orders: tuple[int, ...] = field(default=ORDERS, kw_only=True)

    def common_numbers(self) -> dict[str, float]:
        numbers: dict[str, float] = {"shared_limit": self.shared_limit, "clusters": int(self.clusters)}
        if self.dropout_p > 0:
            seed, offset = (0, 0) if self.rng_in_memory else RNG
            numbers |= {
                "dropout.threshold": dropout_threshold(self.dropout_p),
                "dropout.scale": dropout_scale(self.dropout_p),
                "dropout.seed": seed,
                "dropout.offset": offset,
            }
        return numbers

    def inputs(self, tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        placed = {}
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and self.row_padding:
                padded = torch.full((len(tensor), tensor.shape[1] + self.row_padding), float("nan"), dtype=tensor.dtype)
                padded[:, : tensor.shape[1]] = tensor
                tensor = padded.flatten()[: padded.numel() - self.row_padding]
            placed[name] = (tensor.flatten(), self.shift * tensor.dtype.itemsize)
        if self.rng_in_memory and self.dropout_p > 0:
            placed["dropout.state"] = (torch.tensor(RNG), 0)
        return placed

    def output(self, shape: tuple[int, ...], dtype: torch.dtype) -> Output:
        return shape, dtype, self.shift * dtype.itemsize

    def assert_close(self, name: str, actual: Tensor, expected: Tensor, relative: float, absolute: float) -> None:
        """NaN where NaN is expected, and nowhere else."""
        near = (actual.double() - expected).abs() <= relative * expected.abs() + absolute
        wrong = ~(near | (torch.isnan(actual) & torch.isnan(expected)))
        assert_none(wrong, f"{self.name}: {name}", actual, expected)


class SimulatorFailure(AssertionError):
    """The driver stopped: a sanitizer, the simulator's own checks, or results that depend on the order of threads."""


def missing_tool() -> str | None:
    """Why the simulator cannot be built here, or None."""
    if platform.machine() != "x86_64":
        return "the simulator's fibers are switched by x86-64 assembly"
    if shutil.which("g++") is None:
        return "no g++"
    if cuda_includes() is None:
        return "no CUDA headers: neither a toolkit nor the nvidia-cuda-runtime-cu12 package of the [test-cuda] extra"
    return None


# The macro that lists the dtypes which a family is compiled for.
TYPES = {"row_norm": "ONETRIP_ROW_NORM_PAIRS", "softmax": "ONETRIP_SOFTMAX_TYPES", "adam": "ONETRIP_ADAM_TYPES"}


def type_list(types: Iterable[Sequence[torch.dtype]]) -> str:
    return " ".join(f"F({', '.join(CUDA_TYPES[dtype] for dtype in dtypes)})" for dtypes in types)


def simulator_sources() -> list[Path]:
    return [*SIMULATOR.glob("*.cpp"), *SIMULATOR.glob("*.h")]


def _without_folders(flags: Sequence[str]) -> list[str]:
    """Where a checkout lies is no setting."""
    return [flag for flag in flags if not flag.startswith("-I")]


def compiled(source: Path, flags: Sequence[str], dependencies: Iterable[Path]) -> Path:
    """Compiles one source, under build/ by the hash of flags and dependencies."""
    target = BUILD / f"{source.stem}-{digest_of(_without_folders(flags), [source, *dependencies])}.o"
    return compiled_once(target, ["g++", *flags, "-x", "c++", "-c", str(source), "-o"])


def _precompiled(flags: Sequence[str]) -> Path:
    """A header that includes cudasim.h, compiled ahead: reading it and CUDA's headers takes a second each time."""

    def make(folder: Path) -> None:
        folder.mkdir()
        header = folder / "precompiled.h"
        header.write_text('#include "cudasim.h"\n')
        subprocess.run(["g++", *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)

    digest = digest_of(_without_folders(flags), [SIMULATOR / "cudasim.h"])
    return made_once(BUILD / f"precompiled-{digest}", make) / "precompiled.h"


def build(family: str, types: Iterable[Sequence[torch.dtype]], csrc: Path = CSRC, sanitize: bool = True) -> Path:
    """Compiles the driver of the family for these dtypes: (x, z) of row_norm, (scores,) of softmax, (param, grad) of
    adam. Returns its path, under build/ by the hash of its sources."""
    flags = simulator_flags(csrc)
    sanitizers = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if sanitize else []
    flags += sanitizers
    of_simulator = [*csrc.rglob("*.h"), *simulator_sources(), EMULATOR / "machine_driver.h"]
    # Without optimisation: under sanitizers -O1 takes three times as long to compile, and a case runs a fifth faster.
    chosen = [f"-D{TYPES[family]}(F)={type_list(types)}", "-DONETRIP_ANY_GPU_SMS=4"]
    chosen += ["-O0", "-include", str(_precompiled([*flags, "-O0"]))]
    objects = [
        compiled(csrc / "cuda" / f"{family}.cu", [*flags, *chosen], [*of_simulator, *csrc.rglob("*.cu*")]),
        *(
            compiled(SIMULATOR / f"{name}.cpp", [*flags, "-O1"], of_simulator)
            for name in (*RUNTIME, f"{family}_driver")
        ),
        build_machine("o", "-r", "-nostdlib"),
    ]
    driver = BUILD / f"{family}-{digest_of(map(str, objects))}"
    # -rdynamic: a kernel's machine code is found by its name.
    return compiled_once(driver, ["g++", *sanitizers, "-rdynamic", *map(str, objects), "-ldl", "-o"])


class Bug(NamedTuple):
    """A change to a file of csrc/cuda."""

    file: str
    right: str
    wrong: str


def sources_with(bug: Bug | None, folder: Path) -> Path:
    """A copy of csrc in the folder, with the bug put in."""
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    if bug is not None:
        path = csrc / "cuda" / bug.file
        source = path.read_text()
        assert bug.right in source, f"{bug.file} no longer has {bug.right!r}"
        path.write_text(source.replace(bug.right, bug.wrong))
    return csrc


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def run(driver: Path, cases: Sequence[Case], folder: Path, prelude: Sequence[str] = ()) -> list[Outputs]:
    """Runs the cases; returns each one's outputs. folder: for the files that pass between here and the driver.
    prelude: further commands, before all cases."""
    script = list(prelude)
    blobs: list[bytes] = []
    for case in cases:
        script.append(f"case {case.direction}")
        script += [f"number {name} {value!r}" for name, value in case.numbers.items()]
        for name, (tensor, shift) in case.inputs.items():
            blobs.append(_raw(tensor))
            script.append(f"input {name} {len(blobs[-1])} {shift}")
        for name, (shape, dtype, shift) in case.outputs.items():
            script.append(f"output {name} {torch.Size(shape).numel() * dtype.itemsize} {shift}")
        script.append("run " + " ".join(map(str, case.orders)))
    (folder / "input").write_bytes(b"".join(blobs))
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    result = subprocess.run(
        [str(driver), str(folder / "input"), str(folder / "output")],
        input="\n".join(script) + "\n",
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    codes = result.stdout.split()
    if result.returncode != 0:
        raise SimulatorFailure(f"case {len(codes)} of {len(cases)}: {result.stderr[-3000:]}")
    if any(code != "0" for code in codes):
        raise SimulatorFailure(f"launchers returned {codes}")
    raw = (folder / "output").read_bytes()
    position = 0
    all_outputs: list[Outputs] = []
    for case in cases:
        outputs: Outputs = {}
        for name, (shape, dtype, _) in case.outputs.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            chunk = bytearray(raw[position : position + size])
            outputs[name] = (
                torch.frombuffer(chunk, dtype=dtype).reshape(shape) if chunk else torch.empty(shape, dtype=dtype)
            )
            position += size
        all_outputs.append(outputs)
    return all_outputs


def cases_of(calls: Iterable[RowsCall]) -> list[Case]:
    """Forward and backward of each call."""
    return [case for call in calls for case in (call.forward_case(), call.backward_case())]


def run_calls(driver: Path, calls: Sequence[RowsCall], folder: Path) -> list[tuple[Outputs, Outputs]]:
    """Outputs of forward and of backward of each call."""
    outputs = run(driver, cases_of(calls), folder)
    return list(zip(outputs[::2], outputs[1::2], strict=True))


def check_calls(driver: Path, calls: Sequence[RowsCall], folder: Path) -> None:
    for call, (forward, backward) in zip(calls, run_calls(driver, calls, folder), strict=True):
        call.check_forward(forward)
        call.check_backward(backward)


def run_to_same_bits(driver: Path, calls: Sequence[RowsCall], folder: Path) -> tuple[Outputs, Outputs]:
    """What each of the calls gives, forward and backward."""
    (forward, backward), *others = run_calls(driver, calls, folder)
    for call, other in zip(calls[1:], others, strict=True):
        assert_same_outputs(call.name, other[0], forward)
        assert_same_outputs(call.name, other[1], backward)
    return forward, backward


def assert_same_outputs(what: str, actual: Outputs, expected: Outputs) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert_same_bits(f"{what}: {name}", tensor, expected[name])


def assert_same_bits(name: str, actual: Tensor, expected: Tensor) -> None:
    """NaN is NaN."""
    assert actual.shape == expected.shape, name
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    wrong = (actual.view(bits) != expected.view(bits)) & ~(torch.isnan(actual) & torch.isnan(expected))
    assert_none(wrong, name, actual, expected)


def assert_none(wrong: Tensor, name: str, actual: Tensor, expected: Tensor) -> None:
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {where}: "
            f"{actual[where].item()!r} instead of {expected[where].item()!r}"
        )
