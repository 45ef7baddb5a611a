"""Every operator of onetrip.ops, in the variants that differ in what they save, draw or launch; operands, layouts and
gradients for them: what test_contract.py and others run over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from onetrip import ops
from onetrip.ops.attention import attention
from targets import Target
from tolerances import assert_bitwise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Shape = tuple[int, ...]
DROPOUT: Any = {"dropout_p": 0.3, "rng": (5, 12)}
CLAMPED: Any = {"limit": 1.5, "alpha": 1.702, "up_offset": 1.0}
LOSS: Any = {"label_smoothing": 0.1, "softcap": 5.0, "lse_square_scale": 0.02}
CPU = Target("cpu", "auto")


TRAITS = frozenset(("cuda", "drops", "free_sums"))


class Operator(NamedTuple):
    call: Callable[..., Any]
    """Called with the leaves. One that drops also takes dropout_p= and rng=; without them it has DROPOUT, whose pinned
    rng keeps the call off the native eager path."""
    shapes: Callable[[int, int], tuple[Shape, ...]]
    """Of the leaves, by rows and columns."""
    traits: str = ""
    """Of TRAITS. cuda: the backend of that name has kernels. drops: it has dropout.
    free_sums: their order depends on strides or on the compiler, as of torch's products, a mean, a bias' gradient."""
    saves: int | None = None
    """Index of the result that backward reads."""

    @property
    def compare(self) -> Callable[[Any, Any], None]:
        """Of the same call in another way: bit for bit, or but for the order of sums."""
        return torch.testing.assert_close if "free_sums" in self.traits else assert_bitwise

    def leaves(
        self, target: Target = CPU, rows: int = 4, cols: int = 6, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Normal values. Skips the test where the target has no kernels of the operator."""
        if target.backend == "cuda" and "cuda" not in self.traits:
            pytest.skip("the cuda backend has no kernels of it")
        generator = torch.Generator().manual_seed(rows)
        found = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes(rows, cols))
        return [tensor.to(dtype).to(target.device).requires_grad_() for tensor in found]


def _wide(tensor: Tensor) -> Tensor:
    """float32 beside operands in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _labels(x: Tensor, n_classes: int, ignored: bool = True) -> Tensor:
    """Computed from x, so that what traces a call sees their number depend on x's rows; a third are -100."""
    labels = x.detach().argmax(-1) % n_classes
    return torch.where(labels % 3 == 1, -100, labels) if ignored else labels


def _places(tokens: Tensor) -> Tensor:
    """Two rows for each."""
    return torch.arange(2 * tokens.shape[0], device=tokens.device).flip(0).view(-1, 2)


def _rotary(q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    positions, columns = (torch.arange(n, device=q.device).to(q.dtype) for n in q.shape[2:])
    angles = positions[:, None] * torch.exp(-0.1 * columns)
    return ops.rotary_embedding(q, k, angles.cos(), angles.sin(), **options)


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return ops.linear_cross_entropy(hidden, weight, _labels(hidden, weight.shape[0]), bias, **options)


def _block(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, norm_bias: Tensor | None = None, **more: Any
) -> Any:
    return ops.bias_dropout_residual_norm(x, residual, weight, norm_bias, bias=bias, **DROPOUT | more)


def _norm_and_x(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Where nothing is added, what is normalized is x itself: copied, to be a result like others."""
    y, z = ops.bias_dropout_residual_norm(x, None, weight, norm="rms", return_residual=True)
    return y, z.clone()


def _rows_and_vectors(n_rows: int, n_vectors: int) -> Callable[[int, int], tuple[Shape, ...]]:
    return lambda r, c: ((2, r, c),) * n_rows + ((c,),) * n_vectors


def _scores_and_bias(r: int, c: int) -> tuple[Shape, ...]:
    return (2, 3, r, c), (3, r, c)


def _scores_and_row(r: int, c: int) -> tuple[Shape, ...]:
    return (2, 3, r, c), (c,)


def _packed(r: int, c: int) -> tuple[Shape, ...]:
    return ((2, r, 2 * c),)


def _rotated(r: int, c: int) -> tuple[Shape, ...]:
    return (2, 4, r, 2 * c), (2, 2, r, 2 * c)


def _projected(r: int, c: int) -> tuple[Shape, ...]:
    return (2, r, c), (9, c), (9,)


def _seen(key: Tensor) -> Tensor:
    """A mask that hides one of the keys."""
    return torch.arange(key.shape[2], device=key.device) != 3


def _attending(r: int, c: int) -> tuple[Shape, ...]:
    return (2, 4, r, c), (2, 2, 5, c), (2, 2, 5, c)


_x, _x_vector, _x_x, _x_x_vector = (_rows_and_vectors(*each) for each in ((1, 0), (1, 1), (2, 0), (2, 1)))

OPERATORS = {
    "layer_norm": Operator(ops.layer_norm, _rows_and_vectors(1, 2), "cuda"),
    "layer_norm-alone": Operator(ops.layer_norm, _x, "cuda"),
    "rms_norm": Operator(lambda *t: ops.rms_norm(*t, weight_offset=1.0), _x_vector, "cuda"),
    "rms_norm-cast": Operator(lambda *t: ops.rms_norm(*t, cast_before_weight=True), _x_vector, "cuda"),
    "rms_norm-cast-weight": Operator(lambda *t: ops.rms_norm(*t, cast_before_weight="weight"), _x_vector, "cuda"),
    "sum": Operator(lambda *t, **drop: ops.bias_dropout_residual(*t, **DROPOUT | drop), _x_x_vector, "cuda drops"),
    "block": Operator(
        lambda *t, **drop: _block(*t[:2], *map(_wide, t[2:]), **drop), _rows_and_vectors(2, 3), "cuda drops"
    ),
    "block-and-sum": Operator(
        lambda *t, **drop: _block(*t, return_residual=True, **drop), _rows_and_vectors(2, 3), "cuda drops", saves=1
    ),
    "rms_block-and-sum": Operator(
        lambda *t, **drop: _block(*t, return_residual=True, norm="rms", **drop),
        _rows_and_vectors(2, 2),
        "cuda drops",
        saves=1,
    ),
    # Without dropout and learned masks calls and their backward stay native.
    "sum-native": Operator(ops.bias_dropout_residual, _x_x, "cuda"),
    "norm_of_sum-native": Operator(ops.bias_dropout_residual_norm, _rows_and_vectors(2, 2), "cuda"),
    "rms_norm_of_sum-and-sum-native": Operator(
        lambda *t: ops.bias_dropout_residual_norm(*t, norm="rms", return_residual=True), _x_x_vector, "cuda", saves=1
    ),
    "rms_norm-and-x": Operator(_norm_and_x, _x_vector, "cuda"),
    "softmax-native": Operator(lambda x: ops.softmax(x, scale=0.5, causal=True), _x, "cuda", saves=0),
    "softmax": Operator(lambda *t: ops.softmax(*t, scale=0.5, causal=True), _scores_and_bias, "cuda", saves=0),
    "softmax-dropout": Operator(
        lambda x, mask, **drop: ops.softmax(x, _wide(mask), **DROPOUT | drop), _scores_and_row, "cuda drops"
    ),
    "glu": Operator(lambda *t, **drop: ops.glu(*t, "gelu", **DROPOUT | drop), _x_x, "drops"),
    "glu-clamped": Operator(lambda gate, up: ops.glu(gate, _wide(up), **CLAMPED), _x_x),
    "glu_packed": Operator(lambda x: ops.glu_packed(x, "relu2", gate_first=False), _packed),
    "glu_packed-interleaved": Operator(lambda x: ops.glu_packed(x, interleaved=True, **CLAMPED), _packed),
    "bias_activation": Operator(
        lambda x, bias: ops.bias_activation(x, _wide(bias), "gelu_tanh"), _x_vector, "free_sums"
    ),
    "activation-dropout": Operator(
        lambda x, **drop: ops.bias_activation(x, None, "silu", **DROPOUT | drop), _x, "drops"
    ),
    "bias_activation-relu": Operator(
        lambda *t, **drop: ops.bias_activation(*t, "relu", **DROPOUT | drop), _x_vector, "drops free_sums", saves=0
    ),
    "softcap": Operator(lambda x: ops.softcap(x, 2.0), _x),
    "rotary_embedding": Operator(_rotary, _rotated),
    "rotary_embedding-interleaved": Operator(lambda *t: _rotary(*t, interleaved=True), _rotated),
    "cross_entropy": Operator(lambda x: ops.cross_entropy(x, _labels(x, x.shape[-1]), **LOSS), _x, "free_sums"),
    "cross_entropy-rows": Operator(lambda x: ops.cross_entropy(x, _labels(x, x.shape[-1]), reduction="none"), _x),
    "linear_cross_entropy": Operator(lambda *t: _linear(*t, **LOSS), _projected, "free_sums"),
    "linear_cross_entropy-rows": Operator(
        lambda *t: _linear(*t, reduction="none", chunk_rows=3), _projected, "free_sums"
    ),
    "linear_logprobs": Operator(
        lambda h, w, b: ops.linear_logprobs(h, w, _labels(h, 9, False), b, temperature=8.0, return_entropy=True),
        _projected,
        "free_sums",
    ),
    "moe_combine": Operator(
        lambda y, weights: ops.moe_combine(y, _places(weights), _wide(weights)), lambda r, c: ((2 * r, c), (r, 2))
    ),
    "moe_dispatch": Operator(lambda x: ops.moe_dispatch(x, _places(x)), lambda r, c: ((r, c),)),
    "attention": Operator(
        lambda *t, **drop: attention(*t, scale=0.5, need_weights=False, **DROPOUT | drop)[0],
        _attending,
        "drops free_sums",
    ),
    "attention-weights": Operator(lambda *t: attention(*t, scale=0.5, causal=True), _attending, "free_sums", saves=1),
    "attention-bias": Operator(
        lambda *t: attention(*t[:3], scale=0.5, position_bias=t[3])[0],
        lambda r, c: (*_attending(r, c), (4, r, 5)),
        "free_sums",
    ),
    "attention-sinks": Operator(
        lambda *t: attention(*t[:3], _seen(t[1]), scale=0.5, sinks=t[3], causal=True)[0],
        lambda r, c: (*_attending(r, c), (4, 1, 1)),
        "free_sums",
    ),
    "attention-softcap": Operator(
        lambda *t: attention(*t, _seen(t[1]), scale=0.5, softcap=2.0)[0], _attending, "free_sums"
    ),
}


class Watching(TorchDispatchMode):
    """Sends calls through the torch.library operators, and keeps those of onetrip."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "onetrip":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def outputs_of(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def cotangents_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = {"generator": generator, "dtype": torch.float32, "device": "cpu"}  # not by default, which tests change
    return [torch.randn(output.shape, **made).to(output) for output in outputs]


def results_and_gradients(
    call: Callable[..., Any], leaves: Sequence[Tensor], change: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> list[Tensor]:
    """For random gradients of the results, changed."""
    outputs = outputs_of(call(*leaves))
    gradients = torch.autograd.grad(outputs, leaves, [change(each) for each in cotangents_of(outputs)])
    return [*(output.detach() for output in outputs), *gradients]


def spread(tensor: Tensor) -> Tensor:
    """The same values behind a storage offset of one element, in rows three elements too long, NaN between them."""
    sizes = (*tensor.shape[:-1], 3 + sum(tensor.shape[-1:]))
    wide = tensor.new_full((1 + math.prod(sizes),), float("nan"))[1:].view(sizes)
    return (wide[..., : tensor.shape[-1]] if tensor.dim() else wide[0]).copy_(tensor)


def every_other(tensor: Tensor) -> Tensor:
    """Columns apart, NaN between them, or -1."""
    between = float("nan") if tensor.is_floating_point() else -1
    return torch.stack([tensor, torch.full_like(tensor, between)], -1)[..., 0]


def expanded(*dims: int) -> Callable[[Tensor], Tensor]:
    """Along these dimensions, counted from the last, from its first element."""

    def expand(tensor: Tensor) -> Tensor:
        for dim in dims:
            if tensor.dim() >= -dim:
                tensor = tensor.narrow(dim, 0, 1).expand(tensor.shape)
        return tensor

    return expand


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "spread": spread,
    "column_major": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t.clone(),
    "every_other": every_other,
    "permuted": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else t.clone(),
    "one_element_off": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "lazily_negated": lambda t: torch._neg_view(-t),
    "expanded_columns": expanded(-1),
    "expanded_rows": expanded(-2),
    "expanded_batch": expanded(-3),
    "one_number": expanded(-1, -2, -3),
}
"""What each gives lies otherwise in memory; the last four have other values too."""


def each_operator(but: str = "", trait: str = "") -> pytest.MarkDecorator:
    """All that have the trait, but for those whose names begin with one of these words."""
    assert not trait or trait in TRAITS
    assert all(any(name.startswith(word) for name in OPERATORS) for word in but.split()), but
    chosen = {name: each for name, each in OPERATORS.items() if trait in each.traits}
    chosen = {name: each for name, each in chosen.items() if not any(map(name.startswith, but.split()))}
    return pytest.mark.parametrize("operator", chosen.values(), ids=chosen.keys())


def assert_same(ours: Any, expected: Any, compare: Callable[[Any, Any], None] = assert_bitwise) -> None:
    for one, other in zip(ours, expected, strict=True):
        compare(one, other)
