"""Gradient release: every block of a model steps during backward, and its gradients are freed at once."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from .adam import Adam8bit


def enable_gradient_release(model: nn.Module, optimizer: Adam8bit) -> GradientRelease:
    """From now on a backward pass steps each block of the model when its last gradient is there, and frees them.

    So only a block's gradients exist at a time, instead of 2 or 4 bytes for every parameter. A block is an entry of the
    outermost nn.ModuleList and nn.Sequential, or the parameters that a module outside of them holds itself. The results
    are those of a step after backward, bit for bit. Go on calling optimizer.step() and zero_grad(): they step the
    blocks of which a parameter got no gradient.

    Every backward pass is a step: not for gradient accumulation. torch.utils.checkpoint with use_reentrant=True must
    not hold a module that is called twice. Optimizers' hooks run for optimizer.step() alone.

    Raises TypeError for an optimizer of another class; ValueError where it clips (max_grad_norm needs all gradients at
    once), where it has none of the model's parameters, and for several processes, which would have to exchange the
    gradients first; RuntimeError at a step with a GradScaler, which must see all gradients as well.
    """
    function = "enable_gradient_release"
    if not isinstance(optimizer, Adam8bit):
        raise TypeError(f"{function}: optimizer must be AdamW8bit or Adam8bit, got {type(optimizer).__name__}")
    if optimizer.max_grad_norm is not None:
        raise ValueError(f"{function}: optimizer.max_grad_norm must be None, got {optimizer.max_grad_norm}")
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if has_group and (n_processes := torch.distributed.get_world_size()) > 1:
        raise ValueError(f"{function}: must be called in one process alone, got {n_processes} processes")
    blocks = [_Block(optimizer, params) for params in _blocks(model, optimizer)]
    if not blocks:
        raise ValueError(f"{function}: optimizer must have parameters of the model, got none of them")
    return GradientRelease(optimizer, blocks)


class GradientRelease:
    """What enable_gradient_release has begun."""

    def __init__(self, optimizer: Adam8bit, blocks: list[_Block]) -> None:
        self._handles: list[Any] = [optimizer.register_step_pre_hook(_refuse_scaler)]
        for block in blocks:
            for p in block.params:
                self._handles.append(p.register_post_accumulate_grad_hook(block.on_gradient))

    def remove(self) -> None:
        """Backward passes leave their gradients for optimizer.step() again."""
        while self._handles:
            self._handles.pop().remove()


def _refuse_scaler(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "grad_scale", None) is not None:
        raise RuntimeError("step: a GradScaler must not be used with enable_gradient_release, got its grad_scale")


def _blocks(model: nn.Module, optimizer: Adam8bit) -> list[list[Tensor]]:
    """The optimizer's parameters, by the block that holds them first."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, list[Tensor]] = {}

    def walk(module: nn.Module, block: nn.Module | None) -> None:
        for p in module._parameters.values():
            if p is not None and id(p) in known:
                known.remove(id(p))
                found.setdefault(id(module if block is None else block), []).append(p)
        for child in module.children():
            is_entry = isinstance(module, (nn.ModuleList, nn.Sequential))
            walk(child, block if block is not None else child if is_entry else None)

    walk(model, None)
    return list(found.values())


class _Block:
    """Parameters that step together, by an optimizer of their own, whose states are those of the given one."""

    def __init__(self, optimizer: Adam8bit, params: list[Tensor]) -> None:
        self.params = params
        self._optimizer, self._own = optimizer, copy.copy(optimizer)
        own = {id(p) for p in params}
        self._members = [[p for p in group["params"] if id(p) in own] for group in optimizer.param_groups]

    def on_gradient(self, _: Tensor) -> None:
        if all(p.grad is not None or not p.requires_grad for p in self.params):
            self._step()
            for p in self.params:
                p.grad = None

    def _step(self) -> None:
        state, groups = self._optimizer.state, self._optimizer.param_groups
        self._own.state = defaultdict(dict, {p: state[p] for p in self.params if p in state})
        self._own.param_groups = [
            {**group, "params": members} for group, members in zip(groups, self._members, strict=False) if members
        ]
        self._own.step()
        state.update(self._own.state)
