"""Patched models and AdamW8bit in several gloo processes: DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import optim_distributed
import pytest
import torch
from patching_distributed import (
    callback_around_sharding,
    every_wrapper,
    fsdp2_and_tensor_parallel,
    fsdp2_with_adamw8bit,
    tensor_parallel,
    tensor_parallel_bert,
)

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch (2.6) runs on accelerators only"
    ),
]


of_two_and_four = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])


@of_two_and_four
def test_processes_train_as_one(world: int) -> None:
    """DDP and FSDP2, patched before and after wrapping. FSDP gathers each layer's weights in hooks."""
    optim_distributed.run(world, every_wrapper)


def test_a_callback_patches_before_fsdp2_shards() -> None:
    optim_distributed.run(2, callback_around_sharding)


@of_two_and_four
def test_fsdp2_with_adamw8bit(world: int, tmp_path: Path) -> None:
    """Float32, mixed precision and offloading to the CPU; checkpoints."""
    optim_distributed.run(world, fsdp2_with_adamw8bit, str(tmp_path / "checkpoint"))


@of_two_and_four
def test_tensor_parallel(world: int) -> None:
    """Colwise and rowwise linear layers around fused blocks; norms and residual sums on DTensors."""
    optim_distributed.run(world, tensor_parallel)


def test_tensor_parallel_after_each_sum_a_norm() -> None:
    """BERT: biases in split layers, norms of sums in one module, sequence parallelism. DTensors as operands."""
    optim_distributed.run(2, tensor_parallel_bert)


def test_fsdp2_and_tensor_parallel(tmp_path: Path) -> None:
    optim_distributed.run(4, fsdp2_and_tensor_parallel, str(tmp_path / "checkpoint"))
