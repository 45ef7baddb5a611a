"""Drawings of the recorded results of training: steps of models and of optimizers, losses, updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import targets
from .operator_plots import MEMORY_LABEL, canvas, colours, legend, memory_bars
from .tables import Cases, providers

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def _title(case: dict[str, Any]) -> str:
    return f"{case['model']}, {case.get('dtype', 'fp32')}, {case['batch_size']} x {case['sequence_length']} tokens"


def steps(cases: Cases) -> Canvas:
    """Milliseconds of forward and backward of every step, stacked."""
    heights = [0.9 + 0.32 * len(case["steps"]) for case in cases]
    drawn = canvas(9.0, sum(heights) + 0.5)
    grid = drawn.subplots(len(cases), 1, squeeze=False, height_ratios=heights)
    for axes, case in zip(grid.flat, cases, strict=True):
        for place, step in enumerate(case["steps"].values()):
            start = 0.0
            for which, colour in (("forward", "#2a7de1"), ("backward", "#e07b30"), ("optimizer", "#3fa35b")):
                if which in step:
                    axes.barh(place, step[which]["median_ms"], left=start, height=0.6, color=colour, label=which)
                    start += step[which]["median_ms"]
            axes.annotate(f"{start:,.0f}", (start, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(range(len(case["steps"])), list(case["steps"]), fontsize=8)
        axes.set_ylim(len(case["steps"]) - 0.5, -0.5)
        axes.margins(x=0.08)
        axes.set_title(_title(case), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    legend(drawn)
    drawn.axes[-1].set_xlabel("ms, medians")
    return drawn


def steps_memory(cases: Cases) -> Canvas:
    """MiB saved for backward and at the peak, of every step."""
    heights = [0.9 + 0.4 * len(case["steps"]) for case in cases]
    drawn = canvas(9.0, sum(heights) + 0.4)
    for axes, case in zip(drawn.subplots(len(cases), 1, squeeze=False, height_ratios=heights).flat, cases, strict=True):
        colour = {name: "#e07b30" if name.startswith("eager") else "#2a7de1" for name in case["steps"]}
        memory_bars(axes, case["steps"], colour)
        axes.set_title(_title(case), fontsize=9)
    drawn.supxlabel(MEMORY_LABEL, fontsize=9)
    return drawn


def optimizers(cases: Cases) -> Canvas:
    """Milliseconds of a step of every optimizer, and the bytes of state that it keeps of a parameter."""
    heights = [0.9 + 0.3 * len(case["providers"]) for case in cases]
    drawn = canvas(10.5, sum(heights) + 0.3)
    grid = drawn.subplots(len(cases), 2, squeeze=False, height_ratios=heights, sharey="row")
    for (left, right), case in zip(grid, cases, strict=True):
        timed = [entry for entry in case["providers"] if "step" in entry]
        colour = colours(entry["name"] for entry in timed)
        for axes, values, digits in (
            (left, [entry["step"]["median_ms"] for entry in timed], 3),
            (right, [entry["state_bytes_per_parameter"] for entry in timed], 4),
        ):
            axes.barh(range(len(timed)), values, height=0.62, color=[colour[entry["name"]] for entry in timed])
            for place, value in enumerate(values):
                text = f"{value:.{digits}g}" if value < 1000 else f"{value:,.0f}"
                axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
            axes.margins(x=0.14)
            axes.spines[["top", "right"]].set_visible(False)
        left.set_yticks(range(len(timed)), [entry["name"] for entry in timed], fontsize=8)
        left.set_ylim(len(timed) - 0.5, -0.5)
        left.set_title(f"{case['model']}, {case['dtype']}", fontsize=9, loc="left")
    grid[-1][0].set_xlabel("ms a step, median")
    grid[-1][1].set_xlabel("bytes of state a parameter")
    return drawn


def language_model(cases: Cases) -> Canvas:
    """Training loss with every optimizer: the mean of the seeds, and the range of them."""
    drawn = canvas(8, 4.5)
    axes = drawn.add_subplot()
    points = [case["every"] * (i + 1) for case in cases[:1] for i in range(case["n_steps"] // case["every"])]
    colour = colours(providers(cases))
    for name in providers(cases):
        curves = [entry["training_loss"] for case in cases if (entry := targets.provider(case, name))]
        losses = list(zip(*curves, strict=True))
        axes.plot(points, [sum(each) / len(each) for each in losses], label=name, linewidth=1.5, color=colour[name])
        axes.fill_between(points, list(map(min, losses)), list(map(max, losses)), color=colour[name], alpha=0.2)
    axes.set(xlabel="step", ylabel="training loss (nats a byte)")
    axes.grid(True, linewidth=0.5)
    axes.legend(frameon=False)
    return drawn


def streams(cases: Cases) -> Canvas:
    """The largest update so far apart, stream by stream."""
    drawn = canvas(9, 6)
    colour = colours(providers(cases))
    for case, axes in zip(cases, drawn.subplots(2, 2).flat, strict=False):
        for entry in case["providers"]:
            values = entry["largest_update_of_steps"]
            points = [case["every"] * (i + 1) for i in range(len(values))]
            axes.plot(points, values, label=entry["name"], color=colour[entry["name"]], linewidth=1.2)
        axes.axhline(7.27, color="#8a8f98", linestyle=":", linewidth=1)
        axes.set(title=case["stream"].replace("_", " "), xlabel="step", ylabel="largest |update| / lr", yscale="log")
        axes.grid(True, linewidth=0.5)
    drawn.axes[0].legend(fontsize="small", frameon=False)
    return drawn
