"""Mixtures of experts as transformers computes them by grouped matrix products: rows are sorted by expert and back.

    selected = hidden[perm // k]                        ->      selected = dispatch_(hidden, places)
    ...                                                         ...
    weighted = out * weights[perm].unsqueeze(-1)
    weighted = weighted[inv_perm]
    final = weighted.view(tokens, k, n).sum(dim=1)      ->      final = combine_(out, places, weights)

The code stands in a function of the library, which the wrapper of a class's forward chooses when it runs. The function
is rewritten once; a patched class calls that where the wrapper would choose the original, and the wrapper elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from . import calls
from .classes import Rewrite, plain_forward, wrapped
from .forward import Forward, mentions, n_reads, read_forward
from .report import Unsuitable
from .source import Substitution, bare, deep_copy, define, definition, matches, without_annotations
from .verify import check_function, kind_of

PATTERN = "experts"
_IMPLEMENTATION = "grouped_mm"

_WRAPPER = (
    "CHOSEN = INTERFACE.get_interface(SELF.config._experts_implementation, ORIGINAL)",
    "return CHOSEN(SELF, *ARGS, **OPTIONS)",
)
_BEFORE = (
    "DEVICE = HIDDEN.device",
    "TOP_K = INDEX.size(-1)",
    "TOKENS = HIDDEN.size(0)",
    "COLUMNS = HIDDEN.size(-1)",
    "WEIGHTS = ROUTING.reshape(-1)",
    "EXPERTS = INDEX.reshape(-1)",
)
_SORT, _SELECT, _SORT_WEIGHTS = (
    "SORTED, PERM = torch.sort(EXPERTS)",
    "SELECTED = HIDDEN[PERM // TOP_K]",
    "SORTED_WEIGHTS = WEIGHTS[PERM]",
)
_INVERT = ("INVERSE = torch.empty_like(PERM)", "INVERSE[PERM] = torch.arange(PERM.size(0), device=DEVICE)")
_TAIL = (
    "WEIGHTED = OUT * SORTED_WEIGHTS.unsqueeze(-1)",
    *_INVERT,
    "WEIGHTED = WEIGHTED[INVERSE]",
    "FINAL = WEIGHTED.view(TOKENS, TOP_K, COLUMNS).sum(dim=1)",
    "return FINAL.to(HIDDEN.dtype)",
)
_GUARD = "if not fits_(SELF, HIDDEN, INDEX, ROUTING): return library_(SELF, HIDDEN, INDEX, ROUTING)"
_DISPATCH = "SELECTED = dispatch_(HIDDEN, INVERSE.view(TOKENS, TOP_K))"
_COMBINE = "FINAL = combine_(OUT, INVERSE.view(TOKENS, TOP_K), WEIGHTS.view(TOKENS, TOP_K), dtype=HIDDEN.dtype)"


class Rewritten(NamedTuple):
    """A function of the library, rewritten."""

    library: Any
    source: str
    fused: Any


@dataclass(frozen=True)
class GroupedExperts:
    """In place of a forward whose wrapper may choose the library's function."""

    interface: Any = field(hash=False)
    """Of which the wrapper asks for the function; a mapping."""
    grouped: Rewritten

    def __call__(self, module: Any, original: Any, *args: Any, **options: Any) -> Any:
        is_chosen = module.config._experts_implementation == _IMPLEMENTATION
        if is_chosen and self.interface[_IMPLEMENTATION] is self.grouped.library:
            return self.grouped.fused(module, *args, **options)
        return original(module, *args, **options)


def _fits(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> bool:
    """Whether the operators take these tensors, and are worth their Python. With expert parallelism rows of other
    ranks' experts are left to the library.

    Forward and backward of both, float32, AMD EPYC: 0.45 ms fused and 0.40 ms in the library of 64 rows of 512
    columns, 0.73 and 0.86 ms of 256, 1.4 and 9.2 ms of 1024 rows of 768. On a GPU the library launches more kernels.
    """
    if index.numel() * hidden.shape[-1] < calls.SMALLEST:
        return False
    is_parallel = getattr(module, "_is_expert_parallel", False)  # transformers 5.18 and later have it
    is_fused = not is_parallel and hidden.dim() == 2 and calls.fits(hidden) and calls.fits(weights)
    (calls.count_fused if is_fused else calls.count_fallback)(module)
    return is_fused


def read_experts(cls: type) -> GroupedExperts | Unsuitable | None:
    """What the forward of a class is to call; why it is none; None where no wrapper chooses among implementations."""
    wrapper = plain_forward(cls)
    if wrapped(wrapper) is None:
        return None
    tree = definition(wrapper.__code__)
    found: dict[str, Any] = {}
    if tree is None or len(tree.body) != len(_WRAPPER):
        return None
    if not all(matches(_statement(text), each, found) for text, each in zip(_WRAPPER, tree.body, strict=True)):
        return None
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
    name = getattr(found["INTERFACE"], "id", "")
    interface = cells[name].cell_contents if name in cells else None
    try:
        library = interface[_IMPLEMENTATION]  # type: ignore[index]
    except (KeyError, TypeError):
        return None
    grouped = _rewritten(library)
    return grouped if isinstance(grouped, Unsuitable) else GroupedExperts(interface, grouped)


@lru_cache(maxsize=8)
def _rewritten(library: Any) -> Rewritten | Unsuitable:
    forward = read_forward(library)
    if isinstance(forward, Unsuitable):
        return Unsuitable(forward.reason, f"{_IMPLEMENTATION}: {forward.detail}")
    source = _source(forward)
    if isinstance(source, Unsuitable):
        return source
    return Rewritten(library, source, _compiled(library, source, _fits))


def _compiled(library: Any, source: str, fits: Callable[..., bool]) -> Callable[..., Any]:
    names = {"fits_": fits, "library_": library, "dispatch_": ops.moe_dispatch, "combine_": ops.moe_combine}
    return define(library, source, names, "forward", PATTERN)


def _source(forward: Forward) -> str | Unsuitable:
    """The library's function with fused operators."""
    tree = deep_copy(forward.tree)
    found: dict[str, ast.expr] = {"SELF": ast.Name(forward.self_name)}
    at: dict[str, int] = {}
    start = 0
    for text in (*_BEFORE, _SORT, _SELECT, _SORT_WEIGHTS, *_TAIL):
        for position in range(start, len(tree.body)):
            tried = dict(found)
            if matches(_statement(text), tree.body[position], tried):
                found, at[text], start = tried, position, position + 1
                break
        else:
            return Unsuitable("unknown_forward", f"{_IMPLEMENTATION}: no statement {text}")
    names = {name: each.id for name, each in found.items() if isinstance(each, ast.Name)}
    others = [each for position, each in enumerate(tree.body) if position not in at.values()]
    if ast.unparse(without_annotations(tree.args)) != ", ".join(
        names.get(each, "") for each in ("SELF", "HIDDEN", "INDEX", "ROUTING")
    ):
        return Unsuitable("unknown_forward", f"{_IMPLEMENTATION}: other parameters")
    once = ("DEVICE", "TOP_K", "TOKENS", "COLUMNS", "EXPERTS", "HIDDEN", "INDEX", "PERM")
    own = ("WEIGHTS", "ROUTING", "SORTED_WEIGHTS", "WEIGHTED", "INVERSE")
    if (
        forward.globals.get("torch") is not torch
        or names.keys() != found.keys()
        or at[_TAIL[-1]] - at[_TAIL[0]] != len(_TAIL) - 1
        or any(_is_bound(each, names[name]) for each in others for name in once)
        or any(mentions(each, names[name]) for each in others for name in own)
        or any(n_reads(each, names["PERM"]) for each in others)
    ):
        return Unsuitable("unknown_forward", f"{_IMPLEMENTATION}: what it sorts is used elsewhere")

    def made(*texts: str) -> list[ast.stmt]:
        return [Substitution(found).visit(_statement(text)) for text in texts]

    replaced = {
        _SORT: [tree.body[at[_SORT]], *made(*_INVERT)],
        _SELECT: made(_DISPATCH),
        **{text: [] for text in (_SORT_WEIGHTS, *_TAIL[:-2])},
        _TAIL[-2]: made(_COMBINE),
    }
    by_position = {at[text]: statements for text, statements in replaced.items()}
    tree.body = [new for i, old in enumerate(tree.body) for new in by_position.get(i, [old])]
    tree.body.insert(int(ast.get_docstring(tree) is not None), *made(_GUARD))
    return ast.unparse(bare(ast.fix_missing_locations(tree))) + "\n"


def _statement(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


def _is_bound(statement: ast.stmt, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
        for node in ast.walk(statement)
    )


_FORWARD = "def forward(self, *args, **kwargs):\n    return experts_(self, original, *args, **kwargs)\n"


@dataclass(frozen=True)
class Experts:
    """A module whose forward a wrapper chooses, as a site."""

    experts: GroupedExperts
    pattern = PATTERN
    detail = ""

    def rewrite(self, cls: type) -> Rewrite:
        """The forward that calls the rewritten function, around the class's own."""
        functions = ((self.experts.grouped.library, self.experts.grouped.source),)
        return Rewrite(PATTERN, around=_FORWARD, constants=(("experts_", self.experts),), functions=functions)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a few small experts have the outputs and gradients that they have in the
        library's function."""
        device, dtype = kind_of(module)
        index = torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0], [1, 2]], device=device)
        inputs = {"hidden": (5, 8), "weights": (5, 2), "up": (3, 8, 8), "down": (3, 8, 8)}
        options = SimpleNamespace(
            **dict.fromkeys(("_is_expert_parallel", "has_gate", "has_bias", "has_post_expert_norm"), False),
            is_transposed=False,
            num_experts=3,
            act_fn=torch.tanh,
        )

        def computed(function: Any, hidden: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Any:
            experts = SimpleNamespace(**vars(options), up_proj=up, down_proj=down)
            return function(experts, hidden, index, weights)

        library, source, _ = self.experts.grouped
        fused = _compiled(library, source, lambda *_: True)
        check_function(partial(computed, fused), partial(computed, library), inputs, device, dtype)
