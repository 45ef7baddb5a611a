"""`onetrip anatomy`: one training step of a model, eager beside patched."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .measure import Progress, StepAnatomy, Variant, measure_variants
from .models import UsageError, load_model, make_batch

# A learning rate of 0: the optimizer does all its work, yet every step starts from the same weights.
OPTIMIZERS = {"adamw": partial(torch.optim.AdamW, lr=0.0)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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

    def check(self) -> None:
        """Raises UsageError for what can be known wrong before a model is loaded."""
        for name, least in (("batch_size", 1), ("sequence_length", 1), ("steps", 1), ("warm_up", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise UsageError(f"--{name} must be one of {', '.join(known)}, got {getattr(self, name)}")

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, got {self.device}") from error
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, got {self.device}")
        if device.type == "cuda" and not torch.cuda.is_available():
            built = torch.version.cuda
            why = "no usable NVIDIA GPU was found" if built else "this torch was built without CUDA"
            raise UsageError(f"--device {self.device}: {why}; use --device cpu")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(
                f"--device {self.device}: this machine has {torch.cuda.device_count()} GPU(s), counted from 0"
            )
        return device


@dataclass(frozen=True)
class Comparison:
    """The same step of the same model and batch: as transformers wrote it, patched, and patched with AdamW8bit."""

    options: Options
    device: torch.device
    n_parameters: int
    eager: StepAnatomy
    patched: StepAnatomy
    patched_adamw8bit: StepAnatomy
    sites: dict[str, Any]
    """PatchReport.to_dict() of the patched model."""
    n_patched: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "options": vars(self.options),
            "device": str(self.device),
            "device_name": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "parameters": self.n_parameters,
            "eager": self.eager.to_dict(),
            "patched": self.patched.to_dict(),
            "patched_adamw8bit": self.patched_adamw8bit.to_dict(),
            "speedup": {
                phase: _ratio(getattr(self.eager, f"{phase}_ms"), getattr(self.patched, f"{phase}_ms"))
                for phase in ("forward", "backward", "optimizer", "step")
            },
            "saved_activations_ratio": _ratio(self.patched.saved_activations, self.eager.saved_activations),
            "patch_report": self.sites,
        }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def writable_folder(path: Path) -> Path:
    """The folder, made where missing; UsageError where files cannot be written in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"--output {path}: cannot write there ({error.strerror or error})") from error
    return path


def compare(options: Options, progress: Progress | None = None) -> Comparison:
    """Loads the model and measures it. Raises UsageError where the options cannot be met."""
    import onetrip

    options.check()
    device = options.torch_device()
    torch.manual_seed(options.seed)
    model: nn.Module = load_model(options.model).to(device, DTYPES[options.dtype]).train()
    batch = make_batch(model, options.batch_size, options.sequence_length, options.seed)
    optimizer = OPTIMIZERS[options.optimizer](model.parameters())
    adamw8bit = onetrip.optim.AdamW8bit(model.parameters(), lr=0.0)
    patched = partial(onetrip.patched, model, verify=False)
    with onetrip.patched(model) as report:  # verified once here; the switches between steps need not be
        sites, n_patched = report.to_dict(), len(report.patched)
    measured = measure_variants(
        model,
        lambda: model(**batch).loss,
        {
            "eager": Variant(optimizer),
            "patched": Variant(optimizer, patched),
            "patched + AdamW8bit": Variant(adamw8bit, patched),
        },
        inputs=batch.values(),
        steps=options.steps,
        warm_up=options.warm_up,
        seed=options.seed,
        progress=progress,
    )
    return Comparison(
        options=options,
        device=device,
        n_parameters=sum(p.numel() for p in model.parameters()),
        eager=measured["eager"],
        patched=measured["patched"],
        patched_adamw8bit=measured["patched + AdamW8bit"],
        sites=sites,
        n_patched=n_patched,
    )


def write_json(result: Comparison, folder: Path) -> Path:
    """folder/anatomy.json, replaced whole."""
    path = folder / "anatomy.json"
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    os.replace(temporary, path)
    return path
