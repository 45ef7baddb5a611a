"""An embedding whose matrix is also that of the output layer: its gradient is added to the output layer's, row by row.

Autograd writes a gradient of the whole matrix for the embedding, zero but for the rows of the tokens at hand, and adds
it to the output layer's: four passes over [vocabulary, width]. Here the embedding returns an alias of the matrix, which
the next reader of the matrix takes in its place. In backward the alias brings that reader's gradient, and the rows of
the tokens are added to it where it lies. Readers find each other as the model runs, by the parameter that they share.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...ops.common.tracing import is_transformed
from .. import calls
from ..calls import original_class
from ..classes import Rewrite, plain_forward
from ..report import Unsuitable
from ..source import bare, parse
from ..verify import check_function, kind_of
from .readers import multiplied

PATTERN = "tied_embedding"

SMALLEST = 1 << 18
"""Elements of a matrix that is worth some ten small operators in backward."""
_MOST_TOKENS = 0.5
"""Most tokens, as a share of the matrix's rows. Each token costs about as much as one row of the four passes."""
_LONGEST = 4
"""Readers in one chain of aliases. Where no output layer follows, the next forward would go on with the chain."""


class _Embedding(torch.autograd.Function):
    """(weight[ids], an alias of weight whose gradient this one's is added to)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # Not among the saved tensors: an alias left over from a graph that was freed still passes its gradient on.
        ctx.ids, ctx.version, ctx.padding_idx, ctx.n_rows = ids, ids._version, padding_idx, weight.shape[0]
        return functional.embedding(ids, weight), weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dy, later = grads
        for embedding, found in list(_aliases.items()):
            if found is not None and found.tensor.grad_fn is ctx:
                _aliases[embedding] = None
        if dy is None:
            return later, None, None
        if ctx.ids._version != ctx.version:
            raise RuntimeError(
                "embedding: the token ids needed for gradient computation have been modified by an inplace operation"
            )
        if later is not None and later.is_contiguous() and not torch.is_grad_enabled():
            # In place: the reader of the alias made it for this.
            return _add_rows_(later, dy, ctx.ids, ctx.padding_idx), None, None
        dweight = torch.ops.aten.embedding_dense_backward(dy, ctx.ids, ctx.n_rows, ctx.padding_idx, False)
        return dweight if later is None else later + dweight, None, None


def _add_rows_(total: Tensor, rows: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    """total[ids] += rows, but for those of padding_idx.

    Rows of one token are summed first, in the order and precision of torch's embedding, and added once: the result is
    deterministic. Nothing waits for the GPU: there is room for as many different tokens as there are tokens.
    """
    ids = ids.reshape(-1).long()
    n_tokens = ids.numel()
    in_order, order = ids.sort(stable=True)
    is_new = in_order[1:] != in_order[:-1]
    place_in_order = functional.pad(is_new.cumsum(0), (1, 0))
    places = torch.empty_like(ids).scatter_(0, order, place_in_order)
    if padding_idx >= 0:
        places.masked_fill_(ids == padding_idx, n_tokens)
    # Places that no token takes add their zeros to different rows.
    targets = torch.arange(n_tokens + 1, device=ids.device).scatter_(0, place_in_order, in_order)
    sums = torch.ops.aten.embedding_dense_backward(rows.reshape(n_tokens, -1), places, n_tokens + 1, n_tokens, False)
    return total.index_add_(0, targets, sums)


class _Alias(NamedTuple):
    weight: Tensor
    tensor: Tensor
    n_readers: int


_aliases: dict[int, _Alias | None] = {}
"""id(embedding) -> the alias that it left, until a reader of the matrix takes it. Deleted with the embedding."""


def _take(weight: Tensor) -> _Alias | None:
    """The matrix's alias, for one reader; None where the matrix itself must be read."""
    for embedding, found in list(_aliases.items()):
        if found is not None and found.weight is weight:
            _aliases[embedding] = None
            is_usable = weight.requires_grad and not is_transformed() and _place(found.tensor) == _place(weight)
            return found if is_usable else None
    return None


def _place(x: Tensor) -> tuple[Any, ...]:
    """Where the elements lie. Parameters may be given another tensor (Tensor.data)."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.dtype


def drop_alias(module: nn.Module) -> None:
    """Drop the alias that an embedding left, where no output layer and no backward has followed.

    The alias keeps the matrix's node of the graph, which expects gradients of the shape that the matrix had at first.
    """
    if _aliases.get(id(module)) is not None:
        _aliases[id(module)] = None


def embedded(module: Any, ids: Any) -> Tensor:
    """nn.Embedding.forward."""
    if calls.is_followed():
        return nn.Embedding.forward(module, ids)
    if not _is_fusable(module, ids):
        drop_alias(module)
        return nn.Embedding.forward(module, ids)
    weight = module.weight
    before = _take(weight)
    if before is not None and before.n_readers >= _LONGEST:
        before = None
    padding_idx = -1 if module.padding_idx is None else module.padding_idx
    y, alias = _Embedding.apply(weight if before is None else before.tensor, ids, padding_idx)
    calls.count_fused(module)
    if id(module) not in _aliases:
        calls.forget_with(module, _aliases, id(module))
    _aliases[id(module)] = _Alias(weight, alias, 1 if before is None else before.n_readers + 1)
    return y


def scaled(y: Tensor, scale: Any) -> Tensor:
    """y * scale; y itself where that is a copy, as with BART's scale_embedding=False. y: nothing else reads it."""
    return y if type(scale) in (float, int) and scale == 1 else y * scale


def _is_fusable(module: Any, ids: Any) -> bool:
    if not torch.is_grad_enabled() or not isinstance(ids, Tensor):
        return False
    weight = module.weight
    if not weight.requires_grad or not weight.is_leaf or not weight.is_contiguous():
        return False
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return False
    if not 0 < ids.numel() <= _MOST_TOKENS * weight.shape[0] or ids.device != weight.device or ids.is_inference():
        return False
    return calls.is_plain(module, original_class(type(module))) and not hasattr(type(weight), "__tensor_flatten__")


def weight_of(head: Any) -> Tensor:
    """The matrix of an output layer, by the alias that an embedding left for it. To be read once."""
    weight: Tensor = head.weight
    if calls.is_followed() or not _aliases or not calls.is_plain(head, nn.Linear):
        return weight
    found = _take(weight)
    return weight if found is None else found.tensor


def linear(head: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """nn.Linear.forward. bias: added by the product of a layer that has none (biased_logits.py)."""
    return multiplied(head, x, weight_of(head), head.bias if bias is None else bias)


def tied_modules(model: nn.Module) -> frozenset[int]:
    """ids of the embeddings and the nn.Linear layers that share a matrix of some size."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    matrices = {id(module.weight) for module in embeddings if module.weight.numel() >= SMALLEST}
    heads = [module for module in model.modules() if original_class(type(module)) is nn.Linear]
    heads = [head for head in heads if id(head.weight) in matrices]
    shared = {id(head.weight) for head in heads}
    return frozenset(map(id, (*heads, *(module for module in embeddings if id(module.weight) in shared))))


_EMBEDDING = "def forward(self, input):\n    return embedded_(self, input)\n"
_HEAD = "def forward(self, input, bias=None):\n    count_fused(self)\n    return linear_(self, input, bias)\n"


@dataclass(frozen=True)
class TiedEmbedding:
    """An embedding or an output layer that share their matrix, as a site."""

    rewritten: Rewrite
    """With the forward that reads the matrix by its alias."""
    pattern = PATTERN
    detail = ""

    def rewrite(self, cls: type) -> Rewrite:
        return self.rewritten

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a small tied pair has the outputs and gradients that it has apart."""
        device, dtype = kind_of(module)
        ids = torch.tensor([[3, 0, 3], [7, 7, 3]], device=device)

        def tied(weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            y, alias = _Embedding.apply(weight, ids, 0)
            return y, functional.linear(hidden, alias)

        def apart(weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return functional.embedding(ids, weight, padding_idx=0), functional.linear(hidden, weight)

        check_function(tied, apart, {"weight": (16, 8), "hidden": (3, 8)}, device, dtype)


def tied_site(module: nn.Module) -> TiedEmbedding | None:
    """The site that one of tied_modules is; None for an embedding whose forward does not call nn.Embedding's once."""
    cls = original_class(type(module))
    if cls is nn.Linear:
        return TiedEmbedding(Rewrite(PATTERN, around=_HEAD, constants=(("linear_", linear),)))
    if plain_forward(cls) is nn.Embedding.forward:
        return TiedEmbedding(Rewrite(PATTERN, around=_EMBEDDING, constants=(("embedded_", embedded),)))
    tree: Any = parse(plain_forward(cls), may_call_super=True)
    if isinstance(tree, Unsuitable):
        return None
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().forward"
    ]
    if len(found) != 1 or len(found[0].args) != 1 or found[0].keywords or ast.unparse(tree).count("super(") != 1:
        return None
    call = found[0]
    call.func, call.args = ast.Name("embedded_"), [ast.Name(tree.args.args[0].arg), *call.args]
    for statement in tree.body:
        match statement:
            case ast.Return(value=ast.BinOp(left=ast.Call() as left, op=ast.Mult(), right=scale)) if left is call:
                statement.value = ast.Call(ast.Name("scaled_"), [call, scale], [])
    source = ast.unparse(bare(ast.fix_missing_locations(tree))) + "\n"
    names = (("embedded_", embedded), ("scaled_", scaled))
    return TiedEmbedding(Rewrite(PATTERN, (("forward", source),), constants=names))
