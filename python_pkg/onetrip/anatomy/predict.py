"""The memory and the traffic of a training step before it runs: fake tensors, which have no data, go through it.

torch's MemTracker watches what they allocate, measure.TrafficMode what the operators read and write. onetrip's
operators run as torch.library operators there, whose fake outputs are what the kernels allocate. A model of any size
can be examined, for a GPU that is not present: the fake tensors are on the CPU, and operators that CUDA computes in
another way than the CPU are replaced (see _AsOnGpu).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..measure import optimizer_state_bytes, tensor_bytes
from ..measure.traffic import OPTIMIZER, OUTSIDE, Traffic, TrafficMode
from ..ops.common.tracing import watched
from ..optim import Adam8bit
from ..optim.state import new_state, uses_8bit
from .bytes import StepBytes
from .saved import SavedActivations, saved_activations


class _NoModules:
    """In place of MemTracker's ModTracker: its hooks on modules would keep patched blocks from their fused path, and
    peaks of every module take time of the square of their number."""

    @property
    def is_bw(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def register_user_hooks(self, *hooks: object) -> None: ...

    def clear_user_hooks(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


def _tracker(model: nn.Module, *others: object) -> Any:
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker._mod_tracker = _NoModules()  # type: ignore[assignment]
    for parameter in model.parameters():
        if not parameter.requires_grad:  # else the tracker asks for a hook of its gradient
            tracker._param_to_grad_hook_handles[parameter] = (
                RemovableHandle(OrderedDict()),
                RemovableHandle(OrderedDict()),
            )
    tracker._track_module_params_and_buffers(model)
    tracker.track_external(*others)  # type: ignore[arg-type]
    return tracker


class _AsOnGpu(TorchFunctionMode):
    """Operators that keep something else for backward on CUDA than on the CPU, as CUDA computes them.

    Dropout: a mask of bytes and not of numbers. Attention: the flash kernel where it can (half precision, no mask),
    else the memory-efficient one, neither of which keeps scores.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention_on_gpu(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            return _dropout_on_gpu(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout_on_gpu(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    return torch.ops.aten.native_dropout(input, p, True)[0]


def _attention_on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.dtype != torch.float32 and attn_mask is None and query.shape[-1] <= 256:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if key.shape[1] != query.shape[1]:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def fake_copy(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """The model (on the meta device, as a rule), its parameters and buffers replaced with fake ones on the CPU; those
    of a floating dtype get this one, as by model.to(dtype). Shared ones stay shared."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            wanted = dtype if tensor.is_floating_point() else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=wanted, device="cpu")
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    with mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = fake(tensor)  # type: ignore[assignment]
    return model


def _take_a_first_step(optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimizer the states that it has from its first step on."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(optimizer, Adam8bit):
                optimizer.state[p] = new_state(p, uses_8bit(group, p))
            else:
                p.grad = torch.empty_like(p)
    if not isinstance(optimizer, Adam8bit):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _count_fused_step(optimizer: Adam8bit, traffic: Traffic) -> None:
    """One launch reads parameters, gradients and states, and writes parameters and states."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    kept = tensor_bytes(trained) + optimizer_state_bytes(optimizer)
    read = kept + tensor_bytes(p.grad for p in trained if p.grad is not None)
    traffic.add(OPTIMIZER, "onetrip::adam", OUTSIDE, read, kept)


def resident_bytes(model: nn.Module, make_optimizer: Callable[..., torch.optim.Optimizer], mode: FakeTensorMode) -> int:
    """Weights, gradients and optimizer states of a model of fake tensors: what any step holds at least."""
    with mode:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = make_optimizer(trained)
        _take_a_first_step(optimizer)
        return tensor_bytes(model.parameters()) + tensor_bytes(trained) + optimizer_state_bytes(optimizer)


def predict(
    model: nn.Module,
    make_batch: Callable[[], Mapping[str, Tensor]],
    make_optimizer: Callable[..., torch.optim.Optimizer],
    mode: FakeTensorMode,
    *,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    device_type: str = "cpu",
    autocast: torch.dtype | None = None,
    peak_only: bool = False,
) -> StepBytes:
    """The bytes of one training step of a model of fake tensors (see fake_copy), on a device of this type.

    make_optimizer: takes parameters. context: as Variant's. Fused steps of optimizers (Adam8bit) allocate nothing;
    what libraries take for themselves (a CUDA context, workspaces of matrix products) is not seen. autocast: dtype of
    torch.autocast in forward, by its rules for a CPU: fake tensors are on one. peak_only: saved activations are left
    out, for half the time.
    """
    as_on_device = _AsOnGpu() if device_type == "cuda" else nullcontext()
    with context(), watched(device_type), mode, as_on_device:
        batch = make_batch()
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        _take_a_first_step(optimizer)
        inputs = [t for t in batch.values() if isinstance(t, Tensor)]

        def loss() -> Tensor:
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                found: Tensor = model(**batch).loss
            return found

        loss()  # a patched model's first forward links sums to the norms that read them
        saved = SavedActivations()
        if not peak_only:
            not_counted = [*model.parameters(), *model.buffers(), *inputs]
            saved = saved_activations(loss, not_counted, model)
        tracker = _tracker(model, optimizer, *inputs)
        counted = TrafficMode()
        with tracker, counted:
            loss().backward()
            gradients = tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)
            with counted.optimizer():
                if isinstance(optimizer, Adam8bit):
                    _count_fused_step(optimizer, counted.traffic)
                else:
                    optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        at_peak = {str(getattr(kind, "value", kind)): n for kind, n in snapshot.items()}
        peak = at_peak.pop("Total")
        return StepBytes(
            weights=tensor_bytes(model.parameters()),
            buffers=tensor_bytes(model.buffers()),
            gradients=gradients,
            optimizer_states=optimizer_state_bytes(optimizer),
            batch=tensor_bytes(inputs),
            saved=saved,
            peak=peak,
            at_peak=at_peak,
            traffic=counted.traffic,
        )
