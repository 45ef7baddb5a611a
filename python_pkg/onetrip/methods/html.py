"""methods.html: the tables of `onetrip methods` as sections of a page, and a figure of speed beside memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import html as page_builder
from ..anatomy import format_bytes
from ..environment import describe
from ..html import Cell, Figure, Section, Table
from .report import GOOD, fell_back, heading, made_of, measured, memory_words, speed_words, unmeasured
from .verdict import LEAST_GAIN, LEAST_MEMORY

_COLOURS = {True: "#1a7f5a", False: "#c44e52", None: "#8a8f98"}
_RATIO_NOTE = (
    "A yes or slower stands out of the noise: four pairs of steps in five agree, and the median is away from 1 by more "
    f"than {LEAST_GAIN:.0%} and more than a second baseline's is; of memory, beyond {LEAST_MEMORY:.0%}. "
    "Claimed: by transformers' guide to training on one GPU."
)


def sections(result: dict[str, Any]) -> list[Section]:
    """The sections of one result, as methods.json holds it. Their captions name the model: pages can be joined."""
    name = result["model"]["name"]
    parts: list[str | Table | Figure] = [f"{name}: {heading(result)}."]
    if any("verdict" in entry for entry in measured(result)):
        parts += [_verdicts(result), _figure(result)]
    if measured(result):
        parts.append(_figures(result))
    parts += [*made_of(result), *fell_back(result)]
    if unmeasured(result):
        rows = [(entry["title"], entry["status"], entry["reason"]) for entry in unmeasured(result)]
        parts.append(Table(f"Not measured, {name}", ("method", "status", "reason"), rows))
    if result["interrupted"]:
        parts.append("The run was interrupted: methods that are not listed were not measured.")
    return [Section(f"Methods of training: {name}", parts)]


def tables(result: dict[str, Any]) -> list[Table]:
    """What sections shows as tables, for pages of text: the note of the first says what was measured."""
    found = [_verdicts(result)] if any("verdict" in entry for entry in measured(result)) else []
    found += [_figures(result)] if measured(result) else []
    notes = [f"{heading(result)[0].upper()}{heading(result)[1:]}.", *made_of(result), *fell_back(result)]
    return [replace(table, note=" ".join([*notes, table.note])) for table in found[:1]] + found[1:]


def write_page(result: dict[str, Any], folder: Path) -> Path:
    """folder/methods.html, replaced whole."""
    title = f"onetrip methods {result['model']['name']}"
    return page_builder.write(folder / "methods.html", page_builder.page(title, describe(result), sections(result)))


def _verdicts(result: dict[str, Any]) -> Table:
    rows = [
        (
            entry["title"],
            _judged(entry, "speed", entry["samples_per_s_ratio"]["median"], speed_words(entry)),
            entry["said"]["speed"],
            _judged(entry, "memory", entry["ratios"]["peak_memory"], memory_words(entry)),
            entry["said"]["memory"],
        )
        for entry in measured(result)
        if "verdict" in entry
    ]
    columns = ("method", "improves speed", "claimed", "saves memory", "claimed")
    return Table(f"What each method does, {result['model']['name']}", columns, rows, _RATIO_NOTE)


def _judged(entry: dict[str, Any], subject: str, value: float, words: str) -> Cell:
    return Cell(value, words, GOOD.get(entry["verdict"][subject]))


def _figures(result: dict[str, Any]) -> Table:
    columns = (
        *("method", "samples/s", "of the baseline's", "p20-p80", "peak memory", "saved for backward"),
        *("optimizer states", "held-out loss", "patched sites", "first step, s"),
    )
    rows = []
    for entry in measured(result):
        ratio, loss = entry["samples_per_s_ratio"], entry["loss"]
        rows.append(
            (
                entry["title"],
                Cell(entry["samples_per_s"]["median"], f"{entry['samples_per_s']['median']:.1f}"),
                Cell(ratio["median"], f"{ratio['median']:.2f}x"),
                Cell(ratio["p20"], f"{ratio['p20']:.2f}-{ratio['p80']:.2f}x"),
                *(
                    Cell(entry[name], format_bytes(entry[name]))
                    for name in ("peak_memory", "saved_activations", "optimizer_states")
                ),
                None if loss is None else Cell(loss, f"{loss:.3f}"),
                entry["patched_sites"],
                Cell(entry["first_step_s"], f"{entry['first_step_s']:.2f}"),
            )
        )
    baseline = measured(result)[0]
    before = baseline["loss_before"]
    note = (
        f"Loss of {result['data']['held_out_samples']} samples that no step saw ({result['data']['tokens']}), after "
        f"{baseline['trained_steps']} steps" + ("." if before is None else f"; before the first it was {before:.3f}.")
    )
    return Table(f"Figures of each method, {result['model']['name']}", columns, rows, note)


def _figure(result: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure as Drawing

    entries = [entry for entry in reversed(measured(result)) if "verdict" in entry]
    drawing = Drawing(figsize=(9.5, 1.2 + 0.34 * len(entries)), layout="constrained")
    speed, memory = drawing.subplots(1, 2, sharey=True)
    titles = [entry["title"] for entry in entries]
    ratios = [entry["samples_per_s_ratio"] for entry in entries]
    medians = [ratio["median"] for ratio in ratios]
    below = [max(0.0, ratio["median"] - ratio["p20"]) for ratio in ratios]
    above = [max(0.0, ratio["p80"] - ratio["median"]) for ratio in ratios]
    _bars(speed, "samples a second, times the baseline's", titles, medians, [e["verdict"]["speed"] for e in entries])
    speed.errorbar(medians, range(len(titles)), xerr=(below, above), fmt="none", ecolor="black", elinewidth=1)
    peaks = [entry["ratios"]["peak_memory"] for entry in entries]
    _bars(memory, "peak memory, times the baseline's", titles, peaks, [e["verdict"]["memory"] for e in entries])
    return page_builder.figure(
        drawing,
        f"Speed and memory of each method, {result['model']['name']}",
        "The line is the baseline. Whiskers: 20th to 80th percentile of the pairs of steps.",
        "Two bar charts, a bar for each method: samples a second and peak memory as multiples of the baseline's.",
    )


def _bars(axes: Any, label: str, titles: list[str], values: list[float], verdicts: list[str]) -> None:
    axes.barh(range(len(titles)), values, color=[_COLOURS[GOOD.get(verdict)] for verdict in verdicts], height=0.62)
    axes.set_yticks(range(len(titles)), titles)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
