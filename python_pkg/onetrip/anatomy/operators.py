"""Sorting the profiler's events into classes of operators, as in the literature on where training time goes.

The classes follow Ivanov et al., "Data movement is all you need" (arXiv 2007.00072), a little finer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

FUSED = "fused (onetrip)"
COMPILED = "compiled (torch)"
OPTIMIZER = "optimizer"
OTHER = "element-wise, sums"

# The first pattern that matches the start of a name without its "aten::" wins.
_CLASSES = (
    (FUSED, re.compile(r"onetrip::")),
    (
        "contractions",
        re.compile(
            r"(add)?(mm|bmm|mv)\b|baddbmm|matmul|linear\b|linear_backward|einsum|.*conv|mkldnn_linear|_?scaled_mm"
        ),
    ),
    ("attention", re.compile(r"_?scaled_dot_product|_?(flash|efficient|cudnn)_attention|_fused_sdp")),
    ("normalisation", re.compile(r"(_?fused_|native_)?(layer|rms|group|batch)_norm|rsqrt")),
    ("dropout", re.compile(r"(native_|_fused_)?dropout|bernoulli")),
    ("softmax, loss", re.compile(r"_?(log_)?softmax|_?safe_softmax|nll_loss|cross_entropy")),
    ("embedding", re.compile(r"embedding|index_add|index_select|index\b|index_put|_index_put")),
    (
        "copies, fills",
        re.compile(r"copy_|_?to_copy|to\b|clone|contiguous|empty|zeros?_?\b|fill_|full|cat\b|stack|arange|ones"),
    ),
)
# A custom torch.autograd.Function is recorded as its class, onetrip's as _RowNorm and _RowNormBackward: no namespace, a
# capital, and no digit at the end as AddBackward0 has.
_PYTHON_FUNCTION = re.compile(r"_?[A-Z][A-Za-z_0-9]*(?<![0-9])$")
_COMPILED = re.compile(
    r"CompiledFunction|Torch-Compiled|## Call Compiled|graph_\d|(cpp|triton)_.*fused|.*TorchDynamo|compiled$"
)
AUTOGRAD = "autograd's own"
_AUTOGRAD = re.compile(r"(torch::)?autograd::|[A-Z][A-Za-z]*[0-9]+$")


def operator_class(name: str) -> str:
    """The class of one event of torch's profiler, by its name."""
    if _COMPILED.match(name):
        return COMPILED
    if _PYTHON_FUNCTION.match(name):
        return FUSED
    if _AUTOGRAD.match(name):
        return AUTOGRAD
    name = name.removeprefix("aten::")
    return next((label for label, pattern in _CLASSES if pattern.match(name)), OTHER)


def time_by_operator_class(events: Iterable[Any], *, on_device: bool) -> dict[str, float]:
    """Milliseconds that each class of operator took by itself, largest first; all that an optimizer's step does is one
    class.

    events: `FunctionEvent`s of one profile. on_device: count time on the accelerator rather than on the CPU.
    """
    totals: Counter[str] = Counter()
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU or event.name == "[memory]":
            continue
        own = event.self_device_time_total if on_device else event.self_cpu_time_total
        label = OPTIMIZER if _in_optimizer(event) else operator_class(event.name)
        totals[label] += own / 1e3
    return {label: ms for label, ms in totals.most_common() if ms > 0.0}


def _in_optimizer(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("Optimizer."):
            return True
        event = event.cpu_parent
    return False
