"""Two recorded runs side by side: what became faster or slower beyond noise."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from onetrip import terminal
from onetrip.html import Cell, Entry, Table

from ..measure.results import UsageError, failures, read, read_suite
from .tables import three_digits

SMALLEST_CHANGE = 0.05
"""Change of the median: less is no news, however narrow the intervals."""

_QUIET = 1.05
"""Slowdown by waiting for a CPU on an idle machine."""

Verdict = Literal["faster", "slower", "same"]
Key = tuple[str, str, str, str]
"""Suite, case, provider, pass."""


@dataclass(frozen=True)
class Figures:
    """Times of one thing, in milliseconds or microseconds."""

    median: float
    p20: float
    p80: float
    unit: str


@dataclass(frozen=True)
class Change:
    suite: str
    case: str
    provider: str
    which: str
    before: Figures
    after: Figures
    slowdown: float = 1.0
    """By waiting for a CPU that others held, in the run in which it was more."""

    @property
    def allowed(self) -> float:
        """The ratio that noise and load explain."""
        return (1.0 + SMALLEST_CHANGE) * self.slowdown

    @property
    def ratio(self) -> float:
        """Time after over time before."""
        return self.after.median / self.before.median

    @property
    def verdict(self) -> Verdict:
        """Not "same" where the 20th to 80th percentiles do not overlap and the ratio is beyond the allowed one."""
        if self.after.p80 < self.before.p20 and self.ratio < 1.0 / self.allowed:
            return "faster"
        if self.after.p20 > self.before.p80 and self.ratio > self.allowed:
            return "slower"
        return "same"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "allowed_ratio": self.allowed, "verdict": self.verdict}


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    lost: dict[str, str]
    """What had a number before and fails its check now -> why."""
    only_before: int
    only_after: int
    """Figures that the other run lacks."""
    copy_ratio: float | None
    """Time of a plain copy after over before, median of the cases: far from 1, the machine itself was another."""
    slowdown: tuple[float, float]
    """By waiting for a CPU that others held, in the case where it was most: before, after."""
    differences: list[str]
    """Between the two runs: machine, versions, commit."""

    @property
    def summary(self) -> dict[Verdict, int]:
        """Verdict -> how many figures."""
        verdicts = [change.verdict for change in self.changes]
        return {verdict: verdicts.count(verdict) for verdict in ("faster", "slower", "same")}

    def to_dict(self) -> dict[str, Any]:
        changes = [change.to_dict() for change in self.changes]
        return {"summary": self.summary, **vars(self), "changes": changes}


def _load(path: Path) -> list[dict[str, Any]]:
    """The suites in a file, a machine's folder, or a folder of one machine's folder."""
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    try:
        if not path.is_dir():
            return [read_suite(path)]
        machines = read(path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not machines:
        raise UsageError(f"{path}: no results of a suite in it")
    if len(machines) > 1:
        raise UsageError(f"{path} holds the results of several machines: name one of {', '.join(machines)}")
    return [content for results in machines.values() for content in results.values()]


def _timed(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Figures]]:
    """Every timed thing below a record, by the names that lead to it."""
    if isinstance(value, list):
        value = {item["name"]: item for item in value if isinstance(item, dict) and "name" in item}
    if not isinstance(value, dict):
        return
    unit = next((unit for unit in ("ms", "us") if f"median_{unit}" in value), None)
    if unit is not None:
        yield path, Figures(*(value[f"{name}_{unit}"] for name in ("median", "p20", "p80")), unit)
        return
    for key, item in value.items():
        yield from _timed(item, (*path, key))


class _Run(NamedTuple):
    """What one side holds."""

    figures: dict[Key, Figures]
    slowdown: dict[Key, float]
    """By figure. On a GPU only what the host does is disturbed: microseconds of a call's overhead."""
    copies: dict[Key, Figures]
    failed: dict[str, str]


def _flat(suites: list[dict[str, Any]]) -> _Run:
    run = _Run({}, {}, {}, {})
    for content in suites:
        on_cpu = content["machine"].get("device", "cpu") == "cpu"
        for case in content["cases"]:
            suite, name = content["suite"], case["case"]
            for (group, *rest), found in _timed(case):
                if group.startswith("copy"):
                    run.copies[suite, name, "", group] = found
                else:
                    provider, which = rest[0] if rest else group, " ".join(rest[1:])
                    key = suite, name, provider, which
                    run.figures[key] = found
                    run.slowdown[key] = case.get("cpu_slowdown") or 1.0 if on_cpu or found.unit == "us" else 1.0
            run.failed.update({f"{name}: {provider}": why for provider, why in failures(case).items()})
    return run


def _differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    found = []
    for name, words in (("machine", lambda m: m["id"]), ("commit", lambda c: c["id"][:12] if c else "none")):
        old, new = ({words(content.get(name)) for content in side} for side in (before, after))
        if old != new:
            found.append(f"{name}: {', '.join(sorted(old))} -> {', '.join(sorted(new))}")
    for package in dict.fromkeys(package for content in (*before, *after) for package in content["versions"]):
        old, new = ({content["versions"].get(package, "absent") for content in side} for side in (before, after))
        if old != new:
            found.append(f"{package}: {', '.join(sorted(old))} -> {', '.join(sorted(new))}")
    return found


def compare(before: Path, after: Path) -> Comparison:
    """Raises UsageError where one of them is not readable, or they have no figure in common."""
    suites = _load(before), _load(after)
    try:
        old, new = map(_flat, suites)
        differences = _differences(*suites)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{before} or {after}: not the results of a suite ({error!r})") from None
    common = [key for key in old.figures if key in new.figures]
    had_number = {f"{case}: {provider}" for _, case, provider, _ in old.figures}
    lost = {name: why for name, why in new.failed.items() if name in had_number}
    if not common and not lost:
        raise UsageError(f"{before} and {after} have no figure in common")
    copies = [new.copies[key].median / figures.median for key, figures in old.copies.items() if key in new.copies]
    return Comparison(
        [Change(*key, old.figures[key], new.figures[key], max(old.slowdown[key], new.slowdown[key])) for key in common],
        lost,
        len(old.figures) - len(common),
        len(new.figures) - len(common),
        statistics.median(copies) if copies else None,
        (max(map(old.slowdown.get, common), default=1.0), max(map(new.slowdown.get, common), default=1.0)),
        differences,
    )


def print_comparison(comparison: Comparison, everything: bool = False) -> None:
    """What changed as a table, the most first, and a summary. everything: what did not change too."""
    terminal.show(_parts(comparison, everything))


def _parts(comparison: Comparison, everything: bool) -> Iterator[str | Table]:
    shown = [change for change in comparison.changes if everything or change.verdict != "same"]
    shown.sort(key=lambda change: max(change.ratio, 1 / change.ratio), reverse=True)
    if shown:
        heads = ("case", "provider", "pass", "before", "after", "change", "beyond noise")
        yield Table("All figures" if everything else "Changes beyond noise", heads, list(map(_row, shown)))
    for name, why in comparison.lost.items():
        yield f"no number any more: {name}: {why}"
    yield from comparison.differences
    if comparison.copy_ratio is not None:
        yield f"a plain copy took {comparison.copy_ratio:.2f} times as long"
    if max(comparison.slowdown) > _QUIET:
        most = max((change.allowed for change in comparison.changes), default=1.0)
        before, after = comparison.slowdown
        words = f"waiting for a CPU slowed cases by up to {before:.1f}x before, {after:.1f}x after"
        yield f"{words}: changes of up to {most:.2f}x count as noise"
    counts = ", ".join(f"{n} {verdict}" for verdict, n in comparison.summary.items())
    rest = f"{comparison.only_before} only before, {comparison.only_after} only after"
    yield f"{len(comparison.changes)} figures: {counts}; {rest}"


def _row(change: Change) -> tuple[Entry, ...]:
    good = {"faster": True, "slower": False}.get(change.verdict)
    ratio = change.ratio
    return (
        change.case,
        change.provider,
        change.which,
        *(Cell(figures.median, _text(figures)) for figures in (change.before, change.after)),
        Cell(ratio, f"{1 / ratio:.2f}x faster" if ratio < 1.0 else f"{ratio:.2f}x slower", good),
        Cell(change.verdict, "no" if change.verdict == "same" else change.verdict, good),
    )


def _text(figures: Figures) -> str:
    unit = "µs" if figures.unit == "us" else figures.unit
    return f"{three_digits(figures.median)} {unit} ({three_digits(figures.p20)}–{three_digits(figures.p80)})"
