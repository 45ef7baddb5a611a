"""Softmax windows: in a forward that reaches no attention interface, the statements that end in a dropped-out softmax.

    scores = scores / math.sqrt(width)          (or * scale; may be missing)
    scores = scores + mask                      (under an if, or missing)
    weights = softmax(scores, dim=-1)
    weights = dropout(weights)

become one call, where tensors are as the call needs them; otherwise the statements run as they were written. All else
of the forward stays verbatim: caches, keyword arguments, what is done with the weights.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops import softmax
from ..ops.attention import saturated_mask
from ..ops.backends import KERNEL_DTYPES
from . import calls
from .attention import PATTERN
from .calls import original_class
from .classes import Rewrite, define
from .eager import FUNCTIONS, Inliner, first_match, parse, without_annotations
from .norms import Unsuitable
from .verify import RNG, MaskedDropout, Outcome, check_outcomes, kind_of, prepared, refuse_fallback, undisturbed

SOFTMAXES = (
    "softmax(X, dim=-1)",
    "softmax(X, dim=-1, dtype=T.dtype)",
    "softmax(X, dim=-1, dtype=float32).to(T.dtype)",
    "softmax(X, dim=-1, dtype=float32).type_as(T)",
    "softmax(X.float(), dim=-1).to(T.dtype)",
    "softmax(X.float(), dim=-1).type_as(T)",
)
DROPOUTS = ("self.CHILD(X)", "dropout(X, p=P, training=self.training)")
SCALES = {"X / S": "1.0 / ({})", "X * S": "{}"}
MASKS = ("X + M",)
_PURE_METHODS = {"to", "type", "unsqueeze", "view", "expand", "size"}


@dataclass(frozen=True)
class Window:
    """Statements of a forward, taken apart. Expressions are source."""

    start: int
    stop: int
    """In their block."""
    statements: str
    result: str
    undropped: str
    """The name of the probabilities before dropout, if read later: then only a call without dropout is fused."""
    scores: str
    like: str
    """A tensor that the result is cast to the dtype of; "scores_" where that is the scores' own."""
    mask: str
    scale: str
    child: str
    """The dropout that is called; empty where functional.dropout is, or none."""
    p: str
    """0.0 where there is no dropout."""
    softmax: str
    """Which of SOFTMAXES."""

    @property
    def dropout(self) -> tuple[str, str] | None:
        """("child", its name) or ("attribute", that of its p); None where p is none of the module's attributes."""
        if self.undropped:
            return None  # then nothing is fused
        if self.child:
            return "child", self.child
        own, _, name = self.p.partition(".")
        return ("attribute", name) if own == "self" and name.isidentifier() else None


@dataclass(frozen=True)
class Windows:
    """A forward with windows."""

    tree: ast.FunctionDef
    found: tuple[tuple[ast.AST, str, Window], ...]
    """(the node, the field of the node that holds the block, the window)."""


def read_windows(cls: Any) -> Windows | Unsuitable | None:
    """The windows of a class's forward; None where it computes no softmax of its own."""
    found = _read_windows(getattr(cls, "forward", None))
    return _in_other_method(cls) if found is None else found


@lru_cache(maxsize=4096)
def _in_other_method(cls: Any) -> Unsuitable | None:
    """Why a softmax with dropout in a method that forward calls is left alone; None where there is none."""
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    for name in () if code is None else code.co_names:
        if _computes_softmax(getattr(cls, name, None)):
            return Unsuitable("unknown_forward", f"computes its softmax in {name}, not in forward")
    return None


def _computes_softmax(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    if code is None or not {"softmax", "dropout"} <= _words(code.co_names):
        return False
    tree = parse(method)
    return isinstance(tree, ast.FunctionDef) and _calls_softmax(tree, Inliner(method.__globals__, {}))


def _calls_softmax(tree: ast.FunctionDef, inliner: Inliner) -> bool:
    return any(_name(inliner, call) == "softmax" for call in _calls(tree))


@lru_cache(maxsize=4096)
def _read_windows(forward: Any) -> Windows | Unsuitable | None:
    code = getattr(forward, "__code__", None)
    if code is None or not {"softmax", "dropout"} <= _words(code.co_names):
        return None
    tree = parse(forward)
    if isinstance(tree, Unsuitable):
        return tree
    own_name = tree.args.args[0].arg
    inliner = Inliner(forward.__globals__, {own_name: ast.Name("self")})
    if not _calls_softmax(tree, inliner):
        return None
    found = [
        (node, name, window)
        for node, name in _blocks(tree)
        for index in range(len(getattr(node, name)))
        if (window := _window(tree, getattr(node, name), index, inliner)) is not None
    ]
    if not found:
        return Unsuitable("unknown_forward", "no softmax(x, dim=-1) with a mask or a dropout in consecutive statements")
    return Windows(tree, tuple(found))


def _words(names: tuple[str, ...]) -> set[str]:
    """softmax and dropout, if a name has them in it."""
    return {word for word in ("softmax", "dropout") if any(word in name for name in names)}


def _name(inliner: Inliner, call: ast.Call) -> str | None:
    resolved = inliner.resolve(call.func)
    return FUNCTIONS.get(resolved) if resolved is not None and resolved.__hash__ else None


def _blocks(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Blocks of statements that run at most once: (the node, its field)."""
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield node, name
            for statement in block:
                if isinstance(statement, (ast.If, ast.With)):
                    yield from _blocks(statement)


def _assignment(statement: ast.stmt, inliner: Inliner) -> tuple[str, ast.expr] | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, inliner.inline(value)
    return None


def _window(tree: ast.FunctionDef, block: list[ast.stmt], index: int, inliner: Inliner) -> Window | None:
    """The window whose softmax is statement `index` of the block."""
    softmax_ = _assignment(block[index], inliner)
    inner = first_match(SOFTMAXES, softmax_[1]) if softmax_ is not None else None
    if softmax_ is None or inner is None:
        return None
    weights, scores = softmax_[0], inner[1]["X"]
    mask, scale, start = "None", "1.0", index
    if (added := first_match(MASKS, scores)) is not None and _is_pure(added[1]["M"]):
        scores, mask = added[1]["X"], ast.unparse(added[1]["M"])
    elif isinstance(scores, ast.Name) and (scores.id == weights or not _is_read_after(tree, scores.id, block[index])):
        if start and (masked := _mask(block[start - 1], scores.id, inliner)) is not None:
            mask, start = masked, start - 1
        if start and (scaled := _scale(block[start - 1], scores.id, inliner)) is not None:
            scale, start = scaled, start - 1

    like = ast.unparse(inner[1].get("T", scores))
    stop, result, undropped, child, p = index + 1, weights, "", "", "0.0"
    dropout_ = _assignment(block[stop], inliner) if stop < len(block) else None
    outer = first_match(DROPOUTS, dropout_[1]) if dropout_ is not None else None
    if dropout_ is not None and outer is not None and ast.unparse(outer[1]["X"]) == weights:
        stop, result = stop + 1, dropout_[0]
        if result != weights and _is_read_after(tree, weights, block[stop - 1]):
            undropped = weights
        child = ast.unparse(outer[1]["CHILD"]) if "CHILD" in outer[1] else ""
        p = f"self.{child}.p" if child else ast.unparse(outer[1]["P"])
    elif mask == "None":
        return None
    return Window(
        start=start,
        stop=stop,
        statements="\n".join(ast.unparse(statement) for statement in block[start:stop]),
        result=result,
        undropped=undropped,
        scores=ast.unparse(scores),
        like="scores_" if like == ast.unparse(scores) else like,
        mask=mask,
        scale=scale,
        child=child,
        p=p,
        softmax=inner[0],
    )


def _is_read_after(tree: ast.FunctionDef, name: str, statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and node.lineno > (statement.end_lineno or 0)
        for node in ast.walk(tree)
    )


def _mask(statement: ast.stmt, scores: str, inliner: Inliner) -> str | None:
    """What the statement adds to the scores."""
    condition = ""
    match statement:
        case ast.If(test=test, body=[only], orelse=[]) if not _calls(test):
            condition, statement = f" if {ast.unparse(inliner.inline(test))} else None", only
    added = _assignment(statement, inliner)
    found = first_match(MASKS, added[1]) if added is not None and added[0] == scores else None
    if found is None or ast.unparse(found[1]["X"]) != scores:
        return None
    return f"{ast.unparse(found[1]['M'])}{condition}" if _is_pure(found[1]["M"]) else None


def _is_pure(expression: ast.expr) -> bool:
    """Whether it can be computed once more: a name, an index, a view, a cast."""
    methods = {call.func.attr if isinstance(call.func, ast.Attribute) else "" for call in _calls(expression)}
    return methods <= _PURE_METHODS


def _scale(statement: ast.stmt, scores: str, inliner: Inliner) -> str | None:
    """What the statement multiplies the scores by, if that is the module's own."""
    scaled = _assignment(statement, inliner)
    found = first_match(tuple(SCALES), scaled[1]) if scaled is not None and scaled[0] == scores else None
    if found is None or ast.unparse(found[1]["X"]) != scores:
        return None
    scale = found[1]["S"]
    if any(inliner.resolve(call.func) is not math.sqrt for call in _calls(scale)):
        return None
    called = {id(node) for call in _calls(scale) for node in ast.walk(call.func)}
    names = {node.id for node in ast.walk(scale) if isinstance(node, ast.Name) and id(node) not in called}
    return SCALES[found[0]].format(ast.unparse(scale)) if names <= {"self"} else None


def _calls(expression: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(expression) if isinstance(node, ast.Call)]


def _source(window: Window, fallback: str) -> str:
    """The window fused, where its tensors are as they must be; else the fallback."""
    tests = ["fits_window_(scores_, mask_, scale_, like_)"]
    training = "self.training"
    if window.child:
        tests.append(f"is_plain_(self.{window.child}, Dropout_) and not self.{window.child}.inplace")
        training = f"self.{window.child}.training"
    p = "0.0" if window.p == "0.0" else f"({window.p} if {training} else 0.0)"
    result = window.result
    if window.undropped:
        tests.append(f"{p} == 0.0")
        result += f" = {window.undropped}"
    return f"""\
scores_ = {window.scores}
mask_ = {window.mask}
scale_ = {window.scale}
like_ = {window.like}
if {" and ".join(tests)}:
    count_fused_(self)
    {result} = window_softmax_(scores_, mask_, scale=scale_, dropout_p={p}).to(like_.dtype)
else:
    count_fallback_(self)
{_indented(fallback)}"""


def _indented(source: str) -> str:
    return "".join(f"    {line}\n" for line in source.splitlines())


def window_softmax(scores: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """ops.softmax with a mask as sums in the scores' dtype make it."""
    return softmax(scores, saturated_mask(mask, scores), **options)


def fits_window(scores: Tensor, mask: Tensor | None, scale: object, like: Tensor) -> bool:
    """Whether the fused call, cast to like, gives what the statements would: dtypes, shapes, and a number as scale.

    CUDA's autocast gives float32 probabilities of half scores: left to the statements.
    """
    if scores.dtype not in KERNEL_DTYPES or scores.dtype not in (like.dtype, torch.float32):
        return False
    if like.dtype not in KERNEL_DTYPES or not isinstance(scale, (int, float)):
        return False
    if calls.is_distributed(scores) or (scores.is_cuda and calls.is_autocasting(scores)):
        return False
    if mask is None:
        return True
    if mask.dtype not in KERNEL_DTYPES or calls.is_distributed(mask) or mask.dim() > scores.dim():
        return False
    sizes = zip(mask.shape[::-1], scores.shape[::-1], strict=False)
    # Half scores (autocast's) become float32 by a float32 mask, and stay so unless the statements cast them.
    casts = like is not scores and mask.dtype == torch.float32
    if not (mask.dtype == scores.dtype or scores.dtype == torch.float32 or casts):
        return False
    return all(a in (1, b) for a, b in sizes)


NAMES: dict[str, Any] = {
    "fits_window_": fits_window,
    "window_softmax_": window_softmax,
    "count_fused_": calls.count_fused,
    "count_fallback_": calls.count_fallback,
    "is_plain_": calls.is_plain,
    "Dropout_": nn.Dropout,
}


def rewrite_windows(windows: Windows) -> Rewrite:
    """The forward with its windows fused."""
    tree = copy.deepcopy(windows.tree)
    copies = dict(zip(map(id, ast.walk(windows.tree)), ast.walk(tree), strict=True))
    for node, name, window in reversed(windows.found):
        block = getattr(copies[id(node)], name)
        block[window.start : window.stop] = ast.parse(_source(window, window.statements)).body
    tree.name, tree.returns, tree.args = "forward", None, without_annotations(tree.args)
    return Rewrite(PATTERN, ast.unparse(tree) + "\n", tuple(NAMES.items()), in_module=True)


def isolated(window: Window, original: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A window alone, as functions (self, scores, mask): by the model's operators, and fused, without a fallback."""
    scaled = "scores" if window.scale == "1.0" else f"scores * ({window.scale})"
    weights = window.softmax.replace("X", "scores_").replace("T", "scores_")
    dropped = f"self.{window.child}(weights_)" if window.child else f"dropout(weights_, {window.p}, self.training)"
    if window.p == "0.0":
        dropped = "weights_"
    before = f"""\
def before(self, scores, mask):
    scores_ = {scaled}
    scores_ = scores_ if mask is None else scores_ + mask
    weights_ = {weights}
    return {dropped}
"""
    alone = replace(window, scores="scores", like="scores_", mask="mask", result="result_")
    after = f"def after(self, scores, mask):\n{_indented(_source(alone, 'refuse_(self)'))}    return result_\n"
    known = {"softmax": functional.softmax, "dropout": functional.dropout, "float32": torch.float32}
    fused = {**NAMES, "refuse_": refuse_fallback, "window_softmax_": partial(window_softmax, rng=RNG)}
    return define(original, before, known, "before", PATTERN), define(original, after, fused, "after", PATTERN)


def verify_windows(module: nn.Module, windows: Windows) -> None:
    """Raise VerificationError unless each window, fused, gives what its statements give, on its own."""
    device, dtype = kind_of(module)
    original = original_class(type(module)).forward
    with undisturbed(device):
        for _, _, window in windows.found:
            before, after = isolated(window, original)
            for mask, dropout in product((None, "padding", "bias"), (None, window.dropout)):
                if mask is None or window.mask != "None":
                    actual, expected, truth = (
                        _outcome(prepared(module, like, dropout, 0.25), function, dtype, mask)
                        for function, like in ((after, dtype), (before, dtype), (before, torch.float64))
                    )
                    check_outcomes(actual, expected, truth, f" with {mask}" + ("" if dropout is None else ", dropout"))


def _outcome(module: nn.Module, function: Callable[..., Any], dtype: torch.dtype, mask_kind: str | None) -> Outcome:
    device, like = kind_of(module)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype).to(like)

    leaves = {"scores": drawn(2, 4, 3, 5).requires_grad_()}
    mask = None
    if mask_kind == "bias":
        mask = leaves["mask"] = drawn(1, 4, 3, 5).requires_grad_()
    elif mask_kind == "padding":
        mask = drawn(2, 1, 1, 5).zero_()
        mask[1, ..., 3:] = max(torch.finfo(like).min, torch.finfo(torch.float32).min)
    with MaskedDropout():
        y = function(module, leaves["scores"], mask)
    gradients = torch.autograd.grad(y, list(leaves.values()), drawn(*y.shape))
    return [("output", y.detach()), *((f"gradient of {n}", g) for n, g in zip(leaves, gradients, strict=True))]
