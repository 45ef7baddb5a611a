"""linear_cross_entropy with the vocabulary cut over processes, for test_vocab_parallel.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cross_entropy_cases import OPTIONS, make_labels, unfused
from onetrip import nn, ops, use_backend
from onetrip.ops.cross_entropy_linear import Linear, Slice, by_row, by_row_backward, reduced
from onetrip.reference.cross_entropy import CrossEntropyPlan
from tolerances import assert_like_torch, max_error
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional

N_HIDDEN, N_CLASSES = 24, 301
"""301 classes: the last slice has fewer."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def mine(tensor: Tensor) -> Tensor:
    """This rank's slice, as a leaf."""
    return tensor.detach().chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()


def operands(dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden, weight, bias, labels), the same on every rank."""
    torch.manual_seed(seed)
    hidden = (scale * torch.randn(3, 14, N_HIDDEN)).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(N_CLASSES, N_HIDDEN)).to(dtype).requires_grad_()
    bias = torch.randn(N_CLASSES).to(dtype).requires_grad_()
    return hidden, weight, bias, make_labels(3, 14, n_classes=N_CLASSES)


def sliced(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor, **options: Any) -> list[Tensor]:
    """Loss and gradients from slices; of loss.sum(), or of the loss of each row times its number."""
    leaves = [hidden.detach().requires_grad_(), mine(weight), mine(bias)]
    loss = ops.linear_cross_entropy(
        leaves[0], leaves[1], labels, leaves[2], process_group=dist.group.WORLD, n_classes=weight.shape[0], **options
    )
    return [loss.detach(), *torch.autograd.grad(loss, leaves, cotangent(loss))]


def whole(dtype: torch.dtype, operands: tuple[Tensor, ...], function: Callable[..., Tensor]) -> list[Tensor]:
    """Results of one process: loss, gradient of hidden, this rank's slices of the gradients of weight and bias."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in operands[:3]]
    loss = function(*leaves)
    dhidden, *others = torch.autograd.grad(loss, leaves, cotangent(loss))
    return [loss.detach(), dhidden, *(mine(gradient).detach() for gradient in others)]


def logits_loss(labels: Tensor, **options: Any) -> Callable[..., Tensor]:
    """torch's loss of (hidden, weight, bias), by whole logits."""
    return lambda h, w, b: unfused(functional.linear(h, w, b), labels, **options)


def cotangent(loss: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)


def assert_equal_on_all_ranks(tensor: Tensor) -> None:
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.contiguous())
    assert all(torch.equal(tensor, other) for other in others)


def like_one_process(backend: str) -> None:
    """Every option and dtype, one chunk and several: within torch's own error on whole logits."""
    with use_backend(backend):
        for dtype in DTYPES if backend == "reference" else DTYPES[:3]:
            for name, options in OPTIONS.items():
                *leaves, labels = operands(dtype)
                if "ignore_index" in options:
                    labels = labels.masked_fill(labels == -100, options["ignore_index"])
                torchs = logits_loss(labels, **options)
                truth, expected = whole(torch.float64, leaves, torchs), whole(dtype, leaves, torchs)
                for chunk_rows in (11, None):
                    found = sliced(leaves[0], leaves[1], labels, leaves[2], chunk_rows=chunk_rows, **options)
                    what = f"{backend}, {dtype}, {name}, {chunk_rows}"
                    assert_equal_on_all_ranks(found[0].reshape(-1))
                    assert_equal_on_all_ranks(found[1].reshape(-1))
                    limit = 2.0 * max_error(expected[0].float(), truth[0]) + 1e-5 * truth[0].abs().max()
                    assert max_error(found[0], truth[0]) <= limit, what
                    # Each rank's part of the gradient of hidden is rounded, and so are their sums.
                    terms = labels.numel() * dist.get_world_size()
                    for ours, theirs, exact in zip(found[1:], expected[1:], truth[1:], strict=True):
                        assert ours.dtype == dtype, what
                        if dtype == torch.float64:
                            torch.testing.assert_close(ours, exact)
                        else:
                            assert_like_torch(ours, theirs, exact, terms=terms)


def special_values() -> None:
    """Large logits, impossible classes, ignored rows, rows that are spoilt; ignore_index may be a class."""
    hidden, weight, bias, labels = operands(torch.float32)
    shifted = (bias.detach() + 1e4).requires_grad_()
    for given, options in ((hidden, {}), (torch.zeros_like(hidden), {"label_smoothing": 0.1})):  # exact logits
        torchs = logits_loss(labels, **options)
        truth, theirs = (whole(dtype, (given, weight, shifted), torchs) for dtype in (torch.float64, torch.float32))
        found = sliced(given, weight, labels, shifted, **options)
        for ours, other, exact in zip(found, theirs, truth, strict=True):
            assert_like_torch(ours, other, exact, terms=42)

    impossible = bias.detach().clone()
    impossible[:160] = -torch.inf  # a whole slice of them
    late = labels.clamp(160).where(labels >= 0, labels)
    truth = whole(torch.float64, (hidden, weight, impossible), logits_loss(late))
    for ours, exact in zip(sliced(hidden, weight, late, impossible), truth, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-6)

    for reduction in ("mean", "sum", "none"):
        nothing = sliced(hidden, weight, torch.full_like(labels, -100), bias, reduction=reduction)
        assert all((tensor == 0.0).all() for tensor in nothing)
        empty = sliced(hidden[:0], weight, labels[:0], bias, reduction=reduction)
        assert all((tensor == 0.0).all() for tensor in empty)

    spoilt = hidden.detach().clone()
    spoilt[1, 5, 2] = torch.nan
    labels = labels.clamp(0)
    loss, dhidden, *_ = sliced(spoilt, weight, labels, bias, reduction="none")
    for tensor in (loss, dhidden[..., 0]):
        assert tensor.isnan().nonzero().tolist() == [[1, 5]]


def labels_that_the_host_does_not_know(backend: str) -> None:
    """As on a GPU: rows with ignored labels are not dropped, and a label that is no class spoils its row."""
    hidden, weight, bias, labels = operands(torch.float32)
    rows, labels = hidden.detach().view(-1, N_HIDDEN), labels.view(-1)
    most = mine(weight).shape[0] if dist.get_rank() == 0 else -(-N_CLASSES // dist.get_world_size())
    part = Slice(dist.group.WORLD, dist.get_world_size(), dist.get_rank() * most, most, N_CLASSES)
    plan = CrossEntropyPlan(-100, label_smoothing=0.1)
    truth = whole(torch.float64, (rows, weight, bias), logits_loss(labels, label_smoothing=0.1))
    call = Linear(rows, mine(weight).detach(), mine(bias).detach(), labels, plan, backend, 11, None, part)
    loss, gradients, _ = reduced(call, True, (True, True, True))
    for ours, exact in zip((loss, *gradients), (truth[0], *(each * 2.0 for each in truth[1:])), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-6)
    labels = labels.clamp(0)
    labels[[5, 17]] = torch.tensor([N_CLASSES, -1])
    call = call._replace(labels=labels)
    loss, _ = by_row(call, False)
    dhidden, *_ = by_row_backward(call, torch.ones(1), None, (True, False, False))
    assert dhidden is not None
    for tensor in (loss, dhidden[:, 0]):
        assert tensor.isnan().nonzero()[:, 0].tolist() == [5, 17]


def only_what_is_wanted() -> None:
    """No grad, frozen weights, no bias, a retained graph, autocast, the module."""
    hidden, weight, bias, labels = operands(torch.float32)
    loss, dhidden, dweight, _ = sliced(hidden, weight, labels, bias)
    options = {"process_group": dist.group.WORLD, "n_classes": N_CLASSES}
    with torch.no_grad():
        assert torch.equal(ops.linear_cross_entropy(hidden, mine(weight), labels, mine(bias), **options), loss)
    leaf = hidden.detach().requires_grad_()
    frozen = ops.linear_cross_entropy(leaf, mine(weight).detach(), labels, mine(bias).detach(), **options)
    torch.testing.assert_close(torch.autograd.grad(frozen, leaf)[0], cotangent(loss).reciprocal() * dhidden)
    head = mine(weight)
    once = ops.linear_cross_entropy(hidden.detach(), head, labels, mine(bias).detach(), **options)
    first = torch.autograd.grad(once, head, retain_graph=True)[0].clone()
    torch.testing.assert_close(torch.autograd.grad(once, head)[0], first)
    torch.testing.assert_close(first * 0.5, dweight)
    without = ops.linear_cross_entropy(hidden, mine(weight), labels, **options)
    torch.testing.assert_close(without, unfused(functional.linear(hidden, weight), labels))
    module = nn.LinearCrossEntropyLoss(reduction="sum", **options)
    with torch.autocast("cpu", torch.bfloat16):
        cast = module(hidden, mine(weight), labels, mine(bias))
        expected = unfused(functional.linear(hidden, weight, bias).float(), labels, reduction="sum")
    torch.testing.assert_close(cast, expected, rtol=1e-2, atol=1e-2)


def few_collectives() -> None:
    """One all-gather a chunk, of three numbers a row (four with label smoothing), and one all-reduce."""
    hidden, weight, bias, labels = operands(torch.float32)
    labels = labels.clamp(0)
    for options, n_numbers in (({}, 3), ({"label_smoothing": 0.1}, 4)):
        with (
            mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers,
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces,
        ):
            sliced(hidden, weight, labels, bias, chunk_rows=14, **options)
        assert [call.args[1].numel() for call in gathers.call_args_list] == 3 * [14 * n_numbers]
        assert [call.args[0].shape for call in reduces.call_args_list] == [(42, N_HIDDEN)]


def raises(kind: type[Exception], text: str, function: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        function()


def wrong_calls() -> None:
    """Every rank raises before it communicates."""
    hidden, weight, _, labels = operands(torch.float32)
    part, group = mine(weight), dist.group.WORLD

    def call(weight: Tensor = part, labels: Tensor = labels, **options: Any) -> Tensor:
        return ops.linear_cross_entropy(hidden, weight, labels, **{"process_group": group, "n_classes": 301} | options)

    raises(TypeError, "n_classes must be an int with a process_group, got None", lambda: call(n_classes=None))
    raises(ValueError, "n_classes must be None without a process_group", lambda: call(process_group=None))
    raises(TypeError, "process_group must be", lambda: call(process_group="world"))
    raises(ValueError, f"rows, the slice of 400 classes that rank {dist.get_rank()}", lambda: call(n_classes=400))
    raises(ValueError, "n_classes must give each of", lambda: call(weight[:1], n_classes=1))
    raises(ValueError, "labels must be in [0, 301)", lambda: call(labels=labels + 301))
    raises(RuntimeError, "process_group must be None for", lambda: torch.func.grad(lambda w: call(w))(part))


def compiled() -> None:
    """torch.compile breaks its graph at the call."""
    hidden, weight, bias, labels = operands(torch.float32)
    found = []
    for compiles in (False, True):
        leaves = [hidden.detach().requires_grad_(), mine(weight), mine(bias)]

        def step(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
            group = dist.group.WORLD
            return 3.0 * ops.linear_cross_entropy(2.0 * h, w, labels, b, process_group=group, n_classes=N_CLASSES)

        loss = (torch.compile(step, backend="aot_eager") if compiles else step)(*leaves)
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def like_loss_parallel() -> None:
    """An output layer that parallelize_module has cut, and torch's own loss over sharded logits."""
    hidden, _, _, labels = operands(torch.float32)
    rows, labels = hidden.detach().view(-1, N_HIDDEN), labels.view(-1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for reduction in ("mean", "sum", "none"):
        torch.manual_seed(1)
        head = torch.nn.Sequential(torch.nn.Linear(N_HIDDEN, N_CLASSES))
        parallelize_module(head, mesh, {"0": ColwiseParallel(use_local_output=False)})
        ours = nn.LinearCrossEntropyLoss(reduction=reduction, process_group=mesh.get_group(), n_classes=N_CLASSES)
        leaves = [rows.clone().requires_grad_() for _ in range(2)]
        loss = ours(leaves[0], head[0].weight.to_local(), labels, head[0].bias.to_local())
        loss.sum().backward()
        gradients = [parameter.grad for parameter in head.parameters()]
        head.zero_grad()
        with loss_parallel():
            expected = functional.cross_entropy(head(leaves[1]), labels, reduction=reduction)
            expected.sum().backward()
        expected = expected.full_tensor() if isinstance(expected, DTensor) else expected
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
        for gradient, parameter in zip(gradients, head.parameters(), strict=True):
            assert isinstance(gradient, DTensor)
            torch.testing.assert_close(gradient.full_tensor(), parameter.grad.full_tensor())


def everything(backends: tuple[str, ...]) -> None:
    for backend in backends:
        like_one_process(backend)
        labels_that_the_host_does_not_know(backend)
    for check in (special_values, only_what_is_wanted, few_collectives, wrong_calls, like_loss_parallel):
        check()
    if dist.get_world_size() == 2:
        compiled()
