"""What only a CUDA device can show of softmax: graphs, streams, more than 2^31 elements, wide rows, many rows."""

from __future__ import annotations

import pytest
import torch
from onetrip import ops, use_backend
from onetrip.reference.philox import dropout_scale
from softmax_cases import RNG, exact
from targets import (
    after_a_slow_producer,
    assert_masks_are_new_and_follow_the_seed,
    needs_memory,
    without_synchronising,
)
from tolerances import assert_bitwise, assert_ulps

pytestmark = [pytest.mark.gpu, pytest.mark.promise("softmax D3, S1, S3, S5")]


def test_backends_of_the_card_agree_with_the_cpu(backend):
    scores, bias = torch.randn(3, 4, 33, 77), torch.randn(4, 33, 77)
    dy = torch.randn(3, 4, 33, 77)

    def run(device: str) -> list[torch.Tensor]:
        leaves = [t.detach().to(device).requires_grad_() for t in (scores, bias)]
        y = ops.softmax(*leaves, scale=0.5, causal=True, dropout_p=0.2, rng=RNG)
        return [y, *torch.autograd.grad(y, leaves, dy.to(device))]

    ours = run("cuda")
    with use_backend("reference"):
        truth = run("cpu")
    assert torch.equal(ours[0].cpu() == 0.0, truth[0] == 0.0)  # the same mask, bit for bit
    for tensor, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(tensor.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_graph_replays_draw_new_masks_that_follow_the_seed(backend):
    scores = torch.randn(64, 256, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor]:
        y = ops.softmax(scores, dropout_p=0.5)
        (dx,) = torch.autograd.grad(y.square().sum(), scores)
        return (y + 0.0 * dx,)

    assert step()[0].isfinite().all()
    assert_masks_are_new_and_follow_the_seed(step)


def test_a_slow_producer_on_another_stream_is_waited_for(backend):
    source = torch.randn(4096, 1024, device="cuda")
    expected = ops.softmax(source)  # loads the kernel
    assert_bitwise(after_a_slow_producer(source, ops.softmax), expected)


@pytest.mark.promise("softmax N1")
@pytest.mark.parametrize("width", [8192, 16384, 16385, 65536, 262144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_wide_rows(backend, width, dtype):
    scores = (3.0 * torch.randn(7, width, device="cuda")).to(dtype).requires_grad_()
    y = ops.softmax(scores, scale=0.7)
    assert_ulps(y, exact(scores.detach(), scale=0.7))
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, scores, dy)
    wide = scores.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(torch.softmax(wide * 0.7, -1), wide, dy.double())
    assert (dx.double() - truth).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * truth.abs().max()


@pytest.mark.parametrize("n_rows", [65535, 65536, 1 << 20])
def test_many_rows(backend, n_rows):
    scores = torch.randn(n_rows, 24, device="cuda")
    assert_ulps(ops.softmax(scores), exact(scores))


def test_more_than_two_to_the_31_elements(backend):
    """The last row's bits, and its mask's, forward and backward."""
    needs_memory(40)
    n_rows, n_cols = (1 << 21) + 1, 1024
    scores = torch.zeros(n_rows, n_cols, dtype=torch.bfloat16, device="cuda")
    scores[-1] = torch.randn(n_cols, device="cuda")
    scores.requires_grad_()
    y = ops.softmax(scores, dropout_p=0.3, rng=RNG)
    last = torch.softmax(scores.detach()[-1].double(), -1)
    keep = y.detach()[-1] != 0
    assert 0.6 < keep.double().mean() < 0.8
    assert_ulps(y.detach()[-1], torch.where(keep, last * dropout_scale(0.3), 0.0))
    (dx,) = torch.autograd.grad(y, scores, torch.ones_like(y))
    assert dx[-1].isfinite().all() and (dx[-1] != 0.0).any()


def test_a_call_does_not_synchronise(backend):
    scores = torch.randn(64, 128, device="cuda", requires_grad=True)
    bias = torch.randn(128, device="cuda", requires_grad=True)
    ops.softmax(scores, bias, dropout_p=0.1).sum().backward()
    with without_synchronising():
        ops.softmax(scores, bias, dropout_p=0.1).sum().backward()
