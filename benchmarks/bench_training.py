"""One training step of a whole model, eager attention, dropout 0.1: unpatched and patched, the same weights and data.

Random weights and tokens: time depends on neither. A step is forward and backward; the optimizer's is the same in both.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import onetrip
import pytest
import torch
from onetrip.benchmarks.memory import peak_bytes, saved_bytes
from onetrip.benchmarks.timing import clock_for, summarise
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

ROUNDS, QUICK_ROUNDS = 7, 2
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclass(frozen=True)
class TrainingCase:
    model: str
    batch_size: int
    sequence_length: int
    n_layers: int

    @property
    def id(self) -> str:
        return f"training-{self.model}-{self.n_layers}_layers-{self.batch_size}x{self.sequence_length}"


def cases(quick: bool = False) -> list[TrainingCase]:
    return [TrainingCase("bert_base", 2, 512, n_layers=2 if quick else 12)]


class _Step:
    """A model and the batch it is trained on."""

    def __init__(self, model: torch.nn.Module, batch: dict[str, Tensor]) -> None:
        self.model, self.batch = model, batch

    def forward(self) -> Tensor:
        self.model.zero_grad()
        return self.model(**self.batch).loss

    def forward_backward(self) -> Tensor:
        loss = self.forward()
        loss.backward()
        return loss.detach()

    def matrix_products_ms(self) -> float:
        """Of one step, in the calling thread."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.forward_backward()
        return sum(event.self_cpu_time_total for event in profile.key_averages() if event.key in _PRODUCTS) / 1e3


def _make(case: TrainingCase, device: torch.device) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    torch.manual_seed(0)
    config = bert.BertConfig(num_hidden_layers=case.n_layers, attn_implementation="eager")
    model = bert.BertForSequenceClassification(config).to(device).train()
    shape = case.batch_size, case.sequence_length
    mask = torch.ones(shape, dtype=torch.long, device=device)
    mask[:, -case.sequence_length // 8 :] = 0
    return model, {
        "input_ids": torch.randint(config.vocab_size, shape, device=device),
        "attention_mask": mask,
        "labels": torch.randint(config.num_labels, shape[:1], device=device),
    }


def _without_dropout(steps: dict[str, _Step]) -> dict[str, float]:
    """The loss of each model with its dropout off: then both compute the same function."""
    losses = {}
    for name, step in steps.items():
        step.model.eval()
        with torch.no_grad():
            losses[name] = step.forward().item()
        step.model.train()
    return losses


def test_training(case: TrainingCase, device: torch.device, quick: bool, benchmark: BenchmarkFixture) -> None:
    model, batch = _make(case, device)
    patched = copy.deepcopy(model)
    report = onetrip.patch_model(patched)
    steps = {"eager": _Step(model, batch), "patched": _Step(patched, batch)}
    losses = _without_dropout(steps)
    difference = abs(losses["eager"] - losses["patched"])
    assert difference < 1e-5, f"the patched model's loss differs by {difference}: no number"
    clock = clock_for(device)
    samples: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in steps}

    def one_round() -> None:
        for name, step in steps.items():
            milliseconds, loss = clock.time(step.forward)
            samples[name]["forward"].append(milliseconds)
            samples[name]["backward"].append(clock.time(loss.backward)[0])

    one_round()
    for times in samples.values():
        for values in times.values():
            values.clear()
    benchmark.pedantic(one_round, rounds=QUICK_ROUNDS if quick else ROUNDS)
    found = {}
    for name, times in samples.items():
        step = steps[name]
        times["forward_backward"] = [sum(pair) for pair in zip(times["forward"], times["backward"], strict=True)]
        found[name] = {
            **{which: summarise(values, "ms") for which, values in times.items()},
            "saved_bytes": saved_bytes(step.forward, excluded=list(step.model.parameters())),
            "peak_bytes": peak_bytes(step.forward_backward, device),
            **({"matrix_products_ms": step.matrix_products_ms()} if device.type == "cpu" else {}),
        }
    benchmark.extra_info["record"] = {
        "case": case.id,
        "model": case.model,
        "n_layers": case.n_layers,
        "batch_size": case.batch_size,
        "sequence_length": case.sequence_length,
        "dropout_p": 0.1,
        "patched_sites": len(report.patched),
        "loss_without_dropout": losses,
        "steps": found,
    }
