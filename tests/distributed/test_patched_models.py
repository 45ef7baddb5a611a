"""Patched models and AdamW8bit in several gloo processes: DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import optim_distributed
import pytest
import torch
from patching_distributed import ddp_with_adamw8bit, every_wrapper, fsdp2_with_adamw8bit, tensor_parallel

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch (2.6) runs on accelerators only"
    ),
]


def test_two_processes_train_as_one() -> None:
    """DDP and FSDP2, patched before and after wrapping. FSDP gathers each layer's weights in hooks."""
    optim_distributed.run(2, every_wrapper)


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_with_adamw8bit(world: int) -> None:
    optim_distributed.run(world, ddp_with_adamw8bit)


@pytest.mark.parametrize("world", [2, 4])
def test_fsdp2_with_adamw8bit(world: int, tmp_path: Path) -> None:
    """Float32, mixed precision and offloading to the CPU; checkpoints."""
    optim_distributed.run(world, fsdp2_with_adamw8bit, str(tmp_path / "checkpoint"))


@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel(world: int) -> None:
    """Colwise and rowwise linear layers around fused blocks; norms and residual sums on DTensors."""
    optim_distributed.run(world, tensor_parallel)
