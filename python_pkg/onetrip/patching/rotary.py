"""Rotary position embedding in a forward: a function of q, k, cos and sin becomes one operator.

    q, k = apply_rotary(q, k, cos, sin)     ->      q, k = rotated_0_(self, apply_rotary, q, k, cos, sin)

The function is one of the forward's module, without side effects by its source, and recognised by what it computes.
Everything else of the forward stays as it was written.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..ops.common.backends import KERNEL_DTYPES, use_backend
from . import calls
from .attention.interface import interface_of, is_of_transformers
from .attention.reads import caches_beside_products
from .classes import Rewrite
from .forward import Forward, places
from .rewriting import Rewriting
from .source import is_pure, resolve
from .verify import check_function, kind_of, undisturbed

PATTERN = "rotary"
_Map = Callable[[Tensor], Tensor]


class Layout(NamedTuple):
    """How a function takes q and k."""

    n_dims: int
    """Dimensions of q and k."""
    n_table_dims: int
    """Dimensions of cos and sin: (positions, d), or (batch or 1, positions, d)."""
    to_operator: _Map
    """To (batch, heads, positions, head_dim)."""
    back: _Map


def _same(x: Tensor) -> Tensor:
    return x


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


LAYOUTS = (
    Layout(4, 3, _same, _same),
    Layout(4, 2, _same, _same),
    Layout(4, 3, _transposed, _transposed),
    Layout(3, 2, lambda x: x.transpose(0, 1).unsqueeze(0), lambda x: x.squeeze(0).transpose(0, 1)),
)
"""Heads before positions, twice; positions before heads, with a batch and without one."""


class Table(NamedTuple):
    """What columns of cos and sin belong together."""

    is_interleaved: bool
    to_operator: _Map
    n_columns: int
    """Columns of cos for 8 rotated columns."""


TABLES = (
    Table(False, _same, 8),
    Table(False, lambda table: torch.cat((table, table), dim=-1), 4),
    Table(True, _same, 8),
    Table(True, lambda table: table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1), 8),
)
"""Llama's, GPT-OSS's, Cohere's and GLM's."""


@dataclass(frozen=True)
class Rotation:
    """What a function of q, k, cos and sin computes."""

    function: Any
    layouts: tuple[Layout, ...]
    """Those that it takes: of different dimensions."""
    table: Table
    takes_part: bool
    """Whether cos may have fewer columns than q; the rest is copied."""
    in_float32: bool
    """Whether it casts to float32 and rounds once; else each product and the sum are rounded to their dtype."""
    keeps_dtype: bool
    """Whether the results have q's dtype where cos has a wider one."""

    def layout(self, q: Any, k: Any, cos: Any, sin: Any) -> Layout | None:
        """The layout of the arguments; None if the operator does not take them."""
        if not all(isinstance(each, Tensor) and each.dtype in KERNEL_DTYPES for each in (q, k, cos, sin)):
            return None
        if not q.device == k.device == cos.device == sin.device or any(map(calls.is_distributed, (q, k, cos, sin))):
            return None
        if k.dtype != q.dtype or k.dim() != q.dim() or sin.dtype != cos.dtype or sin.shape != cos.shape:
            return None
        for layout in self.layouts:
            if (layout.n_dims, layout.n_table_dims) == (q.dim(), cos.dim()):
                (batch, _, positions, head_dim), n_heads = layout.to_operator(q).shape, layout.to_operator(k).shape[1]
                d = cos.shape[-1] * 8 // self.table.n_columns
                if (
                    layout.to_operator(k).shape == (batch, n_heads, positions, head_dim)
                    and cos.shape[:-1] in ((positions,), (batch, positions), (1, positions))
                    and (d == head_dim or (self.takes_part and d < head_dim))
                    and d % 2 == 0 < d
                ):
                    return layout
        return None

    def fused(
        self, layout: Layout, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, for_attention: bool = False
    ) -> tuple[Tensor, Tensor]:
        """What the function returns, by the operator. for_attention: that attention alone reads it. In training under
        autocast float32 becomes autocast's dtype then: attention would cast it to that, and rounds the same values."""
        dtype = q.dtype if self.keeps_dtype else torch.promote_types(q.dtype, cos.dtype)
        half = calls.autocast_dtype(q)
        # Without gradients a cache keeps k in the dtype that it has then.
        is_trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
        if for_attention and dtype == torch.float32 and half is not None and is_trained:
            dtype = half
        if self.in_float32:
            cos, sin = cos.float(), sin.float()
        tables = self.table.to_operator(cos), self.table.to_operator(sin)
        q, k = layout.to_operator(q), layout.to_operator(k)
        q, k = ops.rotary_embedding(q, k, *tables, interleaved=self.table.is_interleaved, out_dtype=dtype)
        return layout.back(q), layout.back(k)


@dataclass(frozen=True)
class Rotated:
    """The call of a rotation in a rewritten forward."""

    rotation: Rotation
    for_attention: bool
    interface: Any = field(compare=False)
    """transformers' attention interface, if the forward may ask it."""

    def __call__(
        self,
        module: nn.Module,
        function: Any,
        cache: Any,
        q: Any,
        k: Any,
        cos: Any,
        sin: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        layout = self.rotation.layout(q, k, cos, sin) if function is self.rotation.function else None
        if layout is not None:
            calls.count_fused(module)
            return self.rotation.fused(layout, q, k, cos, sin, self.for_attention and self._casts(module, cache))
        calls.count_fallback(module)
        return function(q, k, cos, sin, *args, **options)

    def _casts(self, module: nn.Module, cache: Any) -> bool:
        """Whether attention casts what it is given: a user's own function need not, and a cache that does not grow by
        torch.cat has memory of the dtype that it was given first."""
        cls = type(cache)
        if cache is not None and (cls.__module__, cls.__name__) != ("transformers.cache_utils", "DynamicCache"):
            return False
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        function = None if self.interface is None else self.interface.get(name)
        return function is None or is_of_transformers(function)  # None: the forward's own


class FoundRotation(NamedTuple):
    """The call of a rotation in a forward."""

    call: ast.Call
    rotation: Rotation
    called: Callable[..., Any]
    """The function of q, k, cos and sin, with the call's further arguments."""
    caches: set[str] | None
    """The caches that read the results beside attention; None where something else reads them."""


@dataclass(frozen=True, eq=False)
class Rotations:
    """A forward that calls rotations, as a site."""

    forward: Forward
    found: tuple[FoundRotation, ...]
    pattern = PATTERN
    detail = ""

    def rewrite(self, cls: type) -> Rewrite:
        """The forward with its rotations fused."""
        rewriting = Rewriting(self.forward)
        for index, (call, rotation, _, caches) in enumerate(self.found):
            is_for_attention = caches is not None and len(caches) < 2
            rotated = Rotated(rotation, is_for_attention, interface_of(self.forward))
            rewriting.constants[f"rotated_{index}_"] = rotated
            rewriting.put_call(call, f"rotated_{index}_", *(caches if is_for_attention and caches else {"None"}))
        return rewriting.rewrite(PATTERN)

    def verify(self, module: nn.Module, rewrite: Rewrite) -> None:
        """Raise VerificationError unless each rotation, fused, computes what the function does."""
        device, dtype = kind_of(module)
        for _, rotation, called, _ in self.found:
            for layout, table_dtype in product(rotation.layouts, {dtype, torch.float32}):
                q, k, *tables = _inputs(layout, rotation.table, 8)
                tables = [table.to(device, table_dtype) for table in tables]
                fused = partial(_with_tables, partial(rotation.fused, layout), tables)
                unfused, mode = partial(_with_tables, called, tables), f" of {rotation.function.__name__}"
                check_function(fused, unfused, {"q": q, "k": k}, device, dtype, mode)


def _with_tables(compute: Any, tables: list[Tensor], q: Tensor, k: Tensor) -> Any:
    """Tables in their own dtype, which need not be q's; in float64, for the truth, they are float64 too."""
    return compute(q, k, *(table.to(q.dtype) if q.dtype == torch.float64 else table for table in tables))


def read_rotations(forward: Forward) -> Rotations | None:
    """The rotations that a forward calls; None if there are none."""
    found = []
    for node in ast.walk(forward.tree):
        match node:
            case ast.Call(func=ast.Name() | ast.Attribute() as function, args=[_, _, _, _, *more], keywords=keywords):
                if all(isinstance(each, ast.Constant) for each in (*more, *(each.value for each in keywords))):
                    resolved = called = resolve(function, forward.globals)
                    options = {each.arg: each.value.value for each in keywords if each.arg}  # type: ignore[attr-defined]
                    if more or options:
                        called = partial(_called_with, called, [each.value for each in more], options)  # type: ignore[attr-defined]
                    rotation = recognise_rotation(resolved, called)
                    if rotation is not None:
                        found.append(FoundRotation(node, rotation, called, _caches(forward, node)))
    return Rotations(forward, tuple(found)) if found else None


def _caches(forward: Forward, call: ast.Call) -> set[str] | None:
    """The caches that read the results; None unless these have names, and attention and caches alone read them."""
    assigned = [each for each in places(forward.tree.body) if getattr(each.statement, "value", None) is call]
    match [(each.statement, each.in_loop) for each in assigned]:
        case [(ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=q), ast.Name(id=k)])]) as statement, False)]:
            return caches_beside_products(forward, statement, q, k)
    return None


def _called_with(function: Any, more: list[Any], options: dict[str, Any], *tensors: Tensor) -> Any:
    return function(*tensors, *more, **options)


def recognise_rotation(function: Any, called: Callable[..., Any]) -> Rotation | None:
    """What a function computes, by probing; None for anything else. called: it, as a function of q, k, cos and sin."""
    if not inspect.isfunction(function) or len(inspect.signature(function).parameters) < 4 or not is_pure(function):
        return None
    layouts, table = _accepted(called, 8)
    if table is None:
        return None
    takes_part = all(layout in _accepted(called, 12)[0] for layout in layouts)
    q, k, cos, sin = (x.bfloat16() for x in _inputs(layouts[0], table, 8))
    rounded, mixed = _pair(called, q, k, cos, sin), _pair(called, q, k, cos.float(), sin.float())
    if rounded is None or mixed is None or rounded[0].dtype != torch.bfloat16:
        return None
    for in_float32 in (False, True):
        rotation = Rotation(function, layouts, table, takes_part, in_float32, mixed[0].dtype == torch.bfloat16)
        with use_backend("reference"):
            if all(map(torch.equal, rounded, rotation.fused(layouts[0], q, k, cos, sin))):
                return rotation
    return None


def _accepted(called: Any, head_dim: int) -> tuple[tuple[Layout, ...], Table | None]:
    """The layouts that a function takes, and its table."""
    for table in TABLES:
        layouts = []
        for layout in LAYOUTS:
            q, k, cos, sin = (x.double() for x in _inputs(layout, table, head_dim))
            outputs = _pair(called, q, k, cos, sin)
            with use_backend("reference"):
                expected = Rotation(None, (), table, True, False, True).fused(layout, q, k, cos, sin)
            if outputs is not None and all(map(_is_close, outputs, expected)):
                layouts.append(layout)
        if layouts:
            return tuple(layouts), table
    return (), None


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    """A function that casts to float32 has its errors."""
    return ours.shape == theirs.shape and torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def _pair(called: Any, *tensors: Tensor) -> tuple[Tensor, Tensor] | None:
    """What a function returns, if it is a pair of tensors."""
    try:
        with undisturbed(torch.device("cpu")):
            outputs = called(*tensors)
    except Exception:  # no function of four tensors of these shapes
        return None
    is_pair = isinstance(outputs, tuple) and len(outputs) == 2 and all(isinstance(each, Tensor) for each in outputs)
    return outputs if is_pair else None


def _inputs(layout: Layout, table: Table, head_dim: int) -> list[Tensor]:
    """q, k, cos and sin for 8 rotated columns, every size another one."""
    batch = 1 if layout.n_dims == 3 else 2
    generator = torch.Generator().manual_seed(0)
    heads = [layout.back(torch.randn(batch, n, 5, head_dim, generator=generator, device="cpu")) for n in (4, 3)]
    shape = (5, table.n_columns) if layout.n_table_dims == 2 else (batch, 5, table.n_columns)
    return [*heads, *(torch.randn(shape, generator=generator, device="cpu") for _ in range(2))]
