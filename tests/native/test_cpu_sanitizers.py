"""The CPU kernels, with OpenMP, under AddressSanitizer and UBSan, at every level this machine has."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "csrc/cpu"
# Without optimisation: the templates compile in half the time, and the shapes are small.
FLAGS = ["-std=c++17", "-O0", "-g1", "-fopenmp", "-ffp-contract=off"]
# Small outputs pass the caches as large ones do.
FLAGS += ["-DONETRIP_STREAM_BYTES=1048576", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
LEVELS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    LEVELS["avx512"] = [*LEVELS["avx2"], *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl"))]
    LEVELS["avx512vbmi"] = [*LEVELS["avx512"], "-mavx512vbmi"]
FAMILIES = {"row_norm": ["row_norm"], "softmax": ["softmax"], "adam": ["adam"], "glu": ["glu", "rotary"]}
"""What each driver runs, cpu_<name>_driver.cpp."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_no_access_outside_the_buffers_and_no_undefined_behaviour(name: str, tmp_path: Path) -> None:
    compiler = next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), None)
    if compiler is None:
        pytest.skip("no C++ compiler")

    def compile(source: Path, target: str, *flags: str) -> str:
        file = tmp_path / f"{target}.o"
        command = [compiler, *FLAGS, *flags, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if "cannot find" in done.stderr and "san" in done.stderr:
            pytest.skip(f"{compiler} has no sanitizers here")
        assert done.returncode == 0, done.stderr
        return str(file)

    driver = Path(__file__).with_name(f"cpu_{name}_driver.cpp")
    jobs = [(driver, driver.stem, "-DONETRIP_LEVEL=driver")]
    jobs.append((CPU / "dispatch.cpp", "dispatch", *(["-DONETRIP_HAVE_X86_LEVELS"] if len(LEVELS) > 1 else [])))
    for family in FAMILIES[name]:
        for level, flags in LEVELS.items():
            if level != "avx512vbmi" or family == "adam":
                jobs.append((CPU / f"{family}.cpp", f"{family}_{level}", f"-DONETRIP_LEVEL={level}", *flags))
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda job: compile(*job), jobs))
    # The families that this driver does not run are not linked: the table of levels has null for them.
    program = tmp_path / "driver"
    linked = [compiler, *FLAGS, *objects, "-Wl,--unresolved-symbols=ignore-in-object-files", "-o", str(program)]
    subprocess.run(linked, check=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "3",
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run([str(program)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "baseline" in done.stdout
