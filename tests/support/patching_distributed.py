"""Runs a patched model in several processes, for tests/patching/test_traps.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from onetrip.patching import links, patch_model
from patching_cases import gpt2
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def batch(rank: int) -> Tensor:
    return torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, batches: list[Tensor], n_steps: int = 4) -> None:
    """Steps of SGD on the mean loss of the batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(n_steps):
        optimizer.zero_grad()
        losses: list[Any] = [model(input_ids=ids, labels=ids).loss / len(batches) for ids in batches]
        for loss in losses:
            loss.backward()
        optimizer.step()


def every_wrapper() -> None:
    """Train on this rank's batch; the weights must be those of one process that sees both batches, unpatched."""
    links.SMALLEST = 0  # also in the processes that start without conftest.py
    expected = gpt2().train()
    train(expected, [batch(rank) for rank in range(dist.get_world_size())])
    for kind in ("ddp", "fsdp2"):
        for patched in ("before", "after"):
            for (name, ours), theirs in zip(_trained(kind, patched), expected.parameters(), strict=True):
                what = f"{kind}, patched {patched} wrapping: {name}: "
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=lambda text, w=what: w + text)


def _trained(kind: str, patched: str) -> list[tuple[str, Tensor]]:
    """The weights of a wrapped model after training, gathered."""
    model: Any = gpt2().train()
    if patched == "before":
        patch_model(model)
    if kind == "ddp":
        wrapped: Any = DistributedDataParallel(model)
    else:
        for layer in model.transformer.h:
            fully_shard(layer)
        wrapped = fully_shard(model)
    if patched == "after":
        patch_model(wrapped)
    train(wrapped, [batch(dist.get_rank())])
    ids = {id(module) for module in model.modules()}
    n_links = sum(site.link is not None for (owner, _), site in links._sites.items() if owner in ids)
    assert n_links > 0 or kind == "fsdp2"  # whose wrapped layers have hooks
    parameters = model.named_parameters()
    return [(name, p.full_tensor() if isinstance(p, DTensor) else p) for name, p in parameters]
