"""The suite "training": what of it needs no model."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from onetrip.benchmarks import bench_training
from onetrip.benchmarks.bench_training import Trainer


def test_what_a_card_alone_can_hold_is_skipped_elsewhere():
    """pytest imports the suite as another module than the command: the same classes are two."""
    command = [sys.executable, "-c", "from onetrip.cli import main; main()", "bench", "--only", "training-bert_large"]
    run = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0
    assert len(re.findall("full size: for a card", run.stderr)) == 4


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
