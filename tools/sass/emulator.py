"""Builds the emulator of machine.h: an object for the simulator's drivers, or a module of Python."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

EMULATOR = Path(__file__).resolve().parent
BUILD = EMULATOR.parents[1] / "build" / "cudasim"


def digest_of(settings: Iterable[str], files: Iterable[Path] = ()) -> str:
    """A hash of what a build depends on: settings, and names and contents of files."""
    digest = hashlib.sha256("\0".join(settings).encode())
    for path in sorted(files, key=lambda path: (path.name, path.parent.name)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """The file or folder that make() leaves at the path it gets. A process that wants the same target at the same time
    waits for it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(target)
    return target


def compiled_once(target: Path, command: Sequence[str]) -> Path:
    """The target of `command TARGET`."""

    def make(unfinished: Path) -> None:
        result = subprocess.run([*command, str(unfinished)], capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{target.name} does not compile:\n{result.stderr[-4000:]}")

    return made_once(target, make)


def python_flags() -> list[str]:
    """Flags of g++ for the sources of a module of Python."""
    import pybind11

    return ["-fPIC", f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]


def build_machine(kind: str, *flags: str) -> Path:
    """The emulator of machine.h, compiled without sanitizers, under build/ by the hash of its sources. kind: the end of
    its name; flags: what makes it that."""
    flags = ("-std=c++20", "-O3", "-fPIC", "-frounding-math", "-ffp-contract=off", *flags)
    sources = sorted(EMULATOR.glob("machine*.cpp"))
    digest = digest_of(flags, [*EMULATOR.glob("*.cpp"), *EMULATOR.glob("*.h")])
    return compiled_once(BUILD / f"machine-{digest}.{kind}", ["g++", *flags, *map(str, sources), "-o"])
