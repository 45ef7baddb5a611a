"""One case, every provider, side by side: checked first, then timed in turns so that a disturbance meets them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from .checks import Check, Inputs, Truth, as_tuple, make_inputs
from .memory import peak_bytes, saved_bytes
from .suite import DTYPE_NAMES, Case, Outputs, Provider
from .timing import Clock, clock_for, summarise

_ROUNDS, _QUICK_ROUNDS = 31, 9
_INPUT_SETS = 3
"""Inputs rotate through this many sets: no call meets the addresses or the values of the one before."""
_SECONDS_PER_PROVIDER = 5.0
_FEWEST_SAMPLES = 3


@dataclass
class _Contestant:
    provider: Provider
    function: Callable[..., Outputs]
    check: Check
    saved: int | None = None
    peak: int | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)

    def tired(self) -> bool:
        """A slow provider does not hold up the others: it stops once it has been heard for long enough."""
        spent = sum(sum(values) for values in self.samples.values()) / 1e3
        return spent > _SECONDS_PER_PROVIDER and all(len(v) >= _FEWEST_SAMPLES for v in self.samples.values())


class Race:
    """Time the providers of a case against each other and against a plain copy of as many bytes.

    In each round every provider runs once: forward, backward of that forward, and (full cases) forward and backward in
    one. Every timed call starts with its inputs out of the caches, and allocates its own outputs.
    """

    def __init__(self, case: Case, providers: list[Provider], device: torch.device, clock: Clock | None = None) -> None:
        self.case = case
        self._device = device
        self._clock = clock_for(device) if clock is None else clock
        self._sets = [
            make_inputs(case.operator, case.n_rows, case.n_cols, case.dtype, device, seed)
            for seed in range(_INPUT_SETS)
        ]
        self._copy_source = torch.randn(case.n_rows, case.n_cols, device=device).to(case.dtype)
        self._copy_target = torch.empty_like(self._copy_source)
        self._copy_samples: dict[str, list[float]] = {"copy": [], "copy_to_fresh_memory": []}
        self._rounds = 0
        self._checked = case.operator.twin or case.operator
        truth = Truth(self._checked, self._sets[0])
        self.unavailable = {provider.name: provider.unavailable(device) for provider in providers}
        self._contestants = [self._admit(p, truth) for p in providers if not self.unavailable[p.name]]

    def _admit(self, provider: Provider, truth: Truth) -> _Contestant:
        function = provider.bind(self.case.operator)
        with provider.scope():
            checked = function if self._checked is self.case.operator else provider.bind(self._checked)
            check = truth.check(checked)
            if check.passed and checked is not function:
                check = self._tried(function, check)
            contestant = _Contestant(provider, function, check)
            if contestant.check.passed and self.case.full:
                inputs = self._sets[0]
                parameters = [inputs.tensors[name] for name in self.case.operator.vectors]
                contestant.saved = saved_bytes(lambda: function(**inputs.tensors), excluded=parameters)
                contestant.peak = peak_bytes(lambda: self._forward_backward(function, inputs), self._device)
        return contestant

    def _tried(self, function: Callable[..., Outputs], check: Check) -> Check:
        """The check of the twin, unless the function itself raises."""
        try:
            self._forward_backward(function, self._sets[0])
        except Exception as error:  # a provider that raises is reported, and the others are measured
            return Check(False, f"{type(error).__name__}: {error}".splitlines()[0])
        return check

    @property
    def failures(self) -> dict[str, str]:
        return {c.provider.name: c.check.detail for c in self._contestants if not c.check.passed}

    @staticmethod
    def _forward(function: Callable[..., Outputs], inputs: Inputs) -> tuple[Tensor, ...]:
        return as_tuple(function(**inputs.tensors))

    @staticmethod
    def _backward(outputs: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, inputs.leaves, inputs.grad_outputs)

    def _forward_backward(self, function: Callable[..., Outputs], inputs: Inputs) -> tuple[Tensor, ...]:
        return self._backward(self._forward(function, inputs), inputs)

    def _time(self, contestant: _Contestant, inputs: Inputs) -> None:
        clock, function = self._clock, contestant.function

        def record(name: str, milliseconds: float) -> None:
            contestant.samples.setdefault(name, []).append(milliseconds)

        with contestant.provider.scope():
            clock.evict()
            milliseconds, outputs = clock.time(lambda: self._forward(function, inputs))
            record("forward", milliseconds)
            clock.evict()
            milliseconds, gradients = clock.time(partial(self._backward, outputs, inputs))
            record("backward", milliseconds)
            del outputs, gradients
            if "forward_backward" in self.case.passes:
                clock.evict()
                record("forward_backward", clock.time(lambda: self._forward_backward(function, inputs))[0])

    def round(self) -> None:
        """Every contestant once, each round starting with another one."""
        inputs = self._sets[self._rounds % _INPUT_SETS]
        racing = [c for c in self._contestants if c.check.passed and not c.tired()]
        first = self._rounds % max(len(racing), 1)
        for contestant in racing[first:] + racing[:first]:
            self._time(contestant, inputs)
        copies = (lambda: self._copy_target.copy_(self._copy_source), self._copy_source.clone)
        for samples, function in zip(self._copy_samples.values(), copies, strict=True):
            self._clock.evict()
            samples.append(self._clock.time(function)[0])
        self._rounds += 1

    def warm_up(self, rounds: int = 2) -> None:
        for _ in range(rounds):
            self.round()
        for samples in self._copy_samples.values():
            samples.clear()
        for contestant in self._contestants:
            contestant.samples.clear()

    def record(self) -> dict[str, object]:
        """Everything that was found, ready for JSON."""
        case = self.case
        least = case.operator.least_bytes(case.n_rows, case.n_cols, self._copy_source.itemsize)
        copies = {name: summarise(samples, "ms") for name, samples in self._copy_samples.items()}
        for copy in copies.values():
            copy["gb_per_s"] = 2 * self._copy_source.nbytes / copy["median_ms"] / 1e6
        records = []
        for contestant in self._contestants:
            record: dict[str, object] = {
                "name": contestant.provider.name,
                "check": asdict(contestant.check),
            }
            for name, samples in contestant.samples.items():
                figures = summarise(samples, "ms")
                figures["gb_per_s"] = getattr(least, name) / figures["median_ms"] / 1e6
                figures["share_of_copy"] = figures["gb_per_s"] / copies["copy"]["gb_per_s"]
                record[name] = figures
            if contestant.saved is not None:
                record |= {"saved_bytes": contestant.saved, "peak_bytes": contestant.peak}
            records.append(record)
        return {
            "case": case.id,
            "operator": case.operator.name,
            "dtype": DTYPE_NAMES[case.dtype],
            "n_rows": case.n_rows,
            "n_cols": case.n_cols,
            "dropout_p": case.operator.dropout_p,
            "full": case.full,
            "least_bytes": {name: getattr(least, name) for name in ("forward", "backward", "forward_backward")},
            **copies,
            "providers": records,
            "unavailable": {name: reason for name, reason in self.unavailable.items() if reason},
        }


def race(case: Case, providers: list[Provider], device: torch.device, quick: bool, benchmark: BenchmarkFixture) -> None:
    """One case of a suite: checked, raced, recorded; fails where a provider of our own gets no number."""
    contest = Race(case, providers, device)
    contest.warm_up()
    benchmark.pedantic(contest.round, rounds=_QUICK_ROUNDS if quick else _ROUNDS)
    benchmark.extra_info["record"] = contest.record()
    own = {name: reason for name, reason in contest.failures.items() if name.startswith("onetrip")}
    if own:
        pytest.fail(f"no number for what fails its check: {own}")
