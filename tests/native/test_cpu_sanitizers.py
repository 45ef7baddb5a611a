"""The CPU kernels, with OpenMP, under AddressSanitizer and UBSan, at every level this machine has.

What a level that it lacks would take to compile is most of the time; the package's own build compiles them all.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from cpu_drivers import FAMILIES, build
from onetrip.ops.common.backends import native

# Small outputs pass the caches as large ones do.
FLAGS = ["-DONETRIP_STREAM_BYTES=1048576", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
LEVELS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    LEVELS["avx512"] = [*LEVELS["avx2"], *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl"))]
    LEVELS["avx512vbmi"] = [*LEVELS["avx512"], "-mavx512vbmi"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_no_access_outside_the_buffers_and_no_undefined_behaviour(name: str, tmp_path: Path) -> None:
    compiler = next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = native()
    assert library is not None
    names = [*LEVELS]
    levels = {level: LEVELS[level] for level in names[: names.index(library.cpu_level()) + 1]}
    program = build(name, tmp_path, compiler, levels, *FLAGS)
    environment = os.environ | {
        "OMP_NUM_THREADS": "3",
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run([str(program)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert library.cpu_level() in done.stdout
