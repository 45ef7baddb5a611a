"""What autograd's graph keeps for backward: how much, and by which modules and operators."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from ..measure import saved_tensors
from .operators import operator_class

NO_MODULE = "(no module)"
NO_OPERATOR = "(unknown)"


@dataclass(frozen=True)
class SavedActivations:
    """Bytes, each storage counted once and whole, for the first module and the first operator that saved it; largest
    first."""

    total: int = 0
    by_module_class: dict[str, int] = field(default_factory=dict)
    """By class of the innermost module."""
    by_block: dict[str, int] = field(default_factory=dict)
    """By place in the model, repeated layers together (their number is a star) and one level of them apart."""
    by_operator_class: dict[str, int] = field(default_factory=dict)
    """See operators.operator_class."""


def _innermost_module(names: dict[int, str]) -> nn.Module | None:
    """The module whose forward calls this, by the stack: hooks on modules would keep patched blocks from their fused
    path."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            return module
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _block(name: str) -> str:
    """bert.encoder.layer.11.attention.self -> encoder.layer.*.attention"""
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    if "*" not in parts:
        return ".".join(parts[:2])
    star = parts.index("*")
    return ".".join(parts[max(0, star - 2) : star + 2])


def _operator(node: Node) -> str:
    """AddmmBackward0 -> addmm, as the profiler calls it; a Function of Python by its class."""
    name = node.name().rsplit("::", 1)[-1]
    if name.startswith("CompiledFunction"):
        return "compiled"
    if not re.search(r"\d$", name):
        return "onetrip::" if "onetrip" in name else name
    name = re.sub(r"Backward\d*$", "", name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _operators_of_storages(loss: Tensor) -> dict[int, str]:
    """The class of the operator that saved each storage first, by the storage's address."""
    nodes, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions]
    found: dict[int, str] = {}
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        names = [name for name in dir(node) if name.startswith("_saved_")]
        values = [node.saved_tensors] if hasattr(node, "saved_tensors") else [getattr(node, name) for name in names]
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                found.setdefault(tensor.untyped_storage()._cdata, operator_class(_operator(node)))
    return found


def saved_activations(
    loss_fn: Callable[[], Tensor], not_counted: Iterable[Tensor] = (), model: nn.Module | None = None
) -> SavedActivations:
    """What the graph of one forward pass keeps alive for backward.

    A storage counts if the graph still holds it when the forward pass has ended; a view keeps all of it. Storages of
    `not_counted` and their views are left out: pass parameters, buffers, inputs. model: without it, modules have no
    names and none are told apart.
    """
    names = {} if model is None else {id(module): name for name, module in model.named_modules()}
    loss, saved_for_backward = saved_tensors(loss_fn, (lambda: _innermost_module(names)) if names else None)
    excluded = {t.untyped_storage()._cdata for t in not_counted}
    operators = _operators_of_storages(loss)
    total, seen = 0, set(excluded)
    by_class: Counter[str] = Counter()
    by_block: Counter[str] = Counter()
    by_operator: Counter[str] = Counter()
    for saved in saved_for_backward:
        storage = saved.tensor.untyped_storage()
        if storage._cdata in seen or _is_number(saved.tensor):
            continue
        seen.add(storage._cdata)
        n_bytes = storage.nbytes()
        total += n_bytes
        by_class[NO_MODULE if saved.label is None else type(saved.label).__name__] += n_bytes
        by_block[_block(names.get(id(saved.label), "")) or NO_MODULE] += n_bytes
        by_operator[operators.get(storage._cdata, NO_OPERATOR)] += n_bytes
    del loss
    # + drops what is 0.
    return SavedActivations(total, *(dict((+counts).most_common()) for counts in (by_class, by_block, by_operator)))


def _is_number(tensor: Tensor) -> bool:
    """Whether an eager call may keep it as a number: a dropout's (seed, offset), the weight of a mean."""
    return tensor.dim() == 0 or (tensor.dtype == torch.int64 and tensor.shape == (2,))
