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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from onetrip import html
from onetrip.environment import header, output_of

from ..measure import results
from ..measure.timing import clock_for, summarise
from ..show import docs_page, html_page

_VARIABLES = ("CUDA", "NVIDIA", "TORCH", "PYTORCH", "TRITON", "ONETRIP", "OMP", "MKL", "XLA")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_COPY_BYTES, _MATRIX = 4 << 30, 8192


def _ceilings(device: torch.device) -> dict[str, object]:
    """What this GPU reaches: a copy of random data, bytes read and written; a product of random bf16 matrices."""
    clock = clock_for(device)
    n = min(_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4) // 2
    source = torch.randn(n, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    a, b = (torch.randn(_MATRIX, _MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))

    def median_ms(function: Callable[[], object]) -> float:
        samples = [clock.time(function)[0] for _ in range(13)]
        return float(summarise(samples[3:], "ms")["median_ms"])

    return {
        "copy_gb_per_s": 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e6,
        "copy_bytes": source.nbytes,
        "bf16_matmul_tflop_per_s": 2 * _MATRIX**3 / median_ms(lambda: a @ b) / 1e9,
        "bf16_matmul_size": _MATRIX,
    }


def environment(output: Path, device: torch.device) -> int:
    """environment.json: enough to set the machine up again, or to doubt its figures."""
    distributions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    found: dict[str, Any] = {
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
    if device.type == "cuda":
        found["ceilings"] = _ceilings(device)
        print({name: round(value) for name, value in found["ceilings"].items()})
    print(f"wrote {html.write(output / 'environment.json', json.dumps(found, indent=1) + chr(10))}")
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
