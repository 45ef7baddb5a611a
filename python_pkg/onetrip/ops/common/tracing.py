"""Who is watching a call: compilers, torch.jit.trace and dispatch modes, functorch transforms, autograd, autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch._C import _is_tracing as is_jit_tracing  # of torch.jit, less its Python half
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Path: TypeAlias = Literal["composed", "traced", "eager"]
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})
_watched_as: ContextVar[str | None] = ContextVar("onetrip_watched_as", default=None)
_times: ContextVar[int] = ContextVar("onetrip_times", default=1)


def is_autocasting(x: Tensor) -> bool:
    """Whether autocast is enabled for x's device. torch has none of meta, and raises when asked."""
    device_type = "cpu" if x.is_cpu else x.device.type  # is_cpu is read in a fifth of the time
    return not x.is_meta and torch.is_autocast_enabled(device_type)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """autocast's dtype where it is enabled for x's device."""
    return torch.get_autocast_dtype(x.device.type) if is_autocasting(x) else None


def is_traced(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the call must be visible to torch's dispatcher: compilers, torch.jit.trace (whose graph would hold the
    allocation of what a kernel writes, and not the kernel), fake, meta and wrapped tensors (in any role: a kernel given
    the address of one would read null), dispatch modes."""
    if torch.compiler.is_compiling():
        return True
    if x.is_meta or type(x) not in _PLAIN_TYPES:
        return True
    for tensor in others:
        if type(tensor) not in _PLAIN_TYPES:
            return True
    return is_jit_tracing() or is_in_torch_dispatch_mode()


def path_of(x: Tensor, *others: Tensor | None) -> Path:
    """How a call with these operands computes.

    "composed": by torch's own operators, under transforms, whether the call is traced or not. The operators of traced
    calls do not serve transforms: forward-mode differentiation would give a tangent of zero without an error.
    "traced": by these operators, of torch.library. "eager": by an autograd.Function or a kernel.
    """
    return "composed" if is_transformed() else "traced" if is_traced(x, *others) else "eager"


def path_of_plain_tensors() -> Path:
    """The same of tensors that native.read knows, outside of compilers."""
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:  # is_transformed, inline
        return "composed"
    return "traced" if is_jit_tracing() or is_in_torch_dispatch_mode() else "eager"


@contextmanager
def watched(device_type: str) -> Iterator[None]:
    """Inside the with block dispatch modes and fake tensors see the operators of an eager call on this type of device.

    Concerns attention: compilers and other dispatch modes see it composed of torch's own operators, which allocate and
    move more. Tensors are on the CPU in any case. An ordinary call does not ask.
    """
    token = _watched_as.set(device_type)
    try:
        yield
    finally:
        _watched_as.reset(token)


def watched_as() -> str | None:
    """The device type of watched(); None outside of it."""
    return None if torch.compiler.is_compiling() else _watched_as.get()


@contextmanager
def standing_for(times: int) -> Iterator[None]:
    """The calls inside the with block stand for so many alike, as measure.traffic counts them."""
    token = _times.set(times)
    try:
        yield
    finally:
        _times.reset(token)


def times() -> int:
    """How many calls alike one stands for."""
    return _times.get()


def is_recorded() -> bool:
    """Whether torch.jit.trace, torch.export or make_fx records a traced call. Their graphs may run where gradients are
    wanted, if none are now; torch.compile makes another graph then."""
    if torch.compiler.is_dynamo_compiling():
        # The flag of is_exporting(), which is true in every compile up to torch 2.11. torch 2.6 has none.
        return getattr(torch.compiler, "_is_exporting_flag", False)
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return is_jit_tracing() or get_proxy_mode() is not None


def reject_onnx_export() -> None:
    """Raise RuntimeError in the middle of torch.onnx.export. Called where an operator enters a graph."""
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            "torch.onnx.export: onetrip's operators have no ONNX form: call onetrip.unpatch_model(model) first"
        )


def is_transformed() -> bool:
    """Whether functorch transforms (torch.func) or forward-mode differentiation are in force: no kernel serves them."""
    return _is_in_functorch() or forward_ad._current_level >= 0


def _is_in_functorch() -> bool:
    return peek_interpreter_stack() is not None


# Dynamo calls it when it traces a call of it: torch 2.6 cannot trace peek_interpreter_stack, and torch 2.13 makes an
# object of its None. As torch.compiler.assume_constant_result does, which would import Dynamo.
_is_in_functorch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def have_storage(*tensors: Tensor | None) -> bool:
    """Whether kernels can read them; batched gradients (is_grads_batched, vectorised jacobians) have no storage."""
    return all(tensor is None or torch._C._has_storage(tensor) for tensor in tensors)


def refuse_double_backward(family: str) -> None:
    """Raises where the gradients being computed are to be differentiated again.

    Called by the first backward and not left to once_differentiable: that hangs its error on a node that leads to no
    input, and torch.autograd.grad leaves such a node, and with it the whole term, out.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"onetrip: gradients of {family} operators cannot be differentiated again (create_graph=True); "
            "use torch's own operators there (onetrip.unpatch_model)"
        )
