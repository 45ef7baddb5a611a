"""anatomy.html: the tables of `onetrip anatomy` as sections of a page, and stacked bars of the memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import html as page_builder
from ..environment import describe
from ..html import Cell, Figure, Section, Table
from ..measure import LOSS, OPTIMIZER, OUTSIDE, load_warning
from .bytes import CLASSES, format_bytes
from .gpus import BOUND_PARTS
from .measure import PHASES
from .options import COLUMNS

_TRAFFIC_PARTS = ("outside", "loss", "products", "attention", "optimizer")
_QUANTILES = ("median", "p20", "p80")
_COLOURS = ("#4c78a8", "#9ecae9", "#f2a541", "#b07aa1", "#8a8f98", "#1a7f5a", "#c44e52")


def sections(result: Mapping[str, Any]) -> list[Section]:
    """The sections of one result, as anatomy.json holds it. Their captions name the model: pages can be joined."""
    options = result["options"]
    name = f"{options['model']}, {options['batch_size']} x {options['sequence_length']}, {options['dtype']}"
    columns = result["columns"]
    parts: list[str | Table | Figure] = [
        f"{result['parameters'] / 1e6:.1f} M parameters, {options['optimizer']}, {result['device']}; "
        f"{result['patched_modules']} modules patched."
    ]
    if any(column["fit"] for column in columns.values()):
        parts.append(_fits(result, name))
    parts += [_figure(columns, name), _memory(result, name), *_saved(columns, name)]
    parts += _traffic(columns, options["gpu"], name)
    parts += [
        f"{COLUMNS[key]} is not predicted: {column['unpredicted']}"
        for key, column in columns.items()
        if column.get("unpredicted")
    ]
    measured = {key: column["measured"] for key, column in columns.items() if column["measured"]}
    if measured:
        parts += [*_times(measured, options["steps"], name), _operators(measured, name), _gpu(result, measured, name)]
    return [Section(f"Anatomy of a training step: {name}", parts)]


def page(result: Mapping[str, Any]) -> str:
    return page_builder.page(f"onetrip anatomy {result['options']['model']}", describe(result), sections(result))


def _size(n: int | None) -> Cell | None:
    return None if n is None else Cell(n, format_bytes(n))


def _kinds(columns: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(column, "measured" or "predicted") of everything there is."""
    return [(key, kind) for key in columns for kind in ("measured", "predicted") if columns[key][kind]]


def _memory(result: Mapping[str, Any], name: str) -> Table:
    columns = result["columns"]
    kinds = _kinds(columns)
    rows = [
        (
            label.replace("_", " "),
            *(_size(columns[key][kind].get(label)) for key, kind in kinds),
        )
        for label in (*CLASSES, "peak", "caches")
        if any(columns[key][kind].get(label) is not None for key, kind in kinds)
    ]
    titles = ("", *(f"{COLUMNS[key]}, {kind}" for key, kind in kinds))
    note = (
        "Temporaries: the peak less all the rest; 0 where part of the rest is freed before the peak. "
        "Caches, on a GPU: what torch's allocator had reserved beyond the peak."
    )
    return Table(f"Memory, {name}", titles, rows, note)


def _saved(columns: Mapping[str, Any], name: str) -> list[Table]:
    best = {key: column["measured"] or column["predicted"] for key, column in columns.items()}
    best = {key: step for key, step in best.items() if step}
    tables = []
    for words, attribute in (
        ("class of operator", "by_operator_class"),
        ("class of module", "by_module_class"),
        ("place in the model", "by_block"),
    ):
        totals = [step["saved"][attribute] for step in best.values()]
        labels = list(dict.fromkeys(label for each in totals for label in each))
        rows = [(label, *(_size(each.get(label, 0)) for each in totals)) for label in labels]
        titles = (words, *(COLUMNS[key] for key in best))
        tables.append(Table(f"Saved activations by {words}, {name}", titles, rows))
    return tables


def _fits(result: Mapping[str, Any], name: str) -> Table:
    rows = [
        (
            COLUMNS[key],
            _size(fit["peak"]),
            Cell("yes" if fit["fits"] else "no", "yes" if fit["fits"] else "no", good=fit["fits"]),
            Cell(fit["margin"], f"{'' if fit['fits'] else '-'}{format_bytes(abs(fit['margin']))}"),
            fit["largest_batch"],
            _size(fit["peak_at_largest"]),
        )
        for key, column in result["columns"].items()
        if (fit := column["fit"])
    ]
    titles = ("", "predicted peak", "fits", "left over", "largest batch", "its peak")
    note = "Not counted: workspaces of libraries; where a size was given and no GPU, the driver and the CUDA context."
    what = result["options"]["gpu"] or result["options"]["fits"]
    return Table(f"Does it fit {what}, {name}", titles, rows, note)


def _traffic(columns: Mapping[str, Any], gpu: str | None, name: str) -> list[Table]:
    """Bytes that a step reads and writes, by part and by operator; the time that they take at least on a GPU."""
    predicted = {key: column["predicted"] for key, column in columns.items() if column["predicted"]}
    counted = {key: step["traffic"] for key, step in predicted.items() if step["traffic"]}
    if not counted:
        return []
    titles = [COLUMNS[key] for key in counted]
    parts = [(part, *(_size(each[part]) for each in counted.values())) for part in _TRAFFIC_PARTS]
    note = "outside: forward and backward without matrix products and attention kernels; the loss is part of it."
    tables = [Table(f"Read and written by a step, {name}", ("", *titles), parts, note)]
    totals: list[dict[str, int]] = [{} for _ in counted]
    for total, each in zip(totals, counted.values(), strict=True):
        for operator in each["operators"]:
            if operator["kind"] in (LOSS, OUTSIDE) and operator["phase"] != OPTIMIZER:
                moved = operator["read"] + operator["written"]
                total[operator["name"]] = total.get(operator["name"], 0) + moved
    labels = dict.fromkeys(label for total in totals for label in total)
    rows = [(label, *(_size(total.get(label, 0)) for total in totals)) for label in labels]
    tables.append(Table(f"Read and written outside products by operator, {name}", ("operator", *titles), rows))
    bounds = [column["bound"] for column in columns.values() if column["bound"]]
    if bounds:
        times = [(part, *(_milliseconds(bound[part], 3) for bound in bounds)) for part in BOUND_PARTS]
        tables.append(Table(f"Lower bound of the time on {gpu}, {name}", ("", *titles), times))
    return tables


def _milliseconds(value: float | None, digits: int = 1) -> Cell | None:
    return None if value is None else Cell(value, f"{value:.{digits}f} ms")


def _times(measured: Mapping[str, Any], steps: int, name: str) -> list[str | Table]:
    rows = [
        (phase, COLUMNS[key], *(_milliseconds(step["ms"][phase][which]) for which in _QUANTILES))
        for phase in PHASES
        for key, step in measured.items()
    ]
    titles = ("phase", "", "median", "p20", "p80")
    warning = load_warning(next(iter(measured.values()))["other_cpus"])
    return [Table(f"Time of {steps} steps, {name}", titles, rows), *([warning] if warning else [])]


def _operators(measured: Mapping[str, Any], name: str) -> Table:
    labels = dict.fromkeys(label for step in measured.values() for label in step["operators_ms"])
    rows = [
        (label, *(Cell(ms := step["operators_ms"].get(label, 0.0), f"{ms:.1f} ms") for step in measured.values()))
        for label in labels
    ]
    note = "One profiled step, self time; profiling slows small operators: read shares."
    titles = ("class of operator", *(COLUMNS[key] for key in measured))
    return Table(f"Time by class of operator, {name}", titles, rows, note)


def _gpu(result: Mapping[str, Any], measured: Mapping[str, Any], name: str) -> str | Table:
    read = {key: step["gpu"] for key, step in measured.items() if step["gpu"]}
    if not read:
        return f"GPU utilisation and power were not read: {result['gpu']}."
    rows = [(COLUMNS[key], gpu["utilisation_percent"], gpu["power_watts"], gpu["samples"]) for key, gpu in read.items()]
    return Table(f"GPU by NVML, {name}", ("", "busy, % of time", "power, W", "samples"), rows)


def _figure(columns: Mapping[str, Any], name: str) -> Figure:
    page_builder.require("matplotlib")
    from matplotlib.figure import Figure as Drawing

    kinds = _kinds(columns)
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
    return page_builder.figure(drawing, f"Memory of a step, {name}", note, f"Stacked bars of memory by class, {name}")
