"""The roofline: operations a second of each operator against the operations that it does on each byte it must move.

Williams, Waterman, Patterson: Roofline: an insightful visual performance model (Communications of the ACM, 2009).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..measure.results import OPERATOR_SUITES, Results
from .operator_plots import canvas, colours, plain_ticks
from .operator_tables import Cases, cases
from .targets import EAGER, own, provider

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

FLOPS = {
    "layer_norm": (8, 13),
    "rms_norm": (4, 9),
    "add_rms_norm": (5, 10),
    "bias_dropout_residual": (2, 1),
    "bias_dropout_residual_layer_norm": (10, 14),
    "softmax": (5, 4),
    "scale_mask_softmax_dropout": (7, 5),
}
"""Of one element, (forward, backward), without dropout: an addition, multiplication, comparison or exponential is one
operation, what happens once a row is none. LayerNorm forward: 1 for the mean, 3 for the variance, 2 to normalise, 2 for
weight and bias. Its backward: 2 for x̂, 1 for dy·weight, 3 for its two sums, 4 for dx, 3 for dweight and dbias."""
DROPOUT_FLOPS = 2
"""To choose and to scale; the random bits are integers."""

_CPU_GHZ = 3.0
_CPU_FLOPS_A_CYCLE = {"avx512vbmi": 64, "avx512": 64, "avx2": 32, "baseline": 16}
"""Two units of 16, 16, 8, 4 lanes; a multiply-add is two."""
_CUDA_LANES = {"7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64}  # fp32 lanes a multiprocessor: CUDA C++ Programming Guide
_CUDA_LANES_SINCE_8_6 = 128


@dataclass(frozen=True)
class Roof:
    gb_per_s: float
    """The fastest copy of the run."""
    peak_gflops: float | None
    assumption: str
    """Where the peak comes from."""


def flops_of_element(case: dict[str, Any], which: str) -> int | None:
    """None for an operator that the table lacks."""
    found = FLOPS.get(re.sub(r"-p[\d.]+$", "", case["operator"]))
    if found is None:
        return None
    return found[("forward", "backward").index(which)] + (DROPOUT_FLOPS if case.get("dropout_p") else 0)


def roof(results: Results, members: Cases) -> Roof:
    fastest = max(case["copy"]["gb_per_s"] for case in members)
    machine = next(iter(results.values()))["machine"]
    if machine["device"] == "cpu":
        level = machine["cpu_level"] or "baseline"
        each = _CPU_FLOPS_A_CYCLE.get(level, _CPU_FLOPS_A_CYCLE["baseline"])
        peak = machine["torch_threads"] * each * _CPU_GHZ
        text = f"{machine['torch_threads']} threads of {each} fp32 operations a cycle ({level}) at {_CPU_GHZ:g} GHz"
        return Roof(fastest, peak, f"assumed, not measured: {text}")
    clock = re.search(r"(?:[^,]*,){2}\s*(\d+) MHz", machine.get("driver and clocks") or "")
    if clock is None or "multiprocessors" not in machine:
        return Roof(fastest, None, "not drawn: the record lacks the GPU's clock or its number of multiprocessors")
    lanes = _CUDA_LANES.get(machine["compute_capability"], _CUDA_LANES_SINCE_8_6)
    peak = machine["multiprocessors"] * lanes * 2 * int(clock[1]) / 1e3
    text = f"{machine['multiprocessors']} multiprocessors of {lanes} fp32 multiply-adds a cycle at {clock[1]} MHz"
    return Roof(fastest, peak, f"from the GPU's data, not measured: {text}")


def members(results: Results) -> Cases:
    """The fp32 cases with every provider, of operators whose operations are counted."""
    return [
        case
        for case in cases(results, *OPERATOR_SUITES)
        if case["full"] and case["dtype"] == "fp32" and flops_of_element(case, "forward") is not None
    ]


def plot(results: Results) -> Canvas:
    """Forward ●, backward ▲; filled: onetrip, hollow: torch eager."""
    found = members(results)
    limits = roof(results, found)
    drawn = canvas(9.5, 5.2)
    axes = drawn.add_subplot()
    colour = colours(f"operator {case['operator']}" for case in found)
    lowest, highest = 1e9, 0.0
    for case in found:
        for which, marker in (("forward", "o"), ("backward", "^")):
            flops = case["n_rows"] * case["n_cols"] * (flops_of_element(case, which) or 0)
            intensity = flops / case["least_bytes"][which]
            for entry, filled in ((own(case), True), (provider(case, EAGER), False)):
                if entry is None or which not in entry:
                    continue
                speed = flops / entry[which]["median_ms"] / 1e6
                lowest, highest = min(lowest, speed), max(highest, speed)
                edge = colour[f"operator {case['operator']}"]
                label = case["operator"] if filled and which == "forward" else None
                face = edge if filled else "none"
                axes.plot(intensity, speed, marker, color=edge, markerfacecolor=face, markersize=8, label=label)
    peak = limits.peak_gflops
    left, right = 0.05, max(10.0, 3 * peak / limits.gb_per_s) if peak else 10.0
    ridge = min(right, peak / limits.gb_per_s) if peak else right
    roofs = [(left, left * limits.gb_per_s), (ridge, ridge * limits.gb_per_s)] + ([(right, peak)] if peak else [])
    axes.plot(*zip(*roofs, strict=True), color="#8a8f98", linewidth=1.8, label=f"copy at {limits.gb_per_s:,.0f} GB/s")
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(lowest / 2, None))
    axes.set(xlabel="operations a byte that must be moved", ylabel="Gflop/s")
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.grid(True, linewidth=0.5)
    drawn.legend(loc="outside right upper", frameon=False, fontsize=8)
    return drawn


def note(results: Results) -> str:
    limits = roof(results, members(results))
    return (
        "Circles: forward; triangles: backward; filled: onetrip; hollow: torch eager. Bytes are the least that a pass "
        "must move. Operations are counted from the formula (an addition, multiplication, comparison or exponential is "
        "one, what happens once a row is none; random bits are not counted), whatever a provider really does. "
        f"The slope is the fastest copy of the run; the flat roof is {limits.assumption}."
    )
