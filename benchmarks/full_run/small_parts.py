"""Parts of `--everything` that are neither a suite nor a test.

    python -m onetrip.benchmarks.full_run.small_parts KIND DIR DEVICE

Each leaves files in DIR.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from pathlib import Path

import torch
from onetrip import html
from onetrip.environment import header, output_of

from ..measure import results
from ..show import docs_page, html_page

_VARIABLES = ("CUDA", "NVIDIA", "TORCH", "PYTORCH", "TRITON", "ONETRIP", "OMP", "MKL", "XLA")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def environment(output: Path, device: torch.device) -> int:
    """environment.json: enough to set the machine up again, or to doubt its figures."""
    distributions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    found = {
        **header(device),
        "platform": platform.platform(),
        "nvidia_smi": output_of("nvidia-smi"),
        "clocks": output_of("nvidia-smi", "-q", "-d", "CLOCK,POWER,TEMPERATURE,PERFORMANCE,ECC"),
        "nvcc": output_of("nvcc", "--version"),
        "compiler": output_of("c++", "--version"),
        "compute_sanitizer": shutil.which("compute-sanitizer"),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)
        },
        "packages": dict(sorted(distributions.items())),
        "torch_config": torch.__config__.show(),
    }
    path = html.write(output / "environment.json", json.dumps(found, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


def report(output: Path, device: torch.device) -> int:
    """report.md with its figures, and report.html; the parts themselves are a suite of the results."""
    state = json.loads((output / "everything.json").read_text())
    # What was verified stands beside what was measured.
    verified = [{"case": name, **part} for name, part in state.pop("parts").items()]
    results.write({"everything": {**state, "suite": "everything", "cases": verified}}, output / "results")
    docs_page.write(results.read(output / "results"), output / "report.md", output / "results")
    print(f"wrote {output / 'report.md'}")
    print(f"wrote {html_page.write(output / 'results', output / 'report.html')['path']}")
    return 0


if __name__ == "__main__":
    kind, output, device = sys.argv[1:]
    sys.exit({"environment": environment, "report": report}[kind](Path(output), torch.device(device)))
