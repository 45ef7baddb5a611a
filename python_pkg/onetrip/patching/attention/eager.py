"""Eager attention functions of transformers: what one computes, and the same by one fused call.

The functions differ in names, in temporaries and in what they omit. So the source is read into one expression without
local names. The patterns below take that expression apart layer by layer, from the outside. A function that the
patterns do not fit is not fused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...ops.attention import attention
from ...ops.common.backends import KERNEL_DTYPES
from ...ops.common.masks import broadcasts
from .. import calls
from ..report import Unsuitable
from ..source import (
    Inliner,
    Substitution,
    Unreadable,
    deep_copy,
    define,
    first_match,
    is_same,
    parse,
    passed_on,
    without_annotations,
)

PATTERN = "attention_softmax"
"""The name of this package's sites in patch_model's patterns."""

ROLES = ("module", "query", "key", "value", "mask")
"""The first arguments of an eager function, by position. The patterns use its own names for the other arguments."""

# In patterns, X is the expression in which the next layer is searched.
HEADS = ("{0}", "repeat_kv({0}, N)", "repeat_kv({0}, N) if C else {0}")
SLICED = "mask[:, :, :, :key.shape[-2]]"
"""Up to transformers 5.1 functions slice their mask: that of a static cache may have more columns than keys."""
MASKS = {
    "X + mask": "mask",
    "X + mask if mask is not None else X": "mask",
    "X + mask[:, :, :, :K.shape[-2]]": SLICED,
    "X + mask[:, :, :, :K.shape[-2]] if mask is not None else X": f"{SLICED} if mask is not None else None",
    "X + mask[:, :, :, :K.shape[-2]] if mask is not None and mask.ndim == 4 else X": (
        f"{SLICED} if mask is not None and mask.ndim == 4 else None"
    ),
}
"""How a mask is added -> the mask that the fused call is given."""
OUTPUTS = ("matmul(X, V).transpose(1, 2)", "matmul(X, V).transpose(1, 2).contiguous()")
LAYERS = {
    "cast": ("X.to(T.dtype)", "X.type(T.dtype)"),
    "dropout": ("dropout(X, p=dropout, training=module.training)",),
    "head_mask": ("X * M if M is not None else X", "X * M.view(1, -1, 1, 1) if M is not None else X"),
    "no_sinks": ("X[..., :-1]", "X[..., :-1] if C else X"),
    "optional_sinks": (
        "softmax(cat([X, SINKS], dim=-1).float(), dim=-1)[..., :-1].to(T.dtype) if IF_SINKS "
        "else softmax(X, dim=-1, dtype=float32).to(T.dtype)",
    ),
    "softmax": ("softmax(X, dim=-1)", "softmax(X, dim=-1, dtype=float32)", "softmax(X, dim=-1, dtype=X.dtype)"),
    "shift": ("X - X.max(dim=-1, keepdim=True).values",),
    "sinks": ("cat([X, SINKS], dim=-1)", "cat([X, SINKS], dim=-1) if IF_SINKS else X"),
    "mask": tuple(MASKS),
    "bias": ("X + position_bias", "X + position_bias if position_bias is not None else X"),
    "softcap": ("tanh(X / softcap) * softcap if softcap is not None else X",),
}
"""Layers around X. The operator's softmax always subtracts the maximum, so an explicit "shift" changes nothing. With a
"head_mask", which functions up to transformers 4.57 take, the original runs."""
SCORES = ("matmul(query, K.transpose(2, 3)) * SCALE", "matmul(query, K.transpose(2, 3))")
ORDER = re.compile(
    r"(cast )?((head_mask )?(dropout )?|dropout head_mask )(cast )?"
    r"(no_sinks (cast )?softmax (shift )?sinks |optional_sinks |softmax )(mask )?((bias )?|(softcap )?)"
)
"""The supported sequences of layers, from the outside in. A soft cap with sinks is not fused."""


@dataclass(frozen=True)
class EagerFunction:
    """An eager attention function whose result is known."""

    function: Callable[..., Any]
    source: str
    """`def attention(...)` with the original's parameters, and maybe more: a default is the original's of that name.
    compile supplies the names that end in _."""
    layers: frozenset[str]
    """Which of LAYERS it has; without "mask" it ignores its mask."""
    is_sdpa: bool = False
    """Whether it takes a bool mask, too, and returns no weights."""
    needs_mask: bool = False
    """Whether it adds its mask without a test for None."""
    takes_sinks: bool = False
    """Whether sinks are its argument, of that name; otherwise they are the module's."""

    @property
    def has_sinks(self) -> bool:
        return not self.layers.isdisjoint(("sinks", "optional_sinks"))

    def compile(self, replaced: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """The fused function. replaced: other values for names in the source; verification pins the rng."""
        names = {**NAMES, "original_": self.function, **(replaced or {})}
        return define(self.function, self.source, names, "attention", PATTERN)


def fits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: object,
    mask_may_be_bool: bool = False,
) -> bool:
    """Whether the fused call supports these arguments: 4-D tensors of one kernel dtype (under autocast, which casts
    them, of several), neither sharded nor empty, masks that broadcast, and a scale that is a number."""
    if not (
        isinstance(scale, (int, float))
        and query.dim() == key.dim() == value.dim() == 4
        and query.dtype in KERNEL_DTYPES
        and (query.dtype == key.dtype == value.dtype or _are_cast(query, key, value))
    ):
        return False
    batch, n_heads, n_queries, width = query.shape
    weights = (batch, n_heads, n_queries, key.shape[2])
    if not (
        key.shape[0] == batch
        and key.shape[3] == width
        and key.shape[:3] == value.shape[:3]
        and key.shape[1] > 0
        and n_heads % key.shape[1] == 0
        and query.numel() > 0
        and key.shape[2] > 0
        and value.shape[3] > 0
        and not any(each is not None and calls.is_distributed(each) for each in (query, key, value, mask, bias, sinks))
    ):
        return False
    return (
        _is_added(mask, weights, mask_may_be_bool)
        and _is_added(bias, weights)
        and (sinks is None or _is_added(sinks, (*weights[:3], 1)))
    )


def _are_cast(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether autocast gives the fused call one dtype, as it gives products. A rotation, a norm or a cache may leave q
    and k in float32 where v has autocast's dtype; a reentrant checkpoint does so in one of its two forwards."""
    return calls.is_autocasting(query) and key.dtype in KERNEL_DTYPES and value.dtype in KERNEL_DTYPES


def _is_added(tensor: Tensor | None, shape: tuple[int, ...], may_be_bool: bool = False) -> bool:
    if tensor is None:
        return True
    has_dtype = tensor.dtype in KERNEL_DTYPES or (may_be_bool and tensor.dtype == torch.bool)
    return has_dtype and broadcasts(tensor.shape, shape)


def biased_mask(mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(mask, bias) as transformers' sdpa function passes them on: a bool mask with a bias becomes one floating mask.

    That mask is finite, so a query without any key attends to all keys equally. A bool mask alone gives it zeros.
    """
    if mask is None or bias is None or mask.dtype != torch.bool:
        return mask, bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min), None


def fused_sdpa(
    attention: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
    bias: Tensor | None = None,
) -> Tensor | None:
    """What SDPA computes, by the fused attention; None for arguments that it does not take. bias: added to the mask.
    SDPA's causal masks count from the first query."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    n_queries, n_keys = query.shape[2], key.shape[2]
    if causal and n_keys > n_queries:
        key, value = key[:, :, :n_queries], value[:, :, :n_queries]
        bias = None if bias is None else bias[..., :n_queries]
    if (causal and n_keys < n_queries) or not fits(query, key, value, mask, bias, None, scale, True):
        return None
    mask, bias = biased_mask(mask, bias)
    output: Tensor = attention(
        query, key, value, mask, scale=scale, position_bias=bias, causal=causal, dropout_p=dropout_p, need_weights=False
    )[0]
    return output


NAMES: dict[str, Any] = {
    "attention_": attention,
    "sdpa_": fused_sdpa,
    "fits_": fits,
    "count_fused_": calls.count_fused,
    "count_fallback_": calls.count_fallback,
}


@cache
def fused_function(found: EagerFunction) -> Callable[..., Any]:
    """The fused function; one per original in the process, so that modules share patched classes."""
    return found.compile()


@cache
def read_eager_function(function: Any) -> EagerFunction | Unsuitable:
    """The result of an eager attention function, read from its source. Cached: every layer has the same function."""
    tree = parse(function)
    if isinstance(tree, Unsuitable):
        return tree
    names = [argument.arg for argument in tree.args.args]
    unusual = tree.args.posonlyargs or tree.args.vararg or tree.args.kwonlyargs or len(names) < len(ROLES)
    if unusual or not all(isinstance(default, ast.Constant) for default in tree.args.defaults):
        return Unsuitable("unknown_forward", f"{function.__name__}({ast.unparse(tree.args)})")
    canonical = dict(zip(names, ROLES, strict=False))
    environment: dict[str, ast.expr] = {name: ast.Name(canonical.get(name, name)) for name in names}
    try:
        result = Inliner(function.__globals__, environment).run(tree.body)
        return _recognise(function, tree.args, result, {role: name for name, role in canonical.items()})
    except Unreadable as error:
        return Unsuitable("unknown_forward", f"{function.__name__}: {error}")


class _Transposes(ast.NodeTransformer):
    """Sorts dimensions and makes them positive. Tensors are 4-D: transpose(-1, -2) becomes transpose(2, 3)."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "transpose":
            try:
                dims = sorted(ast.literal_eval(dim) % 4 for dim in node.args)
            except (TypeError, ValueError):
                raise Unreadable(ast.unparse(node)) from None
            node.args = [ast.Constant(dim) for dim in dims]
        return node


def _recognise(
    function: Callable[..., Any], arguments: ast.arguments, result: ast.expr, names: Mapping[str, str]
) -> EagerFunction | Unsuitable:
    """names: role -> name of the argument."""
    unknown = Unsuitable("unknown_forward", f"{function.__name__} is none of the known attention functions")
    result = _Transposes().visit(deep_copy(result))
    if not (isinstance(result, ast.Tuple) and len(result.elts) == 2):
        return unknown
    output = first_match(OUTPUTS, result.elts[0])
    if output is None or first_match(_heads("value"), output[1]["V"]) is None:
        return Unsuitable(unknown.reason, f"{function.__name__}: its output is not that of probabilities @ value")
    expression, returned = output[1]["X"], result.elts[1]
    optional = first_match(("None if C else X",), returned)
    if optional is not None:
        returned = optional[1]["X"]
    cast = first_match(LAYERS["cast"], expression)
    if not is_same(expression, returned) and (cast is None or not is_same(cast[1]["X"], returned)):
        return unknown

    layers: dict[str, dict[str, ast.expr]] = {}
    order, mask, needs_mask = "", "None", False
    while (layer := _outermost(expression)) is not None:
        name, text, found = layer
        if name == "mask":
            mask, needs_mask = MASKS[text], not isinstance(expression, ast.IfExp)
        order, layers[name], expression = f"{order}{name} ", found, found["X"]
    scores = first_match(SCORES, expression)
    if scores is None or first_match(_heads("key"), scores[1]["K"]) is None or not ORDER.fullmatch(order):
        return unknown
    if not is_same(layers.get("mask", {}).get("K", scores[1]["K"]), scores[1]["K"]):
        return unknown

    def own(expression: ast.expr) -> str:
        arguments = {role: ast.Name(name) for role, name in names.items()}
        return ast.unparse(Substitution(arguments).visit(deep_copy(expression)))

    sinks = "None"
    found = layers.get("sinks") or layers.get("optional_sinks", {})
    if found:
        sinks = own(found["SINKS"]) + (f" if {own(found['IF_SINKS'])} else None" if "IF_SINKS" in found else "")
    module, query, key, value, _ = (names[role] for role in ROLES)
    tensors = f"{query}, {key}, {value}, mask_"
    is_plain = f"{own(layers['head_mask']['M'])} is None and " if "head_mask" in layers else ""
    no_weights = "" if optional is None else f"None if {own(optional[1]['C'])} else "
    bias, softcap = ("position_bias" if "bias" in layers else "None"), ("softcap" if "softcap" in layers else "None")
    p = f"dropout if {module}.training else 0.0" if "dropout" in layers else "0.0"
    source = f"""\
def attention({ast.unparse(without_annotations(arguments))}):
    mask_ = {own(ast.parse(mask, mode="eval").body)}
    sinks_ = {sinks}
    scale_ = {own(scores[1].get("SCALE", ast.Constant(1.0)))}
    if not ({is_plain}fits_({tensors}, {bias}, sinks_, scale_)):
        count_fallback_({module})
        return original_({passed_on(arguments)})
    count_fused_({module})
    output_, weights_ = attention_(
        {tensors}, scale=scale_, softcap={softcap}, position_bias={bias}, sinks=sinks_, dropout_p={p}
    )
    return {output[0].replace("matmul(X, V)", "output_")}, {no_weights}weights_
"""
    return EagerFunction(
        function,
        source,
        frozenset(layers),
        needs_mask=needs_mask,
        takes_sinks="optional_sinks" in layers and any(argument.arg == "sinks" for argument in arguments.args),
    )


def _outermost(expression: ast.expr) -> tuple[str, str, dict[str, ast.expr]] | None:
    """(layer, its pattern, the expressions in it)."""
    for name, patterns in LAYERS.items():
        found = first_match(patterns, expression)
        if found is not None:
            return name, *found
    return None


def _heads(role: str) -> tuple[str, ...]:
    return tuple(pattern.format(role) for pattern in HEADS)
