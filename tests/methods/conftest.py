"""A model so small that its training costs nothing, and a result as a run would give it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from onetrip import anatomy, methods

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def small_preset(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(anatomy.PRESETS, "small", ("bert", "MaskedLM", SIZES))
    return "small"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Steps of so small a model are nothing but the waiting of threads for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def options() -> methods.Options:
    return methods.Options("small", batch_size=4, sequence_length=16, steps=1, device="cpu", warm_up=1)


@pytest.fixture
def session(options: methods.Options) -> methods.Session:
    return methods.Session(options)


@pytest.fixture
def figures() -> dict[str, Any]:
    """Made-up figures of one measured method."""
    seconds = {"median": 0.1, "p20": 0.09, "p80": 0.11}
    return {
        "recipe": {},
        "paired": True,
        "trained_steps": 23,
        "samples_per_step": 8,
        "first_step_s": 0.2,
        "step_ms": {name: 1e3 * value for name, value in seconds.items()},
        "samples_per_s": {"median": 80.0, "p20": 73.0, "p80": 89.0},
        "samples_per_s_ratio": {"median": 1.0, "p20": 0.98, "p80": 1.02},
        "loss_before": 8.3,
        "loss": 7.5,
        "saved_activations": 40 << 20,
        "optimizer_states": 8 << 20,
        "held_memory": 12 << 20,
        "peak_memory": 100 << 20,
        "patched_sites": None,
        "fallback_calls": 0,
    }


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any]) -> list[str]:
    """Sessions measure nothing and give made-up figures; the names of the methods they were asked for."""
    asked: list[str] = []

    def measure(self: methods.Session, method: methods.Method, advance: Any) -> dict[str, Any]:
        asked.append(method.name)
        advance("step 1")
        return dict(figures)

    monkeypatch.setattr(methods.Session, "measure", measure)
    monkeypatch.setattr("onetrip.methods.runs.measure_isolated", lambda _, method, advance: measure(_, method, advance))
    return asked


@pytest.fixture
def break_method() -> Callable[[pytest.MonkeyPatch, str, BaseException], None]:
    """break_method(monkeypatch, name, error): to measure the method of that name raises the error."""

    def break_it(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
        healthy = methods.Session.measure

        def measure(self: methods.Session, method: methods.Method, advance: Any) -> dict[str, Any]:
            if method.name == name:
                raise error
            return healthy(self, method, advance)

        monkeypatch.setattr(methods.Session, "measure", measure)

    return break_it
