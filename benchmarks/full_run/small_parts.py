"""Parts of `--everything` that are neither a suite nor a test.

    python -m onetrip.benchmarks.full_run.small_parts KIND DIR DEVICE

Each leaves a file in DIR and prints a line that begins with FAILED for whatever is wrong.
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
from ..selection import Options, module, runnable
from ..show import docs_page, html_page

_VARIABLES = ("CUDA", "NVIDIA", "TORCH", "PYTORCH", "TRITON", "ONETRIP", "OMP", "MKL", "XLA")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_COPY_BYTES, _MATRIX = 4 << 30, 8192


def _write(path: Path, content: object) -> None:
    html.write(path, json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")


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
    _write(output / "environment.json", found)
    return 0


def doctor(output: Path, device: torch.device) -> int:
    """doctor.json: the self-check of every kernel."""
    from onetrip import doctor as doctor_

    found = doctor_.examine()
    _write(output / "doctor.json", found.to_dict())
    for check in found.checks:
        if not check.passed:
            print(f"FAILED {check}")
    print(f"{sum(check.passed for check in found.checks)} of {len(found.checks)} checks passed")
    return 0 if found.healthy else 1


def merged(output: Path) -> results.Results:
    """The suites of all parts, their cases in the order of the suite; what ran but is not whole is there too."""
    state = json.loads((output / "everything.json").read_text())
    head = {key: value for key, value in state.items() if key != "parts"}
    device = torch.device(state["machine"]["device"])
    found: results.Results = {}
    for path in (path for folder in sorted(output.glob("parts/*/*")) for path in results.suite_files(folder).values()):
        content = results.read_suite(path)
        if content["code"] != state["code"]:
            print(f"{path} is of other code: left out")
            continue
        suite = content["suite"]
        into = found.setdefault(suite, {**content, "asked_for": ["--everything"], "cases": []})
        into["load_average_before"] = max(into["load_average_before"] or 0.0, content["load_average_before"] or 0.0)
        into["complete"] &= content["complete"]
        into["cases"] += content["cases"]
    for suite, content in found.items():
        cases = {case["case"]: case for case in content["cases"]}
        planned = module(suite).cases(state["quick"])
        wanted, _ = runnable({suite: planned}, device, Options.parse())
        order = {case.id: i for i, case in enumerate(planned)}
        content["cases"] = sorted(cases.values(), key=lambda case: order.get(case["case"], len(order)))
        content["complete"] &= cases.keys() >= {case.id for case in wanted[suite]}
    # What was verified stands beside what was measured.
    verified = [{"case": name, **part} for name, part in state["parts"].items()]
    return {**found, "everything": {**head, "suite": "everything", "cases": verified}}


def collect(output: Path, device: torch.device) -> int:
    """results/<machine>/<suite>.json, as they belong into benchmarks/results; report.md, its figures; report.html."""
    found = merged(output)
    for path in results.write(found, output / "results"):
        print(f"wrote {path}")
    for path in (path for kind in results.OTHERS for path in output.glob(f"parts/{kind}-*/{kind}.json")):
        place = output / "results" / header(device)["machine"]["id"]
        place.mkdir(parents=True, exist_ok=True)
        print(f"wrote {shutil.copy(path, place)}")
    recorded = results.read(output / "results")
    docs_page.write(recorded, output / "report.md", output / "results")
    print(f"wrote {output / 'report.md'}")
    print(f"wrote {html_page.write(output / 'results', output / 'report.html').path}")
    return 0


KINDS: dict[str, Callable[[Path, torch.device], int]] = {
    "environment": environment,
    "doctor": doctor,
    "report": collect,
}


def main(arguments: list[str]) -> int:
    kind, output, device = arguments
    return KINDS[kind](Path(output), torch.device(device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
