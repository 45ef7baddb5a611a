"""Who provides the operators: eager PyTorch, torch.compile, and every backend of onetrip."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import onetrip
import torch
from onetrip.ops import backends

from .suite import Case, Operator, Outputs, Provider

EAGER = Provider("torch eager", lambda operator: operator.eager)


_MOST_REFERENCE_ELEMENTS = 1 << 23


def _onetrip(backend: str) -> Provider:
    def unavailable(device: torch.device) -> str:
        if backend == "triton" and device.type == "cpu":
            return "on the CPU it is only interpreted: a time would mean nothing"
        return backends.unavailable_reason(backend, device.type, device.index or 0)

    def scope() -> AbstractContextManager[object]:
        return onetrip.use_backend(backend)

    return Provider(f"onetrip {backend}", lambda operator: operator.fused, unavailable, scope)


def own_provider(device: torch.device) -> Provider:
    """onetrip with the backend that `auto` picks."""
    return _onetrip(onetrip.available_backends(device)[0])


def compiled(mode: str | None = None) -> Provider:
    def bind(operator: Operator) -> Callable[..., Outputs]:
        torch._dynamo.reset()  # a shape that was seen before must not turn this one into a dynamic one
        return torch.compile(operator.eager, dynamic=False, mode=mode)

    def unavailable(device: torch.device) -> str:
        return "" if mode is None or device.type == "cuda" else f"mode {mode} is for CUDA"

    return Provider("torch.compile" if mode is None else f"torch.compile {mode}", bind, unavailable)


def providers(case: Case, device: torch.device, quick: bool = False) -> list[Provider]:
    own = own_provider(device)
    if quick or not case.full or case.dtype != torch.float32:
        return [EAGER, own]
    # With CUDA graphs a second call would overwrite the outputs of the first, which backward still needs.
    found = [EAGER, compiled(), compiled("max-autotune-no-cudagraphs"), own]
    others = [name for name in backends.BACKENDS if f"onetrip {name}" != own.name]
    if case.n_rows * case.n_cols > _MOST_REFERENCE_ELEMENTS:  # seconds a call: Philox in plain PyTorch
        others.remove("reference")
    return found + [_onetrip(name) for name in others]
