"""One gradient for all readers of a tensor: linear layers, and a residual sum after them.

    q, k, v = self.q(x), self.k(x), self.v(x)
    z = x + dropout(self.dense(attention(q, k, v)))

Autograd computes one gradient of x for each reader and adds them in separate passes. Here the readers share a sum. In
backward a linear layer adds its product to the sum in place (a matrix product with beta = 1). The reader that runs last
returns the sum, the others return None. Which readers have the same tensor is found as the model runs.

Under autocast the layers read one cast of x. Their sum is float32 where it begins with the residual's gradient, to
which a GPU's products add as they are. Else it is half precision; if x is the result of a norm, the norm's backward
reads it so, without a cast. On a GPU a product leaves the gradient of a float32 weight in float32: layers whose input
nothing else reads are called here for that, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from ...ops import bias_dropout_residual
from ...ops.common.backends import KERNEL_DTYPES
from ...ops.common.native import reshaped
from ...ops.common.products import add_product_, affine, column_sums, product, widens
from ...ops.common.rng import draw_rng
from ...ops.common.tracing import have_storage, refuse_double_backward
from ...ops.row_norm_autograd import LeftGradient, anchor, share_residual_gradient
from .. import calls
from ..calls import is_plain

Dropout = Callable[[Tensor, Tensor | None], Tensor]


class _Sum:
    """The gradient from the readers that have run, in one backward."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        """The id of each node that has run."""
        self.gradient: Tensor | None = None
        """Without a graph, and with storage, another tensor than the one that a node returned: see _may_be_added_to."""
        self.returned: Tensor | None = None
        """That one. As long as it is kept, a leaf copies it: hooks on the leaf may write to what it takes."""


class Readers:
    """The autograd nodes that read one tensor. Each keeps this alive; it keeps none of them."""

    def __init__(self, x: Tensor, cast: Tensor) -> None:
        self.x, self.dtype = weakref.ref(x), x.dtype
        self.left = None if cast is x else LeftGradient.of(x)
        self.cast = weakref.ref(cast)
        """x as linear layers read it. Not kept: nodes outlive a checkpoint's tensors and a backward."""
        self.takes_residual = cast is x or widens(cast, x.dtype)
        """Whether products can be added to a gradient of x's dtype."""
        self.nodes: list[weakref.ref[Any]] = []
        self.sums: dict[int, _Sum] = {}
        """By the engine's number of the backward: they may be nested."""

    def sum_so_far(self) -> _Sum:
        """In the backward that runs now."""
        return self.sums.setdefault(torch._C._current_graph_task_id(), _Sum())

    def give(self, node: Any, gradient: Tensor | None) -> Tensor | None:
        """What a node returns as the gradient of the tensor: None while others that are to run can add to it, or where
        it is left for the norm that made the tensor.

        gradient: the sum so far and the node's own share."""
        current = self.sum_so_far()
        current.done.add(id(node))
        for reference in self.nodes:
            other = reference()
            if other is not None and id(other) not in current.done and torch._C._will_engine_execute_node(other):
                if gradient is not None and not torch.is_grad_enabled() and have_storage(gradient):
                    current.returned, gradient = gradient, gradient.detach()
                current.gradient = gradient
                return None
        del self.sums[torch._C._current_graph_task_id()]
        if gradient is not None and gradient.dtype != self.dtype and self.left is not None:
            return self.left.leave(gradient)
        return gradient  # cast by the engine, if need be

    def give_residual(self, node: Any, gradient: Tensor | None) -> Tensor | None:
        """The same for a residual sum. gradient: its own share."""
        so_far = self.sum_so_far().gradient
        if gradient is None or so_far is None:
            return self.give(node, so_far if gradient is None else gradient)
        return self.give(node, so_far + gradient)


def _may_be_added_to(tensor: Tensor) -> bool:
    """Whether a product may be added in place. Not where the memory is another tensor's, too: the gradient of the sum's
    other operand, which hooks may keep; nor in a backward with create_graph, where gradients are enabled."""
    if torch.is_grad_enabled() or not tensor.is_contiguous() or not have_storage(tensor):
        return False
    storage = tensor.untyped_storage()  # named, so that it is counted: torch 2.9 would drop it before, 2.13 keeps it
    return torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor and this object


class _Linear(torch.autograd.Function):
    """scale * (dropout(x) @ weight.T + bias). cast: x in the dtype of the product; None where x has it. dropout(x,
    residual): dropout(x), and its sum with the residual, by a mask that it draws again at each call; None for none.
    scale is part of each product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        _: Tensor | None,
        cast: Tensor | None,
        readers: Readers,
        dropout: Dropout | None,
        scale: float,
    ) -> Tensor:
        cast = x if cast is None else cast
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.has_cast = weight.dtype, not x.dtype == weight.dtype == cast.dtype
        if weight.dtype != cast.dtype:
            key, weight = id(weight), weight.to(cast.dtype)
            _casts[key] = weight
        ctx.save_for_backward(cast if ctx.needs_input_grad[1] else None, weight)
        ctx.shape, ctx.readers, ctx.dropout, ctx.scale = x.shape, readers, dropout, scale
        readers.nodes.append(weakref.ref(ctx))
        dropped = cast if dropout is None else dropout(cast, None)
        y = affine(dropped, weight, None if bias is None else bias.to(cast.dtype), scale)
        return reshaped(y, y.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (dy,) = grads
        if ctx.has_cast:  # what was saved has no graph that leads to x and weight
            refuse_double_backward("linear")
        current = ctx.readers.sum_so_far()
        so_far, current.returned = current.gradient, None
        if dy is None:
            return ctx.readers.give(ctx, so_far), *[None] * 7
        cast, weight = ctx.saved_tensors
        n_columns = ctx.shape[-1]
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            if so_far is not None and ctx.dropout is None and _may_be_added_to(so_far):
                dx = so_far
                add_product_(dx.view(-1, n_columns), rows, weight, alpha=ctx.scale)
            else:
                dx = product(rows, weight, rows.dtype, ctx.scale).view(ctx.shape)
                if ctx.dropout is not None:
                    dx = ctx.dropout(dx, so_far)
                elif so_far is not None:
                    dx = so_far + dx
            dx = ctx.readers.give(ctx, dx)
        if ctx.needs_input_grad[1]:
            dropped = cast if ctx.dropout is None else ctx.dropout(cast, None)
            dweight = product(rows.t(), dropped.reshape(-1, n_columns), ctx.dtype, ctx.scale)
        if ctx.needs_input_grad[2]:
            dbias = column_sums(rows, ctx.dtype)
            if ctx.scale != 1.0:
                dbias = dbias * ctx.scale
        return dx, dweight, dbias, *[None] * 5


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cast: Tensor,
    readers: Readers,
    dropout: Dropout | None = None,
    scale: float = 1.0,
) -> Tensor:
    """scale * (x @ weight.T + bias), see _Linear. Its gradient of x is that of all readers."""
    is_watched = None if readers.left is None else anchor()
    cast_or_none = None if cast is x else cast
    result: Tensor = _Linear.apply(x, weight, bias, is_watched, cast_or_none, readers, dropout, scale)
    return result


class _Read(NamedTuple):
    """The last layer that has read a tensor."""

    tensor: weakref.ref[Tensor]
    state: tuple[int, bool, int]
    """State of the tensor when it was read: see _state."""
    readers: weakref.ref[Readers] | None
    """None where the layer called torch's operator."""
    module: weakref.ref[nn.Module]
    """The parent of the layer."""


reads: dict[int, _Read] = {}
"""By id(tensor)."""

_before_sums: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules with a layer that reads a tensor before a residual sum reads it."""


class SharedInput:
    """Calls linear layers of one call of a forward, of which others may read the same tensor."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        """What the last layer read. Cast under autocast, it must live until the next one reads it: what autograd saves
        may be packed."""

    def __call__(self, module: nn.Module, dense: Any, x: Tensor) -> Tensor:
        """dense(x)."""
        if not _is_fusable(dense, x):
            return dense(x)
        calls.count_fused(module)
        y, self.tensor = _read(module, x, dense.weight, dense.bias)
        return y

    def scaled(self, module: nn.Module, dense: Any, factor: Any, x: Tensor) -> Any:
        """dense(x) * factor."""
        if not _is_fusable(dense, x):
            return dense(x) * factor
        # Where x is not contiguous, torch rounds the product before it adds the bias.
        if not x.is_contiguous() or not calls.scales_exactly(factor, dense, x):
            return self(module, dense, x) * factor
        calls.count_fused(module)
        y, self.tensor = _read(module, x, dense.weight, dense.bias, scale=float(factor))
        return y

    def dropped(self, module: nn.Module, dense: Any, dropout: Any, x: Tensor) -> Tensor:
        """dense(dropout(x)). Of a dropout, x is kept, which other readers may keep too, and not what it leaves of x."""
        if is_plain(dropout, nn.Identity) or (is_plain(dropout, nn.Dropout) and not dropout.training):
            return self(module, dense, x)
        again = _redrawing(dropout, x)
        if again is None:
            return self(module, dense, dropout(x))
        if not _is_fusable(dense, x):  # where a checkpoint runs without gradients first: the same mask, rounded alike
            half = calls.autocast_dtype(x)
            return dense(again(x.to(half) if half is not None and calls.multiplies(dense, x) else x, None))
        calls.count_fused(module)
        y, self.tensor = _read(module, x, dense.weight, dense.bias, again)
        return y


def _redrawing(dropout: Any, x: Any) -> Dropout | None:
    """A plain nn.Dropout by a mask drawn now; None for others, and where a mask is drawn as a graph runs."""
    if calls.is_followed() or not isinstance(x, Tensor):
        return None
    if not calls.fits(x) or not calls.is_large(x) or not calls.is_plain_dropout(dropout):
        return None
    rng = (0, 0) if isinstance(x, FakeTensor) else draw_rng(x.device)  # a fake tensor has no values
    if isinstance(rng, Tensor) or not 0.0 < dropout.p < 1.0:
        return None
    return partial(bias_dropout_residual, dropout_p=float(dropout.p), rng=rng)


def linear_parts(module: nn.Module, dense: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """calls.linear_parts, where a residual sum may read x afterwards: found out by the first call.

    Under hooks on saved tensors it may not. A checkpoint must save the same when it runs again.
    """
    if not _is_fusable(dense, x) or calls.has_saved_tensor_hooks():
        return calls.linear_parts(dense, x)
    if module not in _before_sums and not _widens_gradient(x, dense.weight):
        reads[id(x)] = _Read(calls.forgetting(x, reads), _state(x), None, weakref.ref(module))
        return calls.linear_parts(dense, x)
    product, _ = _read(module, x, dense.weight, None)
    return product, None if dense.bias is None else dense.bias.to(product.dtype)


def multiplied(dense: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """nn.Linear.forward of dense, by this weight and bias."""
    if not _is_fusable(dense, x) or not _widens_gradient(x, weight):
        return functional.linear(x, weight, bias)
    return _read(dense, x, weight, bias)[0]


_casts: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""id(weight) -> its last cast, as long as a graph keeps it. No weak reference to the weight: torch.utils.swap_tensors
would raise."""


def _widens_gradient(x: Tensor, weight: Tensor) -> bool:
    """Whether autocast's product of x should leave the gradient of the weight in float32: it is not cast then.

    The weight is cast for that. Another reader of it in the same graph (ALBERT runs a layer many times) takes
    autocast's cast, as it would have. Not under hooks on saved tensors: a checkpoint must save the same when it runs
    again, and knows nothing of casts that live.
    """
    half = calls.autocast_dtype(x)
    if half is None or not weight.requires_grad or not widens(x, weight.dtype, half) or calls.has_saved_tensor_hooks():
        return False
    return id(weight) not in _casts


def read_as_residual(x: Tensor, result: Tensor) -> None:
    """Let a sum, whose residual is x, share the gradient of x with its other readers. result: the sum."""
    if torch.compiler.is_compiling():
        return
    found = reads.get(id(x))
    if found is None or found.tensor() is not x or found.state != _state(x):
        return
    if found.readers is None:
        module = found.module()
        if module is not None:
            _before_sums.add(module)
        return
    readers = found.readers()
    if readers is None or readers.x() is not x or not readers.takes_residual:
        return
    if share_residual_gradient(result, readers.give_residual):
        readers.nodes.append(weakref.ref(result.grad_fn))


def _read(
    module: nn.Module,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dropout: Dropout | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(scale * (dropout(x) @ weight.T + bias), the tensor that was read for x)."""
    dtype = calls.autocast_dtype(x) or x.dtype
    found = reads.get(id(x))
    readers = None
    if found is not None and found.readers is not None and found.tensor() is x and found.state == _state(x):
        readers = found.readers()
    cast = None if readers is None else readers.cast()
    if readers is None or cast is None or cast.dtype != dtype:
        cast = x if x.dtype == dtype else x.detach().to(dtype)
        readers = Readers(x, cast)
        reads[id(x)] = _Read(calls.forgetting(x, reads), _state(x), weakref.ref(readers), weakref.ref(module))
    return linear(x, weight, bias, cast, readers, dropout, scale), cast


def _state(x: Tensor) -> tuple[int, bool, int]:
    """(version, whether it is a leaf, the GPU's current stream). Readers that saw another one have gradients of other
    values, of another edge of the graph, or on another stream."""
    return x._version, x.is_leaf, calls.stream_of(x)


def _is_fusable(dense: Any, x: Any) -> bool:
    """Whether there is a gradient to add up, large enough, and dense is a linear layer that can add to it."""
    if calls.is_followed() or not torch.is_grad_enabled() or not isinstance(x, Tensor):
        return False
    if not x.requires_grad or x.dim() < 2 or x.is_nested or not calls.is_large(x) or x.dtype not in KERNEL_DTYPES:
        return False
    return calls.multiplies(dense, x)
