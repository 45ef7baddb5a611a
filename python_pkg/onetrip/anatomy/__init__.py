"""One training step taken apart: bytes by class of tensor, milliseconds by phase and by class of operator."""

from .bytes import format_bytes
from .compare import Comparison, compare, writable_folder, write
from .fits import largest_batch, memory_size
from .gpu import Sampler
from .gpus import SPEEDS, Speed, lower_bound, usable_bytes
from .measure import (
    StepAnatomy,
    StepTimes,
    Variant,
    measure_step,
    measure_variants,
    profile_run,
    timed_step,
)
from .models import PRESETS, UsageError, load_model, make_batch
from .operators import operator_class
from .options import OPTIMIZERS, Options
from .predict import fake_copy, predict
from .saved import saved_activations

__all__ = [
    "OPTIMIZERS",
    "PRESETS",
    "SPEEDS",
    "Comparison",
    "Options",
    "Sampler",
    "Speed",
    "StepAnatomy",
    "StepTimes",
    "UsageError",
    "Variant",
    "compare",
    "fake_copy",
    "format_bytes",
    "largest_batch",
    "load_model",
    "lower_bound",
    "make_batch",
    "measure_step",
    "measure_variants",
    "memory_size",
    "operator_class",
    "predict",
    "profile_run",
    "saved_activations",
    "timed_step",
    "usable_bytes",
    "writable_folder",
    "write",
]
