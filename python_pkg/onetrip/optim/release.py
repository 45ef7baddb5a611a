"""Gradient release: every block of a model steps during backward, and its gradients are freed at once."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from .adam import Adam8bit

_NAME = "enable_gradient_release"


def enable_gradient_release(model: nn.Module, optimizer: Adam8bit) -> GradientRelease:
    """From now on a backward pass steps each block as soon as all its gradients are there, and then frees them.

    So about one block's gradients exist at a time, instead of 2 or 4 bytes for every parameter. A block is an entry of
    the outermost nn.ModuleList or nn.Sequential, or the parameters that a module outside of them holds itself. The
    results are those of a step after backward, bit for bit. Go on calling optimizer.step() and zero_grad() after each
    backward pass: step() updates what is left, blocks where some parameter got no gradient.

    Any backward pass steps what it reaches, so there must be one between two calls of step(): not for gradient
    accumulation, nor for weights used in two checkpoints with use_reentrant=True. A second gradient raises
    RuntimeError. So does what has to see all gradients before a step: max_grad_norm, and, once its blocks have stepped,
    a GradScaler or DistributedDataParallel.

    Raises TypeError for an optimizer of another class; ValueError where it clips, where it has no parameter of the
    model that takes a gradient, and under torch.distributed.
    """
    if not isinstance(optimizer, Adam8bit):
        raise TypeError(f"{_NAME}: optimizer must be AdamW8bit or Adam8bit, got {type(optimizer).__name__}")
    if optimizer.max_grad_norm is not None:
        raise ValueError(f"{_NAME}: optimizer.max_grad_norm must be None, got {optimizer.max_grad_norm}")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ValueError(f"{_NAME}: must be called without torch.distributed, got a process group")
    blocks = [_Block(optimizer, params) for params in _blocks(model, optimizer)]
    if not blocks:
        raise ValueError(f"{_NAME}: optimizer must have parameters of the model, got none of them")
    return GradientRelease(optimizer, blocks)


class GradientRelease:
    """Handle: remove() ends gradient release."""

    def __init__(self, optimizer: Adam8bit, blocks: list[_Block]) -> None:
        self._blocks = blocks
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._check),
            optimizer.register_step_post_hook(self._begin),
        ]
        for block in blocks:
            for p in block.params:
                self._handles.append(p.register_post_accumulate_grad_hook(block.on_gradient))

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise RuntimeError(f"step: a GradScaler must not be used with {_NAME}")
        if any(block.has_stepped and any(p.grad is not None for p in block.params) for block in self._blocks):
            raise RuntimeError(
                f"step: gradients must come from backward alone under {_NAME}, got some of a stepped block"
            )

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for block in self._blocks:
            block.begin()

    def remove(self) -> None:
        """Backward passes leave their gradients for optimizer.step() again."""
        while self._handles:
            self._handles.pop().remove()
        self._blocks = []  # each keeps the optimizer and the parameters alive


def _blocks(model: nn.Module, optimizer: Adam8bit) -> list[list[Tensor]]:
    """The optimizer's parameters that take gradients, by the block that holds them first, and by device: each device
    has a thread of its own in backward."""
    left = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    found: defaultdict[Any, list[Tensor]] = defaultdict(list)

    def walk(module: nn.Module, block: nn.Module | None) -> None:
        """block: that the module belongs to; None outside of lists."""
        owner = module if block is None else block
        for p in module._parameters.values():
            if p is not None and id(p) in left:
                left.remove(id(p))
                found[id(owner), p.device].append(p)
        for child in module.children():
            walk(child, child if block is None and isinstance(module, (nn.ModuleList, nn.Sequential)) else block)

    walk(model, None)
    return list(found.values())


class _Block:
    """Parameters that step together, by a copy of the optimizer: its tables are its own, its states the optimizer's."""

    def __init__(self, optimizer: Adam8bit, params: list[Tensor]) -> None:
        self.params = params
        self._ids = frozenset(map(id, params))
        self._optimizer, self._own = optimizer, copy.copy(optimizer)
        self.begin()

    def begin(self) -> None:
        """Before a backward pass."""
        self.has_stepped = False
        self._waits_for = set(self._ids)

    def on_gradient(self, p: Tensor) -> None:
        if self.has_stepped:
            raise RuntimeError(
                f"{_NAME}: a parameter must get one gradient between two calls of optimizer.step(), got a second one; "
                "gradient accumulation, or a weight in two reentrant checkpoints"
            )
        if self._optimizer.max_grad_norm is not None:
            raise RuntimeError(f"{_NAME}: optimizer.max_grad_norm must be None, got {self._optimizer.max_grad_norm}")
        self._waits_for.discard(id(p))
        if not self._waits_for:
            self._step()
            self.has_stepped = True
            for p in self.params:
                p.grad = None

    def _step(self) -> None:
        state = self._optimizer.state
        self._own.state = defaultdict(dict, {p: state[p] for p in self.params if p in state})
        self._own._indices = [i for i, p in enumerate(self._optimizer._every_parameter()) if id(p) in self._ids]
        members = [[p for p in group["params"] if id(p) in self._ids] for group in self._optimizer.param_groups]
        self._own.param_groups = [
            {**group, "params": own} for group, own in zip(self._optimizer.param_groups, members, strict=True) if own
        ]
        self._own.step()
        state.update(self._own.state)
