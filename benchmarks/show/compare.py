"""Two recorded runs side by side: what became faster or slower beyond noise."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from onetrip.html import Cell, Entry, Table

from ..measure.results import UsageError, failures, read, read_suite
from .tables import three_digits

SMALLEST_CHANGE = 0.05
"""Change of the median: less is no news, however narrow the intervals."""

_QUIET = 1.05
"""Slowdown by waiting for a CPU on an idle machine."""

Key = tuple[str, str, str, str]
"""Suite, case, provider, pass."""
Change = dict[str, Any]
"""As --json prints it: suite, case, provider, which; before and after: median, p20, p80 and their unit; ratio: time
after over time before; allowed_ratio: what noise and load explain; verdict: faster, slower or same."""
Comparison = dict[str, Any]
"""As --json prints it. summary: verdict -> how many figures; changes; lost: what had a number before and fails its
check now -> why; only_before, only_after: figures that the other run lacks; copy_ratio: time of a plain copy after over
before, median of the cases (far from 1, the machine itself was another); slowdown: by waiting for a CPU that others
held, in the case where it was most, before and after; differences: in machine, versions, commit."""


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


def _timed(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every timed thing below a record, by the names that lead to it."""
    if isinstance(value, list):
        value = {item["name"]: item for item in value if isinstance(item, dict) and "name" in item}
    if not isinstance(value, dict):
        return
    unit = next((unit for unit in ("ms", "us") if f"median_{unit}" in value), None)
    if unit is not None:
        yield path, {name: value[f"{name}_{unit}"] for name in ("median", "p20", "p80")} | {"unit": unit}
        return
    for key, item in value.items():
        yield from _timed(item, (*path, key))


class _Run(NamedTuple):
    """What one side holds."""

    figures: dict[Key, dict[str, Any]]
    slowdown: dict[Key, float]
    """By figure. On a GPU only what the host does is disturbed: microseconds of a call's overhead."""
    copies: dict[Key, float]
    failed: dict[str, str]
    origin: dict[str, set[str]]
    """Machine, commit and packages."""


def _flat(suites: list[dict[str, Any]]) -> _Run:
    run = _Run({}, {}, {}, {}, {})
    for content in suites:
        commit = content.get("commit")
        origin = {"machine": content["machine"]["id"], "commit": commit["id"][:12] if commit else "none"}
        for name, value in {**origin, **content["versions"]}.items():
            run.origin.setdefault(name, set()).add(value)
        on_cpu = content["machine"].get("device", "cpu") == "cpu"
        for case in content["cases"]:
            suite, name = content["suite"], case["case"]
            for (group, *rest), found in _timed(case):
                if group.startswith("copy"):
                    run.copies[suite, name, "", group] = found["median"]
                else:
                    provider, which = rest[0] if rest else group, " ".join(rest[1:])
                    key = suite, name, provider, which
                    run.figures[key] = found
                    run.slowdown[key] = case.get("cpu_slowdown") or 1.0 if on_cpu or found["unit"] == "us" else 1.0
            run.failed.update({f"{name}: {provider}": why for provider, why in failures(case).items()})
    return run


def _change(key: Key, old: _Run, new: _Run) -> Change:
    """The verdict is not "same" where the 20th to 80th percentiles do not overlap and the ratio is beyond the allowed
    one."""
    before, after = old.figures[key], new.figures[key]
    ratio = after["median"] / before["median"]
    allowed = (1.0 + SMALLEST_CHANGE) * max(old.slowdown[key], new.slowdown[key])
    verdict = "same"
    if after["p80"] < before["p20"] and ratio < 1.0 / allowed:
        verdict = "faster"
    if after["p20"] > before["p80"] and ratio > allowed:
        verdict = "slower"
    names = dict(zip(("suite", "case", "provider", "which"), key, strict=True))
    return {**names, "before": before, "after": after, "ratio": ratio, "allowed_ratio": allowed, "verdict": verdict}


def compare(before: Path, after: Path) -> Comparison:
    """Raises UsageError where one of them is not readable, or they have no figure in common."""
    suites = _load(before), _load(after)
    try:
        old, new = map(_flat, suites)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{before} or {after}: not the results of a suite ({error!r})") from None
    common = [key for key in old.figures if key in new.figures]
    had_number = {f"{case}: {provider}" for _, case, provider, _ in old.figures}
    lost = {name: why for name, why in new.failed.items() if name in had_number}
    if not common and not lost:
        raise UsageError(f"{before} and {after} have no figure in common")
    copies = [new.copies[key] / median for key, median in old.copies.items() if key in new.copies]
    changes = [_change(key, old, new) for key in common]
    verdicts = [change["verdict"] for change in changes]
    origins = {name: [run.origin.get(name, {"absent"}) for run in (old, new)] for name in {**old.origin, **new.origin}}
    return {
        "summary": {verdict: verdicts.count(verdict) for verdict in ("faster", "slower", "same")},
        "changes": changes,
        "lost": lost,
        "only_before": len(old.figures) - len(common),
        "only_after": len(new.figures) - len(common),
        "copy_ratio": statistics.median(copies) if copies else None,
        "slowdown": [max(map(run.slowdown.__getitem__, common), default=1.0) for run in (old, new)],
        "differences": [
            f"{name}: {', '.join(sorted(was))} -> {', '.join(sorted(now))}"
            for name, (was, now) in origins.items()
            if was != now
        ],
    }


def parts(found: Comparison, everything: bool = False) -> Iterator[str | Table]:
    """What changed as a table, the most first, and a summary. everything: what did not change too."""
    shown = [change for change in found["changes"] if everything or change["verdict"] != "same"]
    shown.sort(key=lambda change: max(change["ratio"], 1 / change["ratio"]), reverse=True)
    if shown:
        heads = ("case", "provider", "pass", "before", "after", "change", "beyond noise")
        yield Table("All figures" if everything else "Changes beyond noise", heads, list(map(_row, shown)))
    for name, why in found["lost"].items():
        yield f"no number any more: {name}: {why}"
    yield from found["differences"]
    if found["copy_ratio"] is not None:
        yield f"a plain copy took {found['copy_ratio']:.2f} times as long"
    if max(found["slowdown"]) > _QUIET:
        most = max((change["allowed_ratio"] for change in found["changes"]), default=1.0)
        before, after = found["slowdown"]
        words = f"waiting for a CPU slowed cases by up to {before:.1f}x before, {after:.1f}x after"
        yield f"{words}: changes of up to {most:.2f}x count as noise"
    counts = ", ".join(f"{n} {verdict}" for verdict, n in found["summary"].items())
    rest = f"{found['only_before']} only before, {found['only_after']} only after"
    yield f"{len(found['changes'])} figures: {counts}; {rest}"


def _row(change: Change) -> tuple[Entry, ...]:
    good = {"faster": True, "slower": False}.get(change["verdict"])
    ratio = change["ratio"]
    return (
        *(change[name] for name in ("case", "provider", "which")),
        *(Cell(change[side]["median"], _text(**change[side])) for side in ("before", "after")),
        Cell(ratio, f"{1 / ratio:.2f}x faster" if ratio < 1.0 else f"{ratio:.2f}x slower", good),
        Cell(change["verdict"], "no" if change["verdict"] == "same" else change["verdict"], good),
    )


def _text(median: float, p20: float, p80: float, unit: str) -> str:
    return f"{three_digits(median)} {'µs' if unit == 'us' else unit} ({three_digits(p20)}–{three_digits(p80)})"
