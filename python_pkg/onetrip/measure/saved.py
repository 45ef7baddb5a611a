"""What autograd saves for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Saved:
    """One saved tensor. The graph holds this object, so that a weak reference shows when the graph lets go of it."""

    __slots__ = ("__weakref__", "label", "order", "tensor")

    def __init__(self, tensor: Tensor, label: Any, order: int) -> None:
        self.tensor, self.label, self.order = tensor, label, order


def saved_tensors(function: Callable[[], Any], label: Callable[[], Any] | None = None) -> tuple[Any, list[Saved]]:
    """(What function returns, the tensors that its graph holds when it has returned, in the order of saving).

    A tensor appears as often as it was saved. label: called whenever a tensor is saved, for Saved.label.
    """
    held: weakref.WeakSet[Saved] = weakref.WeakSet()
    order = 0

    def pack(tensor: Tensor) -> Saved:
        nonlocal order
        # Detached: a node's own output comes with its grad_fn, a cycle through C++ that would never be freed.
        saved = Saved(tensor.detach(), None if label is None else label(), order)
        order += 1
        held.add(saved)
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        result = function()
    return result, sorted(held, key=lambda saved: saved.order)


def saved_bytes(function: Callable[[], object], excluded: Iterable[Tensor] = (), smallest: int = 0) -> int:
    """Bytes of the storages that the graph of what function returns keeps for backward.

    Each storage counts once and whole, also where a view of it was saved. excluded: tensors whose storages do not
    count, as a rule parameters, buffers and inputs. smallest: tensors of fewer elements do not count.
    """
    result, saved = saved_tensors(function)
    skip = {tensor.untyped_storage()._cdata for tensor in excluded}
    storages = {
        storage._cdata: storage.nbytes()
        for storage in (each.tensor.untyped_storage() for each in saved if each.tensor.numel() >= smallest)
    }
    del result
    return sum(n_bytes for address, n_bytes in storages.items() if address not in skip)
