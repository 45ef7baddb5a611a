"""How long `pip install .` takes from a clean clone: python -m tools.install_time, with nvcc for the CUDA kernels too

A clone of HEAD goes into a fresh virtual environment, with build isolation and without pip's cache. The dependencies
are installed first, so that the package's own seconds are known apart; their sum is what a user waits for.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from onetrip.benchmarks.measure import results
from onetrip.benchmarks.show import docs_page, tables
from onetrip.environment import header, load_average

ROOT = Path(__file__).resolve().parents[1]
_ARCHITECTURE_VARIABLES = ("ONETRIP_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST")


def _timed(*command: str | Path, environment: dict[str, str], cwd: Path) -> float:
    print("+", *command, flush=True)
    start = time.perf_counter()
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed with exit code {done.returncode}: {' '.join(words)}")
    return time.perf_counter() - start


def measure(build: str) -> dict[str, object]:
    """Seconds to install HEAD. build: "cpu", or "cuda" for nvcc with the default architectures."""
    environment = {name: value for name, value in os.environ.items() if name not in _ARCHITECTURE_VARIABLES}
    environment.pop("PYTHONPATH", None)
    environment["ONETRIP_CUDA"] = "1" if build == "cuda" else "0"
    with tempfile.TemporaryDirectory() as folder:
        clone, venv = Path(folder, "clone"), Path(folder, "venv")
        subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, clone], check=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        python = venv / "bin" / "python"
        dependencies = [word for word in importlib.metadata.requires("onetrip") or () if "extra ==" not in word]
        pip = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check")
        # The torch that runs here, so that two records differ in the package alone.
        pinned = [*dependencies, f"torch=={torch.__version__.partition('+')[0]}"]
        dependencies_s = _timed(*pip, *pinned, environment=environment, cwd=clone)
        package_s = _timed(*pip, ".", environment=environment, cwd=clone)
        check = "import onetrip; print(onetrip.ops.common.backends.native() is not None)"
        built = subprocess.run([python, "-c", check], cwd=folder, env=environment, capture_output=True, text=True)
        if built.stdout.strip() != "True":
            sys.exit(f"the installed package has no native library:\n{built.stdout}{built.stderr}")
    return {
        "case": f"install-{build}",
        "build": "CPU kernels only" if build == "cpu" else "CPU and CUDA kernels, default architectures",
        "dependencies_s": dependencies_s,
        "package_s": package_s,
        "total_s": dependencies_s + package_s,
    }


def main() -> None:
    described = header(torch.device("cpu")) | {"quick": False, "load_average_before": load_average()}
    cases = [measure(build) for build in ("cpu", *(["cuda"] if shutil.which("nvcc") else []))]
    found = {"install": {"schema": results.SCHEMA, "suite": "install", **described, "cases": cases}}
    tables.print_results(found)
    for path in results.write(found, results.RECORDED):
        print(f"wrote {path}")
    docs_page.write(results.read(results.RECORDED), ROOT / "docs/benchmarks.md")


if __name__ == "__main__":
    main()
