"""From the words of the command line to cases, and the cases one after the other: each record is kept as soon as it is
made."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from onetrip.environment import header, load_average
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .measure.cases import DTYPE_NAMES, PASSES, Named, Session, Skip, one_line, selects
from .measure.providers import AGAINST, OF_TORCH, PROVIDERS, own_provider, versions
from .measure.results import SUITES, Results, Store, UsageError, fingerprint, own_failures
from .measure.timing import Rounds

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {str(d).partition(".")[2]: d for d in DTYPE_NAMES}
_PASSES = {"forward": PASSES[0], "backward": PASSES[1], "both": PASSES[2]}
_PROVIDERS = tuple(name for name in PROVIDERS if name not in OF_TORCH)
_OPTIMIZERS = ("eager", "apex", "transformer-engine", "bitsandbytes", "torchao")
_OPERATOR = {"dtype": (), "shape": (), "pass": (), "against": _PROVIDERS}
TAKES: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("row_norm", "softmax", "rotary", "glu", "moe"), _OPERATOR),
    "cross_entropy": {**_OPERATOR, "against": (*_PROVIDERS, "chunked")},
    "attention": {"dtype": (), "pass": (), "against": (*_PROVIDERS, "sdpa")},
    "overhead": {"dtype": (), "against": _PROVIDERS},
    "adam": {"dtype": (), "against": _OPTIMIZERS},
}
"""Options that a suite understands, and for "against" the providers it has; any other suite runs as it is or not at
all."""


def _one_of(option: str, known: dict[str, Any]) -> Callable[[str], Any]:
    def parse(word: str) -> Any:
        if word not in known:
            raise UsageError(f"--{option} {word}: unknown value; choose from {', '.join(known)}")
        return known[word]

    return parse


def _shape(word: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
    if match is None:
        raise UsageError(f"--shape {word}: must read ROWSxCOLS, for example 4096x1024")
    return int(match[1]), int(match[2])


_PARSERS: dict[str, Callable[[str], Any]] = {
    "op": str,
    "dtype": _one_of("dtype", _DTYPES),
    "shape": _shape,
    "pass": _one_of("pass", _PASSES),
    "against": _one_of("against", {name: name for name in AGAINST}),
}


@dataclass(frozen=True)
class Options:
    """What a run was asked for. values: by option, in the order of _PARSERS; an option that was not given is absent."""

    only: str | None
    """A glob over the ids of cases, or a part of them."""
    quick: bool
    values: dict[str, tuple[Any, ...]]
    words: tuple[str, ...]
    """The same as the command line has it."""

    @classmethod
    def parse(cls, only: str | None = None, quick: bool = False, **given: Iterable[str] | None) -> Options:
        """given: the words of op, dtype, shape, pass and against. Raises UsageError for what does not exist; the
        operators are looked up by select."""
        words = ["--quick"] * quick + ([f"--only={only}"] if only is not None else [])
        values = {}
        for name, parse in _PARSERS.items():
            if given.get(name):
                values[name] = tuple(dict.fromkeys(map(parse, given[name])))
                words += [f"--{name}={word}" for word in given[name]]
        return cls(only, quick, values, tuple(words))

    def get(self, name: str) -> tuple[Any, ...]:
        return self.values.get(name, ())

    @property
    def passes(self) -> tuple[str, ...]:
        return tuple(name for name in PASSES if name in self.get("pass"))

    def measured(self) -> dict[str, object]:
        """What decides how a case is measured, and not which cases are: records that differ in it must not be mixed."""
        return {"quick": self.quick, "passes": list(self.passes), "against": list(self.get("against"))}


def module(suite: str) -> ModuleType:
    """cases(quick), measure(case, session) and, where it has one, unavailable(case, device)."""
    return importlib.import_module(f"onetrip.benchmarks.suites.{suite}")


def operator_of(case: Named) -> str:
    """The operator of a case; empty where it is no case of one."""
    operator = getattr(case, "operator", None)
    return "" if operator is None else operator.name


def operators(suite: str) -> list[str]:
    """Operators of a suite; one that is not made of operators has none."""
    return list(dict.fromkeys(filter(None, map(operator_of, module(suite).cases()))))


def _stem(operator: str) -> str:
    return operator.partition("-")[0]


def _suites_of(ops: tuple[str, ...]) -> list[str]:
    """The suites in which the names are, no more of them loaded than it takes to find all."""
    if not ops:
        return list(SUITES)
    missing, known, found = set(ops) - set(SUITES), list(SUITES), set(ops) & set(SUITES)
    # An operator is measured in its own suite; its overhead is a suite by itself, and asked for by name.
    for suite in (suite for suite in SUITES if suite != "overhead"):
        if not missing:
            break
        names = [word for name in operators(suite) for word in (_stem(name), name)]
        if missing & set(names):
            found.add(suite)
        missing -= set(names)
        known += names
    if missing:
        name = next(name for name in ops if name in missing)
        raise UsageError(f"--op {name}: unknown value; choose from {', '.join(dict.fromkeys(known))}")
    return [suite for suite in SUITES if suite in found]


def _rejected(suite: str, options: Options) -> str:
    """Why the suite cannot do what was asked for; empty where it can."""
    takes = TAKES.get(suite, {})
    for name in options.values:
        if name != "op" and name not in takes:
            return f"{suite} has no --{name}"
    if (against := options.get("against")) and not set(against) & set(takes["against"]):
        return f"{suite} has no {', '.join(against)}: --against takes {', '.join(takes['against'])}"
    return ""


def _cases(suite: str, options: Options) -> list[Named]:
    """Raises UsageError where the suite was named and cannot do what was asked for with it."""
    found = module(suite).cases(options.quick)
    ops = options.get("op")
    if ops and suite not in ops:
        found = [case for case in found if operator_of(case) in ops or _stem(operator_of(case)) in ops]
    if found and (reason := _rejected(suite, options)):
        if ops:
            raise UsageError(reason)
        return []
    if shapes := options.get("shape"):
        by_operator = {(operator_of(case), case.dtype): case for case in found}
        found = [
            replace(case, n_rows=n_rows, n_cols=n_cols, full=True)
            for case in by_operator.values()
            for n_rows, n_cols in shapes
        ]
    if dtypes := options.get("dtype"):
        # Any dtype, not only the grid's; what is measured in float32 is there in every shape.
        found = [replace(case, dtype=dtype) for dtype in dtypes for case in found]
    if options.passes:
        found = [replace(case, wanted=options.passes) for case in found]
    return [case for case in {case.id: case for case in found}.values() if selects(options.only, case.id)]


def select(options: Options) -> dict[str, list[Named]]:
    """The cases that are meant, by suite; suites without any are left out. Raises UsageError where there are none."""
    found = {suite: cases for suite in _suites_of(options.get("op")) if (cases := _cases(suite, options))}
    if found:
        return found
    if options.only is None:
        raise UsageError(f"no suite has all of {' '.join(options.words)}")
    known = [case.id for cases in select(replace(options, only=None)).values() for case in cases]
    raise UsageError("\n  ".join([f"--only {options.only}: unknown case; choose from:", *known]))


def runnable(
    selected: dict[str, list[Named]], device: torch.device, options: Options
) -> tuple[dict[str, list[Named]], list[str]]:
    """(The cases that the device is for, a line for each other one). A dtype that was asked for is for every device."""
    found, skipped = {}, []
    for suite, cases in selected.items():
        unavailable = getattr(module(suite), "unavailable", lambda case, device: "")
        why = {case.id: "" if options.get("dtype") else unavailable(case, device) for case in cases}
        skipped += [f"skipped {case}: {reason}" for case, reason in why.items() if reason]
        found[suite] = [case for case in cases if not why[case.id]]
    return found, skipped


def listing(device: torch.device) -> dict[str, Any]:
    """Suites with their operators and options; providers with why they are not available ("" where they are)."""
    from .suites.optimizers import PROVIDERS as OPTIMIZERS

    suites = {
        suite: {
            "operators": operators(suite),
            "cases": [case.id for case in module(suite).cases()],
            "options": [f"--{name}" for name in TAKES.get(suite, {})],
        }
        for suite in SUITES
    }
    own = own_provider(device).name
    measured = [(name, provider, "") for name, found in PROVIDERS.items() for provider in found]
    measured += [(provider.key, provider, "a step of Adam") for provider in OPTIMIZERS]
    providers = {}
    for name, provider, note in measured:
        note += "; always measured" * (name == "onetrip")
        providers[provider.name] = {
            "against": "" if name == "onetrip" else name,
            "unavailable": provider.unavailable(device),
            "note": "what onetrip picks here; always measured" if provider.name == own else note,
        }
    return {"device": str(device), "suites": suites, "providers": providers}


def print_listing(found: dict[str, Any]) -> None:
    from onetrip import terminal
    from onetrip.html import Table

    suites = []
    for name, suite in found["suites"].items():
        # Attention has one operator a length: their common stem says enough.
        names = dict.fromkeys(op if not op.startswith("attention-") else "attention" for op in suite["operators"])
        suites.append((name, ", ".join(names) or None, len(suite["cases"]), "\n".join(suite["options"]) or None))
    providers = []
    for name, provider in found["providers"].items():
        available = f"yes ({provider['note']})".removesuffix(" ()")
        words = f"no: {provider['unavailable']}" if provider["unavailable"] else available
        providers.append((provider["against"] or None, name, words))
    title, heads = f"What it is compared with on {found['device']}", ("--against", "provider", "available")
    of_suites = Table("What is measured", ("--op: suite", "--op: operators", "cases", "takes"), suites)
    terminal.show([of_suites, Table(title, heads, providers)])


@dataclass
class Found:
    results: Results
    failures: list[str] = field(default_factory=list)
    """One line for each case that did not pass."""
    interrupted: bool = False
    paths: list[Path] = field(default_factory=list)


def _weight(case: Named) -> float:
    """How long a case takes: with all passes and providers six times as long as one of a series of widths."""
    return 6.0 if getattr(case, "full", True) else 1.0


def _measure(suite: str, case: Named, session: Session, store: Store, say: Callable[[str], None]) -> str:
    """Measures a case and keeps its record; returns why the case did not pass, "" where it did."""
    rounds = Rounds()
    try:
        record = module(suite).measure(case, session._replace(rounds=rounds))
    except Skip as reason:
        say(f"skipped {case.id}: {reason}")
        return ""
    except Exception as error:  # the other cases are measured
        return one_line(error)
    store.add(suite, record | {"cpu_slowdown": rounds.cpu_slowdown})
    failures = own_failures(record)
    return f"no number for what fails its check: {failures}" if failures else ""


def describe(
    device: torch.device, quick: bool, measured: dict[str, object], words: Sequence[str] = ("--everything",)
) -> dict[str, Any]:
    """What the file of a suite says of its run. words: of the command line."""
    found = header(device)
    found["versions"] |= versions()
    return found | {
        "quick": quick,
        "load_average_before": load_average(),
        "code": fingerprint(),
        "measured": measured,
        "asked_for": list(words),
    }


def run(
    selected: Mapping[str, list[Named]],
    device: torch.device,
    options: Options,
    output: Path | None = None,
    resume: bool = False,
    silent: bool = False,
) -> Found:
    """Measure every selected case; selected: as select gave it for the same options.

    output: a folder that holds what is done whenever the run ends, and however. resume: leave out what is there.
    silent: no progress on standard error. Ctrl-C ends the run at once; found.interrupted says so.
    """
    described = describe(device, options.quick, options.measured(), options.words)
    store = Store(output, described, {suite: [case.id for case in cases] for suite, cases in selected.items()})
    done = store.resume() if resume else {}
    waiting, skipped = runnable(selected, device, options)
    cases = [(suite, case) for suite, of_suite in waiting.items() for case in of_suite]
    cases = [(suite, case) for suite, case in cases if case.id not in done.get(suite, ())]
    found = Found(store.results)
    session = Session(device, options.quick, options.get("against"))
    console = Console(file=sys.stderr)
    has_bar = console.is_terminal and not silent
    columns = (*map(TextColumn, ("{task.description}", "{task.fields[words]}")), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not has_bar, speed_estimate_period=3600.0)
    task = bar.add_task("", total=sum(_weight(case) for _, case in cases), words="")

    def say(line: str) -> None:
        if not silent:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    # Standard output is for the results: what a library prints while it is measured goes the way of the progress.
    with bar, redirect_stdout(sys.stderr):
        for note in skipped:
            say(note)
        try:
            for i, (suite, case) in enumerate(cases):
                words = f"{i}/{len(cases)}"
                bar.update(task, description=case.id, words=words)
                if not has_bar:
                    say(f"{case.id} ({words})")
                if failure := _measure(suite, case, session, store, say):
                    found.failures.append(f"{case.id}: {failure}")
                bar.advance(task, _weight(case))
        except KeyboardInterrupt:
            found.interrupted = True
    if not found.interrupted:
        store.finish()
    found.paths = list(store.paths.values())
    return found
