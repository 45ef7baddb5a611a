"""The CPU kernels compiled for aarch64, which take NEON through the compiler's vector types, in an emulator.

Their results are compared with this machine's: Adam's to the bit, the others' to the drivers' tolerances, within which
an element that only one of the two drops would not be.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from cpu_drivers import CPU, FAMILIES, FLAGS, ROOT, build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"  # Debian's cross compiler
STREAM = "-DONETRIP_STREAM_BYTES=65536"  # emulated, one float takes as long as a hundred
BASELINE: dict[str, list[str]] = {"baseline": []}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64"),
    *(
        pytest.mark.skipif(
            shutil.which(program) is None,
            reason=f"{program} is not installed (Debian: apt install g++-aarch64-linux-gnu qemu-user)",
        )
        for program in (COMPILER, EMULATOR, "g++")
    ),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_results_are_those_of_x86(name: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    programs = [build(name, tmp_path / compiler, compiler, BASELINE, STREAM) for compiler in ("g++", COMPILER)]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "ONETRIP_RESULTS": str(results)}
    for command in ([programs[0]], [EMULATOR, "-L", LIBRARIES, programs[1]]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert done.stdout == "baseline \n" and results.stat().st_size > 0
    results.unlink()  # a hundred megabytes


def test_cross_entropy_compiles() -> None:
    """It has no driver."""
    flags = [*FLAGS, "-Wall", "-Werror", "-fsyntax-only", "-DONETRIP_LEVEL=baseline", f"-I{ROOT / 'csrc'}"]
    subprocess.run([COMPILER, *flags, str(CPU / "cross_entropy.cpp")], check=True)
