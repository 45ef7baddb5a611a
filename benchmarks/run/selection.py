"""Which cases a run means: the grid of each suite, or the operators, dtypes and shapes that were asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..measure import libraries
from ..measure.cases import Named, selects
from ..measure.providers import NAMES
from ..measure.results import SUITES, UsageError, bench_file
from ..suites.optimizers import PROVIDERS as OPTIMIZERS
from .options import Options

_RACERS = tuple(name for name in NAMES if name != "sdpa")
_OPTIMIZERS = tuple(dict.fromkeys(provider.key for provider in OPTIMIZERS))
TAKES: dict[str, dict[str, tuple[str, ...]]] = {
    "row_norm": {"--dtype": (), "--shape": (), "--pass": (), "--against": _RACERS},
    "softmax": {"--dtype": (), "--shape": (), "--pass": (), "--against": _RACERS},
    "attention": {"--dtype": (), "--pass": (), "--against": (*_RACERS, "sdpa")},
    "overhead": {"--dtype": (), "--against": _RACERS},
    "adam": {"--dtype": (), "--against": _OPTIMIZERS},
}
"""Options that a suite understands, and for --against whom it can race; any other suite runs as it is or not at all."""


def operator_of(case: Named) -> str:
    """The operator of a case; empty where it is no case of one."""
    operator = getattr(case, "operator", None)
    return "" if operator is None else operator.name


def _stem(operator: str) -> str:
    return operator.partition("-")[0]


def _module(suite: str) -> Any:
    return importlib.import_module(f"onetrip.benchmarks.suites.{bench_file(suite).stem}")


def operators() -> dict[str, list[str]]:
    """The operators of every suite; a suite that is not made of operators has none."""
    return {suite: list(dict.fromkeys(filter(None, map(operator_of, _module(suite).cases())))) for suite in SUITES}


def _check_names(ops: Iterable[str]) -> None:
    known = list(SUITES)
    for names in operators().values():
        known += [word for name in names for word in (_stem(name), name)]
    for name in ops:
        if name not in known:
            raise UsageError(f"--op {name}: no such operator; there are {', '.join(dict.fromkeys(known))}")


def _refused(suite: str, options: Options) -> str:
    """Why the suite cannot do what was asked for; empty where it can."""
    given = {
        "--dtype": options.dtypes,
        "--shape": options.shapes,
        "--pass": options.passes,
        "--against": options.against,
    }
    takes = TAKES.get(suite, {})
    for name, values in given.items():
        if values and name not in takes:
            return f"{suite} has no {name}"
    if options.against and not set(options.against) & set(takes["--against"]):
        return f"{suite} has no {', '.join(options.against)} to race against: there are {', '.join(takes['--against'])}"
    return ""


def cases_of(suite: str, options: Options) -> list[Named]:
    """The cases of one suite; raises UsageError where it was named and cannot do what was asked for with it."""
    found = _module(suite).cases(options.quick)
    named = suite in options.ops
    if options.ops and not named:
        # An operator is meant where it is measured; its overhead is a suite of its own, and asked for by name.
        wanted = () if suite == "overhead" else options.ops
        found = [case for case in found if operator_of(case) in wanted or _stem(operator_of(case)) in wanted]
    if found and (reason := _refused(suite, options)):
        if options.ops:
            raise UsageError(reason)
        return []
    if options.shapes:
        by_operator = {(operator_of(case), case.dtype): case for case in found}
        found = [
            replace(case, n_rows=n_rows, n_cols=n_cols, full=True)
            for case in by_operator.values()
            for n_rows, n_cols in options.shapes
        ]
    if options.dtypes:
        # Any dtype, not only the grid's; what was measured in float32 is there in every shape.
        found = [replace(case, dtype=dtype) for dtype in options.dtypes for case in found]
    if options.passes:
        found = [replace(case, wanted=options.passes) for case in found]
    return [case for case in {case.id: case for case in found}.values() if selects(options.only, case.id)]


def select(options: Options) -> dict[str, list[Named]]:
    """The cases that are meant, by suite; suites without any are left out. Raises UsageError where there are none."""
    _check_names(options.ops)
    found = {suite: cases for suite in SUITES if (cases := cases_of(suite, options))}
    if found:
        return found
    if options.only is None:
        raise UsageError(f"no suite has all of {' '.join(options.words())}")
    known = [case.id for cases in select(replace(options, only=None)).values() for case in cases]
    raise UsageError("\n  ".join([f"--only {options.only}: no such case. There are:", *known]))


def absent(device: Any) -> dict[str, str]:
    """Other libraries that cannot run here -> why."""
    return {libraries.TITLES[name]: why for name in libraries.MODULES if (why := libraries.unavailable(name, device))}
