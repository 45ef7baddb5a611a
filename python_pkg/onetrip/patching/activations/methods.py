"""Activations in methods other than the forward.

Gated products are fused in every method. transformers' mixtures of experts have them: a wrapper of the forward chooses
among implementations, the class's own loop over the experts, and functions of the library that call the class's method.

    gate, up = gate_up_out.chunk(2, dim=-1)     ->      gate = gate_up_out
    return self.act_fn(gate) * up                       return gated_0_(self, self.act_fn, gate)

In methods that the forward names, as DistilBERT's and ALBERT's name the one that computes a chunk, all activations
are.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType

from torch import nn

from ..classes import method_of
from ..forward import Forward, read_forward
from ..source import code_in
from .read import FoundActivation, read_activations


def read_methods(cls: type) -> list[tuple[Forward, list[FoundActivation]]]:
    """The activations of methods with one argument, of those that the forward does not name the gated products."""
    code = getattr(method_of(cls, "forward"), "__code__", None)
    named = set() if code is None else {name for each in (code, *code_in(code)) for name in each.co_names}
    found = []
    for name, function in _functions(cls):
        is_named = name in named
        method = read_forward(function, method=name) if is_named or _may_gate(function.__code__) else None
        if isinstance(method, Forward):
            activations = [each for each in read_activations(method) if is_named or each.product is not None]
            if activations:
                found.append((method, activations))
    return found


def _functions(cls: type) -> Iterator[tuple[str, FunctionType]]:
    names = (name for each in cls.__mro__[: cls.__mro__.index(nn.Module)] for name in vars(each))
    for name in dict.fromkeys(names):
        method = inspect.getattr_static(cls, name)  # a staticmethod is no function here
        if isinstance(method, FunctionType) and name != "forward" and method.__code__.co_argcount == 2:
            yield name, method


@lru_cache(maxsize=4096)
def _may_gate(code: CodeType) -> bool:
    """Whether the code of a method multiplies."""
    instructions = dis.get_instructions(code)
    return any(each.argrepr == "*" or each.opname == "BINARY_MULTIPLY" for each in instructions)  # until Python 3.10
