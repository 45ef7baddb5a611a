"""Which figures one machine's recorded results have: on the HTML page all of them, beside docs/benchmarks.md some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measure.results import OPERATOR_SUITES, Results
from . import plots
from .tables import BOTH, cases, of_every_width, width_series

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_MIB = 1 << 20


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


def _memory(record: dict[str, Any]) -> list[float]:
    return [record[name] / _MIB for name in ("saved_bytes", "peak_bytes")] if "peak_bytes" in record else []


def _phases(step: dict[str, Any]) -> list[float]:
    return [step[name]["median_ms"] for name in ("forward", "backward", "optimizer") if name in step]


def _step(entry: dict[str, Any]) -> list[float]:
    return [entry["step"]["median_ms"]] if "step" in entry else []


def _states(entry: dict[str, Any]) -> list[float]:
    return [entry["state_bytes_per_parameter"]] if "step" in entry else []


def drawings(results: Results) -> Iterator[Drawing]:
    """Everything that can be drawn of one machine's results."""
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
    operators = cases(results, *OPERATOR_SUITES)
    faster = "torch eager's median over onetrip's: above 1 onetrip is faster (blue), below 1 slower (red)."
    if operators:
        title = "How many times faster than torch eager"
        yield Drawing("speed-ups", "speed_up", title, partial(plots.speed_ups, operators), faster, in_docs=True)
    memory = "MiB: saved for backward (upper bar of a pair), at the peak (lower, pale)"
    for dtype in dict.fromkeys(case["dtype"] for case in operators):
        if members := [case for case in operators if case["full"] and case["dtype"] == dtype]:
            title = f"Memory of an operator, {dtype}"
            note = "Above the inputs. Saved: what autograd keeps for backward, without parameters."
            yield Drawing("memory", f"memory-{dtype}", title, partial(plots.bars, members, _memory, memory), note)
    phases = partial(plots.bars, values=_phases, label="ms, medians: forward, backward, optimizer, paler and paler")
    step_memory = partial(plots.bars, values=_memory, label=memory)
    adam_step = partial(plots.bars, values=_step, label="ms, median")
    adam_states = partial(plots.bars, values=_states, label="bytes of state a parameter")
    bound = "The largest update of every gradient stream; dotted: the bound of exact Adam"
    loss = "Training loss with each optimizer, mean and range of the seeds"
    attended = [case for case in cases(results, "attention") if any(BOTH in entry for entry in case["providers"])]
    trained = [case for case in cases(results, "training") if case["steps"]]
    adam, streams, models = (cases(results, f"adam{suffix}") for suffix in ("", "_streams", "_training"))
    for found, topic, name, title, plot in (
        (attended, "attention", "attention", "Attention against length", plots.attention),
        (trained, "training", "training", "A training step, by phase", phases),
        (trained, "training", "training_memory", "Memory of a training step", step_memory),
        (adam, "optimizers", "adam", "A step of AdamW", adam_step),
        (adam, "optimizers", "adam_states", "States of AdamW", adam_states),
        (streams, "optimizers", "adam_streams", bound, plots.streams),
        (models, "optimizers", "adam_training", loss, plots.language_model),
    ):
        if found:
            yield Drawing(topic, name, title, partial(plot, found), in_docs=name in ("adam_streams", "adam_training"))


def of_docs(results: Results) -> list[Drawing]:
    """What draw draws of one machine's results."""
    return [drawing for drawing in drawings(results) if drawing.in_docs]


def draw(machine: str, results: Results, docs: Path) -> None:
    """Writes docs/figures/<machine>/<name>.png."""
    folder = docs / "figures" / machine
    for drawing in of_docs(results):
        folder.mkdir(parents=True, exist_ok=True)
        drawing.plot().savefig(folder / f"{drawing.name}.png", dpi=110, metadata={"Software": None})
