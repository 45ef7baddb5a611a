"""Measuring what a call takes: bytes saved for backward, peak bytes, free memory, wall time and its noise.

anatomy, methods, the benchmarks and the tests measure with these functions; what operators move is in traffic.py.
Nothing here knows onetrip's operators.
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

__all__ = [
    "BusyCpus",
    "Saved",
    "Spread",
    "at_most_more",
    "cuda_peak_bytes",
    "free_bytes",
    "load_warning",
    "now",
    "optimizer_state_bytes",
    "peak_bytes",
    "peak_of_trace",
    "saved_bytes",
    "saved_tensors",
    "spread",
    "storage_bytes",
    "tensor_bytes",
]
