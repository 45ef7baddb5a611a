"""Builds the emulator of machine.h: an object for the simulator's drivers, or a shared library."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

EMULATOR = Path(__file__).resolve().parent
BUILD = EMULATOR.parents[1] / "build" / "cudasim"


def build_machine(kind: str, *flags: str) -> Path:
    """The emulator of machine.h, compiled without sanitizers, under build/ by the hash of its sources. kind: the end of
    its name; flags: what makes it that."""
    flags = ("-std=c++17", "-O2", "-fPIC", "-frounding-math", "-ffp-contract=off", *flags)
    sources = sorted(EMULATOR.glob("machine*.cpp"))
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in [*sources, *sorted(EMULATOR.glob("machine*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    compiled = BUILD / f"machine-{digest.hexdigest()[:16]}.{kind}"
    if not compiled.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = compiled.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *flags, *map(str, sources), "-o", str(unfinished)], check=True)
        unfinished.rename(compiled)
    return compiled
