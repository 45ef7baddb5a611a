"""Linear layers that read one tensor: their matrix products add up the gradient of it.

    q = self.q(x)           shared_ = SharedInput_()
    k = self.k(x)     ->    q = shared_(self, self.q, x)
    v = self.v(x)           k = shared_(self, self.k, x)
                            v = shared_(self, self.v, x)

Autograd computes one gradient of x for each layer and adds them in passes of their own. Here each layer hands the next
one an alias of x. In backward the alias brings the gradient of all later layers, and the layer's product is added to it
where it lies (a matrix product with beta = 1). Which layers read the very same tensor is seen as the model runs; the
source only tells which calls may. Autocast casts the tensor once for all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.common.backends import KERNEL_DTYPES
from ..ops.common.tracing import is_jit_tracing, is_transformed
from . import calls, links
from .calls import is_plain, original_class
from .classes import Rewrite
from .report import Unsuitable
from .residual.choose import child_at
from .residual.read import Reader
from .residual.rewrite import Rewriting
from .source import is_source_of, parse
from .verify import Outcome, check_outcomes, kind_of, undisturbed

PATTERN = "shared_input"


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias, and an alias of x whose gradient this layer's is added to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = x.shape
        y = functional.linear(x, weight, bias)
        # No view: a model may write to it, which autograd forbids for views that a Function returns.
        return torch.ops.aten._unsafe_view(y, y.shape), x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dy, later = grads
        if dy is None:
            return later, None, None
        x, weight = ctx.saved_tensors
        n_columns = ctx.shape[-1]
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            if later is None:
                dx = (rows @ weight).view(ctx.shape)
            elif torch.is_grad_enabled() or not later.is_contiguous():  # to be differentiated again
                dx = torch.addmm(later.reshape(-1, n_columns), rows, weight).view(ctx.shape)
            else:  # in place: the next layer made it, and the alias has no other reader
                dx = later
                dx.view(-1, n_columns).addmm_(rows, weight)
        if ctx.needs_input_grad[1]:
            dweight = rows.t() @ x.reshape(-1, n_columns)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(dim=0)
        return dx, dweight, dbias


class SharedInput:
    """The tensor that linear layers read in one call of a forward."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.version = 0
        self.alias: Tensor | None = None
        """What the next layer reads in its place."""

    def __call__(self, module: nn.Module, dense: Any, x: Tensor) -> Tensor:
        if not _is_fusable(dense, x):
            return dense(x)
        weight, bias = dense.weight, dense.bias
        dtype = torch.get_autocast_dtype(x.device.type) if calls.is_autocasting(x) else x.dtype
        if self.alias is None or x is not self.tensor or x._version != self.version or self.alias.dtype != dtype:
            self.tensor, self.version, self.alias = x, x._version, x.to(dtype)
        calls.count_fused(module)
        y, self.alias = _Linear.apply(self.alias, weight.to(dtype), None if bias is None else bias.to(dtype))
        return y


def _is_fusable(dense: Any, x: Any) -> bool:
    """Whether there is a gradient to add up, large enough to be worth some 10 us of Python."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not isinstance(x, Tensor):
        return False
    if not x.requires_grad or x.dim() < 2 or x.numel() < links.SMALLEST or x.dtype not in KERNEL_DTYPES:
        return False
    if not is_plain(dense, nn.Linear) or is_jit_tracing() or is_transformed() or calls.is_distributed(x):
        return False
    weight = dense.weight
    is_tensor = not hasattr(type(weight), "__tensor_flatten__") and weight.dtype in KERNEL_DTYPES
    has_dtype = weight.dtype == x.dtype or calls.is_autocasting(x)
    return is_tensor and has_dtype and weight.device == x.device and weight.shape[1:] == x.shape[-1:]


@dataclass(eq=False)
class FoundGroups:
    """A forward with calls of children that may read one tensor."""

    tree: ast.FunctionDef
    groups: list[list[tuple[ast.Call, str]]]
    """(call, path of the child)."""


def read_shared_inputs(forward: Any, source: str = "") -> FoundGroups | None:
    """The groups of a forward; None if it has none. source: of its rewrite."""
    tree: Any = ast.parse(source).body[0] if source else parse(forward)
    if isinstance(tree, Unsuitable) or not tree.args.args:
        return None
    scan = _Scan(Reader(forward, tree))
    scan.block(tree.body, {})
    groups = [group for group in scan.readers.values() if len(group) > 1]
    return FoundGroups(tree, groups) if groups and (source or is_source_of(tree, forward)) else None


class _Scan:
    """Follows which names may stand for one value, statement by statement."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.numbers = count()
        self.readers: dict[int, list[tuple[ast.Call, str]]] = {}
        """Number of a value -> calls of a child with it alone."""

    def block(self, body: list[ast.stmt], values: dict[str, frozenset[int]]) -> None:
        """values: name -> numbers of the values that it may have."""
        for statement in body:
            inner = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
            if any(inner):
                for each in inner:
                    self.block(each, dict(values))
            else:
                self.calls(statement, values)
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    values[node.id] = self.new()
            match statement:
                case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=name)):
                    values[target] = self.of(name, values)
                case ast.Assign(
                    targets=[ast.Name(id=target)], value=ast.IfExp(body=ast.Name(id=one), orelse=ast.Name(id=other))
                ):
                    values[target] = self.of(one, values) | self.of(other, values)

    def calls(self, statement: ast.stmt, values: dict[str, frozenset[int]]) -> None:
        for node in ast.walk(statement):
            called = self.reader.called(node) if isinstance(node, ast.Call) else None
            if called is not None and isinstance(called[1], ast.Name):
                for number in self.of(called[1].id, values):
                    self.readers.setdefault(number, []).append((node, called[0]))  # type: ignore[arg-type]

    def of(self, name: str, values: dict[str, frozenset[int]]) -> frozenset[int]:
        return values.setdefault(name, self.new())

    def new(self) -> frozenset[int]:
        return frozenset([next(self.numbers)])


def choose_shared_inputs(module: nn.Module, found: FoundGroups, excluded: Container[int]) -> tuple[ast.Call, ...]:
    """The calls of linear layers in groups of at least two layers."""
    chosen: list[ast.Call] = []
    for group in found.groups:
        linear = [(call, path) for call, path in group if _is_linear(child_at(module, path), excluded)]
        if len({path for _, path in linear}) > 1:
            chosen += (call for call, _ in linear if call not in chosen)
    return tuple(chosen)


def _is_linear(child: Any, excluded: Container[int]) -> bool:
    return isinstance(child, nn.Module) and id(child) not in excluded and original_class(type(child)) is nn.Linear


@dataclass(frozen=True)
class SharedInputs:
    """A module whose linear layers may read one tensor, as a site."""

    forward: FoundGroups
    chosen: tuple[ast.Call, ...]
    pattern = PATTERN
    detail = ""

    def rewrite(self, module: nn.Module) -> Rewrite:
        """The forward with its linear layers called through a SharedInput."""
        return self._rewrite

    @cached_property
    def _rewrite(self) -> Rewrite:
        rewriting = Rewriting(self.forward.tree)
        for call in self.chosen:
            rewriting.put_call(call, "shared_")
        has_docstring = ast.get_docstring(rewriting.tree) is not None
        made = ast.Assign([ast.Name("shared_")], ast.Call(ast.Name("SharedInput_"), [], []))
        rewriting.tree.body.insert(int(has_docstring), made)
        return Rewrite(PATTERN, rewriting.source(), (("SharedInput_", SharedInput),), in_module=True)

    def verify(self, module: nn.Module, rewrite: Rewrite) -> None:
        """Raise VerificationError unless three small layers have the outputs and gradients that they have apart."""
        device, dtype = kind_of(module)
        with undisturbed(device):
            truth = _outcome(False, device, torch.float64)
            check_outcomes(_outcome(True, device, dtype), _outcome(False, device, dtype), truth, "")


def _outcome(is_shared: bool, device: torch.device, dtype: torch.dtype) -> Outcome:
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    x, *weights = (random(*shape).to(device, dtype).requires_grad_() for shape in ((2, 5, 8), (8, 8), (4, 8), (4, 8)))
    outputs, alias = [], x
    for weight in weights:
        y, alias = _Linear.apply(alias, weight, None) if is_shared else (functional.linear(x, weight), alias)
        outputs.append(y)
    cotangents = [torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(dtype) for y in outputs]
    gradients = torch.autograd.grad(outputs, (x, *weights), cotangents)
    return [(f"tensor {index}", each.detach()) for index, each in enumerate((*outputs, *gradients))]
