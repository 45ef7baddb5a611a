"""What a figure was measured on: the machine, the versions, the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import onetrip
import torch

from .timing import last_level_cache_bytes

PACKAGE = Path(__file__).resolve().parent
_GENERATED = (":(exclude)benchmarks/results", ":(exclude)docs/benchmarks.md")


def checkout() -> Path | None:
    """The root of the source tree that the suite runs from; None where it was installed from a wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "csrc").is_dir() else None


def _output(*command: str, cwd: Path | None = None) -> str | None:
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def machine(device: torch.device) -> dict[str, object]:
    """id: the CPU model and its number of cores, or the name of the card."""
    cpus = os.cpu_count() or 1
    native = onetrip.ops.backends.native()
    found: dict[str, object] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "cpu_count": cpus,
        "cpu_level": None if native is None else native.cpu_level(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "system": f"{platform.system()} {platform.release()}",
    }
    name = f"{found['cpu']} {cpus} cores"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
        found |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver and clocks": _output("nvidia-smi", query, "--format=csv,noheader", f"--id={device.index or 0}"),
        }
    return {"id": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"), **found}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "onetrip": onetrip.__version__}
    for package in ("transformers", "triton", "pytest-benchmark"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def commit() -> dict[str, object] | None:
    """The commit of the source tree, and whether anything but recorded results differs from it."""
    root = checkout()
    if root is None or (head := _output("git", "rev-parse", "HEAD", cwd=root)) is None:
        return None
    changes = _output("git", "status", "--porcelain", "--", ".", *_GENERATED, cwd=root)
    return {"id": head, "modified": bool(changes)}


def load_average() -> float | None:
    """Processes that wanted a CPU in the last minute: well above 0 before a run, its times are not to be trusted."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def header(device: torch.device) -> dict[str, object]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(device),
    }
