"""Recorded results as figures beside docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .results import Results


@dataclass(frozen=True)
class Figure:
    title: str
    path: str
    """Relative to docs/."""
    suite: str
    plot: Callable[[list[dict[str, Any]]], Any]
    """From a suite's cases to a matplotlib figure."""


def _language_model(cases: list[dict[str, Any]]) -> Any:
    """Training loss of every optimizer: the mean of the seeds, and the range of them."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(8, 4.5), layout="constrained")
    axes = canvas.add_subplot()
    steps = [case["every"] * (i + 1) for case in cases[:1] for i in range(case["n_steps"] // case["every"])]
    for name in dict.fromkeys(entry["name"] for case in cases for entry in case["providers"]):
        curves = [e["training_loss"] for case in cases for e in case["providers"] if e["name"] == name]
        points = list(zip(*curves, strict=True))
        line = axes.plot(steps, [sum(point) / len(point) for point in points], label=name, linewidth=1.5)[0]
        axes.fill_between(steps, list(map(min, points)), list(map(max, points)), color=line.get_color(), alpha=0.2)
    axes.set(xlabel="step", ylabel="training loss (nats a byte)", yscale="log")
    axes.legend()
    return canvas


def _streams(cases: list[dict[str, Any]]) -> Any:
    """The largest update so far apart, stream by stream."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(8, 6), layout="constrained")
    for case, axes in zip(cases, canvas.subplots(2, 2).flat, strict=False):
        for entry in case["providers"]:
            values = entry["largest_update_of_steps"]
            steps = [case["every"] * (i + 1) for i in range(len(values))]
            axes.plot(steps, values, label=entry["name"], color="black" if entry["name"] == "exact" else None)
        axes.axhline(7.27, color="grey", linestyle=":", linewidth=1)
        axes.set(title=case["stream"], xlabel="step", ylabel="largest |update| / lr", yscale="log")
    canvas.axes[0].legend(fontsize="small")
    return canvas


_DRAWN = (
    ("The largest update of every gradient stream; dotted: the bound of exact Adam", "adam_streams", _streams),
    ("Training loss with each optimizer, mean and range of the seeds", "adam_training", _language_model),
)


def names(machine: str, results: Results) -> list[Figure]:
    """What draw draws of one machine's results."""
    return [
        Figure(title, f"figures/{machine}/{suite}.png", suite, plot)
        for title, suite, plot in _DRAWN
        if results.get(suite, {}).get("cases")
    ]


def draw(machine: str, results: Results, docs: Path) -> None:
    """Writes the figures below docs/."""
    for figure in names(machine, results):
        path = docs / figure.path
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.plot(results[figure.suite]["cases"]).savefig(path, dpi=110, metadata={"Software": None})
