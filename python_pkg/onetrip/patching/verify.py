"""Verification: compares a rewritten forward with the original, on clones, before a site is kept.

Compares the output and every gradient, with dropout off and on; with dropout on, the original uses the operator's mask.
Errors are measured against the original in float64, and may be at most twice the original's. Also compares the output's
dtype under autocast. Runs clones (clones.py), so that the model does not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import ops
from ..ops.common.rng import dropout_scale

RNG = (20260101, 0)
"""(seed, offset) of verification with dropout."""
_ERROR_RATIO = 2.0
_SLACK_IN_EPS = 8.0
"""Absolute tolerance in units of the dtype's epsilon times the largest value: sums may run in another order."""

_Outcome = list[tuple[str, Tensor | None]]
"""Named outputs and gradients."""


class VerificationError(Exception):
    """The rewritten forward and the original compute different results."""


def kind_of(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype of the module's computation. Of meta modules the CPU: clone gives them values there."""
    parameters = list(module.parameters())
    dtype = next((parameter.dtype for parameter in parameters if parameter.is_floating_point()), torch.float32)
    is_somewhere = parameters and not parameters[0].is_meta
    return parameters[0].device if is_somewhere else torch.device("cpu"), dtype


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Gradients on, autocast and warnings off, whatever the caller has set. Restores the random state."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def reject_fallback(module: nn.Module) -> None:
    """Replaces count_fallback: comparing the original with itself would prove nothing."""
    raise VerificationError("the rewritten forward fell back to the original")


class MaskedDropout(TorchFunctionMode):
    """In this mode, every active dropout uses the mask of the fused operators."""

    def __init__(self, columns_before: int = 0) -> None:
        """columns_before: columns of each of the operator's rows that precede those of the dropout's input (sinks)."""
        super().__init__()
        self.columns_before = columns_before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.dropout:
            return func(*args, **kwargs)
        options = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        x, p = options["input"], options.get("p", 0.5)
        if not options.get("training", True):
            return x
        *leading, n_cols = x.shape
        keep = ops.dropout_keep_mask((*leading, n_cols + self.columns_before), p, RNG, x.device)
        keep = keep[..., self.columns_before :]
        return torch.where(keep, x * dropout_scale(p), torch.zeros_like(x))


def drawn(inputs: Mapping[str, Tensor | tuple[int, ...]]) -> dict[str, Tensor]:
    """Normal random numbers, the same at every call, in place of shapes."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: x if isinstance(x, Tensor) else torch.randn(x, generator=generator, device="cpu")
        for name, x in inputs.items()
    }


def check_function(
    fused: Callable[..., Any],
    unfused: Callable[..., Any],
    inputs: Mapping[str, Tensor | tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    mode: str = "",
    make_module: Callable[[torch.dtype | None], nn.Module] | None = None,
) -> None:
    """Raise VerificationError unless two functions of these tensors, cast to dtype, have equal outputs and gradients.

    They return a tensor, or several. inputs: by name; a shape stands for normal random numbers. mode: for the message.
    make_module: makes a module of a dtype (None: its own),
    which is their first argument; the gradients of its parameters are compared, too.
    """

    given = drawn(inputs)

    def outcome(compute: Callable[..., Any], dtype: torch.dtype, module_dtype: torch.dtype | None = None) -> _Outcome:
        leaves = {name: x.detach().to(device, dtype).requires_grad_() for name, x in given.items()}
        module = None if make_module is None else make_module(module_dtype)
        found = compute(*leaves.values()) if module is None else compute(module, *leaves.values())
        outputs = {"output": found} if isinstance(found, Tensor) else {f"output {i}": y for i, y in enumerate(found)}
        if module is not None:
            leaves |= {name: p for name, p in module.named_parameters() if p.requires_grad}
        # Random gradients of the outputs, equal in every dtype.
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(y.shape, generator=generator, device="cpu").bfloat16() for y in outputs.values()]
        cotangents = [each.to(y.device, y.dtype) for each, y in zip(drawn, outputs.values(), strict=True)]
        gradients = torch.autograd.grad([*outputs.values()], [*leaves.values()], cotangents, allow_unused=True)
        return [
            *((name, y.detach()) for name, y in outputs.items()),
            *((f"gradient of {name}", each) for name, each in zip(leaves, gradients, strict=True)),
        ]

    expected = outcome(unfused, dtype)
    try:
        truth = outcome(unfused, torch.float64, torch.float64)
    except Exception:  # the original does not support float64
        truth = expected
    _check_outcomes(outcome(fused, dtype), expected, truth, mode)


def _check_outcomes(actual: _Outcome, expected: _Outcome, truth: _Outcome, mode: str) -> None:
    """Raise VerificationError unless ours have the original's dtypes and shapes, and errors like the original's.

    mode: for the message.
    """
    if len(actual) != len(expected):
        raise VerificationError(f"{len(actual)} outputs and gradients{mode} for {len(expected)}")
    for (name, ours), (_, theirs), (_, exact) in zip(actual, expected, truth, strict=True):
        if ours is None or theirs is None or exact is None:
            if ours is not theirs:
                raise VerificationError(f"{name}{mode}: one has none")
            continue
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            raise VerificationError(f"{name}{mode}: {_kind(ours)} for {_kind(theirs)}")
        exact = exact.double()
        error, original_error = _largest(ours - exact), _largest(theirs - exact)
        slack = _SLACK_IN_EPS * torch.finfo(ours.dtype).eps * max(_largest(exact), 1e-3)
        if not error <= _ERROR_RATIO * original_error + slack:  # so that NaN fails
            raise VerificationError(f"{name}{mode}: error {error:.2e}, the original's {original_error:.2e}")


def check_autocast(fused: Callable[..., Any], unfused: Callable[..., Any], inputs: list[Tensor]) -> None:
    """Raise VerificationError unless both return the same dtypes under autocast, of inputs as given and in its dtype.

    Where unfused raises (a CPU's layer norm of float16 parameters), it does not support autocast.
    """
    with torch.no_grad(), torch.autocast(inputs[0].device.type, torch.bfloat16):
        for cast in (inputs, [x.bfloat16() for x in inputs]):
            try:
                outputs = unfused(*cast)
            except Exception:
                continue
            expected, actual = _dtypes(outputs), _dtypes(fused(*cast))
            if actual != expected:
                raise VerificationError(f"output under autocast: {', '.join(actual)} for {', '.join(expected)}")


def _dtypes(outputs: Any) -> list[str]:
    return [str(y.dtype)[6:] for y in ([outputs] if isinstance(outputs, Tensor) else outputs)]


def _largest(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, torch.inf)) if tensor.numel() else 0.0


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{tuple(tensor.shape)}"
