"""How near 8-bit states stay to Adam in float64, over many steps; and first steps in many threads."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from onetrip import use_backend
from onetrip.optim import AdamW8bit
from onetrip.reference.adam import largest_update
from torch import Tensor

N = 4096
STEPS = 400
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def gaussian(_: int) -> Tensor:
    return torch.randn(N)


def six_decades(_: int) -> Tensor:
    """Elements of 1, 0.1, ... 1e-5 side by side: six levels, which five decades lie between."""
    return torch.randn(N) * 10.0 ** -(torch.arange(N) % 6)


def even_spread(_: int) -> Tensor:
    """From 1 to 1e-6 in every block. What lies in the sixth decade meets the last few codes of the maps, where a code
    is as far from the next as it is large."""
    return torch.randn(N) * 10.0 ** (-6.0 * (torch.arange(N) % 128) / 127)


def sparse_rows(_: int) -> Tensor:
    """An embedding's: 2% of rows of 64 get a gradient."""
    return torch.randn(N) * (torch.rand(N // 64) < 0.02).repeat_interleave(64)


def outlier(_: int) -> Tensor:
    """One element in 256 is 1e5 times the others."""
    return torch.randn(N) * torch.where(torch.arange(N) % 256 == 0, 1e5, 1.0)


class ExactAdam:
    """The update of Adam in float64."""

    def __init__(self, n: int, beta1: float = BETA1, beta2: float = BETA2, eps: float = EPS) -> None:
        self.beta1, self.beta2, self.eps, self.t = beta1, beta2, eps, 0
        self.m, self.v = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)

    def update(self, grad: Tensor) -> Tensor:
        g = grad.double()
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        return (self.m / (1 - self.beta1**self.t)) / ((self.v / (1 - self.beta2**self.t)).sqrt() + self.eps)


def error_of(stream, steps: int, backend: str) -> float:
    """Relative root mean square over the steps; each |update| is checked against its bound."""
    p = torch.nn.Parameter(torch.zeros(N))
    optimizer, exact = AdamW8bit([p], lr=1.0, betas=(BETA1, BETA2), eps=EPS, weight_decay=0.0), ExactAdam(N)
    differences = squares = 0.0
    for step in range(steps):
        p.data.zero_()
        p.grad = stream(step)
        with use_backend(backend):
            optimizer.step()
        update, wanted = -p.detach().double(), exact.update(p.grad)
        assert float(update.abs().max()) <= largest_update(BETA1, BETA2, exact.t) * (1 + 1e-6)
        differences += float((update - wanted).square().sum())
        squares += float(wanted.square().sum())
    return math.sqrt(differences / squares)


@pytest.mark.promise("Q3")
@pytest.mark.parametrize(
    ("stream", "bound"),
    [(gaussian, 0.03), (sparse_rows, 0.04), (six_decades, 0.35), (even_spread, 0.45), (outlier, 0.40)],
    ids=["gaussian", "sparse-rows", "six-levels", "even-spread", "outlier"],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_streams(backend, stream, bound):
    """Q3's four streams of gradients, and the one that is harder than its six decades."""
    assert 0 < error_of(stream, STEPS, backend) <= bound


@pytest.mark.promise("Q6")
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("decade", range(-12, 5, 2))
def test_every_decade_of_gradients(decade, backend):
    """Q6: scales are float32; only eps, which is absolute, sees how large gradients are."""
    assert 0 < error_of(lambda _: torch.randn(N) * 10.0**decade, 60, backend) <= 0.03


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.9), (0.9, 0.81), (0.99, 0.9)], ids=str)
def test_no_stream_takes_exact_adam_past_the_largest_update(betas):
    """C_t is met with equality by the gradients whose weights in m are in proportion to those in v."""
    beta1, beta2 = betas
    for n_steps in (1, 2, 10, 60):
        ratio = beta1 / beta2
        exact = ExactAdam(1, beta1, beta2, eps=0.0)
        for t in range(n_steps):
            age = n_steps - 1 - t
            u = exact.update(torch.tensor([ratio**age if age else 1.0], dtype=torch.float64))
        assert float(u) == pytest.approx(largest_update(beta1, beta2, n_steps), rel=1e-9)
    generator = torch.Generator().manual_seed(1)
    exact = ExactAdam(1000, beta1, beta2, eps=0.0)
    for t in range(1, 60):
        u = exact.update(torch.randn(1000, generator=generator) ** 3)
        assert float(u.abs().max()) <= largest_update(beta1, beta2, t) * (1 + 1e-9)


@pytest.mark.promise("Q8")
@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.float32, {}, 0.99),
        (torch.bfloat16, {}, 1.0),
        (torch.bfloat16, {"master_weight_bits": 32}, 0.99),
        (torch.bfloat16, {"bf16_stochastic_round": True}, 0.99),
    ],
    ids=["f32", "bf16", "bf16-master", "bf16-stochastic"],
)
def test_decay_alone(dtype, options, expected):
    """Q8: 1,000 steps of lr * weight_decay = 1e-5. A bfloat16 weight rounded to nearest is rounded back each time."""
    p = torch.nn.Parameter(torch.full((N,), 1.0, dtype=dtype))
    optimizer = AdamW8bit([p], lr=1e-3, weight_decay=1e-2, **options)
    p.grad = torch.zeros_like(p)
    for _ in range(1000):
        optimizer.step()
    weights = optimizer.master_weights(torch.nn.ParameterList([p]))["0"]
    assert float(weights.mean()) == pytest.approx(expected, rel=1e-3)


THREADS = """
import threading, torch
from onetrip.optim import AdamW8bit

values, grads, results = torch.randn(5000), torch.randn(3, 5000), [None] * 16
barrier = threading.Barrier(16)

def work(i):
    p = torch.nn.Parameter(values.clone())
    barrier.wait()
    optimizer = AdamW8bit([p], lr=0.1)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    results[i] = p.detach()

threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert all(result is not None and torch.equal(result, results[0]) for result in results)
"""


@pytest.mark.promise("adam S6")
@pytest.mark.slow
def test_sixteen_threads_make_their_first_step():
    """S6."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
