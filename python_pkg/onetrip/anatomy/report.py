"""The tables of `onetrip anatomy` in the terminal: a column for each way to take the step, bars beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .bytes import CLASSES, format_bytes
from .compare import Comparison
from .operators import OPTIMIZER
from .options import COLUMNS
from .saved import SavedActivations

__all__ = ["bar", "format_bytes", "format_change", "format_difference", "format_speedup", "render"]

_BAR_WIDTH = 14
_EIGHTHS = " ▏▎▍▌▋▊▉"
_STYLES = ("dim", "green", "cyan", "magenta")
_MOST_ROWS = 8

Line = tuple[str, Sequence[float | None]]
"""(What it is, a value for each column)."""


def format_speedup(eager: float, patched: float) -> str:
    return f"{eager / patched:.2f}x" if patched else "-"


def format_change(eager: float, patched: float) -> str:
    return f"{patched / eager - 1:+.1%}" if eager else "-"


def format_difference(eager: float, patched: float) -> str:
    return f"{patched - eager:+.1f} ms"


def bar(value: float, largest: float, width: int = _BAR_WIDTH) -> str:
    """value / largest of the width, in eighths of a character."""
    full, rest = divmod(round(8 * width * value / largest) if largest > 0 else 0, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def _milliseconds(value: float) -> str:
    return f"{value:.1f} ms"


def _table(
    title: str, names: Sequence[str], rows: Sequence[Sequence[Line]], show: Callable[[float], str], bars: bool = True
) -> Table:
    """Each row has lines; the first is drawn as bars, one a column."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name, style in zip(names, _STYLES, strict=False):
        words = name.replace(" + ", " +\n")
        table.add_column(words, justify="right", style="" if style == "dim" else style, no_wrap=True)
    if bars:
        table.add_column("", width=_BAR_WIDTH, no_wrap=True)
    largest = max((value or 0.0 for lines in rows for value in lines[0][1]), default=0.0)
    for lines in rows:
        drawn = Text("\n").join(
            Text(bar(value or 0.0, largest), style) for value, style in zip(lines[0][1], _STYLES, strict=False)
        )
        labels = Text("\n").join(Text(label, "" if i == 0 else "dim") for i, (label, _) in enumerate(lines))
        cells = [
            Text("\n").join(
                Text("-" if values[i] is None else show(values[i]), "" if line == 0 else "dim")  # type: ignore[arg-type]
                for line, (_, values) in enumerate(lines)
            )
            for i in range(len(names))
        ]
        table.add_row(labels, *cells, *([drawn] if bars else []))
    return table


def _memory(result: Comparison, names: Sequence[str]) -> Table:
    """Measured, with the prediction and the formula under it."""
    columns = list(result.columns.values())
    rows = []
    for name in (*CLASSES, "peak", "caches"):
        kinds: list[Line] = []
        for kind in ("measured", "predicted"):
            steps = [getattr(column, kind) for column in columns]
            of_bytes = kind == "measured" and name != "caches"
            sizes = [step.bytes if of_bytes and step is not None else step for step in steps]
            values = [getattr(size, name, None) for size in sizes]
            if any(value is not None for value in values):
                kinds.append((f"  {kind}", values))
        by_formula = getattr(result.formula, name, None)
        if by_formula is not None and "eager" in result.columns:
            kinds.append(("  formula", [by_formula if column == "eager" else None for column in result.columns]))
        if kinds and any(value for value in kinds[0][1]):
            rows.append([(name.replace("_", " "), kinds[0][1]), *kinds[1:]])
    what = "measured, below it predicted" if result.options.runs else f"predicted for {result.device.type}"
    return _table(f"Memory: {what}", names, rows, format_bytes)


def _saved(result: Comparison, names: Sequence[str]) -> list[Table]:
    steps = [column.measured or column.predicted for column in result.columns.values()]
    saved = [SavedActivations() if step is None else step.saved for step in steps]
    tables = []
    for title, attribute in (
        ("by class of operator", "by_operator_class"),
        ("by class of module", "by_module_class"),
        ("by place in the model", "by_block"),
    ):
        totals = [getattr(each, attribute) for each in saved]
        tables.append(
            _table(f"Saved activations {title}", names, _by_label(totals), format_bytes, attribute != "by_block")
        )
    return tables


def _by_label(totals: Sequence[dict[str, float]]) -> list[list[Line]]:
    """A row a label, largest first; what is beyond _MOST_ROWS as one."""
    found = {label for each in totals for label in each}
    labels = sorted(found, key=lambda label: -max(each.get(label, 0) for each in totals))
    rows: list[list[Line]] = [[(label, [each.get(label, 0) for each in totals])] for label in labels[:_MOST_ROWS]]
    if rest := labels[_MOST_ROWS:]:
        rows.append([("the rest", [sum(each.get(label, 0) for label in rest) for each in totals])])
    return rows


def _times(result: Comparison, names: Sequence[str]) -> list[RenderableType]:
    steps = [column.measured for column in result.columns.values() if column.measured is not None]
    rows: list[list[Line]] = [
        [(phase, [getattr(step, f"{phase}_ms") for step in steps])]
        for phase in ("forward", "backward", "optimizer", "step")
    ]
    ratios = Table(title=f"Speed-up over {names[0]}", title_justify="left")
    for name in ("", *names[1:]):
        ratios.add_column(name, justify="right" if name else "left", style="bold" if name else "")
    for lines in rows:
        label, (base, *others) = lines[0]
        ratios.add_row(label, *(format_speedup(base or 0.0, value or 0.0) for value in others))
    operators = [step.operators_ms for step in steps]
    shown: list[RenderableType] = [
        _table(f"Time, median of {result.options.steps} steps", names, rows, _milliseconds),
        *([ratios] if len(names) > 1 else []),
        _table(
            f"By class of operator, one profiled step ({OPTIMIZER}: its whole step)",
            names,
            _by_label(operators),
            _milliseconds,
        ),
    ]
    losses = ", ".join(f"{name} {step.loss:.6f}" for name, step in zip(names, steps, strict=True))
    shown.append(Text(f"Loss with dropout off, same weights: {losses}"))
    for name, step in zip(names, steps, strict=True):
        if step.gpu is not None:
            busy, watts = step.gpu["utilisation_percent"], step.gpu["power_watts"]
            shown.append(Text(f"GPU, {name}: busy {busy:.0f}% of the time, {watts:.0f} W"))
    if result.gpu_unread:
        shown.append(Text(f"GPU utilisation and power: not read, {result.gpu_unread}", "dim"))
    return shown


def _fits(result: Comparison) -> Table:
    memory = format_bytes(next(column.fit.memory for column in result.columns.values() if column.fit is not None))
    table = Table(
        title=f"Does it fit {result.options.fits} ({memory}), predicted for {result.device.type}",
        title_justify="left",
        caption="Largest: the batch size that still fits. Workspaces of libraries come on top; in a size, though not\n"
        "in a card's, driver and CUDA context too.",
        caption_justify="left",
    )
    for name in ("", "peak", "fits", "by", "largest", "its peak"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
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
    parts += [_memory(result, names), *_saved(result, names)]
    for name, column in result.columns.items():
        if column.unpredicted:
            parts.append(Text(f"{COLUMNS[name]} is not predicted: {column.unpredicted}", "dim"))
    if options.runs:
        parts += _times(result, names)
    return Group(*parts)
