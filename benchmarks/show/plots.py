"""Drawings of recorded results: from cases to matplotlib figures, for the page and for docs/ alike.

Black and white follow the page into dark mode (onetrip.html.figure), so nothing else is drawn in them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measure.results import OPERATOR_SUITES, Results
from . import targets
from .tables import Cases, of_every_width, providers, width_series
from .tables import cases as cases_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_KNOWN = {targets.EAGER: "#e07b30", "torch.compile": "#9467d6", "onetrip reference": "#8a8f98", "exact": "#8a8f98"}
_ONETRIP = ("#2a7de1", "#12a5a5", "#5bb0f5")
_OTHERS = ("#3fa35b", "#d1495b", "#c39a1c", "#c564b5", "#7a8b2f", "#b0744f", "#4c8fb5", "#e58fa0")


def canvas(width: float, height: float) -> Canvas:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def colours(names: Iterable[str]) -> dict[str, str]:
    """One for each provider: onetrip blue, torch orange, torch.compile violet, other libraries in other colours."""
    found: dict[str, str] = {}
    ours, others = 0, 0
    for name in dict.fromkeys(names):
        if name in _KNOWN:
            found[name] = _KNOWN[name]
        elif name.startswith("onetrip"):
            found[name] = _ONETRIP[ours % len(_ONETRIP)]
            ours += 1
        else:
            found[name] = _OTHERS[others % len(_OTHERS)]
            others += 1
    return found


def legend(drawn: Canvas) -> None:
    """One for all axes, above them; each label once."""
    found = dict(
        label for axes in drawn.axes for label in zip(*reversed(axes.get_legend_handles_labels()), strict=True)
    )
    drawn.legend(found.values(), found.keys(), loc="outside upper center", ncols=min(5, len(found) or 1), frameon=False)


def widths(cases: Cases) -> Canvas:
    """GB/s and share of the copy limit against width, forward and backward; band: 20th to 80th percentile."""
    from matplotlib.ticker import NullLocator

    drawn = canvas(10.5, 6.4)
    colour = colours(providers(cases))
    axes = drawn.subplots(2, 2, sharex=True, sharey="row")
    ticks = sorted({case["n_cols"] for case in cases})
    for column, which in enumerate(("forward", "backward")):
        top, bottom = axes[0][column], axes[1][column]
        limit = [(case["n_cols"], case["copy"]["gb_per_s"]) for case in cases]
        top.plot(*zip(*limit, strict=True), color="#8a8f98", linestyle="--", linewidth=1.2, label="copy")
        for name in providers(cases):
            found = [
                (case["n_cols"], entry[which]) for case in cases if which in (entry := targets.provider(case, name))
            ]
            if not found:
                continue
            x = [width for width, _ in found]
            speed = [times["gb_per_s"] for _, times in found]
            low, high = (
                [times["gb_per_s"] * times["median_ms"] / times[end] for _, times in found]
                for end in ("p80_ms", "p20_ms")
            )
            style: dict[str, Any] = {"color": colour[name], "marker": "o", "markersize": 4, "linewidth": 1.8}
            top.plot(x, speed, label=name, **style)
            top.fill_between(x, low, high, color=colour[name], alpha=0.15, linewidth=0)
            bottom.plot(x, [100 * times["share_of_copy"] for _, times in found], label=name, **style)
        bottom.axhline(100, color="#8a8f98", linestyle="--", linewidth=1.2)
        top.set(title=which, xscale="log", ylim=(0, None))
        bottom.set(xlabel="width of a row", ylim=(0, None))
        for each in (top, bottom):
            each.grid(True, linewidth=0.5)
            # Numbers as they are read, not powers of ten.
            each.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
            each.xaxis.set_minor_locator(NullLocator())
            each.tick_params(axis="x", labelrotation=45)
    axes[0][0].set_ylabel("GB/s")
    axes[1][0].set_ylabel("% of a copy's GB/s")
    legend(drawn)
    return drawn


def speed_ups(cases: Cases) -> Canvas:
    """torch eager's time over onetrip's, operator by width, forward above backward."""
    import matplotlib
    from matplotlib.colors import Normalize

    found = Counter((case["operator"], case["dtype"]) for case in cases)
    rows = sorted(found, key=lambda row: (found[row] == 1, row[0]))  # those of many widths first, dtypes side by side
    columns = sorted({case["n_cols"] for case in cases})
    drawn = canvas(max(7.0, 3.2 + 0.72 * len(columns)), 1.2 + 0.58 * len(rows))
    colour, scale = matplotlib.colormaps["RdBu"], Normalize(-math.log2(12), math.log2(12), clip=True)
    for axes, which in zip(drawn.subplots(2, 1), ("forward", "backward"), strict=True):
        axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0), title=which)
        for case in cases:
            value = targets.speed_up(case, which)
            if value is None:
                continue
            x, y = columns.index(case["n_cols"]), rows.index((case["operator"], case["dtype"]))
            place = scale(math.log2(value))
            axes.fill_between([x + 0.03, x + 0.97], y + 0.06, y + 0.94, color=colour(place), linewidth=0)
            text = f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
            ink = "#111111" if 0.2 < place < 0.8 else "#fefefe"
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
        axes.set_xticks([i + 0.5 for i in range(len(columns))], [f"{width:,}" for width in columns], fontsize=8)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], [f"{name}, {dtype}" for name, dtype in rows], fontsize=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    axes.set_xlabel("width of a row")
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


@dataclass(frozen=True)
class Drawing:
    topic: str
    """The section of the page that it stands in."""
    name: str
    """Name of its file, without an extension."""
    title: str
    plot: Callable[[], Canvas]
    note: str = ""


def drawings(results: Results) -> Iterator[Drawing]:
    """The figures of one machine's results: curves, and speed-ups by colour. A number or two of a provider stand in
    tables."""
    for (operator, dtype), members in width_series(of_every_width(results)).items():
        yield Drawing(
            "widths",
            f"width-{operator}-{dtype}",
            f"{operator}, {dtype}: bandwidth against width",
            partial(widths, members),
            "GB/s: the least bytes that the pass must move over its median time; bands: 20th to 80th percentile. "
            "Dashed: what a copy of a tensor of that size reached in the same rounds.",
        )
    faster = "torch eager's median over onetrip's: above 1 onetrip is faster (blue), below 1 slower (red)."
    bound = "The largest update of every gradient stream; dotted: the bound of exact Adam"
    loss = "Training loss with each optimizer, mean and range of the seeds"
    if operators := cases_of(results, *OPERATOR_SUITES):
        title = "How many times faster than torch eager"
        yield Drawing("speed-ups", "speed_up", title, partial(speed_ups, operators), faster)
    if found := cases_of(results, "adam_streams"):
        yield Drawing("optimizers", "adam_streams", bound, partial(streams, found))
    if found := cases_of(results, "adam_training"):
        yield Drawing("optimizers", "adam_training", loss, partial(language_model, found))


def draw(machine: str, results: Results, docs: Path) -> None:
    """Writes docs/figures/<machine>/<name>.png."""
    folder = docs / "figures" / machine
    for drawing in drawings(results):
        folder.mkdir(parents=True, exist_ok=True)
        drawing.plot().savefig(folder / f"{drawing.name}.png", dpi=110, metadata={"Software": None})
