"""The suite "training": what of it needs no model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up_results import every_suite

pytest.importorskip("transformers")

from onetrip.benchmarks.show import run_tables
from onetrip.benchmarks.suites import training
from onetrip.benchmarks.suites.training import Trainer


def test_what_only_a_gpu_can_hold_is_left_out_elsewhere():
    on_cpu = [case.id for case in training.cases() if not training.unavailable(case, torch.device("cpu"))]
    assert on_cpu == [
        "training-bert_base-12_layers-2x512",
        "training-bert_base_mlm-12_layers-4x256-bf16",
        "training-llama_100m-12_layers-4x768-bf16",
        "training-llama_100m_128k-12_layers-1x1024",
    ]
    assert not any(training.unavailable(case, torch.device("cuda")) for case in training.cases())


def test_only_losses_over_the_vocabulary_are_patched_with_linear_cross_entropy():
    for case in training.cases():
        named = {name for variant in training.variants_of(case) for name in variant.patterns}
        assert ("linear_cross_entropy" in named) == (case.model not in ("bert_base", "bert_large"))


def test_a_loss_that_is_checked_is_computed_as_in_training():
    """Patched with linear_cross_entropy, whose logits are computed in evaluation; without dropout."""
    case = training.TrainingCase("bert_base_mlm", 1, 16, n_layers=1)
    variants = {variant.name: variant for variant in training.variants_of(case)}
    losses, seen = [], []
    for name in ("sdpa", "sdpa, patched, linear_cross_entropy"):
        trainer = Trainer(case, variants[name], torch.device("cpu"))
        trainer.model.register_forward_hook(lambda module, args, output: seen.append(type(output.logits).__name__))
        losses.append(trainer.loss_without_dropout())
        assert trainer.model.training and trainer.model.bert.embeddings.dropout.p == 0.1
    assert seen == ["Tensor", "DeferredLogits"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("slowest_s", "rounds"), [(2.0, 7), (5.0, 5), (15.0, 3)])
def test_beside_a_slow_variant_all_are_timed_for_fewer_rounds(monkeypatch, slowest_s, rounds):
    """No more than its share of the time that a part may take, three rounds in any case, and turns to the end."""
    seconds = {"eager": 1.0, "sdpa": slowest_s, "patched": 1.5}

    class Admitted:
        def __init__(self, name: str) -> None:
            self.step_s = seconds[name]

        def step(self, mark: Callable[[float], None]) -> None:
            mark(self.step_s)

        def memory(self) -> dict[str, int]:
            return {}

    class Stopwatch:
        def __init__(self, device: torch.device) -> None:
            pass

        def mark(self, step_s: float) -> None:
            self.step_s = step_s

        def laps(self) -> list[float]:
            return [1e3 * self.step_s / 3] * 3

    monkeypatch.setattr(training, "_Stopwatch", Stopwatch)
    monkeypatch.setattr(training._Found, "_admit", lambda self, variant: Admitted(variant.name))
    found = training._Found(training.cases()[0], torch.device("cuda"), training.ROUNDS)
    found.compare(training.VARIANTS[:3])
    assert [step["step"]["samples"] for step in found.steps.values()] == [rounds] * 3


@pytest.mark.slow
def test_times_are_kept_where_profiling_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(ThreadPoolExecutor):
        def submit(self, *_: Any) -> Any:
            raise BrokenExecutor("out of memory")

    def compare(self: Any, variants: tuple[Any, ...]) -> None:
        self.steps |= {variant.name: {"step": 1.0} for variant in variants}

    monkeypatch.setattr(training, "ProcessPoolExecutor", lambda *_: Broken())
    monkeypatch.setattr(training._Found, "compare", compare)
    session = SimpleNamespace(device=torch.device("cuda"), quick=True, rounds=lambda run, _: run())
    case = training.cases(quick=True)[0]
    steps = training.measure(case, session)["steps"]  # type: ignore[arg-type]
    assert steps and all(step == {"step": 1.0} for step in steps.values())
    assert f"{case.id}, eager: no time of kernels: BrokenExecutor: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "column"), [("matrix_products_ms", "matrix products ms"), ("kernels_ms", "kernels ms")]
)
def test_the_table_says_what_else_was_timed(key: str, column: str) -> None:
    (record,) = every_suite()["training"]["cases"]
    record["steps"] = {"eager": {key: 12.0}}
    (table,) = run_tables.training([record])
    assert column in table.columns and table.rows[0][table.columns.index(column)].text.startswith("12")
