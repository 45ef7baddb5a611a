"""The tables of `onetrip anatomy`."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .compare import Comparison

_BAR_WIDTH = 16
_EIGHTHS = " ▏▎▍▌▋▊▉"

Row = tuple[str, float, float]


def format_bytes(n: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


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


def comparison_table(
    title: str,
    rows: list[Row],
    show: Callable[[float], str],
    verdict: str,
    judge: Callable[[float, float], str],
    names: tuple[str, str] = ("eager", "patched"),
) -> Table:
    """Rows of (label, eager, patched), or what else names says, each with a column of judge(eager, patched) and a pair
    of bars."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name, style in ((names[0], ""), (names[1], "green"), (verdict, "bold")):
        table.add_column(name, justify="right", style=style, no_wrap=True)
    table.add_column(", ".join(names), width=_BAR_WIDTH)
    largest = max((max(eager, patched) for _, eager, patched in rows), default=0.0)
    for label, eager, patched in rows:
        bars = Text.assemble((bar(eager, largest), "dim"), "\n", (bar(patched, largest), "green"))
        table.add_row(label, show(eager), show(patched), judge(eager, patched), bars)
    return table


def _milliseconds(value: float) -> str:
    return f"{value:.1f} ms"


def render(result: Comparison) -> RenderableType:
    """Everything `onetrip anatomy` prints without --json."""
    options, eager, patched = result.options, result.eager, result.patched
    heading = (
        f": {result.n_parameters / 1e6:.1f} M parameters, batch {options.batch_size} x {options.sequence_length}, "
        f"{options.dtype}, {options.optimizer}, {result.device}; {result.n_patched} modules patched"
    )
    phases: list[Row] = [
        (phase, getattr(eager, f"{phase}_ms"), getattr(patched, f"{phase}_ms"))
        for phase in ("forward", "backward", "optimizer", "step")
    ]
    sizes: list[Row] = [
        (name.replace("_", " "), getattr(eager, name), getattr(patched, name))
        for name in ("weights", "gradients", "optimizer_states", "saved_activations", "peak_memory")
    ]
    adamw8bit, names = result.patched_adamw8bit, ("AdamW", "AdamW8bit")
    labels = list(dict.fromkeys([*eager.operators_ms, *patched.operators_ms]))
    operators: list[Row] = [
        (label, eager.operators_ms.get(label, 0.0), patched.operators_ms.get(label, 0.0)) for label in labels
    ]
    return Group(
        Text.assemble((options.model, "bold"), heading),
        comparison_table(f"Time, median of {options.steps} steps", phases, _milliseconds, "speed-up", format_speedup),
        comparison_table("Memory (peak: above the start of the step)", sizes, format_bytes, "change", format_change),
        comparison_table(
            "Patched, with AdamW8bit in place of torch's AdamW: time",
            [
                (phase, getattr(patched, f"{phase}_ms"), getattr(adamw8bit, f"{phase}_ms"))
                for phase in ("optimizer", "step")
            ],
            _milliseconds,
            "speed-up",
            format_speedup,
            names,
        ),
        comparison_table(
            "Patched, with AdamW8bit in place of torch's AdamW: memory",
            [
                (name.replace("_", " "), getattr(patched, name), getattr(adamw8bit, name))
                for name in ("optimizer_states", "peak_memory")
            ],
            format_bytes,
            "change",
            format_change,
            names,
        ),
        comparison_table(
            "Forward and backward by class of operator, one profiled step",
            operators,
            _milliseconds,
            "change",
            format_difference,
        ),
        Text(f"Loss with dropout off, same weights: eager {eager.loss:.6f}, patched {patched.loss:.6f}"),
    )
