"""What the tests of every family's CUDA kernels run over: the architectures that they are compiled for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.gpusim.harness import missing_tool
from tools.sass.cuda_compile import ARCHITECTURES, SIMULATOR, Kernel, measure, missing_compiler, simulator_flags

RUN_ALWAYS = {"row_norm": (70, 90), "softmax": (80, 90), "adam": (80, 90)}
"""Family -> what every run of the slow tests compiles it for, of V100, A100 and H100: a minute or more each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of other GPUs are exhaustive; so are those that execute machine code, but for H100's with bfloat16 rows."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "arch" not in parameters:
            continue
        if item.path.name == "test_machine_code.py":
            kept = (90,) if parameters.get("dtype", "bf16") == "bf16" else ()
        else:
            kept = RUN_ALWAYS.get(getattr(item.module, "FAMILY", ""), ())
        if parameters["arch"] not in kept:
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(params=ARCHITECTURES, ids=lambda arch: f"sm_{arch}", scope="module")
def arch(request: pytest.FixtureRequest) -> int:
    reason = missing_compiler(request.param)
    if reason:
        pytest.skip(reason)
    return int(request.param)


@pytest.fixture(scope="module")
def kernels(arch: int, request: pytest.FixtureRequest) -> list[Kernel]:
    """Those of the module's FAMILY."""
    return measure(request.module.FAMILY, arch)


@pytest.fixture(scope="module")
def host_program(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles a program of this folder that includes launch code of csrc/cuda, and has a runtime of its own.
    simulated: with the simulator, as what includes kernels needs."""
    if missing_tool():
        pytest.skip(str(missing_tool()))

    def build(name: str, simulated: bool = False) -> Path:
        program = tmp_path_factory.mktemp("host") / name
        sources = [Path(__file__).with_name(f"{name}.cpp"), *([SIMULATOR / "cudasim.cpp"] if simulated else [])]
        command = ["g++", *simulator_flags(), *map(str, sources), "-o", str(program), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        return program

    return build
