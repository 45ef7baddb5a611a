"""The tables of `onetrip anatomy` in the terminal: a line for each way to take the step, its bar on that line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..measure import ATTENTION, LOSS, PRODUCT, Traffic, load_warning
from ..measure import OPTIMIZER as OPTIMIZER_PHASE
from .bytes import CLASSES, format_bytes
from .compare import Comparison
from .gpus import BOUND_PARTS
from .measure import PHASES
from .operators import OPTIMIZER
from .options import COLUMNS
from .saved import SavedActivations

_SHORTEST_BAR, _LONGEST_BAR = 4, 32
_BESIDE_BARS = 73
"""Characters of the longest labels and figures beside a bar."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_STYLES = ("", "green", "cyan", "magenta")
_MOST_ROWS = 8

Values = Sequence[float | None]
Lines = tuple[str, Sequence[Values]]
"""(What it is, for each way to take the step the values under the table's heads)."""


def bar(value: float, largest: float, width: int) -> str:
    """value / largest of the width, in eighths of a character."""
    full, rest = divmod(round(8 * width * value / largest) if largest > 0 else 0, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


class _Bar:
    """bar() as wide as its column."""

    def __init__(self, value: float, largest: float, style: str) -> None:
        self.value, self.largest, self.style = value, largest, style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = max(_SHORTEST_BAR, min(options.size.width - _BESIDE_BARS, _LONGEST_BAR))
        return Measurement(_SHORTEST_BAR, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(bar(self.value, self.largest, options.max_width), self.style)


def _milliseconds(value: float) -> str:
    return f"{value:.1f} ms"


def _times_faster(value: float) -> str:
    return f"{value:.2f}x"


def _table(
    title: str,
    ways: Sequence[str],
    heads: Sequence[str],
    rows: Sequence[Lines],
    show: Callable[[float], str],
    show_last: Callable[[float], str] | None = None,
) -> Table:
    """The bar draws the first value of its line. Ways without any value in a row have no line there. show_last: of the
    last head, where it is of another unit."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    table.add_column("", overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", overflow="fold")
    table.add_column("")
    shows = [show] * len(heads) if show_last is None else [*[show] * (len(heads) - 1), show_last]

    def first(values: Values) -> float:
        return next((value for value in values if value is not None), 0.0)

    largest = max((first(values) for _, lines in rows for values in lines), default=0.0)
    for label, lines in rows:
        present = [line for line in zip(ways, lines, _STYLES, strict=False) if any(v is not None for v in line[1])]
        for i, (way, values, style) in enumerate(present):
            figures = ["-" if v is None else show_one(v) for v, show_one in zip(values, shows, strict=True)]
            is_last = i == len(present) - 1 and len(ways) > 1
            table.add_row(
                "" if i else label,
                Text(way, style),
                *figures,
                _Bar(first(values), largest, style),
                end_section=is_last,
            )
    return table


def _memory(result: Comparison, ways: Sequence[str]) -> Table:
    columns = list(result.columns.values())
    kinds = [kind for kind in ("measured", "predicted") if any(getattr(column, kind) for column in columns)]
    rows: list[Lines] = []
    for name in (*CLASSES, "peak", "caches"):
        lines = []
        for column in columns:
            measured = column.measured if name == "caches" or column.measured is None else column.measured.bytes
            steps = {"measured": measured, "predicted": column.predicted}
            lines.append([getattr(steps[kind], name, None) for kind in kinds])
        if any(value for values in lines for value in values):
            rows.append((name.replace("_", " "), lines))
    title = f"Memory on {result.device}" if result.options.runs else f"Memory, predicted for {result.device.type}"
    return _table(title, ways, kinds, rows, format_bytes)


def _saved(result: Comparison, ways: Sequence[str]) -> list[Table]:
    steps = [column.measured or column.predicted for column in result.columns.values()]
    saved = [SavedActivations() if step is None else step.saved for step in steps]
    return [
        _table(
            f"Saved activations {title}", ways, ("bytes",), _by_label([getattr(s, name) for s in saved]), format_bytes
        )
        for title, name in (
            ("by class of operator", "by_operator_class"),
            ("by class of module", "by_module_class"),
            ("by place in the model", "by_block"),
        )
    ]


def _by_label(totals: Sequence[Mapping[str, float]]) -> list[Lines]:
    """A row a label, largest first; all beyond _MOST_ROWS as one."""
    found = {label for each in totals for label in each}
    labels = sorted(found, key=lambda label: -max(each.get(label, 0) for each in totals))
    rows: list[Lines] = [(label, [[each.get(label, 0)] for each in totals]) for label in labels[:_MOST_ROWS]]
    if rest := labels[_MOST_ROWS:]:
        rows.append(("the rest", [[sum(each.get(label, 0) for label in rest)] for each in totals]))
    return rows


def _times(result: Comparison, ways: Sequence[str]) -> list[RenderableType]:
    steps = [column.measured for column in result.columns.values() if column.measured is not None]
    base = steps[0].ms
    rows: list[Lines] = [
        (
            phase,
            [[ms.median, ms.p20, ms.p80, base[phase].median / ms.median] for ms in (step.ms[phase] for step in steps)],
        )
        for phase in PHASES
    ]
    heads = ("median", "p20", "p80", f"vs {ways[0]}")
    shown: list[RenderableType] = [
        _table(f"Time of {result.options.steps} steps", ways, heads, rows, _milliseconds, _times_faster),
    ]
    if warning := load_warning(steps[0].other_cpus):
        shown.append(Text(warning, "yellow"))
    shown.append(
        _table(
            f"By class of operator, one profiled step ({OPTIMIZER}: its whole step)",
            ways,
            ("time",),
            _by_label([step.operators_ms for step in steps]),
            _milliseconds,
        )
    )
    losses = ", ".join(f"{name} {step.loss:.6f}" for name, step in zip(ways, steps, strict=True))
    shown.append(Text(f"Loss with dropout off, same weights: {losses}"))
    for name, step in zip(ways, steps, strict=True):
        if step.gpu is not None:
            busy, watts = step.gpu["utilisation_percent"], step.gpu["power_watts"]
            shown.append(Text(f"GPU, {name}: busy {busy:.0f}% of the time, {watts:.0f} W"))
    if result.gpu_unread:
        shown.append(Text(f"GPU utilization and power were not read: {result.gpu_unread}", "dim"))
    return shown


_PARTS = ("outside products", "of it the loss", "products", "attention kernels", "optimizer")


def _parts(traffic: Traffic) -> tuple[int, ...]:
    """Bytes of each of _PARTS."""
    kinds = (traffic.bytes(kind) for kind in (LOSS, PRODUCT, ATTENTION))
    return traffic.outside(), *kinds, traffic.bytes(phase=OPTIMIZER_PHASE)


def _traffic(result: Comparison) -> list[Table]:
    """Bytes that a step reads and writes, and on a named GPU the time that they take at least."""
    found = {COLUMNS[name]: column.predicted for name, column in result.columns.items() if column.predicted is not None}
    counted = {name: step.traffic for name, step in found.items() if step.traffic is not None}
    if not counted:
        return []
    ways = list(counted)
    parts = [_parts(each) for each in counted.values()]
    base = parts[0]
    rows: list[Lines] = [
        (label, [[each[i], each[i] / base[i] if base[i] else None] for each in parts]) for i, label in enumerate(_PARTS)
    ]
    heads = ("bytes", f"of {ways[0]}")
    where = f"counted for {result.device.type}"
    tables = [_table(f"Read and written by a step, {where}", ways, heads, rows, format_bytes, _share)]
    outside = [each.by_operator(outside=True) for each in counted.values()]
    tables.append(_table("Outside products, by operator", ways, ("bytes",), _by_label(outside), format_bytes))
    bounds = [column.bound for column in result.columns.values() if column.bound is not None]
    if bounds:
        rows = [(name, [[getattr(bound, name)] for bound in bounds]) for name in BOUND_PARTS]
        tables.append(
            _table(f"Lower bound of the time on {result.options.gpu}", ways, ("at least",), rows, _short_time)
        )
    return tables


def _share(value: float) -> str:
    return f"{value:.2f}"


def _short_time(value: float) -> str:
    return f"{value:.3f} ms" if value < 10.0 else _milliseconds(value)


def _fits(result: Comparison) -> Table:
    memory = format_bytes(next(column.fit.memory for column in result.columns.values() if column.fit is not None))
    table = Table(
        title=f"Does it fit {result.options.gpu or result.options.fits} ({memory}), predicted for {result.device.type}",
        title_justify="left",
        caption="Largest: the largest batch size that fits. Not counted: workspaces of libraries; where a size was "
        "given and no GPU, also the driver and the CUDA context.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("", "peak", "fits", "by", "largest", "its peak"):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for name, column in result.columns.items():
        fit = column.fit
        if fit is not None:
            verdict = Text("yes", "green") if fit.fits else Text("no", "red")
            last = "-" if fit.peak_at_largest is None else format_bytes(fit.peak_at_largest)
            by = ("+" if fit.fits else "-") + format_bytes(abs(fit.margin))
            table.add_row(COLUMNS[name], format_bytes(fit.peak), verdict, by, str(fit.largest_batch), last)
    return table


def render(result: Comparison) -> RenderableType:
    """Everything `onetrip anatomy` prints without --json."""
    options = result.options
    heading = (
        f": {result.n_parameters / 1e6:.1f} M parameters, batch {options.batch_size} x {options.sequence_length}, "
        f"{options.dtype}, {options.optimizer}, {result.device}; {result.n_patched} modules patched"
    )
    names = [COLUMNS[name] for name in result.columns]
    parts: list[RenderableType] = [Text.assemble((options.model, "bold"), heading)]
    if any(column.fit is not None for column in result.columns.values()):
        parts.append(_fits(result))
    parts += [_memory(result, names), *_saved(result, names), *_traffic(result)]
    for name, column in result.columns.items():
        if column.unpredicted:
            parts.append(Text(f"{COLUMNS[name]} is not predicted: {column.unpredicted}", "dim"))
    if options.runs:
        parts += _times(result, names)
    return Group(*parts)
