"""One case, every provider, side by side: checked first, then timed in turns so that a disturbance meets them all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from onetrip.measure import free_bytes, peak_bytes, saved_bytes
from torch import Tensor

from .cases import DTYPE_NAMES, PASSES, Case, Operator, Outputs, Provider, Record, Session, Skip, available, one_line
from .checks import Check, Inputs, Truth, make_inputs
from .providers import providers
from .timing import Clock, at_speed, clock_for, rotated

_ROUNDS, _QUICK_ROUNDS = 31, 9
_INPUT_SETS = 3
"""Inputs rotate through this many sets: no call meets the addresses or the values of the one before."""
_SMALL_BYTES = 128 << 20
"""Bytes of a small forward pass, at most: 30 microseconds on an H200, of the order of a few launches."""
_SECONDS_PER_PROVIDER = 5.0
_FEWEST_SAMPLES = 3


def needed_bytes(case: Case) -> int:
    """The least that a case holds at one time: three sets of inputs and incoming gradients, the two tensors of the
    copy, and the truth in float64: inputs, gradients of inputs and outputs, and what stands between."""
    elements = case.n_rows * case.n_cols
    matrices = len(case.operator.matrices)
    given = elements * ((3 * (matrices + 1) + 2) * case.dtype.itemsize + (2 * matrices + 1) * 8)
    weights = sum(map(math.prod, case.operator.weights(case.n_rows, case.n_cols).values()))
    given += weights * (3 * case.dtype.itemsize + 2 * 8)
    return given + case.operator.between(case.n_rows, case.n_cols) * 8


def shortage(case: Case, device: torch.device) -> str:
    """By how much a case does not fit into what is free; empty where it does, or the system does not tell."""
    needed, free = needed_bytes(case), free_bytes(device)
    if free is None or needed <= free:
        return ""
    gib = [value / (1 << 30) for value in (needed, free, needed - free)]
    return f"needs at least {gib[0]:.1f} GiB, {gib[1]:.1f} GiB are free ({gib[2]:.1f} GiB too much)"


def bound_and_checked(
    provider: Provider, operator: Operator, truth: Truth, twin: Operator | None = None
) -> tuple[Callable[..., Outputs], Check]:
    """The provider's function, and what its check found: where that failed the function must not be called. twin:
    checked in place of the operator."""
    with provider.scope():
        try:
            function = provider.bind(operator)
        except Exception as error:  # a library that imports, and lacks what it had
            return operator.eager, Check(False, one_line(error))
        return function, truth.check(function if twin is None else provider.bind(twin))


@dataclass
class _Candidate:
    provider: Provider
    function: Callable[..., Outputs]
    check: Check
    saved: int | None = None
    peak: int | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    replays: dict[str, list[float]] = field(default_factory=dict)
    not_captured: str = ""
    untimed_s: float = 0.0
    """What a forward and a backward took whose memory was measured; they warm it up."""

    def is_done(self, fewest: int) -> bool:
        """A slow provider does not hold up the others: it stops once it has run for long enough."""
        spent = self.untimed_s + sum(sum(values) for values in self.samples.values()) / 1e3
        return spent > _SECONDS_PER_PROVIDER and all(len(v) >= fewest for v in self.samples.values())


class SideBySide:
    """Times the providers of a case in turns, with a plain copy of as many bytes.

    In each round every provider runs once: forward, backward of that forward, and (full cases) forward and backward in
    one. Every timed call starts with its inputs out of the caches, or of a warm operator right after a call with the
    same ones, and allocates its own outputs. Rounds of a warm operator evict nothing: a call on code that has left the
    caches takes up to twice as long, however warm its tensors are.
    """

    def __init__(self, case: Case, providers: list[Provider], device: torch.device, clock: Clock | None = None) -> None:
        self.case = case
        self._device = device
        self._clock = clock_for(device) if clock is None else clock
        self._sets = [
            make_inputs(case.operator, case.n_rows, case.n_cols, case.dtype, device, seed)
            for seed in range(_INPUT_SETS)
        ]
        self._least = case.operator.least_bytes(case.n_rows, case.n_cols, case.dtype.itemsize)
        self._copy_source = torch.randn(case.n_rows, case.n_cols, device=device).to(case.dtype)
        self._copy_target = torch.empty_like(self._copy_source)
        self._copy_samples: dict[str, list[float]] = {"copy": [], "copy_to_fresh_memory": []}
        self._rounds = 0
        torch._dynamo.reset()  # what was compiled for other shapes must not turn these into dynamic ones
        truth = Truth(case.operator.twin or case.operator, self._sets[0])
        present, self.unavailable = available(providers, device)
        self._candidates = [self._admit(provider, truth) for provider in present]

    def _admit(self, provider: Provider, truth: Truth) -> _Candidate:
        twin = self.case.operator.twin
        candidate = _Candidate(provider, *bound_and_checked(provider, self.case.operator, truth, twin))
        if candidate.check.passed and (self.case.full or twin is not None):
            with provider.scope():
                try:  # the first run of what has been checked as its twin
                    self._measure_memory(candidate)
                except Exception as error:  # a provider that raises is reported, and the others are measured
                    candidate.check = Check(False, one_line(error))
        return candidate

    def _measure_memory(self, candidate: _Candidate) -> None:
        function, inputs = candidate.function, self._sets[0]
        operator = self.case.operator
        weights = operator.weights(self.case.n_rows, self.case.n_cols)
        parameters = [inputs.tensors[name] for name in (*operator.vectors, *weights)]
        candidate.saved = saved_bytes(lambda: function(**inputs.tensors), excluded=parameters)
        start = time.perf_counter()  # of a twin torch.compile still compiles the backward here
        candidate.peak = peak_bytes(lambda: inputs.forward_backward(function), self._device)
        candidate.untimed_s = time.perf_counter() - start

    def _prepare(self, warming_call: Callable[[], object]) -> None:
        if self.case.operator.is_warm:
            warming_call()
        else:
            self._clock.evict()

    def _time(self, candidate: _Candidate, inputs: Inputs) -> None:
        function, passes = candidate.function, self.case.passes

        def timed(name: str, call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
            self._prepare(lambda: inputs.forward_backward(function))
            milliseconds, result = self._clock.time(call)
            if name in passes:
                candidate.samples.setdefault(name, []).append(milliseconds)
            return result

        with candidate.provider.scope():
            if "forward" in passes or "backward" in passes:
                outputs = timed("forward", lambda: inputs.forward(function))
                if "backward" in passes:
                    timed("backward", partial(inputs.backward, outputs))
                del outputs
            if "forward_backward" in passes:
                timed("forward_backward", lambda: inputs.forward_backward(function))

    def round(self, fewest: int = _FEWEST_SAMPLES) -> None:
        """Runs every candidate once, each round starting with another one; a slow one stops after `fewest` samples."""
        inputs = self._sets[self._rounds % _INPUT_SETS]
        running = [c for c in self._candidates if c.check.passed and not c.is_done(fewest)]
        for candidate in rotated(running, self._rounds):
            self._time(candidate, inputs)
        copies = (lambda: self._copy_target.copy_(self._copy_source), self._copy_source.clone)
        for samples, function in zip(self._copy_samples.values(), copies, strict=True):
            self._prepare(function)
            samples.append(self._clock.time(function)[0])
        self._rounds += 1

    def warm_up(self) -> None:
        for _ in range(2):
            self.round(fewest=0)  # a call that takes seconds is as warm as it will be
        for samples in self._copy_samples.values():
            samples.clear()
        for candidate in self._candidates:
            candidate.samples.clear()
            candidate.untimed_s = 0.0

    def replay(self, rounds: int) -> None:
        """Where there are CUDA graphs and a launch may take as long as the kernel: the time of the kernels alone.

        The difference to the time of the call is what its host code keeps the device waiting. After all rounds: a
        capture that fails must not disturb them.
        """
        if not self.case.full or self._least.forward > _SMALL_BYTES:
            return
        for candidate in (candidate for candidate in self._candidates if candidate.check.passed):
            for name in (name for name in ("forward", "forward_backward") if name in self.case.passes):
                with candidate.provider.scope():
                    try:
                        captured = self._clock.captured(partial(getattr(self._sets[0], name), candidate.function))
                    except Exception as error:  # whatever cannot be captured has no figure here, and keeps the others
                        candidate.not_captured = one_line(error)
                        break
                    for _ in range(rounds if captured is not None else 0):
                        self._clock.evict()
                        candidate.replays.setdefault(name, []).append(self._clock.time(captured)[0])

    def record(self) -> Record:
        """Everything that was found, ready for JSON."""
        case, least = self.case, self._least
        copied = 2 * self._copy_source.nbytes
        copies = {name: at_speed(samples, copied) for name, samples in self._copy_samples.items()}

        def figures(of_passes: dict[str, list[float]]) -> dict[str, Any]:
            speed = copies["copy"]["gb_per_s"]
            return {name: at_speed(samples, getattr(least, name), speed) for name, samples in of_passes.items()}

        def entry(candidate: _Candidate) -> dict[str, Any]:
            found = {"name": candidate.provider.name, "check": asdict(candidate.check), **figures(candidate.samples)}
            if candidate.replays:
                found["graph"] = figures(candidate.replays)
            if candidate.not_captured:
                found["no_graph"] = candidate.not_captured
            if candidate.saved is not None:
                found |= {"saved_bytes": candidate.saved, "peak_bytes": candidate.peak}
            return found

        return {
            "case": case.id,
            "operator": case.operator.name,
            "dtype": DTYPE_NAMES[case.dtype],
            "n_rows": case.n_rows,
            "n_cols": case.n_cols,
            "dropout_p": case.operator.dropout_p,
            "full": case.full,
            "least_bytes": {name: getattr(least, name) for name in PASSES},
            **copies,
            "providers": list(map(entry, self._candidates)),
            "unavailable": self.unavailable,
        }


def measure(case: Case, session: Session) -> Record:
    """The record of a case of an operator: the measure of the suites row_norm, softmax and attention."""
    if reason := shortage(case, session.device):
        raise Skip(f"does not fit: {reason}")
    compared = SideBySide(case, providers(case, session), session.device)
    compared.warm_up()
    rounds = _QUICK_ROUNDS if session.quick else _ROUNDS
    session.rounds(compared.round, rounds)
    compared.replay(rounds)
    return compared.record()
