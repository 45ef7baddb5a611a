"""What a figure was measured on: the machine, the versions, the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .ops.common.backends import native

_ROOT = Path(__file__).resolve().parents[2]
_GENERATED = tuple(f":(exclude){path}" for path in ("benchmarks/results", "docs/benchmarks.md", "docs/figures"))
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SUFFIX = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PACKAGES = ("transformers", "triton")


def checkout() -> Path | None:
    """The root of the source tree that onetrip runs from; None where it was installed from a wheel."""
    return _ROOT if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "csrc").is_dir() else None


def header(device: torch.device) -> dict[str, Any]:
    """What every recorded result starts with: date, commit, versions, machine."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(device),
    }


def describe(header: Mapping[str, Any]) -> dict[str, str]:
    """A header in words, by subject: measured (the date), machine, versions, commit."""
    machine, commit = header["machine"], header["commit"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cpu_count']} cores"
    if machine["device"] == "cpu":
        where += f", {machine['torch_threads']} threads, kernels: {machine['cpu_level'] or 'not built'}"
    return {
        "measured": header["date"][:10],
        "machine": where,
        "versions": ", ".join(f"{name} {found}" for name, found in header["versions"].items() if found != "absent"),
        "commit": "none (no checkout)"
        if commit is None
        else commit["id"][:12] + (" with changes" if commit["modified"] else ""),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """id: the CPU model, its number of cores and the instructions that torch's kernels are held to, or the name of the
    GPU."""
    cpus = os.cpu_count() or 1
    library = native()
    found: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "cpu_count": cpus,
        "cpu_level": None if library is None else library.cpu_level(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "system": f"{platform.system()} {platform.release()}",
    }
    name = f"{found['cpu']} {cpus} cores {os.environ.get('ATEN_CPU_CAPABILITY', '')}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
        found |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver and clocks": output_of("nvidia-smi", query, "--format=csv,noheader", f"--id={device.index or 0}"),
        }
    return {"id": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"), **found}


def versions() -> dict[str, str]:
    own = {"python": platform.python_version(), "torch": torch.__version__, "onetrip": __version__}
    return own | packages(*_PACKAGES)


def packages(*names: str) -> dict[str, str]:
    """Name -> version, or "absent"."""
    found = dict.fromkeys(names, "absent")
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> dict[str, Any] | None:
    """The commit of the source tree, and whether anything but recorded results differs from it.

    Where there is no repository (an installed package, a copied tree) ONETRIP_COMMIT may name it, with -dirty behind it
    for changes, as git describe --always --abbrev=40 --dirty prints it.
    """
    root = checkout()
    if root is None or (head := output_of("git", "rev-parse", "HEAD", cwd=root)) is None:
        given = os.environ.get("ONETRIP_COMMIT")
        return {"id": given.removesuffix("-dirty"), "modified": given.endswith("-dirty")} if given else None
    changes = output_of("git", "status", "--porcelain", "--", ".", *_GENERATED, cwd=root)
    return {"id": head, "modified": bool(changes)}


def load_average() -> float | None:
    """Processes that wanted a CPU in the last minute: well above 0 before a run, its times are not to be trusted."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def last_level_cache_bytes() -> int:
    sizes = [path.read_text().strip() for path in _CPU_CACHES.glob("index*/size")]
    return max((int(size[:-1]) * _SUFFIX[size[-1]] for size in sizes if size), default=32 << 20)


def _cpu_name() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def output_of(*command: str, cwd: Path | None = None) -> str | None:
    """What the command prints; None where it fails or is not there."""
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
