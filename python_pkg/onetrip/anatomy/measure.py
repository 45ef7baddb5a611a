"""Measuring one training step: milliseconds by phase, bytes by class of tensor, time by class of operator.

Everything takes a `loss_fn`, a function of nothing that runs the forward pass and returns the scalar loss, so that any
model and any way of feeding it can be measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ..measure import (
    Slowdown,
    Spread,
    cuda_peak_bytes,
    now,
    optimizer_state_bytes,
    peak_of_trace,
    spread,
    tensor_bytes,
)
from .bytes import StepBytes
from .gpu import Sampler
from .operators import time_by_operator_class
from .saved import saved_activations

PHASES = ("forward", "backward", "optimizer", "step")
LossFn = Callable[[], Tensor]
Progress = Callable[[int, int, str], None]
"""Called as (units done, units in all, what comes next)."""


@dataclass(frozen=True)
class StepTimes:
    """One training step on the clock; zero_grad counts as part of the optimizer's phase."""

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    loss: float

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.backward_ms + self.optimizer_ms


@dataclass(frozen=True, kw_only=True)
class StepAnatomy(StepBytes):
    """One training step taken apart. peak: peak_memory and what is there before the step."""

    ms: dict[str, Spread]
    """Milliseconds of each of PHASES over the timed steps."""
    peak_memory: int
    """The most that was allocated at once above the start of the step: see measure.peak_bytes."""
    caches: int | None
    """What CUDA's caching allocator had reserved beyond the peak; the CPU's keeps nothing (None)."""
    loss: float
    """With dropout off, before the first step."""
    operators_ms: dict[str, float]
    """By class of operator, from one profiled step: see time_by_operator_class."""
    gpu: dict[str, float] | None = None
    """Utilisation, power and memory during the timed steps, where NVML could be read: see gpu.Sampler."""
    cpu_slowdown: float | None = None
    """Of the timed steps of all variants: see measure.Slowdown."""


def timed_step(loss_fn: LossFn, optimizer: torch.optim.Optimizer, device: torch.device) -> StepTimes:
    """Forward, backward, optimizer step; on CUDA the device is waited for between them."""
    start = now(device)
    loss = loss_fn()
    forward_end = now(device)
    loss.backward()
    backward_end = now(device)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    end = now(device)
    return StepTimes(
        forward_ms=1e3 * (forward_end - start),
        backward_ms=1e3 * (backward_end - forward_end),
        optimizer_ms=1e3 * (end - backward_end),
        loss=float(loss.detach()),
    )


def profile_run(run: Callable[[], object], device: torch.device) -> tuple[int, dict[str, float]]:
    """(peak CPU bytes as measure.peak_bytes, milliseconds by class of operator) of a run."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, profile_memory=True) as trace:
        run()
        now(device)
    return peak_of_trace(trace), time_by_operator_class(trace.events() or [], on_device=device.type == "cuda")


@contextmanager
def _training(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True)
class Variant:
    """One way to take a training step."""

    optimizer: torch.optim.Optimizer
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Gives a context in which the step is to run."""
    loss_fn: LossFn | None = None
    """In place of that of all."""


def measure_variants(
    model: nn.Module,
    loss_fn: LossFn,
    variants: Mapping[str, Variant],
    *,
    inputs: Iterable[Tensor] = (),
    steps: int = 5,
    warm_up: int = 2,
    seed: int = 0,
    progress: Progress | None = None,
    sampler: Sampler | None = None,
) -> dict[str, StepAnatomy]:
    """The same training step in several variants, taken in turns so that a slow minute hits all alike.

    inputs: tensors of the batch, not counted among the saved activations. torch's generators are left as they were; the
    optimizers train the weights, as often as it takes (give them a learning rate of 0 to keep them). sampler: watches
    the timed steps.
    """
    if steps < 1:
        raise ValueError(f"measure_variants: steps must be at least 1, got {steps}")
    if not variants:
        raise ValueError("measure_variants: variants must not be empty")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = list(inputs)
    not_counted = [*model.parameters(), *model.buffers(), *inputs]
    loss_fns = {name: variant.loss_fn or loss_fn for name, variant in variants.items()}
    names = list(variants)
    total = len(names) * (warm_up + steps + 3)
    done = 0
    times: dict[str, list[StepTimes]] = {name: [] for name in names}
    sizes: dict[str, dict[str, Any]] = {name: {} for name in names}

    def advance(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, total, what)
        done += 1

    def take_turn(turn: int) -> list[tuple[str, StepTimes]]:
        taken = []
        # Every turn begins with another variant: what ran last leaves its tensors in the cache.
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            advance(f"{'step' if turn >= warm_up else 'warm-up'}, {name}")
            torch.manual_seed(seed + turn)
            watched = nullcontext() if sampler is None or turn < warm_up else sampler.watching(name)
            with variants[name].context(), watched:
                taken.append((name, timed_step(loss_fns[name], variants[name].optimizer, device)))
        return taken

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        with _training(model, False), torch.no_grad():
            for name in names:
                advance(f"loss, {name}")
                with variants[name].context():
                    sizes[name]["loss"] = float(loss_fns[name]())
        with _training(model, True):
            for turn in range(warm_up):
                take_turn(turn)
            with Slowdown() as slowdown:
                for turn in range(warm_up, warm_up + steps):
                    for name, step in take_turn(turn):
                        times[name].append(step)
            for name in names:
                advance(f"saved activations, {name}")
                optimizer = variants[name].optimizer
                with variants[name].context():
                    gc.collect()
                    sizes[name]["saved"] = saved_activations(loss_fns[name], not_counted, model)
                    loss_fns[name]().backward()
                    sizes[name]["gradients"] = tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)
                    optimizer.zero_grad(set_to_none=True)
                    advance(f"peak memory, {name}")
                    step_again = partial(timed_step, loss_fns[name], optimizer, device)
                    peak, operators = profile_run(step_again, device)
                    caches = None
                    if device.type == "cuda":
                        peak, caches = cuda_peak_bytes(step_again, device)
                    sizes[name] |= {"peak_memory": peak, "operators_ms": operators, "caches": caches}
    if progress is not None:
        progress(total, total, "done")
    weights, buffers, batch = map(tensor_bytes, (model.parameters(), model.buffers(), inputs))
    return {
        name: StepAnatomy(
            ms={phase: spread([getattr(step, f"{phase}_ms") for step in times[name]]) for phase in PHASES},
            weights=weights,
            buffers=buffers,
            batch=batch,
            optimizer_states=(states := optimizer_state_bytes(variants[name].optimizer)),
            peak=weights + buffers + states + batch + sizes[name]["peak_memory"],
            cpu_slowdown=slowdown.factor,
            gpu=None if sampler is None else sampler.summary(name),
            **sizes[name],
        )
        for name in names
    }


def measure_step(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 5,
    warm_up: int = 2,
    progress: Progress | None = None,
) -> StepAnatomy:
    """One training step of a transformers model: `model(**batch).loss`, backward, step. See measure_variants."""
    return measure_variants(
        model,
        lambda: model(**batch).loss,
        {"step": Variant(optimizer)},
        inputs=[t for t in batch.values() if isinstance(t, Tensor)],
        steps=steps,
        warm_up=warm_up,
        progress=progress,
    )["step"]
