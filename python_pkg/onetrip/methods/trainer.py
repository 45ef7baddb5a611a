"""One way of training at work: its steps on the clock, its bytes counted."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import patch_model
from ..anatomy.models import IGNORED_LABEL
from ..measure import now, optimizer_state_bytes, peak_bytes, saved_bytes, storage_bytes
from ..optim import enable_gradient_release
from ..patching import PATTERNS
from .catalog import Recipe
from .data import Batch, Data
from .optimizers import OPTIMIZERS


def _enable_checkpointing(model: Any) -> None:
    """Under the name that this release of transformers has for it: 5.x calls it activation checkpointing."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    enable = getattr(model, f"{name}_checkpointing_enable")
    enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})


@contextmanager
def _matmul_precision(wanted: str) -> Iterator[None]:
    """Set torch's float32 matmul precision within the block: the baseline, in the same process, keeps its own."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted or before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Trainer:
    """A model of its own on its way through the training, after a recipe.

    source: the model to copy, on the CPU. Dropout is drawn anew at every step from (seed, number of the step), so that
    it does not matter who else trains in between.
    """

    def __init__(self, source: nn.Module, recipe: Recipe, data: Data, device: torch.device, seed: int) -> None:
        self.recipe, self.data, self.device, self.seed = recipe, data, device, seed
        self.n_steps = 0
        self.patched_sites: int | None = None
        self._report: Any = None
        self._allocated_before = self._allocated()
        self.model = self._prepared(copy.deepcopy(source).to(device))
        self.optimizer: Any = self._make_optimizer()
        self._forward: Any = torch.compile(self.model) if recipe.compiled else self.model
        self._scaler = torch.amp.GradScaler("cuda") if recipe.autocast == "float16" else None
        self._batches = data.batches(recipe)

    def _prepared(self, model: nn.Module) -> nn.Module:
        anything: Any = model.train()
        # Keys and values that only generation reads: checkpointing turns them off, so the baseline does without too.
        anything.config.use_cache = False
        if self.recipe.attention:
            anything.set_attn_implementation(self.recipe.attention)
        if self.recipe.lora:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(target_modules="all-linear", r=8, lora_alpha=16)
            torch.manual_seed(self.seed)
            anything = get_peft_model(anything, config)
        if self.recipe.checkpointing:
            _enable_checkpointing(anything)
        if self.recipe.patched:
            patterns = (*PATTERNS, "linear_cross_entropy") if self.recipe.linear_loss else PATTERNS
            self._report = patch_model(anything, patterns=patterns)
            self.patched_sites = len(self._report.patched)
        return anything

    def _make_optimizer(self) -> Any:
        optimizer = OPTIMIZERS[self.recipe.optimizer]([p for p in self.model.parameters() if p.requires_grad])
        if self.recipe.gradient_release:
            enable_gradient_release(self.model, optimizer)
        return optimizer

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _autocast(self) -> AbstractContextManager[object]:
        if not self.recipe.autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.recipe.autocast))

    def _to_device(self, batch: Batch) -> Batch:
        wanted, is_async = next(self.model.parameters()).dtype, self.recipe.pin_memory
        dtypes = {name: wanted if t.is_floating_point() else t.dtype for name, t in batch.items()}
        return {name: t.to(self.device, dtypes[name], non_blocking=is_async) for name, t in batch.items()}

    def loss(self, batch: Batch) -> Tensor:
        """The training loss of a batch on the device, with its graph."""
        with self._autocast():
            return self._forward(**batch).loss

    def train_step(self) -> None:
        """One step of the optimizer, from fetching its samples on."""
        batches = [next(self._batches) for _ in range(self.recipe.accumulation)]
        # Mean losses of parts make the whole's mean when weighted by how many labels each part has.
        labels = [int((batch["labels"] != IGNORED_LABEL).sum()) for batch in batches] if len(batches) > 1 else [1]
        torch.manual_seed(self.seed + self.n_steps)
        with _matmul_precision(self.recipe.matmul_precision):
            for batch, n_labels in zip(batches, labels, strict=True):
                loss = self.loss(self._to_device(batch))
                self._empty_cache()
                self._backward(loss, n_labels / sum(labels))
            self._update()
        self.n_steps += 1

    def _empty_cache(self) -> None:
        """Where and how transformers' Trainer does it with torch_empty_cache_steps."""
        if self.recipe.empty_cache_steps and self.n_steps % self.recipe.empty_cache_steps == 0:
            gc.collect()
            torch.cuda.empty_cache()

    def _backward(self, loss: Tensor, weight: float) -> None:
        loss = loss if weight == 1.0 else loss * weight
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _update(self) -> None:
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def timed_step(self) -> float:
        """Seconds of one train_step; a CUDA device is waited for."""
        start = now(self.device)
        self.train_step()
        return now(self.device) - start

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss of samples that no step sees, with dropout off, in the weights' dtype."""
        self.model.eval()
        total = n = 0.0
        for batch in self.data.held_out_batches(self.recipe.batch_size):
            n_labels = int((batch["labels"] != IGNORED_LABEL).sum())
            total += n_labels * float(self.model(**self._to_device(batch)).loss)
            n += n_labels
        self.model.train()
        return total / n

    def _inputs(self) -> Batch:
        return self._to_device(next(self._batches))

    def saved_bytes(self) -> int:
        """Bytes that the graph of one forward pass keeps for backward: see measure.saved_bytes."""
        gc.collect()
        batch = self._inputs()
        owned = [*self.model.parameters(), *self.model.buffers(), *batch.values()]
        return saved_bytes(lambda: self.loss(batch), owned)

    def held_bytes(self) -> int:
        """Bytes that stay from step to step: weights, buffers, the optimizer's states. After the first step."""
        if self.device.type == "cuda":
            return self._allocated() - self._allocated_before
        own = [*self.model.parameters(), *self.model.buffers()]
        return storage_bytes(own) + self.state_bytes()

    def state_bytes(self) -> int:
        return optimizer_state_bytes(self.optimizer)

    def peak_bytes(self) -> int:
        """The most memory that training held at once: what stays, and the peak of a step above it."""
        gc.collect()
        held = self.held_bytes()
        return held + peak_bytes(self.train_step, self.device)

    def fallback_calls(self) -> int:
        """Calls of patched modules that ran their original code."""
        return sum(fallbacks for _, fallbacks in self._report.calls().values()) if self._report is not None else 0

    def close(self) -> None:
        """Ends the processes that load data."""
        shut_down = getattr(self._batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
