"""Rotary position embedding in a forward: a function of q, k, cos and sin becomes one operator.

    q, k = apply_rotary(q, k, cos, sin)     ->      q, k = rotated_0_(self, apply_rotary, q, k, cos, sin)

A forward may also slice off the first columns of each head, rotate them and concatenate them with the rest (Phi). One
operator replaces these statements.
The function is one of the forward's module, without side effects by its source, and recognised by what it computes.
Everything else of the forward stays as it was written.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..ops.common.backends import KERNEL_DTYPES, use_backend
from . import calls
from .attention.interface import interface_of, is_of_transformers
from .attention.reads import caches_beside_products, nodes_after
from .classes import plain_function
from .forward import Forward, Place, places
from .rewriting import InForward, Rewriting
from .source import Inliner, calls_in, is_pure, matches, resolve
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


_N_COLUMNS = 8  # rotated on probe inputs

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
    """Columns of cos for _N_COLUMNS rotated columns."""


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

    def n_rotated(self, cos: Tensor) -> int:
        """Columns of q and k that these tables rotate."""
        return cos.shape[-1] * _N_COLUMNS // self.table.n_columns

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
                d = self.n_rotated(cos)
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
        n_sliced: Any,
        q: Any,
        k: Any,
        cos: Any,
        sin: Any,
        /,
        *args: Any,
        **options: Any,
    ) -> Any:
        """n_sliced: columns of q and k that the function is given; None for all."""
        layout = self.rotation.layout(q, k, cos, sin) if plain_function(function) is self.rotation.function else None
        if layout is not None and n_sliced in (None, self.rotation.n_rotated(cos)):
            calls.count_fused(module)
            return self.rotation.fused(layout, q, k, cos, sin, self.for_attention and self._casts(module, cache))
        calls.count_fallback(module)
        if n_sliced is not None:
            return _in_part(function, n_sliced, q, k, cos, sin)
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


def _in_part(function: Any, n: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The function of the first n columns of each head, beside the others as they are."""
    q_rotated, k_rotated = function(q[..., :n], k[..., :n], cos, sin)
    return torch.cat((q_rotated, q[..., n:]), dim=-1), torch.cat((k_rotated, k[..., n:]), dim=-1)


class Part(NamedTuple):
    """A rotation of a part of q and k, with the statements around it: see _in_part."""

    q: str
    k: str
    n_sliced: ast.expr
    rotation: ast.Assign
    around: tuple[ast.stmt, ...]
    """Slices before it, concatenations after it."""


class FoundRotation(NamedTuple):
    """The call of a rotation in a forward."""

    call: ast.Call
    rotation: Rotation
    called: Callable[..., Any]
    """The function of q, k, cos and sin, with the call's further arguments."""
    caches: frozenset[str] | None
    """The caches that read the results beside attention; None where something else reads them."""
    part: Part | None


def _with_tables(compute: Any, tables: list[Tensor], q: Tensor, k: Tensor) -> Any:
    """Tables in their own dtype, which need not be q's; in float64, for the truth, they are float64 too."""
    return compute(q, k, *(table.to(q.dtype) if q.dtype == torch.float64 else table for table in tables))


def read_rotations(forward: Forward) -> list[FoundRotation]:
    """The rotations that a forward calls."""
    found = []
    for node in ast.walk(forward.tree):
        match node:
            case ast.Call(func=ast.Name() | ast.Attribute() as function, args=[_, _, _, _, *more], keywords=keywords):
                if all(isinstance(each, ast.Constant) for each in (*more, *(each.value for each in keywords))):
                    resolved = called = plain_function(resolve(function, forward.globals))
                    options = {each.arg: each.value.value for each in keywords if each.arg}  # type: ignore[attr-defined]
                    if more or options:
                        called = partial(_called_with, called, [each.value for each in more], options)  # type: ignore[attr-defined]
                    rotation = recognise_rotation(resolved, called)
                    if rotation is not None:
                        found.append(_found(forward, node, rotation, called))
    return found


def _found(forward: Forward, call: ast.Call, rotation: Rotation, called: Callable[..., Any]) -> FoundRotation:
    caches, part = None, None
    assigned = [each for each in places(forward.tree.body) if getattr(each.statement, "value", None) is call]
    match [(each.statement, each.in_loop) for each in assigned]:
        case [(ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=q), ast.Name(id=k)])]) as statement, False)]:
            caches, part = caches_beside_products(forward, statement, q, k), _part(forward, assigned[0])
    if part is not None:
        rotation, called = replace(rotation, takes_part=True), partial(_in_part, called, _N_COLUMNS)
    return FoundRotation(call, rotation, called, caches, part)


_PART = ast.parse("""
A, B = (X[..., :N], X[..., N:])
C, D = (Y[..., :N], Y[..., N:])
A, C = F(A, C, COS, SIN)
X = cat((A, B), dim=-1)
Y = cat((C, D), dim=-1)
""").body


def _part(forward: Forward, place: Place) -> Part | None:
    """The rotation at a place, if it is one of a part, and nothing else reads the parts."""
    statements = place.block[max(place.position - 2, 0) : place.position + 3]
    found: dict[str, Any] = {}
    if not matches(_PART, Inliner(forward.globals, {}).inline(statements), found):
        return None
    names, n = [found[name] for name in "ABCDXY"], found["N"]
    if not all(isinstance(name, ast.Name) for name in names) or calls_in(n):
        return None
    *parts, q, k = (name.id for name in names)
    counts = Counter(node.id for node in ast.walk(forward.tree) if isinstance(node, ast.Name))
    if [counts[part] for part in parts] != [4, 2, 4, 2]:
        return None
    for node in nodes_after(forward.tree, statements[-1]):
        match node:  # a concatenation is contiguous; the operator keeps the strides of q and k
            case ast.Attribute(value=value, attr="view" | "stride" | "is_contiguous") if any(
                isinstance(each, ast.Name) and each.id in (q, k) for each in ast.walk(value)
            ):
                return None
    before, (rotation, *after) = statements[:2], statements[2:]
    assert isinstance(rotation, ast.Assign)
    return Part(q, k, n, rotation, (*before, *after))


def _called_with(function: Any, more: list[Any], options: dict[str, Any], *tensors: Tensor) -> Any:
    return function(*tensors, *more, **options)


class Rotations(InForward):
    """A forward that calls rotations, as a site."""

    patterns = (PATTERN,)
    read = staticmethod(read_rotations)

    @staticmethod
    def is_of(module: nn.Module, each: FoundRotation, excluded: Container[int]) -> bool:
        return True

    def put(self, rewriting: Rewriting) -> None:
        """Rotated in place of the rotations."""
        for index, (call, rotation, _, caches, part) in enumerate(self.chosen):
            is_for_attention = caches is not None and len(caches) < 2
            rotated = Rotated(rotation, is_for_attention, interface_of(self.forward))
            rewriting.constants[f"rotated_{index}_"] = rotated
            cache = next(iter(caches or ()), "None") if is_for_attention else "None"
            if part is not None:
                wholes: list[ast.expr] = [ast.Name(part.q), ast.Name(part.k)]
                rewriting.copy_of(part.rotation).targets = [ast.Tuple(wholes)]
                rewriting.copy_of(call).args[:2] = wholes
                rewriting.remove(*part.around)
            n_sliced = "None" if part is None else ast.unparse(part.n_sliced)
            rewriting.put_call(call, f"rotated_{index}_", cache, n_sliced)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless each rotation, fused, computes what the function does."""
        device, dtype = kind_of(module)
        for _, rotation, called, *_ in self.chosen:
            head_dims = [_N_COLUMNS, _N_COLUMNS + 4] if rotation.takes_part else [_N_COLUMNS]
            for layout, table_dtype, head_dim in product(rotation.layouts, {dtype, torch.float32}, head_dims):
                q, k, *tables = _inputs(layout, rotation.table, head_dim)
                tables = [table.to(device, table_dtype) for table in tables]
                fused = partial(_with_tables, partial(rotation.fused, layout), tables)
                unfused, mode = partial(_with_tables, called, tables), f" of {rotation.function.__name__}"
                check_function(fused, unfused, {"q": q, "k": k}, device, dtype, mode)


def recognise_rotation(function: Any, called: Callable[..., Any]) -> Rotation | None:
    """What a function computes, by probing; None for anything else. called: it, as a function of q, k, cos and sin."""
    if not inspect.isfunction(function) or len(inspect.signature(function).parameters) < 4 or not is_pure(function):
        return None
    layouts, table = _accepted(called, _N_COLUMNS)
    if table is None:
        return None
    takes_part = all(layout in _accepted(called, _N_COLUMNS + 4)[0] for layout in layouts)
    q, k, cos, sin = (x.bfloat16() for x in _inputs(layouts[0], table, _N_COLUMNS))
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
    """q, k, cos and sin for _N_COLUMNS rotated columns, every size another one."""
    batch = 1 if layout.n_dims == 3 else 2
    generator = torch.Generator().manual_seed(0)
    heads = [layout.back(torch.randn(batch, n, 5, head_dim, generator=generator, device="cpu")) for n in (4, 3)]
    shape = (5, table.n_columns) if layout.n_table_dims == 2 else (batch, 5, table.n_columns)
    return [*heads, *(torch.randn(shape, generator=generator, device="cpu") for _ in range(2))]
