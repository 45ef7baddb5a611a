"""Which figures one machine's recorded results have: on the HTML page all of them, beside docs/benchmarks.md some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..measure.results import OPERATOR_SUITES, Results
from . import plots
from .tables import BOTH, cases, of_every_width, width_series

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Drawing:
    topic: str
    """The section of the page that it stands in."""
    name: str
    """Name of its file, without an extension."""
    title: str
    plot: Callable[[], Canvas]
    note: str = ""
    in_docs: bool = False


def drawings(results: Results) -> Iterator[Drawing]:
    """Everything that can be drawn of one machine's results: curves, and speed-ups by colour. A number or two of a
    provider stand in tables."""
    for (operator, dtype), members in width_series(of_every_width(results)).items():
        yield Drawing(
            "widths",
            f"width-{operator}-{dtype}",
            f"{operator}, {dtype}: bandwidth against width",
            partial(plots.widths, members),
            "GB/s: the least bytes that the pass must move over its median time; bands: 20th to 80th percentile. "
            "Dashed: what a copy of a tensor of that size reached in the same rounds.",
            in_docs=dtype == "fp32",
        )
    faster = "torch eager's median over onetrip's: above 1 onetrip is faster (blue), below 1 slower (red)."
    bound = "The largest update of every gradient stream; dotted: the bound of exact Adam"
    loss = "Training loss with each optimizer, mean and range of the seeds"
    operators = cases(results, *OPERATOR_SUITES)
    attended = [case for case in cases(results, "attention") if any(BOTH in entry for entry in case["providers"])]
    streams, models = cases(results, "adam_streams"), cases(results, "adam_training")
    for found, topic, name, title, plot, note in (
        (operators, "speed-ups", "speed_up", "How many times faster than torch eager", plots.speed_ups, faster),
        (attended, "attention", "attention", "Attention against length", plots.attention, ""),
        (streams, "optimizers", "adam_streams", bound, plots.streams, ""),
        (models, "optimizers", "adam_training", loss, plots.language_model, ""),
    ):
        if found:
            yield Drawing(topic, name, title, partial(plot, found), note, in_docs=name != "attention")


def of_docs(results: Results) -> list[Drawing]:
    """What draw draws of one machine's results."""
    return [drawing for drawing in drawings(results) if drawing.in_docs]


def draw(machine: str, results: Results, docs: Path) -> None:
    """Writes docs/figures/<machine>/<name>.png."""
    folder = docs / "figures" / machine
    for drawing in of_docs(results):
        folder.mkdir(parents=True, exist_ok=True)
        drawing.plot().savefig(folder / f"{drawing.name}.png", dpi=110, metadata={"Software": None})
