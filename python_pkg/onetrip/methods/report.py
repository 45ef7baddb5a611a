"""What `onetrip methods` reports, on its page and on the terminal: tables, and a figure of speed beside memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group

from .. import html, terminal
from ..anatomy import format_bytes
from ..environment import describe
from ..html import Cell, Figure, Section, Table
from .catalog import COMBINATIONS
from .runs import FAILED, MEASURED
from .verdict import LEAST_GAIN, LEAST_MEMORY

SPEED_WORDS = {"yes": "yes", "no": "no", "slower": "slower", "unknown": "too few steps"}
GOOD = {"yes": True, "slower": False, "more": False}
_COLOURS = {True: "#1a7f5a", False: "#c44e52", None: "#8a8f98"}
_RATIO_NOTE = (
    "A yes or slower stands out of the noise: four pairs of steps in five agree, and the median is away from 1 by more "
    f"than {LEAST_GAIN:.0%} and more than a second baseline's is; of memory, beyond {LEAST_MEMORY:.0%}. "
    "Claimed: by transformers' guide to training on one GPU."
)
_HEADS = (
    *("method", "samples/s", "of the baseline's", "p20-p80", "peak memory", "saved for backward"),
    *("optimizer states", "held-out loss", "patched sites", "first step, s"),
)
_SHORT_HEADS = ("method", "samples/s", "ratio", "p20-p80", "peak", "saved", "states", "loss", "sites")
"""Heads of the same columns on a terminal, the last left out."""
_SHORT_NOTE = (
    "ratio: samples/s over the baseline's. peak: the most memory held at once. saved: kept for backward by one forward "
    "pass. states: the optimizer's. "
)
_UNMEASURED = "Not measured"


def sections(result: dict[str, Any]) -> list[Section]:
    """The sections of one result, as methods.json holds it. Their captions name the model: pages can be joined."""
    name = result["model"]["name"]
    parts: list[str | Table | Figure] = [*_parts(result, brief=False)]
    if _compared(result):
        parts.insert(2, _drawing(result))
    return [html.named_section("Methods of training", name, parts)]


def tables(result: dict[str, Any]) -> list[Table]:
    """What sections shows as tables, for pages of text: the note of the first says what was measured."""
    found = [part for part in sections(result)[0].parts if isinstance(part, Table)]
    found = [table for table in found if not table.caption.startswith(_UNMEASURED)]
    notes = [heading(result), *made_of(result), *fell_back(result)]
    return [replace(table, note=" ".join([*notes, table.note])) for table in found[:1]] + found[1:]


def write_page(result: dict[str, Any], folder: Path) -> Path:
    """folder/methods.html, replaced whole."""
    title = f"onetrip methods {result['model']['name']}"
    return html.write(folder / "methods.html", html.page(title, describe(result), sections(result)))


def render(result: dict[str, Any]) -> Group:
    """Everything `onetrip methods` prints without --json."""
    return terminal.render(_parts(result, brief=True), result["model"]["name"])


def _parts(result: dict[str, Any], brief: bool) -> list[str | Table]:
    """brief: for a terminal, whose lines are short."""
    parts: list[str | Table] = [heading(result)]
    if _compared(result):
        parts.append(_verdicts(result))
    if measured(result):
        parts.append(_figures(result, brief))
    parts += [*made_of(result), *fell_back(result)]
    if unmeasured(result):
        rows = [
            (
                entry["title"],
                Cell(entry["status"], entry["status"], good=False if entry["status"] == FAILED else None),
                entry["reason"],
            )
            for entry in unmeasured(result)
        ]
        parts.append(Table(_UNMEASURED, ("method", "status", "reason"), rows))
    if result["interrupted"]:
        parts.append("The run was interrupted: methods that are not listed were not measured.")
    return parts


def _compared(result: dict[str, Any]) -> bool:
    return any("verdict" in entry for entry in measured(result))


def measured(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in result["methods"] if entry["status"] == MEASURED]


def unmeasured(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in result["methods"] if entry["status"] != MEASURED]


def speed_words(entry: dict[str, Any]) -> str:
    """ "yes, 1.31x", "no, 1.01x", "slower, 0.62x"."""
    return f"{SPEED_WORDS[entry['verdict']['speed']]}, {entry['samples_per_s_ratio']['median']:.2f}x"


def memory_words(entry: dict[str, Any]) -> str:
    """ "yes, -31%", "no", "more, +62%"."""
    word = entry["verdict"]["memory"]
    return word if word == "no" else f"{word}, {entry['ratios']['peak_memory'] - 1.0:+.0%}"


def heading(result: dict[str, Any]) -> str:
    options = result["options"]
    sequence = "" if result["data"]["tokens"] == "images" else f" x {options['sequence_length']}"
    return (
        f"{result['model']['parameters'] / 1e6:.1f} M parameters, batch {options['batch_size']}{sequence}, "
        f"{options['dtype']}, {result['machine']['device']}; {options['steps']} timed steps of each method, "
        "in turns with the baseline."
    )


def made_of(result: dict[str, Any]) -> list[str]:
    """Which methods the named combinations hold on this machine."""
    return [
        f"{entry['title']}: {' + '.join(entry['parts'])}."
        for entry in measured(result)
        if entry["parts"] and entry["name"] in COMBINATIONS
    ]


def fell_back(result: dict[str, Any]) -> list[str]:
    """Where figures of patched modules are in part those of transformers' own code."""
    return [
        f"{entry['title']}: {entry['fallback_calls']} calls of patched modules ran transformers' own code."
        for entry in measured(result)
        if entry["fallback_calls"]
    ]


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
    return Table("What each method does", columns, rows, _RATIO_NOTE)


def _judged(entry: dict[str, Any], subject: str, value: float, words: str) -> Cell:
    return Cell(value, words, GOOD.get(entry["verdict"][subject]))


def _figures(result: dict[str, Any], brief: bool) -> Table:
    size = _short_size if brief else format_bytes
    rows = []
    for entry in measured(result):
        ratio, loss = entry["samples_per_s_ratio"], entry["loss"]
        rows.append(
            (
                entry["name" if brief else "title"],
                Cell(entry["samples_per_s"]["median"], f"{entry['samples_per_s']['median']:.1f}"),
                Cell(ratio["median"], f"{ratio['median']:.2f}x"),
                Cell(ratio["p20"], f"{ratio['p20']:.2f}-{ratio['p80']:.2f}{'' if brief else 'x'}"),
                *(
                    Cell(entry[name], size(entry[name]))
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
    if brief:
        rows = [row[:-1] for row in rows]
        return Table("Figures of each method", _SHORT_HEADS, rows, _SHORT_NOTE + note)
    return Table("Figures of each method", _HEADS, rows, note)


def _short_size(n: int) -> str:
    return format_bytes(n).replace("iB", "").replace(" ", "")


def _drawing(result: dict[str, Any]) -> Figure:
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
    return html.figure(
        drawing,
        "Speed and memory of each method",
        "The line is the baseline. Whiskers: 20th to 80th percentile of the pairs of steps.",
        "Two bar charts, a bar for each method: samples a second and peak memory as multiples of the baseline's.",
    )


def _bars(axes: Any, label: str, titles: list[str], values: list[float], verdicts: list[str]) -> None:
    axes.barh(range(len(titles)), values, color=[_COLOURS[GOOD.get(verdict)] for verdict in verdicts], height=0.62)
    axes.set_yticks(range(len(titles)), titles)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
