"""Which of a forward's sums are rewritten in one instance, and how: the claims of read.py, checked."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..calls import is_plain, is_plain_dropout, original_class
from ..forward import child_at, has_bias_at
from ..norms import NormSpec
from ..report import Unsuitable
from .read import FoundSum, Operand
from .tails import Tail, tail_of

PATTERNS = ("dropout_add_norm", "add_norm", "dropout_add")


@dataclass(frozen=True)
class Choice:
    """One sum of one instance."""

    found: FoundSum
    branch: int | None = None
    """Which operand (0, 1) is read as `operand`; None if both stay as they are."""
    operand: Operand | None = None
    tail: Tail | None = None
    """Tail of the child that made the operand."""
    norm: tuple[str, ast.Call] | None = None
    """(path of the norm that follows, its call)."""
    spec: NormSpec | None = None
    norm_class: type | None = None

    @property
    def is_dropped(self) -> bool:
        return (self.operand is not None and self.operand.is_dropped) or (self.tail is not None and self.tail.drops)

    @property
    def has_bias(self) -> bool:
        """Whether the bias of a linear layer is left to the sum."""
        return (self.operand is not None and self.operand.linear != "") or (self.tail is not None and self.tail.linear)

    @property
    def pattern(self) -> str:
        """A sum without dropout and norm looks for its norm at run time."""
        if self.is_dropped:
            return "dropout_add" if self.norm is None else "dropout_add_norm"
        return "add_norm"

    @property
    def norm_replaces_sum(self) -> bool:
        """Whether the next statement is `h = self.norm(h)`: nothing else reads the sum."""
        match self.found.place.following[:1]:
            case [ast.Assign(targets=[ast.Name(id=name)], value=value)]:
                return name == self.found.target and self.norm is not None and value is self.norm[1]
        return False


def choose_sums(
    module: nn.Module,
    sums: Sequence[FoundSum],
    norm_of: Callable[[nn.Module], NormSpec | Unsuitable],
    closed: Container[int],
    is_wrapped: bool = False,
) -> list[Choice] | Unsuitable:
    """The sums that can be rewritten; the reason if a norm prevents it.

    norm_of: recognises a leaf norm. closed: ids of children whose dropouts and linear layers stay in them. is_wrapped:
    whether something around the forward may change its results.
    """
    chosen: list[Choice] = []
    taken: set[int] = set()
    reason: Unsuitable | None = None
    for found in sums:
        choice = _with_branch(module, found, taken, closed)
        norm = _norm(module, found, norm_of)
        if isinstance(norm, Unsuitable):
            reason = norm
        elif norm is not None:
            choice = replace(choice, norm=norm[0], spec=norm[1], norm_class=norm[2])
        is_closed = choice.norm is not None  # nothing of its work is left to the caller
        if _is_worth_it(choice) and (is_closed or not is_wrapped):
            taken |= {id(statement) for statement in choice.operand.statements} if choice.operand is not None else set()
            chosen.append(choice)
    is_open = all(each.operand is None and each.norm is None for each in chosen)
    if is_open and not any(isinstance(norm_of(child), NormSpec) for child in module.modules() if not child._modules):
        chosen = []  # additions of something else: position embeddings, masks
    return reason if not chosen and reason is not None else chosen


def _is_worth_it(choice: Choice) -> bool:
    """Whether there is something to fuse: a dropout, a norm, or a norm in another module that reads the result."""
    return choice.is_dropped or choice.norm is not None or choice.found.is_open


def _with_branch(module: nn.Module, found: FoundSum, taken: set[int], closed: Container[int]) -> Choice:
    """Which side is a branch, and how it is read: the reading that takes most off, of those that hold."""
    best, most = Choice(found), 0
    for side, readings in enumerate(found.operands):
        for operand in readings:
            if not _holds(module, operand) or any(id(each) in taken for each in operand.statements):
                continue
            tail = tail_of(module, operand, closed, _takes_off) if operand.opened else None
            if operand.opened and (tail is None or (operand.is_dropped and tail.drops)):
                continue
            choice = Choice(found, side, operand, tail)
            worth = 2 * choice.is_dropped + choice.has_bias
            if worth > most:
                best, most = choice, worth
            break
    return best


def _takes_off(module: nn.Module, operand: Operand) -> bool:
    return (operand.is_dropped or operand.linear != "") and _holds(module, operand)


def _holds(module: nn.Module, operand: Operand) -> bool:
    """Whether the children are what the reading takes them for. Again decided at each call: PEFT may come later."""
    if operand.dropout and not is_plain_dropout(child_at(module, operand.dropout)):
        return False
    return not operand.linear or has_bias_at(module, operand.linear)


def _norm(
    module: nn.Module, found: FoundSum, norm_of: Callable[[nn.Module], NormSpec | Unsuitable]
) -> tuple[tuple[str, ast.Call], NormSpec, type] | Unsuitable | None:
    path = "" if found.norm is None else found.norm[0]
    child = child_at(module, path)
    if found.norm is None or child is None:
        return None
    spec = norm_of(child)
    if isinstance(spec, Unsuitable):
        is_norm = spec.reason == "peft_wrapper" or (spec.reason != "unknown_forward" and not child._modules)
        return Unsuitable(spec.reason, f"{path}: {spec.detail}") if is_norm else None
    if spec.gate:
        return None
    if "forward" in vars(child):
        return Unsuitable("hf_hook", f"{path} has a forward of its own")
    if not is_plain(child, original_class(type(child))):
        return Unsuitable("forward_hooks", f"on {path}")
    return found.norm, spec, original_class(type(child))
