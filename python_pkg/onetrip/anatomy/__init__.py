"""One training step taken apart: bytes by class of tensor, milliseconds by phase and by class of operator."""

from .bytes import StepBytes, format_bytes
from .compare import Column, Comparison, compare, writable_folder, write
from .fits import CARDS, Fit, largest_batch, memory_size
from .formula import FormulaBytes, formula
from .gpu import Sampler
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
from .operators import operator_class, time_by_operator_class
from .options import COLUMNS, OPTIMIZERS, Options
from .predict import fake_copy, predict
from .saved import SavedActivations, saved_activations

__all__ = [
    "CARDS",
    "COLUMNS",
    "OPTIMIZERS",
    "PRESETS",
    "Column",
    "Comparison",
    "Fit",
    "FormulaBytes",
    "Options",
    "Sampler",
    "SavedActivations",
    "StepAnatomy",
    "StepBytes",
    "StepTimes",
    "UsageError",
    "Variant",
    "compare",
    "fake_copy",
    "format_bytes",
    "formula",
    "largest_batch",
    "load_model",
    "make_batch",
    "measure_step",
    "measure_variants",
    "memory_size",
    "operator_class",
    "predict",
    "profile_run",
    "saved_activations",
    "time_by_operator_class",
    "timed_step",
    "writable_folder",
    "write",
]
