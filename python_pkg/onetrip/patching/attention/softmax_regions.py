"""Softmax regions: the statements up to a dropped-out softmax, in a forward that asks no attention interface.

    scores = scores / math.sqrt(width)          (or * scale; optional)
    scores = scores + mask                      (optional, repeated, in place (+=), or under an if)
    weights = softmax(scores, dim=-1)
    weights = dropout(weights)

become one call if the tensors are as the call needs them; otherwise the original statements run. The rest of the
forward stays verbatim: caches, keyword arguments, later uses of the weights.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from inspect import getattr_static
from textwrap import indent
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import calls
from ..classes import method_of
from ..forward import Forward, Place, places, read_forward
from ..report import Unsuitable
from ..rewriting import InForward, Rewriting
from ..source import Inliner, calls_in, first_match
from ..verify import RNG, MaskedDropout, check_function, kind_of
from .eager import PATTERN
from .masked_fill import added_mask, read_fill, read_product
from .reads import caches_beside_products, nodes_after
from .region_softmax import fits_region, in_dtype_of, region_softmax

SOFTMAXES = (
    "softmax(X, dim=-1)",
    "softmax(X, dim=-1, dtype=T.dtype)",
    "softmax(X, dim=-1).to(T.dtype)",
    "softmax(X, dim=-1, dtype=float32).to(T.dtype)",
    "softmax(X, dim=-1, dtype=float32).type_as(T)",
    "softmax(X.float(), dim=-1).to(T.dtype)",
    "softmax(X.float(), dim=-1).type_as(T)",
)
DROPOUTS = ("self.CHILD(X)", "dropout(X, p=P, training=self.training)")
SCALES = {"X / S": "1.0 / ({})", "X * S": "{}"}
MASKS = ("X + M",)
_SAFE = {"dtype", "shape", "size"}  # of the scores, to be read by a mask
_VIEWS_AND_CASTS = {"to", "type", "unsqueeze", "view", "expand", "size"}


@dataclass(frozen=True)
class Region:
    """Consecutive statements of a forward, and their parts as source."""

    statements: tuple[ast.stmt, ...]
    result: str
    undropped: str
    """The name of the probabilities before dropout, if read later. Then only calls without dropout are fused."""
    scores: str
    like: str
    """The tensor whose dtype the result is cast to; "scores_" for the scores, "None" for no cast."""
    for_products: bool
    """Whether the result is read by matrix products alone, or returned beside what they give."""
    masks: tuple[str, ...]
    """What is added to the scaled scores; an expression may be None when it runs."""
    scale: str
    child: str
    """The name of the dropout module; empty for functional.dropout and for none."""
    p: str
    """0.0 if there is no dropout."""
    fill: str = ""
    """The mask of a masked_fill before the softmax (masked_fill.py)."""
    product: str = ""
    """The product with the weights after it, where there is a fill."""
    reads_weights: bool = False
    """Whether the weights are read after the product."""

    @property
    def source(self) -> str:
        """That of the statements."""
        return "\n".join(map(ast.unparse, self.statements))


class SoftmaxRegions(InForward):
    """A forward, or a method, with softmax regions: every instance of its class is a site."""

    patterns = (PATTERN,)

    def put(self, rewriting: Rewriting) -> None:
        """The fused calls before the statements of the regions, which run where those do not fit."""
        for region in self.chosen:
            first, *others = region.statements
            rewriting.replace(first, partial(_fused_statements, region))
            rewriting.remove(*others)
        rewriting.constants.update(NAMES)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless the fused call computes a region's softmax, with its mask and dropout."""
        device, dtype = kind_of(module)
        scores, filled = {"scores": (2, 4, 3, 5)}, {"scores": (2, 4, 3, 5), "values": (8, 5, 6)}
        biased = scores | {"mask": (1, 4, 3, 5)}
        padding = torch.zeros(2, 1, 1, 5, device=device)
        padding[1, ..., 3:] = torch.finfo(torch.float32).min
        hidden = torch.zeros(2, 1, 3, 5, dtype=torch.bool, device=device)
        hidden[1, :, 1:, 3:] = hidden[1, :, 2] = True
        n_masks = max(len(region.masks) for region in self.chosen)
        cases: list[tuple[str, Any, Tensor | None]] = [("", scores, None)]
        cases += [(" with bias", biased, None), (" with padding", scores, padding)] if n_masks else []
        cases += [(" with bias and padding", biased, padding)] if n_masks > 1 else []
        with MaskedDropout():
            for p, mode in ((0.0, ""), (0.25, " with dropout")):
                for name, inputs, more in cases:
                    check_function(*_pair(_fused, _unfused, p, more), inputs, device, dtype, mode + name)
                if any(region.fill for region in self.chosen):
                    pair = _pair(_fused_fill, _unfused_fill, p, hidden)
                    check_function(*pair, filled, device, dtype, f"{mode} with filled scores")


def _pair(fused: Any, unfused: Any, *arguments: Any) -> tuple[Any, Any]:
    return partial(fused, *arguments), partial(unfused, *arguments)


def _fused(p: float, padding: Tensor | None, scores: Tensor, mask: Tensor | None = None) -> Tensor:
    masks = tuple(_saturated(each, scores) for each in (mask, padding) if each is not None)
    return region_softmax(scores, masks, None, scale=0.5, dropout_p=p, rng=RNG)


def _unfused(p: float, padding: Tensor | None, scores: Tensor, mask: Tensor | None = None) -> Tensor:
    added = 0.5 * scores
    for each in (mask, padding):
        added = added if each is None else added + _saturated(each, scores)
    return functional.dropout(functional.softmax(added, dim=-1), p)


def _fused_fill(p: float, mask: Tensor, scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    added = added_mask(scores, mask)
    if added is None:  # float16
        return _unfused_fill(p, mask, scores, values)
    weights = region_softmax(scores, (added.mask,), None, dropout_p=p, rng=RNG)
    return added.product(weights.view(-1, *weights.shape[2:]), values), added.read(weights)


def _unfused_fill(p: float, mask: Tensor, scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    weights = functional.softmax(scores.masked_fill(mask, torch.finfo(scores.dtype).min), dim=-1)
    weights = functional.dropout(weights, p)
    return torch.bmm(weights.view(-1, *weights.shape[2:]), values), weights


def _saturated(mask: Tensor, scores: Tensor) -> Tensor:
    """The mask in the dtype of the scores, finite."""
    return mask.to(scores.dtype).clamp(min=torch.finfo(scores.dtype).min)


def read_softmax_regions(cls: Any) -> SoftmaxRegions | Unsuitable | None:
    """The regions of a class's forward; None if it computes no softmax itself."""
    called = getattr(getattr(method_of(cls, "forward"), "__code__", None), "co_names", ())
    reason: Unsuitable | None = None
    for method in ("forward", *called):
        function: Any = method_of(cls, method)
        if not _mentions_softmax(getattr(getattr(function, "__code__", None), "co_names", ())):
            continue
        forward = read_forward(function, method=method)
        if isinstance(forward, Unsuitable):
            reason = reason or (forward if method == "forward" else None)
            continue
        tree = forward.tree
        if forward.self_name != "self":
            reason = reason or Unsuitable("unknown_forward", f"{method}: its first parameter is not called self")
            continue
        inliner = Inliner(function.__globals__, {})
        if _calls_softmax(tree, inliner):
            found = tuple(_regions(forward, inliner, _may_return_weights(cls, method)))
            if found and isinstance(getattr_static(cls, method), FunctionType):
                return SoftmaxRegions(forward, found)
            reason = reason or Unsuitable("unknown_forward", f"{method}: {_why_not(tree, inliner)}")
    return reason


def _why_not(tree: ast.FunctionDef, inliner: Inliner) -> str:
    """The first statement with a softmax, and what it would need beside it."""
    statements = (each for each in ast.walk(tree) if isinstance(each, ast.stmt) and not hasattr(each, "body"))
    own = [each for each in statements if any(inliner.function_name(call.func) == "softmax" for call in calls_in(each))]
    if not own:
        return "softmax is called in a condition or a loop's head"
    shown = f"`{ast.unparse(own[0])}`"
    if _match(own, 0, inliner, SOFTMAXES) is None:
        return f"{shown} is not name = softmax(x, dim=-1), with a cast of x or of the result at most"
    for place in _run_once(tree):
        if place.statement is own[0]:
            following = f"`{ast.unparse(place.following[0]).splitlines()[0]}`" if place.following else "nothing"
            return f"{shown} has no mask in it or just before it, and is followed by {following}, not by its dropout"
    return f"{shown} is in a loop"


def _mentions_softmax(names: tuple[str, ...]) -> bool:
    return all(any(word in name for name in names) for word in ("softmax", "dropout"))


def _calls_softmax(tree: ast.FunctionDef, inliner: Inliner) -> bool:
    return any(inliner.function_name(call.func) == "softmax" for call in calls_in(tree))


def _may_return_weights(cls: Any, method: str) -> bool:
    """Whether the forward at most returns what the method returns beside its output."""
    if method == "forward":
        return True
    forward = read_forward(method_of(cls, "forward"))
    if isinstance(forward, Unsuitable):
        return False
    for statement in ast.walk(forward.tree):
        match statement:
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(), *others])],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=forward.self_name), attr=called)),
            ) if called == method:
                names = [other.id for other in others if isinstance(other, ast.Name)]
                return caches_beside_products(forward, statement, *names, may_be_returned=True) == set()
    return False


def _regions(forward: Forward, inliner: Inliner, may_be_returned: bool = True) -> Iterator[Region]:
    found = (_region(forward, place, inliner, may_be_returned) for place in _run_once(forward.tree))
    return (region for region in found if region is not None)


def _run_once(tree: ast.FunctionDef) -> Iterator[Place]:
    """The statements that run at most once."""
    return (place for place in places(tree.body) if not place.in_loop)


def _match(
    block: list[ast.stmt], index: int, inliner: Inliner, patterns: tuple[str, ...], x: str = ""
) -> tuple[str, str, dict[str, ast.expr]] | None:
    """(name, pattern, its parts) of the statement that gives the name a value which the pattern fits. x: what X is."""
    match block[index : index + 1]:
        case [ast.Assign(targets=[ast.Name(id=name)], value=value)]:
            found = first_match(patterns, inliner.inline(value))
            if found is not None and x in ("", ast.unparse(found[1]["X"])):
                return name, *found
    return None


def _region(forward: Forward, place: Place, inliner: Inliner, may_be_returned: bool) -> Region | None:
    """The region whose softmax is the statement at the place."""
    tree, block, index = forward.tree, place.block, place.position
    if (softmax_ := _match(block, index, inliner, SOFTMAXES)) is None:
        return None
    weights, form, parts = softmax_
    scores, last = parts["X"], index
    cast = _match(block, index + 1, inliner, ("X.to(T.dtype)",), weights)
    if cast is not None and cast[0] == weights and form == SOFTMAXES[0]:
        parts, last = cast[2] | parts, index + 1
    masks, scale, start, fill = [], "1.0", index, ""
    if (added := first_match(MASKS, scores)) is not None and _is_pure(added[1]["M"]):
        scores, masks = added[1]["X"], [ast.unparse(added[1]["M"])]
    elif isinstance(scores, ast.Name) and (scores.id == weights or not _is_read_after(tree, scores.id, block[index])):
        found: list[_Mask] = []
        while start and (mask := _mask(block[start - 1], scores.id, inliner)) is not None:
            found, start = [mask, *found], start - 1
        scaled = _scale(block, start - 1, scores.id, inliner) if start else None
        n_before = _masks_before(found, scaled is not None)
        masks, start = [each.source for each in found[n_before:]], start + n_before
        if scaled is not None and not n_before:
            scale, start = scaled, start - 1
        fill = read_fill(block[index - 1], scores.id, forward) if index else ""

    like = ast.unparse(parts["T"]) if "T" in parts else "None"
    stop, result, undropped, child, p = last + 1, weights, "", "", "0.0"
    if (dropout_ := _match(block, stop, inliner, DROPOUTS, weights)) is not None:
        stop, result, parts = stop + 1, dropout_[0], dropout_[2]
        if result != weights and _is_read_after(tree, weights, block[stop - 1]):
            undropped = weights
        child = ast.unparse(parts["CHILD"]) if "CHILD" in parts else ""
        p = f"self.{child}.p" if child else ast.unparse(parts["P"])
    elif not masks:
        return None
    names = [result, undropped] if undropped else [result]
    for_products = caches_beside_products(forward, block[stop - 1], *names, may_be_returned=may_be_returned) == set()
    product = "" if not fill or stop == len(block) else read_product(block[stop], result, forward, *names)
    reads_weights = product != "" and any(getattr(node, "id", "") in names for node in nodes_after(tree, block[stop]))
    if product and (for_products or not reads_weights):
        start, stop = index - 1, stop + 1
    else:
        fill = ""
    return Region(
        statements=tuple(block[start:stop]),
        result=result,
        undropped=undropped,
        scores=ast.unparse(scores),
        like="scores_" if like == ast.unparse(scores) else like,
        for_products=for_products,
        masks=tuple(masks),
        scale=scale,
        child=child,
        p=p,
        fill=fill,
        product=product,
        reads_weights=reads_weights,
    )


def _is_read_after(tree: ast.FunctionDef, name: str, statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in nodes_after(tree, statement)
    )


class _Mask(NamedTuple):
    """What a statement adds to the scores."""

    source: str
    is_in_place: bool
    reads_dtype: bool
    """Of the scores."""


def _mask(statement: ast.stmt, scores: str, inliner: Inliner) -> _Mask | None:
    """None if the statement does something else. The expression may be evaluated before earlier masks are added."""
    test: ast.expr | None = None
    match statement:
        case ast.If(test=test, body=[only], orelse=[]) if not calls_in(test):
            statement = only
    match statement:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=mask):
            mask, is_in_place = inliner.inline(mask), True
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if found := first_match(MASKS, inliner.inline(value)):
            mask, is_in_place = found[1]["M"], False
            if ast.unparse(found[1]["X"]) != scores:
                return None
        case _:
            return None
    nodes = [node for part in (mask, test) if part is not None for node in ast.walk(part)]
    read = [n.attr for n in nodes if isinstance(n, ast.Attribute) and _is_name(n.value, scores) and n.attr in _SAFE]
    if name != scores or not _is_pure(mask) or sum(_is_name(node, scores) for node in nodes) > len(read):
        return None
    if is_in_place:
        mask = ast.Call(ast.Name("in_dtype_of_"), [ast.Name("scores_"), mask], [])
    if test is not None:
        mask = ast.IfExp(inliner.inline(test), mask, ast.Constant(None))
    return _Mask(ast.unparse(mask), is_in_place, "dtype" in read)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _masks_before(masks: list[_Mask], has_scale: bool) -> int:
    """How many of the first masks stay statements. Scores that are added to in place must be new, or other names would
    see it: a scale makes them. An addition that is not in place may give them another dtype."""
    n = 0
    for i, mask in enumerate(masks):
        may_have_other_dtype = not all(each.is_in_place for each in masks[n:i])
        if mask.is_in_place and (may_have_other_dtype or not has_scale):
            n = i + 1
        elif mask.reads_dtype and may_have_other_dtype:
            n = i
    return n


def _is_pure(expression: ast.expr) -> bool:
    """Whether evaluating it twice is safe: names, indices, views and casts."""
    methods = {call.func.attr if isinstance(call.func, ast.Attribute) else "" for call in calls_in(expression)}
    return methods <= _VIEWS_AND_CASTS


def _scale(block: list[ast.stmt], index: int, scores: str, inliner: Inliner) -> str | None:
    """The factor by which the statement multiplies the scores, if it depends on the module only."""
    found = _match(block, index, inliner, tuple(SCALES), scores)
    if found is None or found[0] != scores:
        return None
    _, form, parts = found
    scale = parts["S"]
    if any(inliner.resolve(call.func) is not math.sqrt for call in calls_in(scale)):
        return None
    called = {id(node) for call in calls_in(scale) for node in ast.walk(call.func)}
    names = {node.id for node in ast.walk(scale) if isinstance(node, ast.Name) and id(node) not in called}
    return SCALES[form].format(ast.unparse(scale)) if names <= {"self"} else None


def _fused_statements(region: Region) -> list[ast.stmt]:
    """The fused call if its tensors fit; else the statements of the region."""
    tests = [f"fits_region_(scores_, masks_, scale_, like_, {region.for_products})"]
    training = "self.training"
    if region.child:
        tests.append(f"is_plain_(self.{region.child}, Dropout_) and not self.{region.child}.inplace")
        training = f"self.{region.child}.training"
    p = "0.0" if region.p == "0.0" else f"(float_({region.p}) if {training} else 0.0)"
    result = region.result
    if region.undropped:
        tests.append(f"{p} == 0.0")
        result += f" = {region.undropped}"
    masks, rest, otherwise = "masks_", "", f"count_fallback_(self)\n{region.source}"
    if region.fill:
        tests.append(f"(added_ := added_mask_(scores_, {region.fill})) is not None")
        masks, rest = "(added_.mask,)", f"\n    {region.product}"
        if region.reads_weights:
            rest += f"\n    {result} = added_.read({region.result})"
        filling, *inner, product = region.statements
        unfilled = replace(region, statements=tuple(inner), fill="")
        otherwise = "\n".join(map(ast.unparse, (filling, *_fused_statements(unfilled), product)))
    source = f"""\
scores_ = {region.scores}
masks_ = ({"".join(f"{mask}, " for mask in region.masks)})
scale_ = {region.scale}
like_ = {region.like}
if {" and ".join(tests)}:
    count_fused_(self)
    {result} = region_softmax_(scores_, {masks}, like_, scale=scale_, dropout_p={p}){rest}
else:
{indent(otherwise, "    ")}"""
    return ast.parse(source).body


NAMES: dict[str, Any] = {
    "fits_region_": fits_region,
    "region_softmax_": region_softmax,
    "in_dtype_of_": in_dtype_of,
    "added_mask_": added_mask,
    "count_fused_": calls.count_fused,
    "count_fallback_": calls.count_fallback,
    "is_plain_": calls.is_plain,
    "Dropout_": nn.Dropout,
    "float_": float,
    **dict.fromkeys(("scores_", "masks_", "scale_", "like_", "added_")),
}
