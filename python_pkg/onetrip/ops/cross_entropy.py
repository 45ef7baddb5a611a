"""Cross-entropy of logits, and of hidden @ weight.T without ever holding all logits; token log-probabilities.

Sources: label smoothing, Szegedy et al. 2016; z-loss, Chowdhery et al. 2022; soft cap, Gemma 2, 2024; gradients
computed chunk by chunk in forward, Liger-Kernel, Hsu et al. 2024. Calls take the same paths as those of softmax.py.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import linear

from ..reference import cross_entropy as reference
from ..reference.cross_entropy import CrossEntropyPlan
from .common.backends import KERNEL_DTYPES, check_composed, choose
from .common.checks import (
    check_bool,
    check_device,
    check_divisor,
    check_finite,
    check_int64,
    check_probability,
    check_rows,
    raise_unknown,
)
from .common.native import as_rows, in_memory, read
from .common.tracing import (
    autocast_dtype,
    is_autocasting,
    is_recorded,
    path_of,
    path_of_plain_tensors,
    reject_onnx_export,
)
from .cross_entropy_autograd import apply, apply_by_row, apply_reduced, count_labels, forward, forward_reduced
from .cross_entropy_linear import (
    Linear,
    Slice,
    Wants,
    by_row,
    is_one_chunk,
    mean_weight,
    reduced,
    total_and_dlogits,
)

REDUCTIONS = ("mean", "sum", "none")
_DEFAULT, _TOKENS = CrossEntropyPlan(-100), CrossEntropyPlan()


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    **unknown: NoReturn,
) -> Tensor:
    """Cross-entropy of rows of logits with their labels, as torch.nn.functional.cross_entropy with class indices.

    logits: (*, n_classes), float32, float16, bfloat16 or float64, any strides; the classes are the last dimension.
    labels: (*) int64. Rows with the label ignore_index have loss 0 and gradient 0. Other labels outside [0, n_classes)
    raise ValueError on a CPU; on a GPU, where looking would wait for it, they make their row's loss and gradient NaN,
    and under torch.func the loss alone.
    A row's loss is lse - t[label], lse = logsumexp(t), t = softcap * tanh(logits / softcap) where a soft cap is set;
    label_smoothing, in [0, 1], mixes in the mean over all classes as torch does; lse_square_scale * lse^2 is added
    (z-loss). reduction: "mean" over the rows that are not ignored (0 where all are), "sum", or "none": as labels.

    Returns float32 (float64 for float64); sums are float32. NaN in a row spoils that row's loss and gradient only.
    Saves logits and labels themselves and two numbers a row; the gradient is computed from them, deterministically.
    """
    function = "cross_entropy"
    if unknown:
        raise_unknown(function, unknown)
    plan = checked_plan(function, ignore_index, label_smoothing, softcap, lse_square_scale, reduction)
    found = -1 if is_compiling() else read.labels(plan.ignore_index, labels, logits)
    if found < 0:
        check_rows(function, "logits", logits)
        _check_labels(function, "labels", labels, "logits", logits)
        if logits.shape[-1] == 0:
            raise ValueError(f"{function}: logits must have at least one class, got shape {tuple(logits.shape)}")
    shape = labels.shape
    rows = logits if logits.dim() == 2 else as_rows(logits)
    row_labels = labels if labels.dim() == 1 else labels.reshape(-1)
    path = path_of(logits, labels) if found < 0 else path_of_plain_tensors()
    if path == "composed":
        check_composed(function, logits.device, "cross_entropy")
        return _reduced(reference.forward(rows, row_labels, plan).loss, row_labels, plan, reduction, shape)
    if path == "traced":
        reject_onnx_export()
        loss, _ = torch.ops.onetrip.cross_entropy(rows, row_labels, *plan)
        return _reduced(loss, row_labels, plan, reduction, shape)
    backend = choose(function, logits.device, logits.dtype in KERNEL_DTYPES, "cross_entropy")
    row_labels, n_kept = _counted(function, row_labels, rows.shape[1], ignore_index, found)
    if torch.is_grad_enabled() and logits.requires_grad:
        loss = apply(rows, (row_labels, n_kept, plan, backend, reduction))
        return cast(Tensor, loss.view(shape) if reduction == "none" else loss)
    if reduction == "none":
        return forward(backend, rows, row_labels, plan).loss.view(shape)
    return forward_reduced(backend, rows, row_labels, n_kept, plan, reduction == "mean")[0]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    n_classes: int | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """cross_entropy of hidden @ weight.T + bias, in chunks of rows: all of the logits never exist at once.

    hidden: (*, n_hidden), float32, float16, bfloat16 or float64; weight: (n_classes, n_hidden) and bias: (n_classes,)
    of the same dtype. Under autocast all are cast to its dtype, and gradients have the dtypes of what they are of.
    labels: (*) int64. ignore_index to reduction: as in cross_entropy. chunk_rows: rows whose logits exist at once;
    None: so that these take about 64 MB, for bfloat16 on a CPU 16 to 64 MB; in half precision by Triton, where the
    gradient of weight is wanted, up to twice weight's bytes, which adds nothing to the peak.
    On a CPU rows with ignored labels are dropped before the matrix product. On a GPU their number is not known without
    waiting for it: all rows are multiplied, and nothing is synchronized.

    Returns float32 (float64 for float64). Where all rows are ignored: 0, and zero gradients. With "mean" and "sum" the
    gradients are computed in forward, where grad is enabled, and kept instead of activations; backward multiplies them
    by the incoming gradient. float16: until then each row has the weight 1 in them, so that they do not underflow
    before the factor of a loss scaler comes. With "none" backward computes the chunks again. Only gradients of what
    requires grad are computed. On a CPU the gradient of the logits is kept in their place where it is smaller, up to
    one chunk and not in float16, and backward computes them from it. Those of weight and bias are summed in float32.
    Deterministic where torch's matrix products are. torch.export, torch.jit.trace and make_fx record it as "none", and
    reduce.

    process_group: the vocabulary is cut over its ranks (tensor parallelism). weight and bias hold this rank's classes:
    of n_classes in all, rank r has those from r * ceil(n_classes / n_ranks) on, as torch.chunk and a DTensor's Shard(0)
    cut them. hidden and labels, whose values number all classes, are the same on every rank; so are the loss and the
    gradient of hidden, which is summed over ranks. Those of weight and bias are this rank's. Every rank must make the
    call, and its backward, with the same options and requires_grad. Ranks communicate once a chunk, three or four
    numbers a row, and once more for the gradient of hidden. torch.compile breaks its graph at the call, which runs
    eagerly. n_classes must be given with a process_group, and only then.
    """
    function = "linear_cross_entropy"
    if unknown:
        raise_unknown(function, unknown)
    if process_group is not None and is_compiling():
        return torch.compiler.disable(linear_cross_entropy)(
            hidden, weight, labels, bias, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap,
            lse_square_scale=lse_square_scale, reduction=reduction, chunk_rows=chunk_rows, process_group=process_group,
            n_classes=n_classes,
        )  # fmt: skip
    plan = checked_plan(function, ignore_index, label_smoothing, softcap, lse_square_scale, reduction)
    found = _check_operands(function, hidden, weight, bias, "labels", labels, plan, process_group is None)
    check_chunk_rows(function, chunk_rows)
    part = _slice_of(function, weight, process_group, n_classes)
    if reduction == "none":
        loss, _ = _by_row(function, hidden, weight, bias, labels, plan, found, chunk_rows=chunk_rows, part=part)
        return loss
    rows, row_labels = _rows_of(_autocast(hidden), labels)
    operands = (rows, weight, bias)
    path = path_of(*operands, labels) if found < 0 else path_of_plain_tensors()
    # Which gradients will be wanted of a recorded graph is not known, and torch.jit.trace knows no list of bools.
    if path == "composed" or (path == "traced" and is_recorded()):
        loss, _ = _by_row(function, hidden, weight, bias, labels, plan, found, chunk_rows=chunk_rows, part=part)
        return _reduced(loss, labels, plan, reduction, labels.shape)
    if path == "traced":
        _reject_traced(function, part)
        settings = (reduction == "mean", chunk_rows or 0, _wants(*operands))
        return cast(Tensor, torch.ops.onetrip.linear_cross_entropy(*operands, row_labels, *settings, *plan)[0])
    row_labels, n_kept = _counted(function, row_labels, n_classes or weight.shape[0], ignore_index, found)
    backend = choose(function, hidden.device, hidden.dtype in KERNEL_DTYPES, "cross_entropy")
    others: tuple[Any, ...] = (row_labels, plan, backend, chunk_rows or 0, n_kept, part)
    if any(_wants(*operands)):
        return cast(Tensor, apply_reduced(*operands, (others, reduction == "mean")))
    call = Linear.of(*operands, *others)
    if is_one_chunk(call):
        return total_and_dlogits(call, call.kept_index(), reduction == "mean", wants_dlogits=False)[0]
    return reduced(call, reduction == "mean", (False,) * 3)[0]


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature) at the tokens, for preference and policy losses.

    hidden, weight, bias, chunks: as in linear_cross_entropy. tokens: (*) int64, all in [0, n_classes): others raise
    ValueError on a CPU and give NaN on a GPU. temperature > 0. return_entropy: the entropy of each row's distribution
    too, in nats.

    Returns float32 (float64 for float64), shaped as tokens; with return_entropy a pair of such. Saves its arguments
    only: backward computes the chunks again.
    """
    function = "linear_logprobs"
    if unknown:
        raise_unknown(function, unknown)
    found = _check_operands(function, hidden, weight, bias, "tokens", tokens, _TOKENS)
    check_bool(function, "return_entropy", return_entropy)
    check_divisor(function, "temperature", temperature)
    plan = _TOKENS if temperature == 1.0 else CrossEntropyPlan(scale=1.0 / temperature)
    logprobs, entropy = _by_row(function, hidden, weight, bias, tokens, plan, found, -1.0, wants_entropy=return_entropy)
    return (logprobs, entropy) if entropy is not None else logprobs


def _by_row(
    function: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    plan: CrossEntropyPlan,
    found: int,
    sign: float = 1.0,
    *,
    chunk_rows: int | None = None,
    wants_entropy: bool = False,
    part: Slice | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(sign * losses, entropies where wanted), shaped as labels. found: _check_operands."""
    shape = labels.shape
    rows, labels = _rows_of(_autocast(hidden), labels)
    operands = (rows, weight, bias)
    entropy: Tensor | None
    path = path_of(*operands, labels) if found < 0 else path_of_plain_tensors()
    if path == "composed":
        check_composed(function, hidden.device, "cross_entropy")
        _reject_traced(function, part)
        loss, _, entropy = reference.forward(_logits(*operands), labels, plan, wants_entropy)
        loss = loss * sign
    elif path == "traced":
        _reject_traced(function, part)
        settings = (wants_entropy, chunk_rows or 0, *plan)
        loss, entropy = torch.ops.onetrip.linear_cross_entropy_rows(*operands, labels, *settings)
        loss = loss * sign
    else:
        n_classes = weight.shape[0] if part is None else part.n_classes
        labels, n_kept = _counted(function, labels, n_classes, plan.ignore_index, found)
        backend = choose(function, hidden.device, hidden.dtype in KERNEL_DTYPES, "cross_entropy")
        others: tuple[Any, ...] = (labels, plan, backend, chunk_rows or 0, n_kept, part)
        if any(_wants(*operands)):
            loss, entropy = apply_by_row(*operands, (others, wants_entropy, sign))
        else:
            loss, entropy = by_row(Linear.of(*operands, *others), wants_entropy, sign)
    if len(shape) != 1:
        loss, entropy = loss.view(shape), entropy.view(shape) if wants_entropy and entropy is not None else None
    return loss, entropy if wants_entropy else None


def _rows_of(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """hidden as a matrix, labels as a vector."""
    if hidden.dim() == 2:
        return hidden, labels
    return as_rows(hidden), labels.reshape(-1)


def _counted(function: str, labels: Tensor, n_classes: int, ignore_index: int, found: int) -> tuple[Tensor, int | None]:
    """The labels as kernels read them, and how many are not ignored: found, where that is not negative."""
    if found >= 0:
        return labels, found
    labels = in_memory(labels).contiguous()
    return labels, count_labels(function, labels, n_classes, ignore_index)


def _wants(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Wants:
    """Which gradients a call must be ready to give."""
    if not torch.is_grad_enabled():
        return False, False, False
    return hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad


def _autocast(hidden: Tensor) -> Tensor:
    """Cast as autocast casts the operands of torch.nn.functional.linear. Of weight and bias Linear.of makes a cast."""
    dtype = autocast_dtype(hidden)
    return hidden if dtype is None or hidden.dtype == torch.float64 else hidden.to(dtype)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By torch's own operators."""
    return linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))


def _reduced(loss: Tensor, labels: Tensor, plan: CrossEntropyPlan, reduction: str, shape: torch.Size) -> Tensor:
    """By torch's own operators, from the losses of all rows."""
    if reduction == "none":
        return loss.view(shape)
    total = loss.sum()
    return total * mean_weight(labels, None, plan.ignore_index, loss.dtype) if reduction == "mean" else total


def checked_plan(
    function: str, ignore_index: int, label_smoothing: float, softcap: float | None, lse_square_scale: float,
    reduction: str,
) -> CrossEntropyPlan:  # fmt: skip
    is_plain = softcap is None and label_smoothing == 0.0 == lse_square_scale and reduction in REDUCTIONS
    if is_plain and type(ignore_index) is int and ignore_index == _DEFAULT.ignore_index:
        return _DEFAULT  # an ordinary call
    if type(ignore_index) is not int:
        raise TypeError(f"{function}: ignore_index must be an int, got {ignore_index!r}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"{function}: ignore_index must be an int64, got {ignore_index}")
    check_probability(function, "label_smoothing", label_smoothing)
    if softcap is not None:
        check_divisor(function, "softcap", softcap)
    check_finite(function, "lse_square_scale", lse_square_scale)
    if reduction not in REDUCTIONS:
        raise ValueError(f"{function}: reduction must be one of {REDUCTIONS}, got {reduction!r}")
    return CrossEntropyPlan(ignore_index, float(label_smoothing), float(softcap or 0.0), float(lse_square_scale), 1.0)


def check_chunk_rows(function: str, chunk_rows: object) -> None:
    if chunk_rows is not None and (type(chunk_rows) is not int or chunk_rows < 1):
        raise ValueError(f"{function}: chunk_rows must be None or an int >= 1, got {chunk_rows!r}")


def _check_labels(function: str, argument: str, labels: Tensor, of: str, rows: Tensor) -> None:
    check_int64(function, argument, labels)
    if labels.shape != rows.shape[:-1]:
        raise ValueError(
            f"{function}: {argument} must have the shape of {of} without its last dimension, "
            f"{tuple(rows.shape[:-1])}, got {tuple(labels.shape)}"
        )
    check_device(function, argument, labels, rows, of)


def _check_operands(
    function: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, argument: str, labels: Tensor,
    plan: CrossEntropyPlan, is_whole: bool = True,
) -> int:  # fmt: skip
    """read.labels; the checks, where that is negative. is_whole: labels number the classes of weight."""
    found = -1 if is_compiling() or not is_whole else read.labels(plan.ignore_index, labels, hidden, weight, bias)
    if found < 0:
        _check_linear(function, hidden, weight, bias)
        _check_labels(function, argument, labels, "hidden", hidden)
    return found


def _slice_of(function: str, weight: Tensor, group: object, n_classes: object) -> Slice | None:
    """What weight is this rank's slice of; None where it is whole."""
    if group is None:
        if n_classes is not None:
            raise ValueError(f"{function}: n_classes must be None without a process_group, got {n_classes!r}")
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{function}: process_group must be None or a ProcessGroup of this process, got {group!r}")
    if type(n_classes) is not int:
        raise TypeError(f"{function}: n_classes must be an int with a process_group, got {n_classes!r}")
    rank, n_ranks = group.rank(), group.size()
    most = -(-n_classes // n_ranks)
    if most * (n_ranks - 1) >= n_classes:
        raise ValueError(
            f"{function}: n_classes must give each of {n_ranks} ranks a class, slices of ceil(n_classes / n_ranks), "
            f"got {n_classes}"
        )
    n_here = min(most, n_classes - rank * most)
    if weight.shape[0] != n_here:
        raise ValueError(
            f"{function}: weight must have {n_here} rows, the slice of {n_classes} classes that rank {rank} of "
            f"{n_ranks} has, got {weight.shape[0]}"
        )
    return Slice(group, n_ranks, rank * most, most, n_classes) if n_ranks > 1 else None


def _reject_traced(function: str, part: Slice | None) -> None:
    reject_onnx_export()
    if part is not None:
        raise RuntimeError(
            f"{function}: process_group must be None for tensors of other classes (of a DTensor pass to_local()) and "
            "where the call is traced or transformed (torch.jit.trace, torch.func)"
        )


def _check_linear(function: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_rows(function, "hidden", hidden)
    check_rows(function, "weight", weight)
    n_hidden = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != n_hidden or weight.shape[0] == 0:
        raise ValueError(
            f"{function}: weight must have shape (n_classes, {n_hidden}), n_classes >= 1, got {tuple(weight.shape)}"
        )
    operands = [("weight", weight)]
    if bias is not None:
        check_rows(function, "bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{function}: bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
        operands.append(("bias", bias))
    may_mix = is_autocasting(hidden) and hidden.dtype != torch.float64
    for argument, tensor in operands:
        check_device(function, argument, tensor, hidden, "hidden")
        if tensor.dtype != hidden.dtype and not may_mix:
            raise TypeError(
                f"{function}: {argument} must have the dtype of hidden, {str(hidden.dtype)[6:]}, "
                f"got {str(tensor.dtype)[6:]}"
            )
