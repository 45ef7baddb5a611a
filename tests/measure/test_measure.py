"""Bytes and wall time: each figure against a case whose value is known beforehand."""

import os
import subprocess
import sys
import time

import pytest
import torch
from onetrip import measure
from torch import nn
from torch.utils.checkpoint import checkpoint

N = 100
VECTOR = 4 * N
CPU = torch.device("cpu")


@pytest.fixture
def w():
    return nn.Parameter(torch.rand(N))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        pytest.param(lambda w: w.exp().sum(), VECTOR, id="an-output"),
        pytest.param(lambda w: (y := w.exp()).mul(y).sum(), VECTOR, id="the-same-tensor-three-times"),
        pytest.param(lambda w: (y := w.exp())[:10].sin().sum() + y.sum(), VECTOR, id="a-view-beside-its-base"),
        pytest.param(lambda w: (w * 2)[:10].sin().sum(), VECTOR, id="a-view-keeps-its-whole-storage"),
        pytest.param(lambda w: w.sin().cos().sum(), VECTOR, id="the-parameter-itself-is-not-counted"),
        pytest.param(lambda w: w.view(10, 10).t().sin().sum(), 0, id="views-of-the-parameter-are-not-counted"),
        pytest.param(lambda w: (w.exp(), w.sum())[1], 0, id="a-branch-that-was-dropped"),
        pytest.param(
            lambda w: checkpoint(lambda v: v.exp().sin().exp().sum(), w * 2, use_reentrant=False),
            VECTOR,
            id="checkpointed-keeps-its-input-only",
        ),
    ],
)
def test_saved_bytes(w, loss, expected):
    assert measure.saved_bytes(lambda: loss(w), [w]) == expected


def test_inputs_are_counted_unless_named(w):
    x = torch.rand(N)
    assert measure.saved_bytes(lambda: (x * w).sum(), [w]) == VECTOR
    assert measure.saved_bytes(lambda: (x * w).sum(), [w, x]) == 0


def test_tensors_below_the_smallest_are_not_counted(w):
    def loss():
        return w.exp().sum() + w[:10].exp().exp().sum()

    assert measure.saved_bytes(loss, [w]) == VECTOR + 2 * 40
    assert measure.saved_bytes(loss, [w], smallest=11) == VECTOR


def test_saved_tensors_are_labelled_in_the_order_of_saving(w):
    labels = iter("ab")
    loss, saved = measure.saved_tensors(lambda: w.exp().exp().sum(), lambda: next(labels))
    assert [each.label for each in saved] == ["a", "b"]
    assert torch.equal(saved[1].tensor, w.detach().exp().exp())
    loss.backward()


def test_peak_is_the_most_held_at_once():
    def run():
        first = torch.empty(1 << 20, dtype=torch.uint8)
        second = torch.empty(2 << 20, dtype=torch.uint8)
        del first
        return second, torch.empty(1 << 19, dtype=torch.uint8)

    assert measure.peak_bytes(run, CPU) == 3 << 20


def test_cuda_peak_is_taken_from_an_empty_cache(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    for name, n_bytes in (("memory_allocated", 3), ("max_memory_allocated", 10), ("max_memory_reserved", 14)):
        monkeypatch.setattr(torch.cuda, name, lambda device, n_bytes=n_bytes: n_bytes)
    device = torch.device("cuda")
    assert measure.cuda_peak_bytes(lambda: calls.append("run"), device) == (7, 4)
    assert measure.peak_bytes(lambda: calls.append("run"), device) == 7
    assert calls == 2 * ["empty_cache", "reset", "run"]


def test_free_memory_of_a_gpu_includes_what_the_allocator_holds_unused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    assert measure.free_bytes(torch.device("cuda")) == 120
    assert 0 < measure.free_bytes(CPU) < 1 << 50


def test_storages_count_once_and_states_of_optimizers_may_be_nested(w):
    x = torch.rand(N)
    assert measure.tensor_bytes([x, x[:10]]) == VECTOR + 40
    assert measure.storage_bytes([x, x[:10], x.view(10, 10)]) == VECTOR
    adam = torch.optim.Adam([w])
    assert measure.optimizer_state_bytes(adam) == 0
    w.sum().backward()
    adam.step()
    assert measure.optimizer_state_bytes(adam) == 2 * VECTOR + 4  # the step is a float32 number
    adam.state[w] = {"list": [torch.zeros(2), {"deeper": torch.zeros(3)}], "step": 7}
    assert measure.optimizer_state_bytes(adam) == 20


@pytest.mark.parametrize(
    ("values", "expected"), [([3.0], (3, 3, 3)), ([5.0, 1.0, 2.0, 4.0, 3.0, 6.0], (3.5, 2.0, 5.0))]
)
def test_spread(values, expected):
    found = measure.spread(values)
    assert (found.median, found.p20, found.p80) == pytest.approx(expected)


def slowdown_of(monkeypatch, before, after):
    """Of a block between two readings: thread -> nanoseconds that it ran and waited."""
    readings = iter([before, after])
    monkeypatch.setattr(measure, "_scheduled", lambda: next(readings))
    with measure.Slowdown() as slowdown:
        pass
    return slowdown.factor


def test_waiting_threads_add_up_beside_the_one_that_ran_longest(monkeypatch):
    before, after = {"1": (100, 10), "ended": (1, 1)}, {"1": (300, 60), "new": (100, 50)}
    assert slowdown_of(monkeypatch, before, after) == 1.0 + (50 + 50) / 200


def test_without_counters_nothing_is_said_of_the_load(monkeypatch):
    assert slowdown_of(monkeypatch, {}, {}) is None


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the system has no schedstat")
def test_a_process_that_spins_on_our_cpu_is_seen():
    cpus = os.sched_getaffinity(0)
    spin = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"
    other = subprocess.Popen([sys.executable, "-c", spin])
    try:
        for process in (0, other.pid):
            os.sched_setaffinity(process, {min(cpus)})
        time.sleep(0.2)  # the other one starts
        with measure.Slowdown() as slowdown:
            end = time.thread_time() + 0.3
            while time.thread_time() < end:
                pass
    finally:
        os.sched_setaffinity(0, cpus)
        other.kill()
        other.wait()
    assert slowdown.factor > 1.3
