"""Programs that run the CPU kernels without Python: tests/native/cpu_<name>_driver.cpp, the kernels, their dispatch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "csrc/cpu"
DRIVERS = ROOT / "tests/native"
FAMILIES = {"row_norm": ["row_norm"], "softmax": ["softmax"], "adam": ["adam"], "glu": ["glu", "rotary"]}
"""What each driver runs."""
# Without optimisation or inlining by force: the templates compile in a quarter of the time, and the shapes are small.
FLAGS = ("-std=c++17", "-O0", "-g1", "-fopenmp", "-ffp-contract=off", "-DONETRIP_INLINE=inline")


def build(name: str, folder: Path, compiler: str, levels: Mapping[str, Sequence[str]], *flags: str) -> Path:
    """The driver of FAMILIES[name]. levels: instruction-set level -> its flags, beside `flags` of every file.

    Skips where the compiler has not the sanitizers that flags ask for.
    """

    def compile(source: Path, target: str, *more: str) -> str:
        file = folder / f"{target}.o"
        command = [compiler, *FLAGS, *flags, *more, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if "cannot find" in done.stderr and "san" in done.stderr:
            pytest.skip(f"{compiler} has no sanitizers here")
        assert done.returncode == 0, done.stderr
        return str(file)

    driver = DRIVERS / f"cpu_{name}_driver.cpp"
    jobs = [(driver, driver.stem, "-DONETRIP_LEVEL=driver")]
    jobs.append((CPU / "dispatch.cpp", "dispatch", *(["-DONETRIP_HAVE_X86_LEVELS"] if len(levels) > 1 else [])))
    for family in FAMILIES[name]:
        for level, own in levels.items():
            if level != "avx512vbmi" or family == "adam":
                jobs.append((CPU / f"{family}.cpp", f"{family}_{level}", f"-DONETRIP_LEVEL={level}", *own))
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda job: compile(*job), jobs))
    # The families that this driver does not run are not linked: the table of levels has null for them.
    program = folder / "driver"
    unresolved = "-Wl,--unresolved-symbols=ignore-in-object-files"
    subprocess.run([compiler, *FLAGS, *flags, *objects, unresolved, "-o", str(program)], check=True)
    return program
