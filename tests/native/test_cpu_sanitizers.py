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
FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
LEVELS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    LEVELS["avx512"] = [*LEVELS["avx2"], *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl"))]
    LEVELS["avx512vbmi"] = [*LEVELS["avx512"], "-mavx512vbmi"]


@pytest.mark.slow
def test_no_access_outside_the_buffers_and_no_undefined_behaviour(tmp_path):
    compiler = next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), None)
    if compiler is None:
        pytest.skip("no C++ compiler")

    def compile(source: Path, name: str, *flags: str) -> str:
        target = tmp_path / f"{name}.o"
        command = [compiler, *FLAGS, *flags, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if "cannot find" in done.stderr and "san" in done.stderr:
            pytest.skip(f"{compiler} has no sanitizers here")
        assert done.returncode == 0, done.stderr
        return str(target)

    drivers = sorted(Path(__file__).parent.glob("cpu_*_driver.cpp"))
    jobs = [(driver, driver.stem, "-DONETRIP_LEVEL=driver") for driver in drivers]
    jobs.append((CPU / "dispatch.cpp", "dispatch", *(["-DONETRIP_HAVE_X86_LEVELS"] if len(LEVELS) > 1 else [])))
    for family in sorted(CPU.glob("*.cpp")):
        if family.stem != "dispatch":
            for level, flags in LEVELS.items():
                if level == "avx512vbmi" and family.stem != "adam":
                    continue
                jobs.append((family, f"{family.stem}_{level}", f"-DONETRIP_LEVEL={level}", *flags))
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda job: compile(*job), jobs))
    options = {"OMP_NUM_THREADS": "3", "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    environment = {**os.environ, **options}
    environment.pop("LD_PRELOAD", None)
    for driver in objects[: len(drivers)]:
        program = tmp_path / "driver"
        subprocess.run([compiler, *FLAGS, driver, *objects[len(drivers) :], "-o", str(program)], check=True)
        done = subprocess.run([str(program)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, driver + done.stdout[-2000:] + done.stderr[-4000:]
        assert "baseline" in done.stdout
