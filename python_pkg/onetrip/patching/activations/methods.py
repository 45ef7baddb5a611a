"""Gated products in methods other than the forward.

transformers' mixtures of experts have them. A wrapper of the forward chooses among implementations: the class's own
loop over the experts, and functions of the library that call the class's method for the gated product.

    gate, up = gate_up_out.chunk(2, dim=-1)     ->      gate = gate_up_out
    return self.act_fn(gate) * up                       return gated_0_(self, self.act_fn, gate)
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import FunctionType

from torch import nn

from ..forward import Forward, read_forward
from .read import FoundActivation, read_activations


def read_methods(cls: type) -> list[tuple[Forward, list[FoundActivation]]]:
    """The products of methods with one argument. Of methods only products: where else a method is called from is not
    known."""
    read = (read_forward(function, method=name) for name, function in _functions(cls))
    methods = [each for each in read if isinstance(each, Forward)]
    found = [(each, [one for one in read_activations(each) if one.product is not None]) for each in methods]
    return [each for each in found if each[1]]


def _functions(cls: type) -> Iterator[tuple[str, FunctionType]]:
    names = (name for each in cls.__mro__[: cls.__mro__.index(nn.Module)] for name in vars(each))
    for name in dict.fromkeys(names):
        method = inspect.getattr_static(cls, name)  # a staticmethod is no function here
        if isinstance(method, FunctionType) and name != "forward" and _may_gate(method):
            yield name, method


def _may_gate(method: FunctionType) -> bool:
    """Whether the method takes one argument and multiplies."""
    code = method.__code__
    multiplies = any(each.argrepr == "*" or each.opname == "BINARY_MULTIPLY" for each in dis.get_instructions(code))
    return code.co_argcount == 2 and multiplies  # BINARY_MULTIPLY: Python 3.10
