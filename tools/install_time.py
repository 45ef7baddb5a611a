"""How long `pip install .` takes from a clean clone: python -m tools.install_time [--output DIR] [cpu] [cuda]

A clone of HEAD goes into a fresh virtual environment, with build isolation and without pip's cache. The dependencies
are installed first, so that the package's own seconds are known apart; their sum is what a user waits for.
"""

from __future__ import annotations

import argparse
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
from onetrip.environment import checkout, header, load_average

_ARCHITECTURE_VARIABLES = ("ONETRIP_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST")


def _timed(*command: str | Path, environment: dict[str, str], cwd: Path) -> float:
    print("+", *command, flush=True)
    start = time.perf_counter()
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed with exit code {done.returncode}: {' '.join(words)}")
    return time.perf_counter() - start


def measure(root: Path, build: str) -> dict[str, object]:
    """Seconds to install HEAD of the tree at root. build: "cpu", or "cuda" for nvcc with the default architectures."""
    environment = {name: value for name, value in os.environ.items() if name not in _ARCHITECTURE_VARIABLES}
    environment.pop("PYTHONPATH", None)
    environment["ONETRIP_CUDA"] = "1" if build == "cuda" else "0"
    with tempfile.TemporaryDirectory() as folder:
        clone, venv = Path(folder, "clone"), Path(folder, "venv")
        subprocess.run(["git", "clone", "--quiet", "--no-local", root, clone], check=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
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
    parser = argparse.ArgumentParser(description="Time pip install . from a clean clone of HEAD.")
    parser.add_argument("builds", nargs="*", metavar="cpu|cuda", help="default: cpu, and cuda where there is an nvcc")
    parser.add_argument("--output", type=Path, default=results.RECORDED, metavar="DIR")
    options = parser.parse_args()
    if unknown := set(options.builds) - {"cpu", "cuda"}:
        parser.error(f"builds must be cpu or cuda, got {' '.join(sorted(unknown))}")
    root = checkout()
    if root is None:
        parser.error("this needs a source tree, and onetrip is an installed package")
    builds = options.builds or ["cpu", *(["cuda"] if shutil.which("nvcc") else [])]
    described = header(torch.device("cpu")) | {"quick": False, "load_average_before": load_average()}
    cases = [measure(root, build) for build in builds]
    found = {"install": {"schema": results.SCHEMA, "suite": "install", **described, "cases": cases}}
    tables.print_results(found)
    for path in results.write(found, options.output):
        print(f"wrote {path}")
    if options.output == results.RECORDED:
        docs_page.write(results.read(results.RECORDED), root / "docs/benchmarks.md")


if __name__ == "__main__":
    main()
