"""What only a CUDA device can show: graphs, streams, more than 2^32 elements, a second GPU, autocast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from onetrip import nn, ops, use_backend
from onetrip.ops.common.backends import choose
from onetrip.reference.philox import keep_mask
from row_norm_cases import Inputs, call, gradients, make, normed, truth
from targets import (
    after_a_slow_producer,
    assert_masks_are_new_and_follow_the_seed,
    needs_memory,
    without_synchronising,
)
from tolerances import assert_bitwise, assert_like_torch, assert_ulps
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu
ALL = "residual bias weight norm_bias"


@pytest.mark.promise("D3")
def test_graph_replays_draw_new_masks_that_follow_the_seed(backend):
    x, residual = torch.ones(2, 64, 256, device="cuda")
    static = torch.ones(64, 256, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        z = ops.bias_dropout_residual(static, residual, dropout_p=0.5)
        return z - residual, torch.autograd.grad(z.sum(), static)[0]

    assert_masks_are_new_and_follow_the_seed(step)
    assert x.all()


@pytest.mark.promise("S5")
def test_a_slow_producer_on_another_stream_is_waited_for(backend):
    i = make((4096, 1024), torch.float32, ALL, device="cuda")
    expected = call(i)  # loads the kernels
    assert_bitwise(after_a_slow_producer(i.x, lambda x: call(replace(i, x=x))), expected)


@pytest.mark.promise("S5")
def test_a_call_does_not_synchronise(backend):
    leaves = make((64, 256), torch.float32, ALL, device="cuda").leaves()
    call(leaves, dropout_p=0.1).sum().backward()
    with without_synchronising():
        call(leaves, dropout_p=0.1).sum().backward()


def test_what_a_backward_computes_again_uses_the_backend_of_its_block(backend):
    x, chosen = torch.ones(8, 8, device="cuda", requires_grad=True), []

    def function(x: torch.Tensor) -> torch.Tensor:
        chosen.append(choose("test", x.device, True))
        return ops.rms_norm(x)

    y = checkpoint(function, x, use_reentrant=False)
    with use_backend("reference"):
        z = checkpoint(function, x, use_reentrant=False)
        z.sum().backward()
    y.sum().backward()
    assert chosen == [backend, "reference", "reference", backend]


def test_each_call_moves_the_generator_by_four(backend):
    x = torch.ones(8, 8, device="cuda")
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.get_offset()
    ops.bias_dropout_residual(x, x, dropout_p=0.5)
    assert generator.get_offset() == before + 4


@pytest.mark.promise("S1, S3")
@pytest.mark.slow
@pytest.mark.parametrize("n_rows", [65_535, 65_536, 1 << 20, (1 << 20) + 1])
def test_many_rows(backend, n_rows):
    i = make((n_rows, 33), torch.float32, ALL, device="cuda")
    leaves = i.leaves()
    y = call(leaves)
    assert_ulps(y, truth(i)[1])
    y.sum().backward()
    assert leaves.x.grad.isfinite().all()


@pytest.mark.promise("S1, S3")
@pytest.mark.promise("D7")
@pytest.mark.slow
@pytest.mark.parametrize("n_cols", [1 << 10, (1 << 18)], ids=["narrow", "wide"])
def test_more_than_two_to_the_32_elements(backend, n_cols):
    """bfloat16: x, residual, z and y, and their gradients, are 8.6 GB each."""
    needs_memory(60)
    n_rows = (1 << 32) // n_cols + 3
    x = torch.randn(n_rows, n_cols, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(n_cols, device="cuda", requires_grad=True)
    y = ops.bias_dropout_residual_norm(x, None, weight, dropout_p=0.5, norm="rms", rng=(1, 4))
    y.backward(torch.ones_like(y))
    for rows in (slice(0, 2), slice(n_rows - 2, n_rows)):
        keep = keep_mask((2, n_cols), 0.5, (1, 4), "cuda", first_element=(rows.start or 0) * n_cols)
        z = torch.where(keep, x.detach()[rows].double() * 2, 0.0)
        assert_ulps(y.detach()[rows], F.rms_norm(z, (n_cols,), eps=1e-5))
        assert not x.grad[rows][~keep].any()
        assert x.grad[rows][keep].count_nonzero() > 0.9 * keep.count_nonzero()


@pytest.mark.promise("S4")
def test_second_card(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, {torch.cuda.device_count()} visible")
    i = make((100, 777), torch.float32, ALL, device="cuda:1")
    assert torch.cuda.current_device() == 0
    y = call(i, dropout_p=0.2, rng=(1, 4))
    assert y.device.index == 1 and torch.cuda.current_device() == 0
    assert_bitwise(y, call(i.map(lambda t: t.to("cuda:0")), dropout_p=0.2, rng=(1, 4)))


@pytest.mark.promise("B5")
@pytest.mark.parametrize("argument", ["residual", "bias", "weight", "norm_bias"])
def test_mixed_devices_are_refused_with_both_named(cuda, argument):
    i = make((4, 8), torch.float32, ALL, device=cuda)
    setattr(i, argument, getattr(i, argument).cpu())
    with pytest.raises(ValueError, match=f"{argument} must be on the device of x, cuda:0, got cpu"):
        call(i)


def test_cpu_and_card_draw_the_same_mask_and_nearly_the_same_values(backend):
    i = make((33, 1025), torch.float32, ALL)
    with use_backend("auto"):
        expected = call(i, dropout_p=0.3, rng=(5, 4), return_residual=True)
    y, z = call(i.map(lambda t: t.cuda()), dropout_p=0.3, rng=(5, 4), return_residual=True)
    assert_bitwise(z.cpu(), expected[1])
    torch.testing.assert_close(y.cpu(), expected[0])


@pytest.mark.promise("I7")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_gives_torchs_dtypes(backend, dtype):
    x = torch.randn(4, 64, device="cuda")
    linear, norm, torchs = torch.nn.Linear(64, 64).cuda(), nn.LayerNorm(64).cuda(), torch.nn.LayerNorm(64).cuda()
    with torch.autocast("cuda", dtype):
        h = linear(x)
        assert h.dtype == dtype and norm(h).dtype == torchs(h).dtype
        assert_like_torch(norm(h), torchs(h), F.layer_norm(h.double(), (64,)))
    norm(linear(x)).sum().backward()
    assert norm.weight.grad.dtype == torch.float32


@pytest.mark.promise("I7")
def test_grad_scaler_steps(backend):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), nn.LayerNorm(32), nn.RMSNorm(32)).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(8, 32, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert loss.isfinite()


@pytest.mark.promise("N2")
@pytest.mark.parametrize("width", [8192, 16_384, 65_536, 262_144])
def test_wide_rows(backend, width):
    i = make((3, width), torch.bfloat16, "residual weight norm_bias", device="cuda")
    leaves = i.leaves()
    y, z = call(leaves, return_residual=True)
    assert_ulps(y, normed(z.detach().double(), i.double()))
    double, y64, _ = truth(i)
    dy = torch.randn(3, width, device="cuda").bfloat16()
    y.backward(dy)
    y64.backward(dy.double())
    for name, tensor in leaves.tensors().items():
        exact = double.tensors()[name].grad
        assert_like_torch(tensor.grad, exact.bfloat16(), exact, terms=3)


def _gradients(leaves: Inputs) -> dict[str, torch.Tensor]:
    y, z = call(leaves, dropout_p=0.1, return_residual=True, rng=(3, 4))
    return {"y": y.detach(), **gradients(leaves, [y, z], [torch.ones_like(y), torch.ones_like(z)])}


@pytest.mark.parametrize("n_cols", [64, 128, 256, 768, 1024, 1280, 4096, 8192, 16_384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_gradients_are_the_same_bits_wherever_rows_begin(cuda, dtype, n_cols):
    """Aligned rows are copied ahead, over and over in the same shared memory; others are not."""
    aligned = make((1000, n_cols), dtype, ALL, device=cuda)
    odd = aligned.map(lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape).detach())
    with use_backend("cuda"):
        expected = _gradients(aligned.map(lambda t: t.requires_grad_()))
        found = _gradients(odd.map(lambda t: t.requires_grad_()))
    for name, tensor in expected.items():
        if name != "y":
            assert_bitwise(found[name], tensor)


@pytest.mark.parametrize("n_cols", [256, 4096, 8192, 16_384, 65_536])
def test_a_replay_gives_the_bits_of_a_call(backend, n_cols):
    """Clusters of blocks are launched otherwise, and what the driver says is asked for before the capture or in it."""
    leaves = make((40, n_cols), torch.bfloat16, ALL, device="cuda").leaves()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = _gradients(leaves)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = _gradients(leaves)
    graph.replay()
    for name, tensor in expected.items():
        assert_bitwise(replayed[name], tensor)
