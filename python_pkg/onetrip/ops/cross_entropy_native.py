"""From tensors to the native cross-entropy launcher. Allocates what it writes."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..reference.cross_entropy import CrossEntropyPlan, RowStatistics
from .common.backends import native
from .common.native import DTYPE_CODE, Launcher, raise_error

_CPU = torch.device("cpu")  # a string is parsed in a tenth of a microsecond


@lru_cache(maxsize=1024)
def _launcher(plan: CrossEntropyPlan, dtype: torch.dtype) -> Launcher:
    return native().cross_entropy(DTYPE_CODE[dtype], *plan)


def _launch(logits: Tensor, plan: CrossEntropyPlan, *operands: Tensor | float | None) -> None:
    code = _launcher(plan, logits.dtype)(*logits.shape, logits, logits.stride(0), *operands)
    if code:
        raise_error("cross_entropy", logits, code)


def kept_labels(labels: Tensor, n_classes: int, ignore_index: int) -> int:
    """How many labels (contiguous) are not ignored; -1 where one is no class, or there is no library."""
    library = native()
    return -1 if library is None else library.kept_labels(labels.data_ptr(), labels.numel(), n_classes, ignore_index)


def total(logits: Tensor, labels: Tensor, plan: CrossEntropyPlan, divisor: int) -> tuple[Tensor, Tensor]:
    """(the sum of the losses over divisor, reference.cross_entropy.forward's stats followed by the losses: one
    dimension), as forward."""
    n_rows = logits.shape[0]
    found = torch.empty((), dtype=torch.float32, device=_CPU)
    stats = torch.empty(3 * n_rows, dtype=torch.float32, device=_CPU)
    _launch(logits, plan, labels, None, stats, 0, None, None, 0, None, None, found, divisor)
    return found, stats


def total_and_gradient_(logits: Tensor, labels: Tensor, plan: CrossEntropyPlan, divisor: int) -> Tensor:
    """The sum of the losses over divisor; its gradient is written over the logits, which are contiguous."""
    found = torch.empty((), dtype=torch.float32, device=_CPU)
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=_CPU)
    _launch(logits, plan, labels, loss, None, 0, None, 1.0 / divisor, 0, None, logits, found, divisor)
    return found


def add_to_sums(nearest: Tensor, rest: Tensor, terms: Tensor, is_first: bool) -> None:
    """sums += terms (bfloat16), in float32. A sum is the bfloat16 nearest to it, and an int16: by how many units of
    float32 it is larger. is_first: these are still to be written. All contiguous."""
    addresses = (tensor.data_ptr() for tensor in (nearest, rest, terms))
    code = native().add_to_sums(*addresses, terms.numel(), is_first)
    if code:
        raise_error("linear_cross_entropy", terms, code)


def forward(logits: Tensor, labels: Tensor, plan: CrossEntropyPlan, wants_entropy: bool = False) -> RowStatistics:
    """reference.cross_entropy.forward by the native library, for logits of last stride 1 and contiguous labels."""
    stats = torch.empty((logits.shape[0], 2), dtype=torch.float32, device=_CPU)
    loss, entropy = losses(logits, labels, plan, wants_entropy, stats)
    return RowStatistics(loss, stats, entropy)


def losses(
    logits: Tensor, labels: Tensor, plan: CrossEntropyPlan, wants_entropy: bool, stats: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(losses, entropies where wanted) of forward; stats: to be written."""
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=_CPU)
    entropy = torch.empty_like(loss) if wants_entropy else None
    _launch(logits, plan, labels, loss, stats, 0, entropy, None, 0, None, None, None, 1)
    return loss, entropy


def backward(logits: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, plan: CrossEntropyPlan) -> Tensor:
    """reference.cross_entropy.backward. weights: contiguous, as stats."""
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=_CPU)
    _launch_backward(logits, labels, stats, weights, plan, dlogits)
    return dlogits


def backward_(logits: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, plan: CrossEntropyPlan) -> None:
    """reference.cross_entropy.backward_."""
    _launch_backward(logits, labels, stats, weights, plan, logits)


def _launch_backward(
    logits: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, plan: CrossEntropyPlan, dlogits: Tensor
) -> None:
    _launch(logits, plan, labels, None, stats, 1, None, weights, int(weights.numel() > 1), None, dlogits, None, 1)


def forward_backward_(
    logits: Tensor, labels: Tensor, weights: Tensor, entropy_weights: Tensor | None, plan: CrossEntropyPlan
) -> Tensor:
    """reference.cross_entropy.forward_backward_, for contiguous logits."""
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=_CPU)
    stride = int(weights.numel() > 1)
    _launch(logits, plan, labels, loss, None, 0, None, weights, stride, entropy_weights, logits, None, 1)
    return loss
