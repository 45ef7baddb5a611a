"""`onetrip anatomy`: one training step of a model, in columns: eager, patched, with AdamW8bit, compiled."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import html as page_builder
from .. import patched
from ..environment import header
from ..measure import free_bytes
from ..patching import PATTERNS
from .bytes import StepBytes, format_bytes
from .fits import Fit, largest_batch
from .gpu import Sampler
from .gpus import Bound, lower_bound
from .measure import PHASES, Progress, StepAnatomy, Variant, measure_variants
from .models import UsageError, first_line, load_model, make_batch, reason_of
from .options import COLUMNS, DTYPES, OPTIMIZERS, Options
from .predict import fake_copy, predict, resident_bytes


@dataclass(frozen=True)
class Column:
    """One way to take the step. What was not asked for, or cannot be, is None."""

    predicted: StepBytes | None = None
    measured: StepAnatomy | None = None
    fit: Fit | None = None
    bound: Bound | None = None
    """Lower bound of the step's time on the GPU that was named, where its peaks are known."""
    unpredicted: str = ""
    """Why there is no prediction of a step that was measured; "" where there is one, or none can be (compiled)."""

    def to_dict(self) -> dict[str, Any]:
        parts = {"predicted": self.predicted, "measured": self.measured, "fit": self.fit, "bound": self.bound}
        described = {name: None if part is None else part.to_dict() for name, part in parts.items()}
        return {**described, "unpredicted": self.unpredicted}


@dataclass(frozen=True)
class Comparison:
    """The same step of the same model and batch in every column that was asked for."""

    options: Options
    device: torch.device
    """Where it ran, or of the kind that it was predicted for."""
    model_class: str
    """Whose head and loss the step has."""
    n_parameters: int
    columns: dict[str, Column]
    sites: dict[str, Any]
    """PatchReport.to_dict() of the patched model."""
    gpu_unread: str = ""
    """Why NVML was not asked; "" where it was."""
    header: dict[str, Any] = field(default_factory=dict)

    @property
    def n_patched(self) -> int:
        return len(self.sites["patched"])

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.header,
            "options": vars(self.options),
            "device": str(self.device),
            "model_class": self.model_class,
            "parameters": self.n_parameters,
            "columns": {name: column.to_dict() for name, column in self.columns.items()},
            "ratios": self._ratios(),
            "gpu": self.gpu_unread or "read by NVML",
            "patched_modules": self.n_patched,
            "patch_report": self.sites,
        }

    def _ratios(self) -> dict[str, Any]:
        """Ratios of each measured column to the first: speed-up by phase, saved activations and peak."""
        measured = {name: column.measured for name, column in self.columns.items() if column.measured is not None}
        if not measured:
            return {}
        base = next(iter(measured.values()))
        return {
            name: {
                "speedup": {phase: _ratio(base.ms[phase].median, step.ms[phase].median) for phase in PHASES},
                "saved_activations": _ratio(step.saved_activations, base.saved_activations),
                "peak": _ratio(step.peak, base.peak),
            }
            for name, step in measured.items()
        }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def writable_folder(path: Path) -> Path:
    """The folder, which need not be there yet; UsageError where a page could not be made, or written in it."""
    try:
        page_builder.require()
    except page_builder.MissingPackage as error:
        raise UsageError(f"--output: {error}") from None
    if reason := page_builder.unwritable(path):
        raise UsageError(f"--output {path}: cannot write there ({reason})")
    return path


def compare(options: Options, progress: Progress | None = None) -> Comparison:
    """Predicts the step, and unless told otherwise runs it. Raises UsageError where the options cannot be met.

    Fake tensors cannot follow every model (one whose operators ask for data): its columns are measured all the same,
    and say why they are not predicted. Where nothing is to be run that is a UsageError.
    """
    options.check()
    device = options.torch_device()
    fake = fake_copy(load_model(options.model, weights=False), FakeTensorMode(), DTYPES[options.dtype])
    predictions = _Predictions(fake.train(), options, device.type, progress)
    predicted, unpredicted = {}, {}
    # With "compiled" alone the eager step is predicted: its memory is checked.
    for name in [name for name in options.columns if name != "compiled"] or ["eager"]:
        try:
            predicted[name] = predictions.of(name, options.batch_size)
        except _NotPredicted as error:
            unpredicted[name] = str(error)
    measured: dict[str, StepAnatomy] = {}
    gpu_unread = "nothing was run"
    if options.runs:
        _check_memory(predicted, predictions, device)
        measured, gpu_unread, sites = _measure(options, device, progress)
    else:
        with patched(fake, verify=False) as report:
            sites = report.to_dict()
    memory, speed, dtype = options.memory(), options.speed(), options.autocast or options.dtype
    columns = {}
    for name in options.columns:
        step, fit, bound = predicted.get(name), None, None
        if step is not None and memory is not None:
            fit = predictions.fit(name, step, memory)
            bound = lower_bound(step.traffic, speed, dtype) if speed and step.traffic else None
        columns[name] = Column(step, measured.get(name), fit, bound, unpredicted.get(name, ""))
    return Comparison(
        options=options,
        device=device,
        model_class=type(fake).__name__,
        n_parameters=sum(p.numel() for p in fake.parameters()),
        columns=columns,
        sites=sites,
        gpu_unread=gpu_unread,
        header=header(device if options.runs else torch.device("cpu")),
    )


class _NotPredicted(Exception):
    """Fake tensors could not take the step; the message is one line and says why."""


class _Predictions:
    """Predicts the step of one model of fake tensors, for any column and batch size."""

    def __init__(self, model: nn.Module, options: Options, device_type: str, progress: Progress | None) -> None:
        self.model, self.options, self.device_type, self.progress = model, options, device_type, progress
        self.done = 0
        self.mode = next(p for p in model.parameters()).fake_mode  # type: ignore[attr-defined]

    def of(self, name: str, batch_size: int, peak_only: bool = False) -> StepBytes:
        """Raises _NotPredicted; UsageError where nothing else is to be done than predicting."""
        if self.progress is not None and not peak_only:
            self.progress(self.done, len(self.options.columns), f"predicting, {COLUMNS[name]}")
            self.done += 1
        chosen = "adamw8bit" if name == "patched_adamw8bit" else self.options.optimizer
        make_optimizer = OPTIMIZERS[chosen]
        if self.device_type == "cuda" and "8bit" not in chosen:
            make_optimizer = partial(make_optimizer, foreach=True)  # torch's choice there
        make = partial(make_batch, self.model, batch_size, self.options.sequence_length, self.options.seed)
        context = _context(name, self.model)
        try:
            with _nothing_logged():
                return predict(
                    self.model, make, make_optimizer, self.mode,
                    context=context, device_type=self.device_type, autocast=self.options.autocast_dtype(),
                    peak_only=peak_only,
                )  # fmt: skip
        except UsageError:
            raise
        except Exception as error:  # what an operator that needs data raises differs from one to the next
            self.model.zero_grad(set_to_none=True)
            reason = reason_of(error)
            if self.options.runs:
                raise _NotPredicted(reason) from error
            raise UsageError(
                f"{self.options.model} cannot be predicted, {COLUMNS[name]}: {reason.rstrip('.')}; without --fits, "
                "--gpu and --predict-only it is measured"
            ) from error

    def resident(self) -> int:
        return resident_bytes(self.model, OPTIMIZERS[self.options.optimizer], self.mode)

    def fit(self, name: str, step: StepBytes, memory: int) -> Fit:
        asked = 0

        def peak_of(batch_size: int) -> int:
            nonlocal asked
            if self.progress is not None:
                self.progress(asked, asked + 3, f"largest batch that fits, {COLUMNS[name]}: {batch_size}?")
            asked += 1
            return step.peak if batch_size == self.options.batch_size else self.of(name, batch_size, True).peak

        return Fit(memory, step.peak, *largest_batch(peak_of, memory))


@contextmanager
def _nothing_logged() -> Iterator[None]:
    """FakeTensorMode logs the traceback of what it raises."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _context(name: str, model: nn.Module) -> Callable[[], AbstractContextManager[object]]:
    if not name.startswith("patched"):
        return nullcontext
    patterns = (*PATTERNS, "linear_cross_entropy") if name == "patched_loss" else PATTERNS
    return partial(patched, model, patterns=patterns, verify=False)


def _check_memory(predicted: dict[str, StepBytes], predictions: _Predictions, device: torch.device) -> None:
    """Raises UsageError where the columns, whose optimizers' states stand side by side, need more than is free.

    Where none of them could be predicted: weights, gradients and optimizer states alone.
    """
    free = free_bytes(device)
    if free is None:
        return
    if predicted:
        # The states of each optimizer once: all columns but one share theirs.
        states = {name == "patched_adamw8bit": step.optimizer_states for name, step in predicted.items()}
        needed = max(step.peak - step.optimizer_states for step in predicted.values()) + sum(states.values())
    else:
        needed = predictions.resident()
    if needed > free:
        raise UsageError(
            f"the step does not fit on {device}: it is predicted to take {format_bytes(needed)}, {format_bytes(free)} "
            f"are free, {format_bytes(needed - free)} too little; --predict-only shows it without running it"
        )


def _loss(model: Any, batch: dict[str, Tensor], device: torch.device, autocast: torch.dtype | None) -> Tensor:
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        loss: Tensor = model(**batch).loss
    return loss


def _measure(
    options: Options, device: torch.device, progress: Progress | None
) -> tuple[dict[str, StepAnatomy], str, dict[str, Any]]:
    """(the columns, why no GPU was sampled, the patches)."""
    torch.manual_seed(options.seed)
    model = load_model(options.model).to(device, DTYPES[options.dtype]).train()
    batch = make_batch(model, options.batch_size, options.sequence_length, options.seed)
    with patched(model) as report:  # verified once here; the switches between steps need not be
        patches = report.to_dict()
    optimizer = OPTIMIZERS[options.optimizer](model.parameters())
    variants = {}
    for name in options.columns:
        used = OPTIMIZERS["adamw8bit"](model.parameters()) if name == "patched_adamw8bit" else optimizer
        loss_fn = None
        if name == "compiled":
            loss_fn = partial(_loss, torch.compile(model), batch, device, options.autocast_dtype())
        variants[name] = Variant(used, _context(name, model), loss_fn)
    with Sampler(device) as sampler:
        try:
            measured = measure_variants(
                model,
                partial(_loss, model, batch, device, options.autocast_dtype()),
                {COLUMNS[name]: variant for name, variant in variants.items()},
                inputs=batch.values(),
                steps=options.steps,
                warm_up=options.warm_up,
                seed=options.seed,
                progress=progress,
                sampler=sampler,
            )
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UsageError(f"--columns compiled: torch.compile failed here ({first_line(error)})") from error
    return {name: measured[COLUMNS[name]] for name in options.columns}, sampler.reason, patches


def write(result: Comparison, folder: Path) -> list[Path]:
    """folder/anatomy.json and folder/anatomy.html, each replaced whole."""
    from .report import page

    contents = {"anatomy.json": json.dumps(result.to_dict(), indent=2) + "\n", "anatomy.html": page(result.to_dict())}
    return [page_builder.write(folder / name, content) for name, content in contents.items()]
