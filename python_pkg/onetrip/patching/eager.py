"""Reading eager attention functions: what a function computes, from its source, and the same by one fused call.

The functions of transformers' models differ in names, in temporaries and in what they leave out. So the source is read
into one expression, in which every local name stands for what it was assigned; that expression is taken apart from the
outside by the patterns below, layer by layer. What no pattern fits is not fused.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..ops.attention import attention
from ..ops.backends import KERNEL_DTYPES
from . import calls
from .classes import define
from .norms import Unsuitable

ROLES = ("module", "query", "key", "value", "mask")
"""Of an eager function's first arguments, by position; the others go by their own names."""

FUNCTIONS: dict[Any, str] = {
    functional.softmax: "softmax",
    torch.softmax: "softmax",
    functional.dropout: "dropout",
    torch.dropout: "dropout",
    torch.matmul: "matmul",
    torch.cat: "cat",
    torch.tanh: "tanh",
}
"""What a call must resolve to for a pattern to name it."""

# In patterns, names in capitals stand for any expression; X is what the next layer is looked for in.
HEADS = ("{0}", "repeat_kv({0}, N)", "repeat_kv({0}, N) if C else {0}")
OUTPUTS = ("matmul(X, V).transpose(1, 2)", "matmul(X, V).transpose(1, 2).contiguous()")
LAYERS = {
    "cast": ("X.to(T.dtype)", "X.type(T.dtype)"),
    "dropout": ("dropout(X, p=dropout, training=module.training)",),
    "no_sinks": ("X[..., :-1]", "X[..., :-1] if C else X"),
    "softmax": ("softmax(X, dim=-1)", "softmax(X, dim=-1, dtype=float32)", "softmax(X, dim=-1, dtype=X.dtype)"),
    "shift": ("X - X.max(dim=-1, keepdim=True).values",),
    "sinks": ("cat([X, SINKS], dim=-1)", "cat([X, SINKS], dim=-1) if IF_SINKS else X"),
    "mask": ("X + mask", "X + mask if mask is not None else X"),
    "bias": ("X + position_bias", "X + position_bias if position_bias is not None else X"),
    "softcap": ("tanh(X / softcap) * softcap if softcap is not None else X",),
}
"""A layer around X. The softmax subtracts a maximum whether or not it was done before."""
SCORES = ("matmul(query, K.transpose(2, 3)) * SCALE", "matmul(query, K.transpose(2, 3))")
ORDER = re.compile(
    r"(cast )?(dropout )?(cast )?(no_sinks (cast )?softmax (shift )?sinks |softmax )(mask )?((bias )?|(softcap )?)"
)
"""Layers from the outside in. A soft cap with sinks is not fused."""


@dataclass(frozen=True)
class EagerFunction:
    """An eager attention function that was understood."""

    function: Callable[..., Any]
    source: str
    """`def attention(...)`, with the original's parameters; names ending in _ are given by compile."""
    has_mask: bool
    has_softcap: bool
    has_position_bias: bool
    has_sinks: bool
    returns_weights: bool = True
    has_bool_mask: bool = False

    def compile(self, replaced: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """The fused function. replaced: other values for names in the source (verification pins the rng)."""
        names = {**NAMES, "original_": self.function, **(replaced or {})}
        return define(self.function, self.source, names, "attention", "attention_softmax")


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
    """Whether the fused call computes what the eager expression does: dtypes and shapes as attention functions get them
    (a mask that is added and broadcasts), none of them sharded or empty; a scale that is no tensor."""
    if not (
        isinstance(scale, (int, float))
        and query.dim() == key.dim() == value.dim() == 4
        and query.dtype in KERNEL_DTYPES
    ):
        return False
    batch, n_heads, n_queries, width = query.shape
    weights = (batch, n_heads, n_queries, key.shape[2])
    if not (
        query.dtype == key.dtype == value.dtype
        and key.shape[0] == batch
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


def _is_added(tensor: Tensor | None, shape: tuple[int, ...], may_be_bool: bool = False) -> bool:
    if tensor is None:
        return True
    return (
        (tensor.dtype in KERNEL_DTYPES or (may_be_bool and tensor.dtype == torch.bool))
        and tensor.dim() <= len(shape)
        and all(size in (1, of) for size, of in zip(tensor.shape[::-1], shape[::-1], strict=False))
    )


def biased_mask(mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(mask, bias), where both are there and the mask is bool as the one mask that transformers' sdpa function makes of
    them: finite, so that a query without any key weighs all of them alike. A bool mask alone gives it zeros."""
    if mask is None or bias is None or mask.dtype != torch.bool:
        return mask, bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min), None


NAMES: dict[str, Any] = {
    "attention_": attention,
    "biased_mask_": biased_mask,
    "fits_": fits,
    "count_fused_": calls.count_fused,
    "count_fallback_": calls.count_fallback,
}


_functions: dict[Any, EagerFunction | Unsuitable] = {}


def read_eager_function(function: Any) -> EagerFunction | Unsuitable:
    """What an eager attention function computes; remembered."""
    if function not in _functions:
        _functions[function] = _read(function)
    return _functions[function]


def parse(function: Any) -> ast.FunctionDef | Unsuitable:
    """The definition of a plain function without decorators."""
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return Unsuitable("unknown_forward", "not a plain Python function")
    if function.__closure__:
        return Unsuitable("unknown_forward", "calls super(), or is defined inside of a function")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return Unsuitable("unknown_forward", "its source cannot be read")
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        return Unsuitable("unknown_forward", "decorated")
    return tree


def without_annotations(arguments: ast.arguments) -> ast.arguments:
    """The parameters, less what their annotations would have to import."""
    arguments = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0].args  # type: ignore[attr-defined]
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return arguments


class Unreadable(Exception):
    """Source that is no chain of assignments."""


def _read(function: Any) -> EagerFunction | Unsuitable:
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


class Inliner:
    """Runs statements on expressions: a name's value is the expression that it was assigned, names in it replaced."""

    def __init__(self, function_globals: Mapping[str, Any], environment: dict[str, ast.expr]) -> None:
        self.globals, self.environment = function_globals, environment

    def run(self, body: list[ast.stmt]) -> ast.expr:
        """What the body returns."""
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self.inline(statement.value)
            self.step(statement)
        raise Unreadable("returns nothing")

    def step(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.environment[name] = self.inline(value)
            case ast.If(test=test, body=body, orelse=orelse):
                condition = self.inline(test)
                branches = [Inliner(self.globals, dict(self.environment)) for _ in range(2)]
                for branch, statements in zip(branches, (body, orelse), strict=True):
                    for each in statements:
                        branch.step(each)
                then, otherwise = (branch.environment for branch in branches)
                for name in then.keys() | otherwise.keys():
                    if name not in then or name not in otherwise:
                        self.environment.pop(name, None)
                    elif then[name] is not otherwise[name]:
                        self.environment[name] = ast.IfExp(condition, then[name], otherwise[name])
            case _:
                raise Unreadable(ast.unparse(statement).splitlines()[0])

    def inline(self, expression: Any) -> Any:
        match expression:
            case ast.Name(id=name):
                return self.environment.get(name) or ast.Name(name)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                resolved = self.resolve(function)
                known = FUNCTIONS.get(resolved) if resolved is not None and resolved.__hash__ else None
                return ast.Call(
                    ast.Name(known) if known else self.inline(function),
                    [self.inline(each) for each in arguments],
                    sorted((ast.keyword(k.arg, self.inline(k.value)) for k in keywords), key=lambda k: k.arg or ""),
                )
            case ast.Attribute() if self.resolve(expression) is torch.float32:
                return ast.Name("float32")
            case ast.AST():
                fields = {name: self.inline(value) for name, value in ast.iter_fields(expression) if name != "ctx"}
                return type(expression)(**fields)
            case list():
                return [self.inline(each) for each in expression]
        return expression

    def resolve(self, expression: ast.expr) -> Any:
        """What a dotted name of the module stands for."""
        match expression:
            case ast.Name(id=name) if name not in self.environment:
                return self.globals.get(name)
            case ast.Attribute(value=inner, attr=name):
                return getattr(self.resolve(inner), name, None)
        return None


def _key(expression: Any) -> str:
    return ast.dump(expression) if isinstance(expression, ast.AST) else repr(expression)


def match(pattern: Any, expression: Any, found: dict[str, ast.expr]) -> bool:
    """Whether the expression is the pattern, with names in capitals standing for any expression, each for one."""
    if isinstance(pattern, ast.Name) and pattern.id.isupper():
        if pattern.id in found:
            return _key(found[pattern.id]) == _key(expression)
        found[pattern.id] = expression
        return True
    if isinstance(pattern, str) and pattern.isupper() and isinstance(expression, str):  # an attribute's name
        found[pattern] = ast.Name(expression)
        return True
    if isinstance(pattern, list):
        return (
            isinstance(expression, list)
            and len(pattern) == len(expression)
            and all(match(one, other, found) for one, other in zip(pattern, expression, strict=True))
        )
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(expression) and all(
            match(value, getattr(expression, name, None), found)
            for name, value in ast.iter_fields(pattern)
            if name not in ("ctx", "kind")
        )
    return bool(pattern == expression)


def first_match(patterns: tuple[str, ...], expression: ast.expr) -> tuple[str, dict[str, ast.expr]] | None:
    """The first pattern that fits, and what its capitals stand for."""
    for text in patterns:
        found: dict[str, ast.expr] = {}
        if match(_parsed(text), expression, found):
            return text, found
    return None


def _parsed(text: str) -> ast.expr:
    # Keywords in the order in which the inliner puts them; 4-D tensors: -2 and -1 are 2 and 3.
    tree = ast.parse(text, mode="eval").body
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords.sort(key=lambda keyword: keyword.arg or "")
    return tree


class _Transposes(ast.NodeTransformer):
    """Of 4-D tensors: transpose(-1, -2) is transpose(2, 3)."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "transpose":
            try:
                dims = sorted(ast.literal_eval(dim) % 4 for dim in node.args)
            except (TypeError, ValueError):
                raise Unreadable(ast.unparse(node)) from None
            node.args = [ast.Constant(dim) for dim in dims]
        return node


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.names.get(node.id, node.id))


def _recognise(
    function: Callable[..., Any], arguments: ast.arguments, result: ast.expr, names: Mapping[str, str]
) -> EagerFunction | Unsuitable:
    """names: role -> the argument's own name."""
    refusal = Unsuitable("unknown_forward", f"{function.__name__} computes something else than the known attentions")
    result = _Transposes().visit(copy.deepcopy(result))
    if not (isinstance(result, ast.Tuple) and len(result.elts) == 2):
        return refusal
    output = first_match(OUTPUTS, result.elts[0])
    if output is None or first_match(_heads("value"), output[1]["V"]) is None:
        return refusal
    expression = output[1]["X"]
    cast = first_match(LAYERS["cast"], expression)
    if _key(expression) != _key(result.elts[1]) and (cast is None or _key(cast[1]["X"]) != _key(result.elts[1])):
        return refusal

    layers: dict[str, dict[str, ast.expr]] = {}
    order = ""
    while (layer := _outermost(expression)) is not None:
        name, found = layer
        order, layers[name], expression = f"{order}{name} ", found, found["X"]
    scores = first_match(SCORES, expression)
    if scores is None or first_match(_heads("key"), scores[1]["K"]) is None or not ORDER.fullmatch(order):
        return refusal

    def own(expression: ast.expr) -> str:
        return ast.unparse(_Renamed(names).visit(copy.deepcopy(expression)))

    sinks = "None"
    if "sinks" in layers:
        found = layers["sinks"]
        sinks = own(found["SINKS"]) + (f" if {own(found['IF_SINKS'])} else None" if "IF_SINKS" in found else "")
    module, query, key, value, mask = (names[role] for role in ROLES)
    tensors = f"{query}, {key}, {value}, {mask if 'mask' in layers else 'None'}"
    bias, softcap = ("position_bias" if "bias" in layers else "None"), ("softcap" if "softcap" in layers else "None")
    same = ", ".join(
        argument.arg if i < len(ROLES) else f"{argument.arg}={argument.arg}"
        for i, argument in enumerate(arguments.args)
    )
    same += f", **{arguments.kwarg.arg}" if arguments.kwarg else ""
    p = f"dropout if {module}.training else 0.0" if "dropout" in layers else "0.0"
    source = f"""\
def attention({ast.unparse(without_annotations(arguments))}):
    sinks_ = {sinks}
    scale_ = {own(scores[1].get("SCALE", ast.Constant(1.0)))}
    if not fits_({tensors}, {bias}, sinks_, scale_):
        count_fallback_({module})
        return original_({same})
    count_fused_({module})
    output_, weights_ = attention_(
        {tensors}, scale=scale_, softcap={softcap}, position_bias={bias}, sinks=sinks_, dropout_p={p}
    )
    return {output[0].replace("matmul(X, V)", "output_")}, weights_
"""
    kinds = ("mask", "softcap", "bias", "sinks")
    return EagerFunction(function, source, *(kind in layers for kind in kinds))


def _outermost(expression: ast.expr) -> tuple[str, dict[str, ast.expr]] | None:
    for name, patterns in LAYERS.items():
        found = first_match(patterns, expression)
        if found is not None:
            return name, found[1]
    return None


def _heads(role: str) -> tuple[str, ...]:
    return tuple(pattern.format(role) for pattern in HEADS)
