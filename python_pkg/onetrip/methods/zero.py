"""A step of DeepSpeed's ZeRO: its engine owns model, optimizer and backward."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch import Tensor

from .optimizers import LEARNING_RATE
from .trainer import Trainer


def _single_process_group(device: torch.device) -> None:
    """What DeepSpeed reads of a launcher, for one process on this device and on a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # DeepSpeed takes the local rank for the number of the device.
    for name, value in (("RANK", 0), ("LOCAL_RANK", device.index or 0), ("WORLD_SIZE", 1), ("MASTER_PORT", port)):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"


class ZeroTrainer(Trainer):
    """Trainer whose backward and update are DeepSpeed's, on one device."""

    def _make_optimizer(self) -> Any:
        if self.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        _single_process_group(self.device)
        import deepspeed

        optimizer = super()._make_optimizer()
        zero: dict[str, Any] = {"stage": self.recipe.zero_stage}
        if self.recipe.offload:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
            trained = [p for p in self.model.parameters() if p.requires_grad]
            optimizer = DeepSpeedCPUAdam(trained, lr=LEARNING_RATE, adamw_mode=True)
        config = {
            "train_micro_batch_size_per_gpu": self.recipe.batch_size,
            "gradient_accumulation_steps": self.recipe.accumulation,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": next(self.model.parameters()).dtype == torch.bfloat16},
        }
        engine, optimizer, _, _ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)
        self._engine = engine
        return optimizer

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with self._autocast():
            return self._engine(**batch).loss

    def _backward(self, loss: Tensor, weight: float) -> None:
        # The engine divides by the number of passes and must be stepped after each.
        self._engine.backward(loss * (weight * self.recipe.accumulation))
        self._engine.step()

    def _update(self) -> None:
        """The engine's step after the last pass has done it."""

    def close(self) -> None:
        super().close()
        self._engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
