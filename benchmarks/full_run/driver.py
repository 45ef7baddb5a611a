"""Launches of our kernels under a tool that watches them: compute-sanitizer (sanitizer.py), ncu (counters.py).

The tool starts a process of its own that makes the launches, `python -m <module> drive ...`, and watches it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import torch
from onetrip import use_backend

Launch = tuple[str, Callable[[], list[str]]]
"""What it launches, and the call: it returns what was wrong with the results."""


def kernels(backend: str) -> list[str]:
    """Parts of the names that tell our kernels from all others: the namespace of the CUDA ones, Triton's by name."""
    if backend == "cuda":
        return ["onetrip"]
    import onetrip.kernels

    folder = Path(onetrip.kernels.__file__).parent
    return sorted(
        {name for path in folder.glob("*.py") for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.M)}
    )


def drive(launches: Iterable[Launch], backend: str) -> int:
    """Makes every launch: what the tool watches."""
    n_launches = n_failures = 0
    with use_backend(backend):
        for name, launch in launches:
            for line in launch():
                print(f"FAILED {name}: {line}", flush=True)
                n_failures += 1
            torch.cuda.synchronize()
            n_launches += 1
    if not n_launches:
        print("FAILED: nothing was launched", flush=True)
    print(f"all {n_launches} launches have ended", flush=True)
    return 1 if n_failures or not n_launches else 0


def has_ended(printed: str) -> bool:
    """Whether drive came to its end."""
    return re.search(r"^all \d+ launches have ended$", printed, re.MULTILINE) is not None


def failures(printed: str) -> list[str]:
    """What drive found wrong."""
    return re.findall(r"^FAILED .+$", printed, re.MULTILINE)


def main(drive: Callable[..., int], run: Callable[..., int]) -> NoReturn:
    """Entry point of counters.py and sanitizer.py: `drive ...` is what the tool watches, all else the part."""
    *words, last = sys.argv[1:]
    sys.exit(drive(*words[1:], last) if words[:1] == ["drive"] else run(*words, Path(last)))
