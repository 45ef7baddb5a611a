"""The tables of `onetrip methods`."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..anatomy import format_bytes
from .catalog import COMBINATIONS
from .runs import FAILED, MEASURED

SPEED_WORDS = {"yes": "yes", "no": "no", "slower": "slower", "unknown": "too few steps"}
GOOD = {"yes": True, "slower": False, "more": False}
_STYLES = {True: "green", False: "red", None: ""}


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
        "in turns with the baseline"
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


def verdict_table(result: dict[str, Any]) -> Table:
    """Method, improves speed, saves memory: with what is said beside what was found."""
    table = Table(title="What it does here, beyond noise", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("method", overflow="fold")
    for column in ("improves speed", "(claimed)", "saves memory", "(claimed)"):
        table.add_column(column, style="dim" if column == "(claimed)" else "", overflow="fold")
    for entry in measured(result):
        if "verdict" in entry:
            table.add_row(
                entry["title"],
                Text(speed_words(entry), _STYLES[GOOD.get(entry["verdict"]["speed"])]),
                entry["said"]["speed"],
                Text(memory_words(entry), _STYLES[GOOD.get(entry["verdict"]["memory"])]),
                entry["said"]["memory"],
            )
    return table


def figure_table(result: dict[str, Any]) -> Table:
    """Every figure of every method."""
    table = Table(title="Figures", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", overflow="fold")
    for column in ("samples/s", "ratio", "p20-p80", "peak", "saved", "states", "loss", "sites"):
        table.add_column(column, justify="right", overflow="fold")
    for entry in measured(result):
        ratio = entry["samples_per_s_ratio"]
        table.add_row(
            entry["name"],
            f"{entry['samples_per_s']['median']:.1f}",
            f"{ratio['median']:.2f}",
            f"{ratio['p20']:.2f}-{ratio['p80']:.2f}",
            *(_bytes(entry[name]) for name in ("peak_memory", "saved_activations", "optimizer_states")),
            "nan" if entry["loss"] is None else f"{entry['loss']:.3f}",
            "" if entry["patched_sites"] is None else str(entry["patched_sites"]),
        )
    return table


def _bytes(n: int) -> str:
    return format_bytes(n).replace("iB", "").replace(" ", "")


def render(result: dict[str, Any]) -> RenderableType:
    """Everything `onetrip methods` prints without --json."""
    parts: list[RenderableType] = [Text.assemble((result["model"]["name"], "bold"), ": ", heading(result))]
    entries = measured(result)
    if entries:
        parts.append(figure_table(result))
        steps, before = entries[0]["trained_steps"], entries[0]["loss_before"]
        start = "" if before is None else f"; {before:.3f} before the first"
        parts.append(
            Text(
                "ratio: samples/s over the baseline's. peak: most memory held at once. saved: kept for backward by one "
                f"forward pass. states: the optimizer's. loss: of held-out samples after {steps} steps{start}."
            )
        )
    if any("verdict" in entry for entry in entries):
        parts.append(verdict_table(result))
    parts += [*made_of(result), *fell_back(result)]
    for entry in unmeasured(result):
        style = "red" if entry["status"] == FAILED else "dim"
        parts.append(Text(f"{entry['status']}: {entry['title']}: {entry['reason']}", style))
    if result["interrupted"]:
        parts.append(Text("interrupted: the methods not listed were not measured", "yellow"))
    return Group(*parts)
