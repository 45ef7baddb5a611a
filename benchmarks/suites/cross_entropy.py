"""The cross_entropy family: rows of logits, and losses of a language model's last layer without all of its logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from onetrip import ops
from torch import Tensor
from torch.nn import functional as F

from ..measure.cases import Case, Dropout, LeastBytes, Operator, Outputs, dtypes, gpu_cases, matrices
from ..measure.providers import form
from ..measure.side_by_side import measure as measure

IGNORED = -100
ROWS, HIDDEN = 2048, 512
VOCABULARIES = (32000, 128256)


def _labels(n_rows: int, n_classes: int, share: float, device: torch.device) -> dict[str, Tensor]:
    """share: of the rows whose label is not ignored."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(n_classes, (n_rows,), generator=generator)
    kept = torch.rand(n_rows, generator=generator) < share
    kept[0] = True
    return {"labels": torch.where(kept, labels, IGNORED).to(device)}


def _eager_rows(dropout: Dropout, logits: Tensor, labels: Tensor) -> Outputs:
    return F.cross_entropy(logits, labels)


def _eager_linear(dropout: Dropout, hidden: Tensor, weight: Tensor, labels: Tensor) -> Outputs:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def _eager_logprobs(dropout: Dropout, hidden: Tensor, weight: Tensor, labels: Tensor) -> Outputs:
    return torch.log_softmax(F.linear(hidden, weight), -1).gather(-1, labels[:, None])[:, 0]


def _liger(loss: Callable[..., Outputs], logits: Tensor, labels: Tensor) -> Outputs:
    return loss(logits.clone(), labels)  # it writes the gradient over the logits that it is given


def _liger_linear(loss: Callable[..., Outputs], hidden: Tensor, weight: Tensor, labels: Tensor) -> Outputs:
    return loss(hidden, weight, labels)


def _chunked(loss: Callable[..., Outputs], hidden: Tensor, weight: Tensor, labels: Tensor) -> Outputs:
    return loss(hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions())


def _linear(
    name: str,
    n_classes: int,
    formula: Callable[..., Outputs],
    fused: Callable[..., Outputs],
    share: float,
    others: Mapping[str, Callable[[], Callable[..., Outputs]]],
) -> Operator:
    """The operator of hidden states [n_rows, n_cols] and a weight [n_classes, n_cols]."""

    def least_bytes(n_rows: int, n_cols: int, itemsize: int) -> LeastBytes:
        # Forward: hidden and weight read. Backward: both read, their gradients written.
        both = (n_rows + n_classes) * n_cols * itemsize
        return LeastBytes(both, 2 * both)

    return Operator(
        name,
        ("hidden",),
        (),
        formula,
        fused,
        least_bytes,
        constants=lambda n_rows, n_cols, dtype, device: _labels(n_rows, n_classes, share, device),
        weights=lambda n_rows, n_cols: {"weight": (n_classes, n_cols)},
        between=lambda n_rows, n_cols: 3 * n_rows * n_classes,
        others=others,
        family="cross_entropy",
    )


CROSS_ENTROPY = Operator(
    "cross_entropy",
    ("logits",),
    (),
    _eager_rows,
    ops.cross_entropy,
    matrices(1, 2),  # forward: logits read; backward: logits read, their gradient written
    constants=lambda n_rows, n_cols, dtype, device: _labels(n_rows, n_cols, 1.0, device),
    others=form("liger", "liger_cross_entropy", _liger),
    family="cross_entropy",
)


def linear_cross_entropy(n_classes: int, suffix: str = "", share: float = 1.0) -> Operator:
    others = form("chunked", "linear_cross_entropy", _chunked, "torch.nn.functional")
    others |= form("liger", "liger_fused_linear_cross_entropy", _liger_linear)
    name = f"linear_cross_entropy-V{n_classes}{suffix}"
    return _linear(name, n_classes, _eager_linear, ops.linear_cross_entropy, share, others)


def linear_logprobs(n_classes: int) -> Operator:
    def fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Outputs:
        return ops.linear_logprobs(hidden, weight, labels)

    return _linear(f"linear_logprobs-V{n_classes}", n_classes, _eager_logprobs, fused, 1.0, {})


LINEAR = {n: linear_cross_entropy(n) for n in VOCABULARIES}
MASKED = {n: linear_cross_entropy(n, "-labels15", 0.15) for n in VOCABULARIES}
LOGPROBS = {n: linear_logprobs(n) for n in VOCABULARIES}


def cases(quick: bool = False) -> list[Case]:
    n_rows, small = (ROWS // 16 if quick else ROWS), VOCABULARIES[0]
    found = []
    for dtype in dtypes(quick):
        found.append(Case(CROSS_ENTROPY, n_rows, small, dtype, full=True))
        found += [Case(of[small], n_rows, HIDDEN, dtype, full=True) for of in (LINEAR, MASKED, LOGPROBS)]
        if not quick:
            found.append(Case(LINEAR[VOCABULARIES[1]], n_rows // 2, HIDDEN, dtype, full=True))
    if torch.cuda.is_available() and not quick:
        # A batch of a model of 8 billion parameters: the products take a device of many cores to fill.
        found += [
            Case(of[n], 8192, 4096, torch.bfloat16, full=True)
            for n in VOCABULARIES
            for of in (LINEAR, MASKED, LOGPROBS)
        ]
        found += gpu_cases([CROSS_ENTROPY])
    return found
