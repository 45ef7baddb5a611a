"""Operators of torch.library, which traced calls put into graphs. Each family registers its own (*_autograd.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .tracing import refuse_double_backward, reject_onnx_export

library = torch.library.Library("onetrip", "FRAGMENT")


def filled(like: Tensor, tensors: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """The tensors, with an empty one for None: operators return nothing else."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def unfilled(tensors: Iterable[Tensor], wants: Iterable[object]) -> tuple[Tensor | None, ...]:
    """The inverse: None for tensors that were not wanted."""
    return tuple(tensor if wanted else None for tensor, wanted in zip(tensors, wants, strict=True))


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operator without gradients. run computes it on every device; fake allocates what run returns."""

    def fake_in_graph(*arguments: Any) -> Any:
        reject_onnx_export()  # torch.onnx.export(dynamo=True): Dynamo does not trace this check in the public functions
        return fake(*arguments)

    name, _, _ = schema.partition("(")
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"onetrip::{name}", fake_in_graph, lib=library)


def register_gradients(
    name: str, save: Callable[..., None], backward: Callable[..., Any], *, twice_differentiable: bool = False
) -> None:
    """save(ctx, inputs, output) and backward(ctx, *gradients), as those of an autograd.Function.
    Unless twice_differentiable, backward raises RuntimeError where its gradients are to be differentiated again."""

    def backward_once(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_double_backward(name)
        return backward(ctx, *grads)

    run = backward if twice_differentiable else backward_once
    torch.library.register_autograd(f"onetrip::{name}", run, setup_context=save, lib=library)
