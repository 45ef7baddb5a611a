"""The one table of tolerances, and comparators that fail on NaN, on aliases and on empty tensors.

Every comparison is with a float64 result. Two rules:
- ulps: one rounding to the output dtype, plus what float32 arithmetic may lose before it (FLOAT32_ATOL, FLOAT32_RTOL).
- torch: max error <= 2 x max error of torch in the same dtype + one rounding of the largest value.

What torch.compile gives is compared with eager calls, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOAT32_ATOL, FLOAT32_RTOL = 1e-5, 1.3e-6
"""Float32 arithmetic on values of order one (torch.testing's own default for float32)."""

TORCH_FACTOR = 2.0
"""Our error may be this many times torch's in the same dtype."""

HALF_ROUNDING = {
    dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
"""Largest relative error of one rounding to the dtype."""


def _same_kind(actual: Tensor, exact: Tensor, allow_empty: bool) -> tuple[Tensor, Tensor]:
    """Both in float64, after the checks without which a comparison means nothing."""
    assert exact.dtype == torch.float64, f"compare with float64, got {exact.dtype}"
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    assert actual.numel() > 0 or allow_empty, "nothing to compare: the tensors are empty"
    assert not aliases(actual, exact), "compared with itself: the tensors share memory"
    actual, exact = actual.detach().to("cpu", torch.float64), exact.detach().cpu()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = kind(actual) != kind(exact)
        assert not wrong.any(), f"{kind.__name__} differs at {wrong.nonzero()[:4].tolist()}"
    finite = exact.isfinite()
    return actual[finite], exact[finite]


def aliases(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.numel() > 0


def max_error(actual: Tensor, exact: Tensor) -> float:
    """Largest |actual - exact| over the finite values; NaN and Inf must stand in the same places."""
    actual, exact = _same_kind(actual, exact, allow_empty=True)
    return (actual - exact).abs().max().item() if actual.numel() else 0.0


def assert_ulps(actual: Tensor, exact: Tensor, ulps: float = 1.0, *, allow_empty: bool = False) -> None:
    """Every element within `ulps` of the dtype of actual from the float64 result, plus float32's own error."""
    info = torch.finfo(actual.dtype)
    values, exact = _same_kind(actual, exact, allow_empty)
    exponent = torch.floor(torch.log2(exact.abs().clamp_min(info.tiny)))
    allowed = FLOAT32_ATOL + FLOAT32_RTOL * exact.abs()
    if actual.dtype != torch.float32:
        allowed = allowed + ulps * info.eps * torch.exp2(exponent)
    excess = (values - exact).abs() / allowed
    if excess.numel():
        worst = int(excess.argmax())
        assert excess[worst] <= 1.0, (
            f"{actual.dtype}: {values[worst].item()!r} where {exact[worst].item()!r} was expected, "
            f"{excess[worst].item():.3g} x the allowed {allowed[worst].item():.3g}; {int((excess > 1).sum())} such"
        )


def assert_like_torch(actual: Tensor, torchs: Tensor, exact: Tensor, *, terms: int = 1, summands: float = 0.0) -> None:
    """Max error at most TORCH_FACTOR x torch's own plus one rounding of the largest value.

    torchs: torch's result in the same dtype. terms: how many products each element sums up (rows, for a weight's
    gradient): a float32 sum of random signs loses sqrt(terms) roundings. summands: how large these products are,
    where they cancel and the sum is much smaller.
    """
    assert actual.dtype == torchs.dtype, f"dtype {actual.dtype}, torch gives {torchs.dtype}"
    assert actual.numel() > 0, "nothing to compare: the tensors are empty"
    assert not aliases(actual, torchs), "compared with itself: the tensors share memory"
    scale = max(exact.abs()[exact.isfinite()].max().item(), summands)
    sums = HALF_ROUNDING[torch.float64 if actual.dtype == torch.float64 else torch.float32]
    allowed = TORCH_FACTOR * max_error(torchs, exact) + scale * (HALF_ROUNDING[actual.dtype] + sums * math.sqrt(terms))
    error = max_error(actual, exact)
    assert error <= allowed, f"max error {error:.3g}, allowed {allowed:.3g} (torch: {max_error(torchs, exact):.3g})"


def assert_bitwise(actual: Tensor, expected: Tensor, *, allow_empty: bool = False) -> None:
    """The same dtype, shape and bits (-0 differs from 0, a NaN equals only the same NaN), in different memory."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        f"{actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    )
    assert actual.numel() > 0 or allow_empty, "nothing to compare: the tensors are empty"
    assert not aliases(actual, expected), "compared with itself: the tensors share memory"
    same = bits(actual) == bits(expected)
    first = (~same).nonzero()[:1].tolist()
    assert same.all(), f"{int((~same).sum())} of {same.numel()} elements differ in their bits, first at {first}"


def bits(tensor: Tensor) -> Tensor:
    """The bit pattern of every element, as integers on the CPU."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().cpu().resolve_neg().contiguous().view(integer)


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_compiles_to_the_same(
    function: Callable[..., Any],
    leaves: Sequence[Tensor],
    *,
    backend: str = "aot_eager",
    compare: Callable[[Tensor, Tensor], None] = assert_bitwise,
) -> None:
    """function(*leaves), compiled without a graph break, gives its results, their strides, and their gradients.

    leaves: require grad. The strides of gradients are torch.compile's choice. compare(ours, eager): of each tensor.
    """
    found, strides = [], []
    for run in (torch.compile(function, fullgraph=True, backend=backend), function):
        outputs = _tuple(run(*leaves))
        strides.append([output.stride() for output in outputs])
        cotangents = [torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape).to(o.dtype) for o in outputs]
        gradients = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        found.append([*(o.detach().clone() for o in outputs), *(g for g in gradients if g is not None)])
    assert strides[0] == strides[1]
    for ours, eager in zip(*found, strict=True):
        compare(ours, eager)


def assert_compiles_once(
    function: Callable[..., Any],
    calls: Iterable[Sequence[Tensor]],
    compare: Callable[[Tensor, Tensor], None] = assert_bitwise,
) -> None:
    """Compiled for sizes that vary, function is compiled for the first of the calls only, and gives what eager ones
    do."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for i, arguments in enumerate(calls):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            outputs = _tuple(compiled(*arguments))
        for ours, eager in zip(outputs, _tuple(function(*arguments)), strict=True):
            compare(ours, eager)
