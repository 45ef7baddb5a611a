"""From figures to yes and no: a difference counts where it stands out of the noise of the steps."""

from __future__ import annotations

from collections.abc import Sequence

from ..measure import Spread, spread

LEAST_STEPS = 5
"""Fewer pairs of steps have no spread to speak of."""
LEAST_GAIN = 0.02
"""Less than this is not worth a yes, however sure."""
LEAST_MEMORY = 0.01


def paired_ratio(baseline: Sequence[float], method: Sequence[float], samples_factor: float) -> Spread:
    """How many times the baseline's samples a second, from seconds of steps that took turns."""
    return spread([samples_factor * b / m for b, m in zip(baseline, method, strict=True)])


def unpaired_ratio(baseline: Spread, method: Spread) -> Spread:
    """The same from samples a second measured at different times: the noise of both counts."""
    return Spread(method.median / baseline.median, method.p20 / baseline.p80, method.p80 / baseline.p20)


def speed_verdict(ratio: Spread, n_steps: int, baseline_drift: float = 0.0) -> str:
    """yes, no, slower, or unknown from too few steps.

    Four steps of five must agree, and the median be away from 1 by more than LEAST_GAIN and by more than
    baseline_drift, what a second baseline beside the first came to.
    """
    if n_steps < LEAST_STEPS:
        return "unknown"
    margin = max(LEAST_GAIN, abs(baseline_drift))
    if ratio.p20 > 1.0 and ratio.median > 1.0 + margin:
        return "yes"
    if ratio.p80 < 1.0 and ratio.median < 1.0 - margin:
        return "slower"
    return "no"


def memory_verdict(ratio: float) -> str:
    """yes, no, or more. Bytes repeat from run to run: their noise is what an allocator rounds."""
    if ratio < 1.0 - LEAST_MEMORY:
        return "yes"
    return "more" if ratio > 1.0 + LEAST_MEMORY else "no"
