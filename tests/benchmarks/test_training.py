"""The suite "training": what of it needs no model."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from onetrip.benchmarks.suites import bench_training
from onetrip.benchmarks.suites.bench_training import Trainer


def test_what_a_card_alone_can_hold_is_left_out_elsewhere():
    """Of the command's cases too, when pytest has imported the suite under a name of its own."""
    spec = importlib.util.spec_from_file_location("bench_training_of_pytest", bench_training.__file__)
    imported = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = imported  # dataclasses look there
    try:
        spec.loader.exec_module(imported)
    finally:
        del sys.modules[spec.name]
    on_cpu = [case.id for case in bench_training.cases() if not imported.unavailable(case, torch.device("cpu"))]
    assert on_cpu == ["training-bert_base-12_layers-2x512"]
    assert not any(imported.unavailable(case, torch.device("cuda")) for case in bench_training.cases())


def test_the_loss_that_is_checked_is_of_what_is_timed(monkeypatch):
    """Of the compiled callable, in evaluation mode; the model trains again afterwards."""
    trainer = Trainer.__new__(Trainer)
    trainer.model, trainer.batch, trainer._dtype = torch.nn.Dropout(0.5), {}, torch.float32
    modes = []

    def compiled() -> SimpleNamespace:
        modes.append((trainer.model.training, torch.is_grad_enabled()))
        return SimpleNamespace(loss=torch.tensor(3.0))

    trainer._call = compiled
    assert trainer.loss_without_dropout() == 3.0
    assert modes == [(False, False)]
    assert trainer.model.training
    assert bench_training.VARIANTS[-1].compiled


@pytest.mark.parametrize(("slowest_s", "rounds"), [(2.0, 7), (5.0, 5), (15.0, 3)])
def test_beside_a_slow_variant_all_are_timed_for_fewer_rounds(monkeypatch, slowest_s, rounds):
    """No more than its share of the time that a part may take, three rounds in any case, and turns to the end."""
    seconds = {"eager": 1.0, "sdpa": slowest_s, "patched": 1.5}

    class Admitted:
        def __init__(self, name: str) -> None:
            self.step_s = seconds[name]

        def step(self, watch: SimpleNamespace) -> None:
            watch.laps = lambda: [1e3 * self.step_s / 3] * 3

        def memory(self) -> dict[str, int]:
            return {}

    monkeypatch.setattr(bench_training, "_Stopwatch", lambda device: SimpleNamespace())
    monkeypatch.setattr(bench_training._Found, "_admit", lambda self, variant: Admitted(variant.name))
    found = bench_training._Found(bench_training.cases()[0], torch.device("cuda"), bench_training.ROUNDS)
    found.race(bench_training.VARIANTS[:3])
    assert [step["step"]["samples"] for step in found.steps.values()] == [rounds] * 3
