"""`onetrip doctor`: what works on this machine, why the rest does not, and whether the kernels compute right."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group

from . import __version__, cpu_advice, selfcheck, terminal
from .environment import packages
from .html import Cell, Table
from .ops.common.backends import (
    BACKENDS,
    KERNEL_DTYPES,
    available_backends,
    choose,
    environment_fault,
    native,
    unavailable_reason,
    use_backend,
)

Progress = Callable[[int, int, str], None]

_CHOICE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_REBUILD = "install a C++ compiler (g++ or clang++) and install onetrip again"


@dataclass(frozen=True)
class Choice:
    """Which backend `auto` takes for tensors of a device and dtypes, and why."""

    device: str
    dtypes: str
    backend: str
    why: str


@dataclass(frozen=True)
class Report:
    """Everything that doctor found. facts: what is printed as it stands, by subject. fault: of the environment, for
    which no operator runs; "" where there is none."""

    facts: dict[str, str]
    choices: tuple[Choice, ...]
    checks: tuple[selfcheck.Check, ...]
    fault: str = ""

    @property
    def healthy(self) -> bool:
        return not self.fault and all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "fault": self.fault,
            "facts": self.facts,
            "choices": [vars(choice) for choice in self.choices],
            "checks": [check.to_dict() for check in self.checks],
        }


def devices() -> list[torch.device]:
    """The CPU and every GPU that torch can use."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(n_gpus))]


def examine(progress: Progress | None = None) -> Report:
    """Looks at everything and runs every check. progress: called as (checks done, checks in all, what comes next)."""
    found = devices()
    planned = [
        (device, backend, *case)
        for device in found
        for backend in available_backends(device)
        for case in selfcheck.cases(backend)
    ]
    checks: list[selfcheck.Check] = []
    for done, (device, backend, kernel, dtype) in enumerate(planned):
        if progress is not None:
            progress(done, len(planned), f"{device}, {backend}: {kernel.name}")
        checks.extend(selfcheck.run_check(device, backend, kernel, dtype))
    choices = tuple(choice for device in found for choice in _choices(device))
    return Report(_facts(), choices, tuple(checks), environment_fault(found))


def _facts() -> dict[str, str]:
    library = native()
    facts = {
        "onetrip": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,  # with the CUDA it was built for, which the wheel's own metadata may leave out
        **packages("triton", "transformers"),
    }
    if library is None:
        facts["native library"] = f"not built: {_REBUILD}; until then kernels run through Triton or the slow reference"
    else:
        facts["native library"] = f"CPU kernels at level {library.cpu_level()}"
    facts["CPU"] = platform.machine()
    facts.update(cpu_advice.facts())
    facts["CUDA kernels"] = _cuda_kernels(library)
    for device in devices():
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            facts[str(device)] = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    facts["Triton kernels"] = "; ".join(
        f"{kind}: {unavailable_reason('triton', kind) or 'usable'}" for kind in ("cpu", "cuda")
    )
    if os.environ.get("ONETRIP_BACKEND"):
        facts["ONETRIP_BACKEND"] = (
            f"{os.environ['ONETRIP_BACKEND']} (set in the environment; what follows is auto's choice)"
        )
    return facts


def _cuda_kernels(library: Any) -> str:
    if library is None:
        return "not built"
    if not library.cuda_architectures():
        served = "; NVIDIA GPUs are served by the Triton kernels" if importlib.util.find_spec("triton") else ""
        return library.cuda_unavailable_reason(0) + served
    reason = unavailable_reason("cuda", "cuda")
    return f"built for {library.cuda_architectures()}; {'not usable: ' + reason if reason else 'usable'}"


def _choices(device: torch.device) -> list[Choice]:
    """One entry for each backend that auto takes on the device."""
    by_backend: dict[str, list[torch.dtype]] = {}
    with use_backend("auto"):
        for dtype in _CHOICE_DTYPES:
            backend = choose("doctor", device, dtype in KERNEL_DTYPES)
            by_backend.setdefault(backend, []).append(dtype)
    return [
        Choice(
            str(device),
            ", ".join(str(d).removeprefix("torch.") for d in dtypes),
            backend,
            _why(device, backend, dtypes),
        )
        for backend, dtypes in by_backend.items()
    ]


def _why(device: torch.device, backend: str, dtypes: list[torch.dtype]) -> str:
    if not KERNEL_DTYPES.intersection(dtypes):
        return "kernels compute float32, float16 and bfloat16 only"
    passed_over = [
        f"{name}: {unavailable_reason(name, device.type, device.index or 0)}"
        for name in BACKENDS[: BACKENDS.index(backend)]
        if name not in ("cpu", "cuda") or name == device.type
    ]
    return "; ".join(passed_over) or "first choice for this device"


def render(report: Report) -> Group:
    """What `onetrip doctor` prints without --json."""
    failed = [check for check in report.checks if not check.passed]
    verdict = (
        f"{len(failed)} of {len(report.checks)} checks failed" if failed else f"all {len(report.checks)} checks passed"
    )
    choices = [(choice.device, choice.dtypes, choice.backend, choice.why) for choice in report.choices]
    return terminal.render(
        [
            Table("This machine", ("", ""), list(report.facts.items())),
            Table("What auto picks", ("device", "dtypes", "backend", "why"), choices),
            *_check_tables(report),
            *(f"FAILED {check}" for check in failed),
            verdict,
            *([report.fault] if report.fault else []),
        ]
    )


def _check_tables(report: Report) -> Iterator[Table]:
    """A table for each device and backend: kernels by dtypes, in each cell the largest error of both directions."""
    by_backend: dict[tuple[str, str], list[selfcheck.Check]] = {}
    for check in report.checks:
        by_backend.setdefault((check.device, check.backend), []).append(check)
    for (device, backend), checks in by_backend.items():
        dtypes = list(dict.fromkeys(check.dtype for check in checks))
        rows = [
            (kernel, *(_cell([c for c in checks if c.kernel == kernel and c.dtype == dtype]) for dtype in dtypes))
            for kernel in dict.fromkeys(check.kernel for check in checks)
        ]
        yield Table(f"Self-check of {backend} on {device}: largest error against float64", ("", *dtypes), rows)


def _cell(checks: list[selfcheck.Check]) -> Cell | None:
    if not checks:
        return None
    if all(check.passed for check in checks):
        largest = max(check.error for check in checks)
        return Cell(largest, f"{largest:.0e}", good=True)
    return Cell(None, "FAILED", good=False)
