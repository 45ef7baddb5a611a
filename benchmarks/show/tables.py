"""Tables of one machine's recorded results, for the terminal, docs/benchmarks.md and the HTML page alike: operators.

The other suites have theirs in run_tables.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from onetrip import terminal
from onetrip.environment import describe
from onetrip.html import Cell, Entry, Table

from ..measure.cases import ELEMENTS, gpu_shapes
from ..measure.results import OPERATOR_SUITES, Results, failures
from . import targets

Cases = list[dict[str, Any]]
Times = dict[str, Any]
"""A pass of a provider: median_ms, p20_ms, p80_ms, gb_per_s, share_of_copy."""
_MIB = 1 << 20
BOTH = "forward_backward"
_SLOWED = 1.1
"""Slowdown by other processes: above it a time is doubtful."""
_PROVIDER = (
    "provider", "forward ms", "GB/s", "of copy", "backward ms", "GB/s", "of copy", "both ms", "eager / it",
    "saved MiB", "peak MiB", "error",
)  # fmt: skip


def three_digits(value: float) -> str:
    """Three significant digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def milliseconds(times: Times | None) -> Cell | None:
    """The median, and the 20th and 80th percentile in brackets."""
    if times is None:
        return None
    median, p20, p80 = (three_digits(times[name]) for name in ("median_ms", "p20_ms", "p80_ms"))
    return Cell(times["median_ms"], f"{median} ({p20}–{p80})")


def microseconds(times: Times | None) -> Cell | None:
    if times is None:
        return None
    return Cell(times["median_us"], f"{times['median_us']:.1f} ({times['p20_us']:.1f}–{times['p80_us']:.1f})")


def shown(value: float | None, form: str, unit: float = 1.0) -> Cell | None:
    """A cell that reads form.format(value / unit)."""
    return None if value is None else Cell(value, form.format(value / unit))


percent = partial(shown, form="{:.0f}%")
ratio = partial(shown, form="{:.2f}x")
error = partial(shown, form="{:.0e}")
mib = partial(shown, form="{:.1f}", unit=_MIB)


def fixed(value: float | None, digits: int) -> Cell | None:
    return shown(value, f"{{:.{digits}f}}")


def of_copy(times: Times | None) -> Cell | None:
    return times and shown(times["share_of_copy"], "{:.0f}%", 0.01)


def gigabytes(times: Times | None) -> Cell | None:
    return times and fixed(times["gb_per_s"], 1)


def cases(results: Results, *suites: str) -> Cases:
    return [case for suite in suites for case in results.get(suite, {}).get("cases", ())]


def providers(cases: Cases) -> list[str]:
    """In the order of their first appearance."""
    return list(dict.fromkeys(entry["name"] for case in cases for entry in case["providers"]))


def of_every_width(results: Results) -> Cases:
    """The cases of operators that have the same number of elements, up to a row, whatever the width."""
    return [case for case in cases(results, *OPERATOR_SUITES) if case["n_rows"] == ELEMENTS // case["n_cols"]]


def verdicts(results: Results) -> Iterator[Table]:
    found = [verdict for verdict in targets.verdicts(results) if verdict.reached is not None]
    if found:
        words = {True: Cell("yes", "yes", good=True), False: Cell("no", "no", good=False)}
        rows = [(verdict.target, verdict.measured, words[verdict.reached]) for verdict in found]
        yield Table("Targets", ("target", "measured", "reached"), rows)


def _provider(case: dict[str, Any], entry: dict[str, Any]) -> tuple[Entry, ...]:
    """The columns of _PROVIDER; without numbers where the provider failed its check."""
    forward, backward, *rest = _times(case, entry)
    speeds = [(gigabytes(times), of_copy(times)) for times in (entry.get("forward"), entry.get("backward"))]
    largest_error = error(entry["check"].get("largest_error"))
    return (entry["name"], forward, *speeds[0], backward, *speeds[1], *rest, largest_error)


def _times(case: dict[str, Any], entry: dict[str, Any]) -> tuple[Entry, ...]:
    """Forward, backward and both in milliseconds, times faster than eager, saved and peak MiB."""
    both, eager = entry.get(BOTH), targets.provider(case, targets.EAGER).get(BOTH)
    return (
        *(milliseconds(entry.get(name)) for name in ("forward", "backward", BOTH)),
        ratio(eager["median_ms"] / both["median_ms"] if both and eager else None),
        mib(entry.get("saved_bytes")),
        mib(entry.get("peak_bytes")),
    )


def operators(cases: Cases) -> Iterator[Table]:
    """A table a case: every provider of it."""
    for case in cases:
        note = (
            f"Least bytes: forward {case['least_bytes']['forward'] / _MIB:.1f} MiB, "
            f"backward {case['least_bytes']['backward'] / _MIB:.1f} MiB. "
            f"A copy ran at {case['copy']['gb_per_s']:.1f} GB/s, "
            f"at {case['copy_to_fresh_memory']['gb_per_s']:.1f} GB/s into a tensor that it allocates."
        )
        title = f"{case['operator']}, {case['n_rows']} x {case['n_cols']} {case['dtype']}"
        yield Table(title, _PROVIDER, [_provider(case, entry) for entry in case["providers"]], note)


def measurements(cases: Cases) -> Iterator[Table]:
    """All cases in one table, to be sorted."""
    rows = [
        (case["operator"], case["n_rows"], case["n_cols"], case["dtype"], *_provider(case, entry))
        for case in cases
        for entry in case["providers"]
    ]
    if rows:
        yield Table(
            "Every operator, shape, dtype and provider", ("operator", "rows", "width", "dtype", *_PROVIDER), rows
        )


def width_series(cases: Cases) -> dict[tuple[str, str], Cases]:
    """(operator, dtype) -> its cases by width, of what was measured at more than one."""
    series: dict[tuple[str, str], Cases] = {}
    for case in cases:
        series.setdefault((case["operator"], case["dtype"]), []).append(case)
    return {
        name: sorted(members, key=lambda case: case["n_cols"]) for name, members in series.items() if len(members) > 1
    }


def full(results: Results) -> Cases:
    return [case for case in cases(results, *OPERATOR_SUITES) if case["full"]]


def alone(results: Results) -> Cases:
    """The cases that stand in no table of their own and in no series of widths; a GPU's many shapes left out."""
    series = width_series(of_every_width(results)).values()
    shown = {case["case"] for members in series for case in members}
    return [
        case
        for case in cases(results, *OPERATOR_SUITES)
        if not case["full"] and case["case"] not in shown and (case["n_rows"], case["n_cols"]) not in gpu_shapes()
    ]


def widths(cases: Cases) -> Iterator[Table]:
    columns = (
        "width", "torch forward ms", "onetrip forward ms", "torch / onetrip", "of copy", "torch backward ms",
        "onetrip backward ms", "torch / onetrip", "of copy",
    )  # fmt: skip
    for (operator, dtype), members in width_series(cases).items():
        rows = []
        for case in members:
            torch, ours = targets.provider(case, targets.EAGER), targets.own(case)
            row: list[Entry] = [case["n_cols"]]
            for name in ("forward", "backward"):
                row += [
                    milliseconds(torch.get(name)),
                    milliseconds(ours.get(name)),
                    ratio(targets.speed_up(case, name)),
                    of_copy(ours.get(name)),
                ]
            rows.append(row)
        yield Table(f"{operator} alone, {dtype}, 4 Mi elements at every width", columns, rows)


def by_dtype_and_dropout(cases: Cases) -> list[tuple[tuple[str, float], Cases]]:
    """Cases of attention by (dtype, dropout_p): fp32 first, and without dropout first."""
    found: dict[tuple[str, float], Cases] = {}
    for case in cases:
        found.setdefault((case["dtype"], case["dropout_p"]), []).append(case)
    return sorted(found.items(), key=lambda item: (item[0][0] != "fp32", *item[0]))


def attention(cases: Cases) -> Iterator[Table]:
    columns = ("length", "provider", "forward ms", "backward ms", "both ms", "eager / it", "saved MiB", "peak MiB")
    for (dtype, dropout_p), members in by_dtype_and_dropout(cases):
        rows = [
            (attention_length(case), entry["name"], *_times(case, entry))
            for case in members
            for entry in case["providers"]
            if entry["check"]["passed"]
        ]
        note = (
            "Heads of width 64, no mask. SDPA's flash backend keeps no scores; where this operator keeps weights for "
            "backward, they are in *saved*. It is for models that run eager attention, or SDPA where that is slower. "
            "With dropout every provider was checked without it: a mask cannot be read off the output."
        )
        yield Table(f"Attention, {dtype}, dropout {dropout_p:g}", columns, rows, note)


def attention_length(case: dict[str, Any]) -> int:
    """Tokens, from a name such as attention-L1024-p0.1."""
    return int(case["operator"].split("-")[1][1:])


def attention_winners(cases: Cases) -> Iterator[Table]:
    columns = ("length", "dtype", "dropout", "fastest of SDPA", "its both ms", "onetrip both ms", "faster", "by")
    rows = []
    for case in cases:
        timed = [entry for entry in case["providers"] if BOTH in entry]
        sdpa = [entry for entry in timed if entry["name"].startswith("SDPA")]
        ours = next((entry for entry in timed if entry["name"].startswith("onetrip")), None)
        if not sdpa or ours is None:
            continue
        best = min(sdpa, key=lambda entry: entry[BOTH]["median_ms"])
        faster = best[BOTH]["median_ms"] / ours[BOTH]["median_ms"]
        rows.append(
            (
                attention_length(case),
                case["dtype"],
                case["dropout_p"],
                best["name"],
                milliseconds(best[BOTH]),
                milliseconds(ours[BOTH]),
                "onetrip" if faster > 1.0 else "SDPA",
                ratio(max(faster, 1.0 / faster)),
            )
        )
    if rows:
        yield Table("Attention: where SDPA wins", columns, rows)


def graphs(cases: Cases) -> Iterator[Table]:
    """Where small launches were also timed as CUDA graphs: the kernels alone, without what the host costs."""
    columns = ("operator", "rows", "width", "dtype", "provider", "forward ms", "alone", "both ms", "alone")
    rows = [
        (
            *(case["operator"], case["n_rows"], case["n_cols"], case["dtype"], entry["name"]),
            milliseconds(entry.get("forward")),
            milliseconds(entry["graph"].get("forward")),
            milliseconds(entry.get(BOTH)),
            milliseconds(entry["graph"].get(BOTH)),
        )
        for case in cases
        for entry in case["providers"]
        if "graph" in entry
    ]
    if rows:
        yield Table("Kernels alone, as CUDA graphs", columns, rows)


def without_number(cases: Iterable[dict[str, Any]]) -> Iterator[Table]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for name, reason in case.get("unavailable", {}).items():
            reasons.setdefault((name, reason), []).append(case["case"])
        for name, why in failures(case).items():
            reasons.setdefault((name, f"failed: {why}"), []).append(case["case"])
    rows = [(name, reason, ids[0] if len(ids) == 1 else f"{len(ids)} cases") for (name, reason), ids in reasons.items()]
    if rows:
        yield Table("Without a number", ("provider", "why", "where"), rows)


def by_topic(results: Results) -> dict[str, list[Table]]:
    """Every table of one machine's results, by what it is about, in the order of the documentation."""
    found = {
        "targets": [*verdicts(results)],
        "operators": [*operators(full(results) + alone(results))],
        "widths": [*widths(of_every_width(results))],
        "graphs": [*graphs(cases(results, *OPERATOR_SUITES))],
        "attention": [
            *attention_winners(cases(results, "attention")),
            *attention(cases(results, "attention")),
        ],
    }
    if results.keys() - {*OPERATOR_SUITES, "attention"}:
        from . import run_tables

        found |= run_tables.by_topic(results)
    return found | {"missing": [*without_number(cases(results, *results))]}


def every(results: Results) -> list[Table]:
    return [table for tables in by_topic(results).values() for table in tables]


def origins(results: Results) -> dict[tuple[str, ...], list[str]]:
    """(date, machine, versions, commit) -> the suites that were measured so."""
    found: dict[tuple[str, ...], list[str]] = {}
    for suite, content in results.items():
        found.setdefault(tuple(describe(content).values()), []).append(suite)
    return found


def provenance(results: Results) -> list[str]:
    """One line for each distinct origin."""
    return [
        f"{', '.join(suites)}: {date}, {machine}; {versions}; commit {commit}."
        for (date, machine, versions, commit), suites in origins(results).items()
    ]


def load_in_words(results: Results) -> str:
    """What waiting for CPUs that other processes held did to the cases; empty where it was little."""
    found = [case["cpu_slowdown"] for case in cases(results, *results) if case.get("cpu_slowdown") is not None]
    slowed = [slowdown for slowdown in found if slowdown > _SLOWED]
    if not slowed:
        return ""
    n = f"{len(slowed)} of {len(found)}"
    return f"Other processes slowed {n} cases by up to {max(slowed):.1f}x: distrust times, less so ratios."


def print_results(results: Results, width: int = 160) -> None:
    """width: of what is no terminal."""
    terminal.show([*every(results), *provenance(results)], width)
