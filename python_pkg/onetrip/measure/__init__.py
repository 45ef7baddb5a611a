"""Measuring what a call takes: bytes saved for backward, peak bytes, free memory, wall time and its noise.

anatomy, methods, the benchmarks and the tests measure with these functions. Nothing here knows onetrip's operators.
"""

from .clock import BusyCpus, Spread, load_warning, now, spread
from .memory import (
    at_most_more,
    cuda_peak_bytes,
    free_bytes,
    optimizer_state_bytes,
    peak_bytes,
    peak_of_trace,
    storage_bytes,
    tensor_bytes,
)
from .saved import Saved, saved_bytes, saved_tensors
from .traffic import (
    ATTENTION,
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OUTSIDE,
    PRODUCT,
    OperatorTraffic,
    Traffic,
    TrafficMode,
    memory_bytes,
    traffic,
)

__all__ = [
    "ATTENTION",
    "BACKWARD",
    "FORWARD",
    "LOSS",
    "OPTIMIZER",
    "OUTSIDE",
    "PRODUCT",
    "BusyCpus",
    "OperatorTraffic",
    "Saved",
    "Spread",
    "Traffic",
    "TrafficMode",
    "at_most_more",
    "cuda_peak_bytes",
    "free_bytes",
    "load_warning",
    "memory_bytes",
    "now",
    "optimizer_state_bytes",
    "peak_bytes",
    "peak_of_trace",
    "saved_bytes",
    "saved_tensors",
    "spread",
    "storage_bytes",
    "tensor_bytes",
    "traffic",
]
