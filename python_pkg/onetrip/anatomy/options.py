"""What `onetrip anatomy` is asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .. import optim
from ..ops.common.backends import environment_fault
from .fits import memory_size
from .gpus import SPEEDS, Speed, known, usable_bytes
from .models import UsageError

# A learning rate of 0: the optimizer does all its work, yet every step starts from the same weights.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.0),
    "adam": partial(torch.optim.Adam, lr=0.0),
    "adamw8bit": partial(optim.AdamW8bit, lr=0.0),
    "adam8bit": partial(optim.Adam8bit, lr=0.0),
    "sgd": partial(torch.optim.SGD, lr=0.0),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.0, momentum=0.9),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTOCAST = ("bfloat16", "float16")
COLUMNS = {
    "eager": "eager",
    "patched": "patched",
    "patched_loss": "patched + linear_cross_entropy",
    "patched_adamw8bit": "patched + AdamW8bit",
    "compiled": "torch.compile",
}
"""Ways to take the step, and their titles. The last is the eager model compiled; it is measured, not predicted."""
DEFAULT_COLUMNS = ("eager", "patched", "patched_adamw8bit")


@dataclass(frozen=True)
class Options:
    """What to take apart. Names are those of the command's options."""

    model: str
    batch_size: int = 8
    sequence_length: int = 128
    dtype: str = "float32"
    optimizer: str = "adamw"
    device: str = "auto"
    steps: int = 5
    warm_up: int = 2
    seed: int = 0
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    fits: str | None = None
    """A size of memory. With it, gpu or predict_only nothing is run: the step is predicted, on any machine, for CUDA
    unless device says cpu."""
    gpu: str | None = None
    """The name of a GPU: see gpus."""
    predict_only: bool = False
    autocast: str | None = None
    """The dtype of torch.autocast in the forward pass: bfloat16 or float16; None for no autocast."""

    @property
    def runs(self) -> bool:
        return self.fits is None and self.gpu is None and not self.predict_only

    def check(self) -> None:
        """Raises UsageError for what can be known wrong before a model is loaded."""
        for name, least in (("batch_size", 1), ("sequence_length", 1), ("steps", 1), ("warm_up", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        known: dict[str, Any]
        for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise UsageError(f"--{name} must be one of {', '.join(known)}, got {getattr(self, name)}")
        if self.autocast is not None and (self.autocast not in AUTOCAST or self.dtype != "float32"):
            got = f"{self.autocast} with {self.dtype}"
            raise UsageError(f"--autocast must be one of {', '.join(AUTOCAST)}, with --dtype float32, got {got}")
        if not self.columns or not set(self.columns) <= set(COLUMNS):
            got = ", ".join(name for name in self.columns if name not in COLUMNS) or "none"
            raise UsageError(f"--columns must be of {', '.join(COLUMNS)}, got {got}")
        if not self.runs and "compiled" in self.columns:
            raise UsageError("--columns compiled can be measured only, not predicted: leave it out")
        if self.fits is not None and self.gpu is not None:
            raise UsageError("--fits and --gpu must not both be given")
        if fault := environment_fault([self.torch_device()] if self.runs else []):
            raise UsageError(fault)
        self.memory()

    def autocast_dtype(self) -> torch.dtype | None:
        return None if self.autocast is None else DTYPES[self.autocast]

    def memory(self) -> int | None:
        if self.gpu is not None:
            return usable_bytes(known(self.gpu))
        return None if self.fits is None else memory_size(self.fits)

    def speed(self) -> Speed | None:
        """Peaks of the GPU that was named, where they are known."""
        return None if self.gpu is None else SPEEDS.get(known(self.gpu))

    def torch_device(self) -> torch.device:
        """Where the step runs; where nothing runs, a device of the type that it is predicted for.

        Raises UsageError where there is no such device.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() or not self.runs else "cpu")
        if not re.fullmatch(r"cpu(:0)?|cuda(:(0|[1-9]\d?))?", str(self.device), re.ASCII):
            raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, got {self.device}")
        device = torch.device(self.device)
        if not self.runs:
            return torch.device(device.type)
        if device.type == "cuda" and not torch.cuda.is_available():
            built = torch.version.cuda
            why = "no usable NVIDIA GPU was found" if built else "this torch was built without CUDA"
            raise UsageError(f"--device {self.device}: {why}; use --device cpu")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(
                f"--device {self.device}: this machine has {torch.cuda.device_count()} GPU(s), counted from 0"
            )
        return device
