"""What `onetrip anatomy` reports, on its page and on the terminal: tables, and stacked bars of the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group

from .. import html, terminal
from ..environment import describe
from ..html import Cell, Figure, Section, Table
from ..measure import SLOWED
from ..measure.traffic import OperatorTraffic, Traffic
from .bytes import CLASSES, format_bytes
from .gpus import BOUND_PARTS
from .measure import PHASES
from .options import COLUMNS

_TRAFFIC_PARTS = {
    "outside": "outside products",
    "loss": "of it the loss",
    "products": "products",
    "attention": "attention kernels",
    "optimizer": "optimizer",
}
_QUANTILES = ("median", "p20", "p80")
_COLOURS = ("#4c78a8", "#9ecae9", "#f2a541", "#b07aa1", "#8a8f98", "#1a7f5a", "#c44e52")
_MOST_ROWS = 8
"""Most rows of a table on a terminal; the rest are added up."""

Totals = Mapping[str, Mapping[str, float]]
"""By way to take the step: what was found, by label."""
Show = Callable[[float | None], Cell | None]


def sections(result: Mapping[str, Any]) -> list[Section]:
    """The sections of one result, as anatomy.json holds it. Their captions name the model: pages can be joined."""
    name = _name(result)
    heading, *tables = _parts(result, None)
    parts = [heading, _drawing(result["columns"]), *tables]
    return [html.named_section("Anatomy of a training step", name, parts)]


def page(result: Mapping[str, Any]) -> str:
    return html.page(f"onetrip anatomy {result['options']['model']}", describe(result), sections(result))


def render(result: Mapping[str, Any]) -> Group:
    """Everything `onetrip anatomy` prints without --json."""
    return terminal.render(_parts(result, _MOST_ROWS), _name(result))


def _name(result: Mapping[str, Any]) -> str:
    options = result["options"]
    dtype = options["dtype"] if options.get("autocast") is None else f"autocast to {options['autocast']}"
    return f"{options['model']}, {options['batch_size']} x {options['sequence_length']}, {dtype}"


def _parts(result: Mapping[str, Any], most_rows: int | None) -> list[str | Table]:
    """most_rows: the smallest rows of a table beyond these are added up."""
    options, columns = result["options"], result["columns"]
    measured = {COLUMNS[key]: column["measured"] for key, column in columns.items() if column["measured"]}
    where = result["device"] if measured else f"predicted for {result['device']}"
    model_class = f"{result['model_class']}, " if "model_class" in result else ""  # which older files do not have
    parts: list[str | Table] = [
        f"{model_class}{result['parameters'] / 1e6:.1f} M parameters, {options['optimizer']}, {where}; "
        f"{result['patched_modules']} modules patched."
    ]
    if any(column["fit"] for column in columns.values()):
        parts.append(_fits(result))
    parts += [_memory(columns), *_saved(columns, most_rows), *_traffic(columns, options["gpu"], most_rows)]
    parts += [
        f"{COLUMNS[key]} is not predicted: {column['unpredicted']}"
        for key, column in columns.items()
        if column.get("unpredicted")
    ]
    if measured:
        parts += [*_times(measured, options["steps"]), _operators(measured, most_rows), _gpu(result, measured)]
    return parts


def _size(n: float | None) -> Cell | None:
    return None if n is None else Cell(n, format_bytes(n))


def _milliseconds(value: float | None) -> Cell | None:
    return None if value is None else Cell(value, f"{value:.1f} ms")


def _short_time(value: float | None) -> Cell | None:
    return Cell(value, f"{value:.3f} ms") if value is not None and value < 10.0 else _milliseconds(value)


def _ratio(value: float, base: float, unit: str = "") -> Cell | None:
    return Cell(value / base, f"{value / base:.2f}{unit}") if base else None


def _memory(columns: Mapping[str, Any]) -> Table:
    kinds = [kind for kind in ("measured", "predicted") if any(column[kind] for column in columns.values())]
    rows = []
    for label in (*CLASSES, "peak", "caches"):
        found = {key: [(column[kind] or {}).get(label) for kind in kinds] for key, column in columns.items()}
        if any(value for values in found.values() for value in values):
            rows += [
                (label.replace("_", " "), COLUMNS[key], *map(_size, values))
                for key, values in found.items()
                if any(value is not None for value in values)
            ]
    note = (
        "Temporaries: the peak less all the rest; 0 where part of the rest is freed before the peak. "
        "Caches, on a GPU: what torch's allocator had reserved beyond the peak."
    )
    return Table("Memory", ("", "", *kinds), rows, note, grouped=True)


def _by_label(caption: str, head: str, totals: Totals, show: Show, most_rows: int | None, note: str = "") -> Table:
    """A group of rows for each label, the largest first."""
    found = dict.fromkeys(label for each in totals.values() for label in each)
    labels = sorted(found, key=lambda label: -max(each.get(label, 0) for each in totals.values()))
    if most_rows is not None and labels[most_rows:]:
        rest = set(labels[most_rows:])
        labels = [*labels[:most_rows], "the rest"]
        totals = {
            way: {**each, "the rest": sum(value for label, value in each.items() if label in rest)}
            for way, each in totals.items()
        }
    rows = [(label, way, show(each.get(label, 0))) for label in labels for way, each in totals.items()]
    return Table(caption, ("", "", head), rows, note, grouped=True)


def _saved(columns: Mapping[str, Any], most_rows: int | None) -> list[Table]:
    best = {key: column["measured"] or column["predicted"] for key, column in columns.items()}
    return [
        _by_label(
            f"Saved activations by {words}",
            "bytes",
            {COLUMNS[key]: step["saved"][attribute] for key, step in best.items() if step},
            _size,
            most_rows,
        )
        for words, attribute in (
            ("class of operator", "by_operator_class"),
            ("class of module", "by_module_class"),
            ("place in the model", "by_block"),
        )
    ]


def _fits(result: Mapping[str, Any]) -> Table:
    fits = {COLUMNS[key]: column["fit"] for key, column in result["columns"].items() if column["fit"]}
    rows = [
        (
            way,
            _size(fit["peak"]),
            Cell("yes" if fit["fits"] else "no", "yes" if fit["fits"] else "no", good=fit["fits"]),
            _size(fit["margin"]),
            fit["largest_batch"],
            _size(fit["peak_at_largest"]),
        )
        for way, fit in fits.items()
    ]
    titles = ("", "predicted peak", "fits", "left over", "largest batch", "its peak")
    note = "Not counted: workspaces of libraries; where a size was given and no GPU, the driver and the CUDA context."
    what = result["options"]["gpu"] or result["options"]["fits"]
    memory = format_bytes(next(iter(fits.values()))["memory"])
    return Table(f"Does it fit {what} ({memory}), predicted for {result['device']}", titles, rows, note)


def _traffic(columns: Mapping[str, Any], gpu: str | None, most_rows: int | None) -> list[Table]:
    """Bytes that a step reads and writes, by part and by operator; the time that they take at least on a GPU."""
    predicted = {COLUMNS[key]: column["predicted"] for key, column in columns.items() if column["predicted"]}
    counted = {way: step["traffic"] for way, step in predicted.items() if step["traffic"]}
    if not counted:
        return []
    base = next(iter(counted))
    parts = [
        (label, way, _size(each[part]), _ratio(each[part], counted[base][part]))
        for part, label in _TRAFFIC_PARTS.items()
        for way, each in counted.items()
    ]
    note = "Outside products: forward and backward without matrix products and attention kernels."
    tables = [Table("Read and written by a step", ("", "", "bytes", f"of {base}"), parts, note, grouped=True)]
    outside = {}
    for way, each in counted.items():
        operators = {(found["phase"], found["name"]): OperatorTraffic(**found) for found in each["operators"]}
        outside[way] = Traffic(operators).by_operator(outside=True)
    caption = "Read and written outside products by operator"
    tables.append(_by_label(caption, "bytes", outside, _size, most_rows))
    bounds = {COLUMNS[key]: column["bound"] for key, column in columns.items() if column["bound"]}
    if bounds:
        times = [(part, way, _short_time(bound[part])) for part in BOUND_PARTS for way, bound in bounds.items()]
        titles = ("", "", "at least")
        tables.append(Table(f"Lower bound of the time on {gpu}", titles, times, grouped=True))
    return tables


def _times(measured: Mapping[str, Any], steps: int) -> list[str | Table]:
    base = next(iter(measured.values()))
    rows = [
        (
            phase,
            way,
            *(_milliseconds(step["ms"][phase][which]) for which in _QUANTILES),
            _ratio(base["ms"][phase]["median"], step["ms"][phase]["median"], "x"),
        )
        for phase in PHASES
        for way, step in measured.items()
    ]
    titles = ("", "", *_QUANTILES, f"vs {next(iter(measured))}")
    slowdown = base.get("cpu_slowdown") or 1.0
    warning = f"Other processes slowed the timed steps {slowdown:.1f}x: distrust times, less so ratios."
    losses = ", ".join(f"{way} {step['loss']:.6f}" for way, step in measured.items())
    return [
        Table(f"Time of {steps} steps", titles, rows, grouped=True),
        *([warning] if slowdown > SLOWED else []),
        f"Loss with dropout off, same weights: {losses}.",
    ]


def _operators(measured: Mapping[str, Any], most_rows: int | None) -> Table:
    totals = {way: step["operators_ms"] for way, step in measured.items()}
    note = "One profiled step, self time; profiling slows small operators: read shares. optimizer: its whole step."
    return _by_label("Time by class of operator", "time", totals, _milliseconds, most_rows, note)


def _gpu(result: Mapping[str, Any], measured: Mapping[str, Any]) -> str | Table:
    read = {way: step["gpu"] for way, step in measured.items() if step["gpu"]}
    if not read:
        return f"GPU utilisation and power were not read: {result['gpu']}."
    rows = [
        (way, gpu["utilisation_percent"], gpu["power_watts"], _size(gpu["memory_in_use"]), gpu["samples"])
        for way, gpu in read.items()
    ]
    return Table("GPU by NVML", ("", "busy, % of time", "power, W", "memory in use", "samples"), rows)


def _drawing(columns: Mapping[str, Any]) -> Figure:
    html.require("matplotlib")
    from matplotlib.figure import Figure as Drawing

    kinds = [(key, kind) for key in columns for kind in ("measured", "predicted") if columns[key][kind]]
    gib = 1 << 30
    largest = max(columns[key][kind]["peak"] for key, kind in kinds)
    unit, words = (gib, "GiB") if largest >= gib else (1 << 20, "MiB")
    drawing = Drawing(figsize=(9, 0.9 + 0.45 * len(kinds)), layout="constrained")
    axes = drawing.subplots()
    labels = [f"{COLUMNS[key]}, {kind}" for key, kind in kinds]
    left = [0.0] * len(kinds)
    for label, colour in zip(CLASSES, _COLOURS, strict=True):
        widths = [columns[key][kind][label] / unit for key, kind in kinds]
        if any(widths):
            axes.barh(labels, widths, left=left, color=colour, label=label.replace("_", " "))
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.plot([columns[key][kind]["peak"] / unit for key, kind in kinds], labels, "k|", markersize=14, label="peak")
    axes.invert_yaxis()
    axes.set_xlabel(words)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    note = "The bar is all that the step holds at some time; the line its peak, which can come before all is there."
    return html.figure(drawing, "Memory of a step", note, "Stacked bars of memory by class")
