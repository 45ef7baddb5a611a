"""Runs functions of this file in several processes, for tests/optim/test_distributed.py."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from onetrip.optim import AdamW8bit
from onetrip.reference.adam import BLOCK, code_map
from optim_cases import same
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SHAPES = {"rows": (10, 100), "wide": (7, 256), "uneven": (5, 90), "vector": (1001,)}
"""Rows of no multiple of 128, of one, a first dimension that no world size divides, one dimension."""


PRELOAD = ["onetrip", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor"]
"""Imported once; every process then is a fork of the one that did. A function's own module may name others so."""


def _worker(rank: int, function: Callable[..., None], world: int, store: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        function(*arguments)
        dist.barrier()  # no thread of gloo holds a tensor when Python ends
    finally:
        dist.destroy_process_group()


def run(world: int, function: Callable[..., None], *arguments: Any) -> None:
    """function(*arguments) in `world` processes of one gloo group; raises where one of them does."""
    multiprocessing.set_forkserver_preload(getattr(sys.modules[function.__module__], "PRELOAD", PRELOAD))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _worker,
            (function, world, str(Path(folder) / "store"), arguments),
            nprocs=world,
            start_method="forkserver",
        )


class Weights(nn.Module):
    """Parameters of SHAPES; the gradients are those of a loss that is quadratic in each."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + step)
        losses = [(p * torch.randn(p.shape, generator=generator) + p * p).sum() for _, p in sorted(self.items())]
        return torch.stack(losses).sum()

    def items(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, getattr(self, name)) for name in SHAPES]


def build(sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Weights()
    if sharded:
        fully_shard(model)
    return model, AdamW8bit(model.parameters(), lr=1e-2, weight_decay=0.1, min_8bit_numel=400)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and state_dict, gathered."""

    def full(value: torch.Tensor) -> torch.Tensor:
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()

    state = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    result = {name: full(p) for name, p in model.named_parameters()}
    for index, entry in state.items():
        result |= {f"{names[index]}.{key}": full(value) for key, value in entry.items()}
    return result


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def reshard(old: str | None, new: str, result: str) -> None:
    """Three steps, or those of a checkpoint, saved by this world size; rank 0 writes the whole values."""
    model, optimizer = build(sharded=True)
    if old is None:
        train(model, optimizer, 0, 3)
    else:
        load(model, optimizer, old)
    save(model, optimizer, new)
    values = whole(model, optimizer)
    train(model, optimizer, 3, 5)
    after = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save((values, after), result)


def against_one_process() -> None:
    """Every rank has the same gradients, so that one process must get the same: bit for bit where no border cuts a
    block, and everywhere with 32-bit states."""
    plain, plain_optimizer = build(sharded=False)
    model, optimizer = build(sharded=True)
    wrapped, wrapped_optimizer = build(sharded=False)
    wrapped = nn.parallel.DistributedDataParallel(wrapped)
    for each in ((plain, plain_optimizer), (model, optimizer), (wrapped, wrapped_optimizer)):
        train(*each, 0, 4)
    expected, got = whole(plain, plain_optimizer), whole(model, optimizer)
    assert same(expected, whole(wrapped.module, wrapped_optimizer))
    assert same(expected["wide"], got["wide"]) and same(expected["wide.exp_avg_codes"], got["wide.exp_avg_codes"])
    for name in SHAPES:
        assert float((expected[name] - got[name]).abs().max()) < 4 * 1e-2 * 0.1
        assert got[f"{name}.exp_avg_codes"].dtype == torch.uint8
    for each in (plain_optimizer, optimizer):
        each.state.clear()
        each.param_groups[0]["optim_bits"] = 32
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        with torch.no_grad():
            p.copy_(distribute_tensor(q.detach().clone(), p.device_mesh, p.placements))
    train(plain, plain_optimizer, 4, 6)
    train(model, optimizer, 4, 6)
    assert same(whole(plain, plain_optimizer), whole(model, optimizer))
    norms = []
    for of_model, its_optimizer in ((plain, plain_optimizer), (model, optimizer)):
        its_optimizer.max_grad_norm = 0.5
        train(of_model, its_optimizer, 6, 8)
        norms.append(its_optimizer.last_grad_norm)
    assert same(*norms) and norms[0] > 0.5
    assert same(whole(plain, plain_optimizer), whole(model, optimizer))


def roundings() -> None:
    """Master weights and stochastic rounding of bfloat16: sharded as in one process, bit for bit where no border cuts
    a block; master weights gathered."""
    for options in ({"master_weight_bits": 32}, {"master_weight_bits": 24}, {"bf16_stochastic_round": True}):
        plain, sharded = Weights().bfloat16(), Weights().bfloat16()
        fully_shard(sharded)
        both = [(each, AdamW8bit(each.parameters(), lr=1e-3, optim_bits=32, **options)) for each in (plain, sharded)]
        for each in both:
            train(*each, 0, 3)
        expected, got = (whole(*each) for each in both)
        assert all(same(expected[key], got[key]) for key in expected if key.startswith("wide"))
        if "master_weight_bits" in options:
            assert same(expected, got)
            masters = [optimizer.master_weights(model) for model, optimizer in both]
            assert same(masters[0], {name: value.full_tensor() for name, value in masters[1].items()})
        resumed = Weights().bfloat16()
        fully_shard(resumed)
        with torch.no_grad():
            for p, q in zip(resumed.parameters(), sharded.parameters(), strict=True):
                p.copy_(q)
        of_resumed = AdamW8bit(resumed.parameters())
        of_resumed.load_state_dict(both[1][1].state_dict())
        for each in (both[1], (resumed, of_resumed)):
            train(*each, 3, 5)
        assert same(whole(*both[1]), whole(resumed, of_resumed))
    # Columns are no contiguous range: each rank has random bits of its own. Names of parameters are any.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = nn.Module()
    columns.logit_scale = nn.Parameter(distribute_tensor(torch.ones(64, 128, dtype=torch.bfloat16), mesh, [Shard(1)]))
    optimizer = AdamW8bit(columns.parameters(), lr=1e-3, weight_decay=0.0, bf16_stochastic_round=True)
    columns.logit_scale.grad = torch.ones_like(columns.logit_scale)
    optimizer.step()
    parts = columns.logit_scale.detach().full_tensor().chunk(dist.get_world_size(), dim=1)
    assert len(parts[0].unique()) == 2 and not same(parts[0].contiguous(), parts[1].contiguous())
    optimizer.param_groups[0].update(bf16_stochastic_round=False, master_weight_bits=32)
    optimizer.step()
    assert optimizer.master_weights(columns)["logit_scale"].full_tensor().dtype == torch.float32


def whole_state_dicts() -> None:
    """A gathered state_dict goes into one process's optimizer, and one process's into a sharded one."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = build(sharded=True)
    train(model, optimizer, 0, 3)
    gathered = get_optimizer_state_dict(model, optimizer, options=options)
    plain, plain_optimizer = build(sharded=False)
    set_optimizer_state_dict(plain, plain_optimizer, gathered)
    near(whole(plain, plain_optimizer), whole(model, optimizer), with_params=False)
    assert plain_optimizer.state[plain.rows]["exp_avg_scale"].shape == (8,)

    target, its_optimizer = build(sharded=True)
    train(target, its_optimizer, 0, 1)
    set_optimizer_state_dict(target, its_optimizer, gathered, options=options)
    assert same({k: v for k, v in whole(target, its_optimizer).items() if "." in k},
                {k: v for k, v in whole(model, optimizer).items() if "." in k})  # fmt: skip

    plain, plain_optimizer = build(sharded=False)
    train(plain, plain_optimizer, 0, 3)
    target, its_optimizer = build(sharded=True)
    its_optimizer.load_state_dict(plain_optimizer.state_dict())
    near(whole(target, its_optimizer), whole(plain, plain_optimizer), with_params=False)
    for of_model in (plain, nn.parallel.DistributedDataParallel(plain)):  # torch makes DTensors of the scales
        gathered = get_optimizer_state_dict(of_model, plain_optimizer, options=options)
        target, its_optimizer = build(sharded=True)
        set_optimizer_state_dict(target, its_optimizer, gathered, options=options)
        near(whole(target, its_optimizer), whole(plain, plain_optimizer), with_params=False)


def residuals_are_broadcast() -> None:
    """DDP: no collective of gloo or NCCL takes int16."""
    model = Weights().bfloat16()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = AdamW8bit(model.parameters(), master_weight_bits=32)
    train(wrapped, optimizer, 0, 2)
    expected = whole(model, optimizer)
    gathered = get_optimizer_state_dict(wrapped, optimizer, options=StateDictOptions(full_state_dict=True))
    resumed = AdamW8bit(model.parameters(), master_weight_bits=32)
    resumed.zero_grad()  # else torch makes no states for what is to be received
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(wrapped, resumed, gathered if dist.get_rank() == 0 else {}, options=options)
    assert same(whole(model, resumed), expected)


def other_shardings() -> None:
    """Columns, and replicas: steps and resuming at the same sharding; another sharding is rejected."""
    mesh = init_device_mesh("cpu", (2,))
    values, grads = torch.randn(6, 301), torch.randn(3, 6, 301)
    for value in (values, grads):
        dist.broadcast(value, 0)
    for placement in (Shard(1), Replicate()):
        p = nn.Parameter(distribute_tensor(values, mesh, [placement]))
        optimizer = AdamW8bit([p], lr=0.1, min_8bit_numel=100)
        alone = nn.Parameter(p.to_local().detach().clone())
        of_alone = AdamW8bit([alone], lr=0.1, min_8bit_numel=100)
        for grad in grads[:2]:
            p.grad = distribute_tensor(grad, mesh, [placement])
            alone.grad = p.grad.to_local().clone()
            optimizer.step()
            of_alone.step()
        assert same(p.to_local().detach(), alone.detach())
        twin = nn.Parameter(p.detach().clone())
        of_twin = AdamW8bit([twin], lr=0.1, min_8bit_numel=100)
        of_twin.load_state_dict(optimizer.state_dict())
        for each, its_optimizer in ((p, optimizer), (twin, of_twin)):
            each.grad = distribute_tensor(grads[2], mesh, [placement])
            its_optimizer.step()
        assert same(p.to_local().detach(), twin.to_local().detach())
        # A gradient placed otherwise is brought to the parameter's placement.
        p.grad = distribute_tensor(grads[0], mesh, [Shard(0)])
        twin.grad = distribute_tensor(grads[0], mesh, [placement])
        optimizer.step()
        of_twin.step()
        assert same(p.to_local().detach(), twin.to_local().detach())
        optimizer.max_grad_norm = math.inf
        beside = nn.Parameter(torch.zeros(3))
        beside.grad = torch.tensor([3.0, 4.0, 0.0])
        optimizer.add_param_group({"params": [beside]})
        p.grad = distribute_tensor(grads[0], mesh, [placement])
        optimizer.step()
        torch.testing.assert_close(optimizer.last_grad_norm, (grads[0].square().sum() + 25.0).sqrt())
        optimizer.param_groups.pop()
        del optimizer.state[beside]
    by_columns = nn.Parameter(distribute_tensor(values, mesh, [Shard(1)]))
    other = AdamW8bit([by_columns], min_8bit_numel=100)
    with pytest.raises(ValueError, match="must be shaped like its parameter"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="must be whole"):
        optimizer.save_safetensors("nowhere")


def near(a: dict[str, Any], b: dict[str, Any], with_params: bool = True) -> None:
    """Gathered values that differ only where a block was cut: by a code's rounding."""
    for name in SHAPES:
        if with_params:
            assert same(a[name], b[name])
        assert same(a[f"{name}.n_steps"], b[f"{name}.n_steps"])
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            x, y = (moment(values, name, key, signed) for values in (a, b))
            assert float((x - y).abs().max()) <= 0.01 * float(y.abs().max()), (name, key)
    assert same(moment(a, "wide", "exp_avg", True), moment(b, "wide", "exp_avg", True))


def moment(values: dict[str, Any], name: str, key: str, signed: bool) -> torch.Tensor:
    """A moment of gathered values, whose scales are by rows or by blocks."""
    codes, scale = values[f"{name}.{key}_codes"], values[f"{name}.{key}_scale"]
    unit = torch.tensor(code_map(signed))[codes.long()].view(-1)
    element = torch.arange(unit.numel())
    if scale.dim() == 1:
        return unit * scale[element // BLOCK]
    length = unit.numel() // codes.shape[0]
    row = element // length
    return unit * scale[row, element // BLOCK - row * length // BLOCK]


def two_ranks() -> None:
    against_one_process()
    roundings()
    whole_state_dicts()
    residuals_are_broadcast()
    other_shardings()
