"""The parts of the full run, as data: what each one proves, and why one cannot run on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from onetrip.ops.common.backends import FAMILIES, unavailable_reason

from ..measure.cases import DTYPE_NAMES, LARGE_ELEMENTS, Case, Named, gpu_shapes
from ..measure.results import SUITES
from ..runner import Options, module, runnable
from . import gpu_tests

_FOLDER = "onetrip.benchmarks.full_run"
_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_MODELS = {
    "cuda": ("bert-large", "--batch-size=4", "--sequence-length=512"),
    "cpu": ("minilm", "--batch-size=4"),
    "quick": ("tiny-bert", "--batch-size=2", "--sequence-length=16", "--steps=2"),
}
"""What `onetrip anatomy` and `onetrip methods` look at, by device."""
_COLUMNS = "eager,patched,patched_adamw8bit"
_FIRST = (
    "environment",
    "doctor",
    "gpu-tests-special",
    "gpu-tests-*-cuda",
    "gpu-tests-models",
    "sanitizer-memcheck-cuda-*",
    "sanitizer-racecheck-cuda-*",
    "row_norm-*-large",
    "softmax-*-large",
    "adam",
    "training-bert_large-24_layers-4x512-bf16",
    "counters-cuda",
)
"""What comes first on a GPU: whether the CUDA kernels are right, what they reach where memory is the limit, and why."""


@dataclass(frozen=True)
class Place:
    """Where and how a run happens."""

    output: Path
    device: torch.device
    quick: bool = False
    tests: Path | None = None
    """The root of a source tree, whose tests can be run."""
    machine: str = "machine"
    """Its id: the folder in output/results that the other commands write into."""


@dataclass(frozen=True)
class Part:
    """One process: python -m <command>. When its time is up it gets SIGINT, as Ctrl-C: what it has done is kept."""

    name: str
    proves: str
    command: tuple[str, ...]
    missing: str = ""
    """Why it cannot run here; empty where it can."""
    always: bool = False
    """Runs at the end of every call, whatever was done before."""
    folder: Path | None = None
    """Where it runs; None: in the current folder."""


def _own(kind: str, proves: str, place: Place, always: bool = False) -> Part:
    command = (f"{_FOLDER}.small_parts", kind, str(place.output), place.device.type)
    return Part(kind, proves, command, always=always)


def _gpu_tests(place: Place) -> Iterator[Part]:
    missing = _no_gpu(place)
    if not missing and place.tests is None:
        missing = "the tests are not installed with the package: call from the root of a source tree"
    missing = missing or gpu_tests.missing()
    for shard in gpu_tests.SHARDS:
        command = gpu_tests.command(shard, place.tests or Path(), place.output)
        proves = f"the tests marked gpu: {shard.what}"
        yield Part(f"gpu-tests-{shard.name}", proves, command, missing, folder=place.tests)


def _sanitizers(tools: tuple[str, ...], place: Place) -> Iterator[Part]:
    for backend in ("cuda", "triton"):
        missing = _missing("compute-sanitizer", backend, place)
        for tool in tools:
            for family in sorted(FAMILIES[backend]):
                command = (f"{_FOLDER}.sanitizer", tool, backend, family, str(place.output))
                proves = f"{tool} finds nothing in the kernels of {family}"
                yield Part(f"sanitizer-{tool}-{backend}-{family}", proves, command, missing)


def _counters(place: Place) -> Iterator[Part]:
    for backend in ("cuda", "triton"):
        command = (f"{_FOLDER}.counters", backend, str(place.output))
        missing = _missing("ncu", backend, place)
        yield Part(f"counters-{backend}", "what each kernel moves, executes and waits for", command, missing)


def _missing(tool: str, backend: str, place: Place) -> str:
    """Why a tool cannot watch the kernels of a backend; empty where it can."""
    absent = "" if shutil.which(tool) else f"{tool} is not on PATH: it comes with the CUDA toolkit"
    return _no_gpu(place) or absent or unavailable_reason(backend, "cuda")


def _no_gpu(place: Place) -> str:
    if place.device.type == "cuda":
        return ""
    return "torch sees no CUDA device" if not torch.cuda.is_available() else "the run is on the CPU"


def _group(suite: str, case: Named) -> str:
    """The name of the part that a case belongs to. A process holds an operator in a dtype and of one kind of size, or a
    training step: what one of them breaks, others outlive."""
    if suite == "training":
        return case.id
    if not isinstance(case, Case):
        return suite
    operator = case.operator.name.partition("-")[0].removeprefix(suite)
    name = "-".join(filter(None, (suite, operator, DTYPE_NAMES[case.dtype])))
    if (case.n_rows, case.n_cols) not in gpu_shapes():
        return name
    return f"{name}-large" if case.n_rows * case.n_cols == LARGE_ELEMENTS else f"{name}-rows"


def _suite(suite: str, place: Place) -> Iterator[Part]:
    groups: dict[str, list[Named]] = {}
    for case in module(suite).cases(place.quick):
        groups.setdefault(_group(suite, case), []).append(case)
    for name, members in groups.items():
        found, skipped = runnable({suite: members}, place.device, Options.parse())
        # As globs, which mean whole ids; a plain word means any part of one.
        pattern = ",".join(f"[{case.id[0]}]{case.id[1:]}" for case in members)
        command = ["onetrip.benchmarks", f"--op={suite}", f"--only={pattern}", f"--device={place.device.type}"]
        command += ["--resume", f"--output={place.output / 'results'}", *(["--quick"] if place.quick else [])]
        n = len(found[suite])
        proves = f"{n} case{'s' * (n != 1)} of the suite {suite}, each checked and timed"
        yield Part(name, proves, tuple(command), "" if n else skipped[0].partition(": ")[2])


def _commands(place: Place) -> Iterator[Part]:
    """The other commands, which are sections of their own in the report."""
    model, *options = _MODELS["quick" if place.quick else place.device.type]
    columns = _COLUMNS if place.quick else f"{_COLUMNS},compiled"
    for command, proves, more in (
        ("anatomy", "where the time and the memory of a step go, predicted and measured", (f"--columns={columns}",)),
        ("methods", "which method improves speed and which saves memory", ("--resume",)),
    ):
        where = (f"--device={place.device.type}", f"--output={place.output / 'results' / place.machine}")
        yield Part(f"{command}-{model}", f"{proves}: {model}", ("onetrip", command, model, *options, *where, *more))


def parts(place: Place) -> list[Part]:
    """Every part, in order of worth: a run that is cut short has the most important ones."""
    ordered = [
        _own("environment", "GPU, clocks, versions, commit", place),
        Part("doctor", "a numeric check of every kernel on every device", ("onetrip", "doctor")),
        *_gpu_tests(place),
        *_sanitizers(_TOOLS[:2], place),
        *(part for suite in SUITES for part in _suite(suite, place)),
        *_counters(place),
        *_commands(place),
        *_sanitizers(_TOOLS[2:], place),
        _own("report", "everything that was found, on one page", place, always=True),
    ]
    if place.device.type == "cuda":
        ordered.sort(key=lambda part: not any(fnmatchcase(part.name, pattern) for pattern in _FIRST))
    return ordered
