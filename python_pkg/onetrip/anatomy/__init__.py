"""One training step taken apart: bytes by class of tensor, milliseconds by phase and by class of operator."""

from .compare import Comparison, Options, compare, writable_folder, write_json
from .measure import (
    StepAnatomy,
    StepTimes,
    Variant,
    measure_step,
    measure_variants,
    optimizer_state_bytes,
    peak_memory_bytes,
    profile_run,
    saved_activation_bytes,
    tensor_bytes,
    timed_step,
)
from .models import PRESETS, UsageError, load_model, make_batch
from .operators import operator_class, time_by_operator_class

__all__ = [
    "PRESETS",
    "Comparison",
    "Options",
    "StepAnatomy",
    "StepTimes",
    "UsageError",
    "Variant",
    "compare",
    "load_model",
    "make_batch",
    "measure_step",
    "measure_variants",
    "operator_class",
    "optimizer_state_bytes",
    "peak_memory_bytes",
    "profile_run",
    "saved_activation_bytes",
    "tensor_bytes",
    "time_by_operator_class",
    "timed_step",
    "writable_folder",
    "write_json",
]
