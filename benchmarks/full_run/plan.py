"""What `--everything` runs, as data: the parts, what each one proves, and why one cannot run on this machine."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from onetrip.ops.backends import unavailable_reason

from ..measure.cases import DTYPE_NAMES, LARGE_ELEMENTS, Case, Named, gpu_shapes
from ..measure.results import SUITES, bench_file
from . import gpu_tests

LIMIT_S = 470.0
"""No part takes longer: under eight minutes, so that a call of ten minutes holds any one of them."""
START_S = 8.0
"""Of a process: Python, torch, the card's context."""
_FOLDER = "onetrip.benchmarks.full_run"
CHECKS = ("doctor", "gpu-tests", "sanitizer")
"""How the names of parts begin that prove something and measure nothing."""

_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_PART_S = 150.0
"""What a part of several cases may be estimated at: the less one takes, the less a budget leaves unused."""
_RACE_S = {"cuda": 80.0, "cpu": 45.0, "quick": 3.0}
"""Of a case in which everybody races, torch.compile's compilations included."""
_CASE_S: Mapping[str, Mapping[str, float]] = {
    "attention-L16384-*": {"cuda": 40.0, "cpu": 320.0, "quick": 3.0},
    "attention-*": {"cuda": 40.0, "cpu": 60.0, "quick": 3.0},
    "overhead-*": {"cuda": 2.0, "cpu": 3.0, "quick": 3.0},
    "training-*": {"cuda": 100.0, "cpu": 360.0, "quick": 60.0},
    "adam-*": {"cuda": 30.0, "cpu": 100.0, "quick": 3.0},
    "adam_training-*": {"cuda": 60.0, "cpu": 400.0, "quick": 30.0},
    "*": {"cuda": 4.0, "cpu": 6.0, "quick": 3.0},
}
"""Of other cases, by id, the first that fits: on a card, on two cores. Guesses: a part that takes longer is cut at its
limit, and keeps the cases that have ended."""
_MODELS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("bert-large", "--batch-size=4", "--sequence-length=512"),
    "cpu": ("minilm", "--batch-size=4"),
    "quick": ("tiny-bert", "--batch-size=2", "--sequence-length=16", "--steps=2"),
}
"""What `onetrip anatomy` and `onetrip methods` look at, by device."""
_COLUMNS = "eager,patched,patched_adamw8bit"
_COMMAND_S: Mapping[str, Mapping[str, float]] = {
    "anatomy": {"cuda": 150.0, "cpu": 150.0, "quick": 60.0},
    "methods": {"cuda": 300.0, "cpu": 450.0, "quick": 90.0},
}


_HALF_AN_HOUR = (
    *("environment", "doctor", "gpu-tests-special", "gpu-tests-*-cuda", "gpu-tests-models", "sanitizer-memcheck-cuda"),
    *("sanitizer-racecheck-cuda", "row_norm-*-large", "softmax-*-large", "adam"),
    *("training-bert_large-24_layers-4x512-bf16", "counters-cuda"),
)
"""What comes first on a card, which may be lent for no longer: whether the CUDA kernels are right, what they reach
where memory is the limit, and why."""


@dataclass(frozen=True)
class Place:
    """Where and how a run happens."""

    output: Path
    device: torch.device
    quick: bool = False
    tests: Path | None = None
    """The root of a source tree, whose tests can be run."""


@dataclass(frozen=True)
class Part:
    """One process: python -m <command>. In a command {deadline} stands for when it must have ended (Unix time)."""

    name: str
    proves: str
    command: tuple[str, ...]
    seconds: float
    """Estimated."""
    missing: str = ""
    """Why it cannot run here; empty where it can."""
    always: bool = False
    """Runs at the end of every call, whatever was done before."""

    @property
    def is_check(self) -> bool:
        return self.name.startswith(CHECKS)


def _own(kind: str, place: Place) -> tuple[str, ...]:
    return (f"{_FOLDER}.small_parts", kind, str(place.output), place.device.type)


def _first(place: Place) -> Iterator[Part]:
    yield Part("environment", "card, clocks, versions, commit, measured ceilings", _own("environment", place), 15.0)
    yield Part("doctor", "a numeric check of every kernel on every device", _own("doctor", place), 60.0)


def _gpu_tests(place: Place) -> Iterator[Part]:
    missing = _no_card(place)
    if not missing and place.tests is None:
        missing = "the tests are not installed with the package: call from the root of a source tree"
    if not missing:
        missing = gpu_tests.missing()
    for shard in gpu_tests.SHARDS:
        command = (
            f"{_FOLDER}.gpu_tests",
            shard.name,
            str(place.tests),
            str(place.output),
            "{deadline}",
        )
        yield Part(f"gpu-tests-{shard.name}", f"the tests marked gpu: {shard.what}", command, shard.seconds, missing)


def _sanitizers(place: Place) -> Iterator[Part]:
    missing = _no_card(place)
    if not missing and shutil.which("compute-sanitizer") is None:
        missing = "compute-sanitizer is not on PATH: it comes with the CUDA toolkit"
    for backend in ("cuda", "triton"):
        for tool in _TOOLS:
            absent = missing or unavailable_reason(backend, "cuda")
            command = (f"{_FOLDER}.sanitizer", tool, backend, str(place.output), "{deadline}")
            yield Part(f"sanitizer-{tool}-{backend}", f"{tool} finds nothing in the kernels", command, 90.0, absent)


def _counters(place: Place) -> Iterator[Part]:
    missing = _no_card(place)
    if not missing and shutil.which("ncu") is None:
        missing = "ncu is not on PATH: it comes with the CUDA toolkit, as Nsight Compute"
    for backend in ("cuda", "triton"):
        absent = missing or unavailable_reason(backend, "cuda")
        command = (f"{_FOLDER}.counters", backend, str(place.output), "{deadline}")
        yield Part(f"counters-{backend}", "what each kernel moves, executes and waits for", command, 180.0, absent)


def _no_card(place: Place) -> str:
    if place.device.type == "cuda":
        return ""
    return "torch sees no CUDA device" if not torch.cuda.is_available() else "the run is on the CPU"


def _seconds(case: Named, place: Place) -> float:
    kind = "quick" if place.quick else place.device.type
    found = next(pattern for pattern in _CASE_S if fnmatchcase(case.id, pattern))
    races = isinstance(case, Case) and case.full and (case.dtype == torch.float32 or place.device.type == "cuda")
    return (_RACE_S if races and found == "*" else _CASE_S[found])[kind]


def _whole(suite: str, case: Named) -> str:
    return suite


def _operator(suite: str, case: Named) -> str:
    if not isinstance(case, Case):
        return _one(suite, case)
    stem = case.operator.name.removeprefix(suite).lstrip("-")
    return "-".join(filter(None, (suite, stem, DTYPE_NAMES[case.dtype])))


def _size(suite: str, case: Named) -> str:
    """Apart: tensors larger than a card's L2 cache; and those for the sake of the number of their rows."""
    name = _operator(suite, case)
    if not isinstance(case, Case) or (case.n_rows, case.n_cols) not in gpu_shapes():
        return name
    return f"{name}-large" if case.n_rows * case.n_cols == LARGE_ELEMENTS else f"{name}-rows"


def _one(suite: str, case: Named) -> str:
    return f"{suite}-{case.id.removeprefix(f'{suite}-')}"


_Kind = Callable[[str, Named], str]
"""Suite, case -> the name of the part that it belongs to."""


@dataclass(frozen=True)
class _Estimated:
    case: Named
    missing: str
    """Why the case cannot run on the device; empty where it can."""
    seconds: float


def _groups(
    suite: str, cases: Sequence[_Estimated], kinds: Sequence[_Kind] = (_whole, _operator, _size, _one)
) -> Iterator[tuple[str, Sequence[_Estimated]]]:
    """(name, cases that share a process): the suite, an operator in a dtype, of one kind of size, or a case, as is
    short enough."""
    kind, *finer = kinds
    found: dict[str, list[_Estimated]] = {}
    for each in cases:
        found.setdefault(kind(suite, each.case), []).append(each)
    for name, members in found.items():
        if finer and len(members) > 1 and START_S + sum(each.seconds for each in members) > _PART_S:
            yield from _groups(suite, members, finer)
        else:
            yield name, members


def _suite(suite: str, place: Place) -> Iterator[Part]:
    module = importlib.import_module(f"onetrip.benchmarks.suites.{bench_file(suite).stem}")
    why = getattr(module, "unavailable", lambda case, device: "")
    cases = [
        _Estimated(case, missing, 0.0 if missing else _seconds(case, place))
        for case in module.cases(place.quick)
        for missing in [why(case, place.device)]
    ]
    for name, members in _groups(suite, cases):
        # As globs, which mean whole ids; a plain word means any part of one.
        pattern = "*" if name == suite else ",".join(f"[{each.case.id[0]}]{each.case.id[1:]}" for each in members)
        command = ["onetrip.benchmarks", f"--op={suite}", f"--only={pattern}", f"--device={place.device.type}"]
        command += ["--resume", f"--output={place.output / 'parts' / name}", *(["--quick"] if place.quick else [])]
        n = sum(not each.missing for each in members) or len(members)
        proves = f"{n} case{'s' if n > 1 else ''} of the suite {suite}, each checked and timed"
        missing = members[0].missing if all(each.missing for each in members) else ""
        yield Part(name, proves, tuple(command), START_S + sum(each.seconds for each in members), missing)


def _commands(place: Place) -> Iterator[Part]:
    """The other commands, which are sections of their own in the report."""
    size = "quick" if place.quick else place.device.type
    model, *options = _MODELS[size]
    columns = _COLUMNS if place.quick else f"{_COLUMNS},compiled"
    for command, proves, more in (
        ("anatomy", "where the time and the memory of a step go, predicted and measured", (f"--columns={columns}",)),
        ("methods", "which method improves speed and which saves memory", ("--resume",)),
    ):
        name = f"{command}-{model}"
        where = (f"--device={place.device.type}", f"--output={place.output / 'parts' / name}")
        words = ("onetrip", command, model, *options, *where, *more)
        yield Part(name, f"{proves}: {model}", words, _COMMAND_S[command][size])


def _last(place: Place) -> Iterator[Part]:
    yield Part("peers", "which other libraries raced, and why the rest did not", _own("peers", place), 30.0)
    yield Part("report", "everything that was found, on one page", _own("report", place), 25.0, always=True)


def parts(place: Place) -> list[Part]:
    """Every part, in order of worth: a run that is cut short has the most important ones."""
    sanitizers = list(_sanitizers(place))
    ordered = [
        *_first(place),
        *_gpu_tests(place),
        *sanitizers[:2],
        *(part for suite in SUITES for part in _suite(suite, place)),
        # They say why a figure of the suites is what it is. What follows says nothing of a kernel's speed.
        *_counters(place),
        *_commands(place),
        *sanitizers[2:],
        *_last(place),
    ]
    if place.device.type == "cuda":
        ordered.sort(key=lambda part: not any(fnmatchcase(part.name, pattern) for pattern in _HALF_AN_HOUR))
    return ordered
