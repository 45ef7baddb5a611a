"""Tables of one machine's recorded results, for the terminal, docs/benchmarks.md and the HTML page alike: operators.

The other suites have theirs in run_tables.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from onetrip import terminal
from onetrip.environment import describe
from onetrip.html import Cell, Entry, Table
from onetrip.measure import SLOWED

from ..measure.cases import ELEMENTS, gpu_shapes
from ..measure.results import OPERATOR_SUITES, Results, failures
from . import targets

Cases = list[dict[str, Any]]
Times = dict[str, Any]
"""A pass of a provider: median_ms, p20_ms, p80_ms, gb_per_s, share_of_copy."""
_MIB = 1 << 20
BOTH = "forward_backward"
Column = tuple[str, Callable[[Any], Entry]]
"""Its head, and the entry of a row."""


def table(caption: str, columns: Sequence[Column], rows: Iterable[Any], note: str = "") -> list[Table]:
    """The one table; none where there are no rows."""
    entries = [tuple(entry(row) for _, entry in columns) for row in rows]
    return [Table(caption, [head for head, _ in columns], entries, note)] if entries else []


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


def verdicts(results: Results) -> list[Table]:
    columns: list[Column] = [
        ("target", lambda verdict: verdict.target),
        ("measured", lambda verdict: verdict.measured),
        ("reached", lambda verdict: Cell(*(("yes", "yes") if verdict.reached else ("no", "no")), verdict.reached)),
    ]
    judged = [verdict for verdict in targets.verdicts(results) if verdict.reached is not None]
    return table("Targets", columns, judged)


class Row(NamedTuple):
    """A provider of a case; without numbers where it failed its check."""

    case: dict[str, Any]
    entry: dict[str, Any]


def by_provider(cases: Cases) -> list[Row]:
    return [Row(case, entry) for case in cases for entry in case["providers"]]


def _milliseconds(name: str) -> Column:
    which = BOTH if name == "both" else name
    return f"{name} ms", lambda row: milliseconds(row.entry.get(which))


def _speed(which: str) -> list[Column]:
    return [
        _milliseconds(which),
        ("GB/s", lambda row: gigabytes(row.entry.get(which))),
        ("of copy", lambda row: of_copy(row.entry.get(which))),
    ]


_NAME: Column = ("provider", lambda row: row.entry["name"])
_BOTH_AND_MEMORY: list[Column] = [
    _milliseconds("both"),
    ("eager / it", lambda row: ratio(targets.speed_up(row.case, BOTH, ours=row.entry["name"]))),
    ("saved MiB", lambda row: mib(row.entry.get("saved_bytes"))),
    ("peak MiB", lambda row: mib(row.entry.get("peak_bytes"))),
]
_PROVIDER: list[Column] = [
    *(_NAME, *_speed("forward"), *_speed("backward"), *_BOTH_AND_MEMORY),
    ("error", lambda row: error(row.entry["check"].get("largest_error"))),
]
_CASE: list[Column] = [
    ("operator", lambda row: row.case["operator"]),
    ("rows", lambda row: row.case["n_rows"]),
    ("width", lambda row: row.case["n_cols"]),
    ("dtype", lambda row: row.case["dtype"]),
]


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
        yield from table(title, _PROVIDER, by_provider([case]), note)


def measurements(cases: Cases) -> list[Table]:
    """All cases in one table, to be sorted."""
    return table("Every operator, shape, dtype and provider", [*_CASE, *_PROVIDER], by_provider(cases))


def grouped(cases: Cases, *names: str) -> dict[tuple[Any, ...], Cases]:
    """Their values of these names -> the cases that have them."""
    found: dict[tuple[Any, ...], Cases] = {}
    for case in cases:
        found.setdefault(tuple(case[name] for name in names), []).append(case)
    return found


def width_series(cases: Cases) -> dict[tuple[str, str], Cases]:
    """(operator, dtype) -> its cases by width, of what was measured at more than one."""
    series = grouped(cases, "operator", "dtype").items()
    return {name: sorted(found, key=lambda case: case["n_cols"]) for name, found in series if len(found) > 1}


def with_own_table(results: Results) -> Cases:
    """The full cases, then those that stand in no series of widths; a GPU's many shapes left out."""
    found = cases(results, *OPERATOR_SUITES)
    shown = {case["case"] for members in width_series(of_every_width(results)).values() for case in members}
    others = (case for case in found if not case["full"] and case["case"] not in shown)
    others = (case for case in others if (case["n_rows"], case["n_cols"]) not in gpu_shapes())
    return [*(case for case in found if case["full"]), *others]


def _torch_and_onetrip(which: str) -> list[Column]:
    return [
        (f"torch {which} ms", lambda case: milliseconds(targets.provider(case, targets.EAGER).get(which))),
        (f"onetrip {which} ms", lambda case: milliseconds(targets.own(case).get(which))),
        ("torch / onetrip", lambda case: ratio(targets.speed_up(case, which))),
        ("of copy", lambda case: of_copy(targets.own(case).get(which))),
    ]


def widths(cases: Cases) -> Iterator[Table]:
    width: Column = ("width", lambda case: case["n_cols"])
    columns = [width, *_torch_and_onetrip("forward"), *_torch_and_onetrip("backward")]
    for (operator, dtype), members in width_series(cases).items():
        yield from table(f"{operator} alone, {dtype}, 4 Mi elements at every width", columns, members)


def attention(cases: Cases) -> Iterator[Table]:
    length: Column = ("length", lambda row: attention_length(row.case))
    columns = [length, _NAME, _milliseconds("forward"), _milliseconds("backward"), *_BOTH_AND_MEMORY]
    note = (
        "Heads of width 64, no mask. SDPA's flash backend keeps no scores; where this operator keeps weights for "
        "backward, they are in *saved*. It is for models that run eager attention, or SDPA where that is slower. "
        "With dropout every provider was checked without it: a mask cannot be read off the output."
    )
    fp32_first = sorted(grouped(cases, "dtype", "dropout_p").items(), key=lambda item: (item[0][0] != "fp32", *item[0]))
    for (dtype, dropout_p), members in fp32_first:
        rows = [row for row in by_provider(members) if row.entry["check"]["passed"]]
        yield from table(f"Attention, {dtype}, dropout {dropout_p:g}", columns, rows, note)


def attention_length(case: dict[str, Any]) -> int:
    """Tokens, from a name such as attention-L1024-p0.1."""
    return int(case["operator"].split("-")[1][1:])


def attention_winners(cases: Cases) -> list[Table]:
    """A row is (case, the fastest backend of SDPA, onetrip, its time over onetrip's)."""
    rows = []
    for case in cases:
        timed = [entry for entry in case["providers"] if BOTH in entry]
        sdpa = [entry for entry in timed if entry["name"].startswith("SDPA")]
        ours = targets.own({"providers": timed})
        if sdpa and ours:
            fastest = min(sdpa, key=lambda entry: entry[BOTH]["median_ms"])
            rows.append((case, fastest, ours, fastest[BOTH]["median_ms"] / ours[BOTH]["median_ms"]))
    columns: list[Column] = [
        ("length", lambda row: attention_length(row[0])),
        ("dtype", lambda row: row[0]["dtype"]),
        ("dropout", lambda row: row[0]["dropout_p"]),
        ("fastest of SDPA", lambda row: row[1]["name"]),
        ("its both ms", lambda row: milliseconds(row[1][BOTH])),
        ("onetrip both ms", lambda row: milliseconds(row[2][BOTH])),
        ("faster", lambda row: "onetrip" if row[3] > 1.0 else "SDPA"),
        ("by", lambda row: ratio(max(row[3], 1.0 / row[3]))),
    ]
    return table("Attention: where SDPA wins", columns, rows)


def graphs(cases: Cases) -> list[Table]:
    """Where small launches were also timed as CUDA graphs: the kernels alone, without what the host costs."""
    columns: list[Column] = [
        *(*_CASE, _NAME, _milliseconds("forward")),
        ("alone", lambda row: milliseconds(row.entry["graph"].get("forward"))),
        _milliseconds("both"),
        ("alone", lambda row: milliseconds(row.entry["graph"].get(BOTH))),
    ]
    return table("Kernels alone, as CUDA graphs", columns, (row for row in by_provider(cases) if "graph" in row.entry))


def without_number(cases: Iterable[dict[str, Any]]) -> list[Table]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        failed = {name: f"failed: {why}" for name, why in failures(case).items()}
        for reason in (*case.get("unavailable", {}).items(), *failed.items()):
            reasons.setdefault(reason, []).append(case["case"])
    columns: list[Column] = [
        ("provider", lambda item: item[0][0]),
        ("why", lambda item: item[0][1]),
        ("where", lambda item: item[1][0] if len(item[1]) == 1 else f"{len(item[1])} cases"),
    ]
    return table("Without a number", columns, reasons.items())


def by_topic(results: Results) -> dict[str, list[Table]]:
    """Every table of one machine's results, by what it is about, in the order of the documentation."""
    of_attention = cases(results, "attention")
    found = {
        "targets": verdicts(results),
        "operators": [*operators(with_own_table(results))],
        "widths": [*widths(of_every_width(results))],
        "graphs": graphs(cases(results, *OPERATOR_SUITES)),
        "attention": [*attention_winners(of_attention), *attention(of_attention)],
    }
    if results.keys() - {*OPERATOR_SUITES, "attention"}:
        from . import run_tables

        found |= run_tables.by_topic(results)
    return found | {"missing": without_number(cases(results, *results))}


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
    """What waiting for a CPU that others held did to the cases; empty where it was little."""
    found = [case["cpu_slowdown"] or 1.0 for case in cases(results, *results) if "cpu_slowdown" in case]  # None: short
    if not (slowed := [slowdown for slowdown in found if slowdown > SLOWED]):
        return ""
    n = f"{len(slowed)} of {len(found)}"
    return f"Other processes slowed {n} cases by up to {max(slowed):.1f}x: distrust times, less so ratios."


def print_results(results: Results, width: int = 160) -> None:
    """width: of what is no terminal."""
    terminal.show([*every(results), *provenance(results)], width)
