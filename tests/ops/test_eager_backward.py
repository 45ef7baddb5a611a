"""Backward in one native call (csrc/eager) against the Python that computes what it does not: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import onetrip
import pytest
import torch
from onetrip import ops
from onetrip.ops import glu_autograd, rotary_autograd, row_norm_autograd, softmax_autograd
from onetrip.ops.common.backends import unavailable_reason
from onetrip.ops.common.native import read
from operator_cases import every_other
from torch import Tensor
from triton_runner import DEVICE

SHAPE = (3, 5, 24)
RNG = (7, 2)
X, RESIDUAL, BIAS, WEIGHT, NORM_BIAS = range(5)
pytestmark = pytest.mark.skipif(read.operands((torch.ones(1),)) < 0, reason="needs the native library and torch 2.10")


def block(leaves: list[Tensor], norm: str, p: float, return_residual: bool) -> Any:
    x, residual, bias, weight, norm_bias = leaves
    return ops.bias_dropout_residual_norm(
        x, residual, weight, norm_bias if norm == "layer" else None, bias=bias, norm=norm, dropout_p=p,
        return_residual=return_residual,
    )  # fmt: skip


FUNCTIONS: dict[str, Callable[[list[Tensor]], Any]] = {
    "layer_norm": lambda leaves: ops.layer_norm(leaves[X], leaves[WEIGHT], leaves[NORM_BIAS]),
    "layer_norm, no parameters": lambda leaves: ops.layer_norm(leaves[X]),
    "rms_norm": lambda leaves: ops.rms_norm(leaves[X], leaves[WEIGHT], weight_offset=1.0),
    "sum": lambda leaves: ops.bias_dropout_residual(leaves[X], leaves[RESIDUAL], leaves[BIAS]),
    "sum, dropout": lambda leaves: ops.bias_dropout_residual(*leaves[:3], dropout_p=0.3),
    "block": lambda leaves: block(leaves, "layer", 0.0, False),
    "block, dropout": lambda leaves: block(leaves, "layer", 0.3, False),
    "rms block and sum": lambda leaves: block(leaves, "rms", 0.0, True),
    "block and sum, dropout": lambda leaves: block(leaves, "layer", 0.3, True),
}
DTYPES = {
    "f32": [torch.float32] * 5,
    "bf16": [torch.bfloat16] * 5,
    "bf16, float32 parameters": [torch.bfloat16] * 3 + [torch.float32] * 2,
    "bf16, float32 residual": [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32],
}


def leaves_of(dtypes: list[torch.dtype], wanted: set[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [SHAPE, SHAPE, SHAPE[-1:], SHAPE[-1:], SHAPE[-1:]]
    return [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_(i in wanted)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]


def gradients(outputs: Any, leaves: list[Tensor], which: str, change: Callable[[Tensor], Tensor]) -> list[Any]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = [output for output, name in zip(outputs, ("y", "z"), strict=False) if which in (name, "both")]
    generator = torch.Generator().manual_seed(1)
    cotangents = [change(torch.randn(SHAPE, generator=generator).to(output.dtype)) for output in used]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    return list(torch.autograd.grad(used, inputs, cotangents, allow_unused=True, retain_graph=True))


def refuse(*_: Any) -> Any:
    raise AssertionError("Python computed the gradients")


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_row_norm_gives_what_python_gives(name: str, dtypes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whichs = ("y", "z", "both") if "and sum" in name else ("y",)
    for which, wanted in product(whichs, ({X}, {RESIDUAL, WEIGHT}, {BIAS, NORM_BIAS}, {*range(5)})):
        leaves = leaves_of(dtypes, wanted)
        with monkeypatch.context() as patch:
            patch.setattr("onetrip.ops.row_norm.eager_rng", lambda *_: RNG)
            outputs = FUNCTIONS[name](leaves)
        if not (outputs[0] if isinstance(outputs, tuple) else outputs).requires_grad:
            continue
        expected = gradients(outputs, leaves, which, every_other)
        with monkeypatch.context() as patch:
            # Python casts a dz that is passed on to x or a residual of another dtype.
            casts = dtypes[X] != dtypes[RESIDUAL] and (which == "z" or name.startswith("sum"))
            if not casts:
                patch.setattr(row_norm_autograd, "input_gradients", refuse)
            actual = gradients(outputs, leaves, which, Tensor.contiguous)
        for ours, theirs in zip(actual, expected, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True, "scale": 0.5}, {"dropout_p": 0.3}], ids=str)
def test_softmax_gives_what_python_gives(options: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(2, 5, 5, dtype=dtype, requires_grad=True)
    cotangent = torch.randn(2, 5, 5, dtype=dtype)
    y = ops.softmax(scores, **options)
    (expected,) = torch.autograd.grad(y, scores, every_other(cotangent), retain_graph=True)
    monkeypatch.setattr(softmax_autograd, "backward", refuse)
    (actual,) = torch.autograd.grad(y, scores, cotangent)
    assert torch.equal(actual, expected)


CLAMPED: Any = {"limit": 0.5, "alpha": 1.702, "up_offset": 1.0}
GLU: dict[str, Callable[[list[Tensor], float], Tensor]] = {
    "glu": lambda leaves, p: ops.glu(leaves[0], leaves[1], "silu", dropout_p=p, rng=RNG),
    "packed": lambda leaves, p: ops.glu_packed(leaves[0], "gelu", dropout_p=p, rng=RNG),
    "packed, up first": lambda leaves, p: ops.glu_packed(leaves[0], "relu2", gate_first=False, dropout_p=p, rng=RNG),
    "clamped": lambda leaves, p: ops.glu(leaves[0], leaves[1], **CLAMPED, dropout_p=p, rng=RNG),
    "interleaved": lambda leaves, p: ops.glu_packed(leaves[0], interleaved=True, **CLAMPED, dropout_p=p, rng=RNG),
    "bias": lambda leaves, p: ops.bias_activation(leaves[0], leaves[2], "gelu_tanh", dropout_p=p, rng=RNG),
    "no bias": lambda leaves, p: ops.bias_activation(leaves[0], None, "gelu", dropout_p=p, rng=RNG),
    "relu": lambda leaves, p: ops.bias_activation(leaves[0], leaves[2], "relu", dropout_p=p, rng=RNG),
    "softcap": lambda leaves, p: ops.softcap(leaves[0], 2.0),
}
HAS_TRITON = not unavailable_reason("triton", DEVICE.type)
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "triton"] if HAS_TRITON else ["cpu"])
EVERY_GLU = pytest.mark.parametrize("name", GLU)


@pytest.fixture
def device(backend: str) -> Iterator[torch.device]:
    """Where the backend is in use. test_triton_cases.py runs Triton's cases, interpreted and on a GPU."""
    with onetrip.use_backend(backend):
        yield DEVICE if backend == "triton" else torch.device("cpu")


def glu_operands(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """gate, up, bias."""
    shapes = shape, shape, shape[-1:]
    return [torch.randn(*sizes, device=device).to(dtype) for sizes in shapes]


@BACKENDS
@pytest.mark.parametrize("p", [0.0, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [SHAPE, (24,), (1, 5, 1, 24), (4, 12)], ids=str)
@EVERY_GLU
def test_glu_gives_what_python_gives(
    name: str, shape: Any, dtype: Any, p: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = glu_operands(shape, dtype, device)
    results = []
    for change in (every_other, Tensor.contiguous):
        leaves = [change(tensor).requires_grad_() for tensor in given]
        with monkeypatch.context() as patch:
            if change is Tensor.contiguous:
                patch.setattr(glu_autograd, "forward", refuse)
                patch.setattr(glu_autograd, "backward", refuse)
            y = GLU[name](leaves, p)
            cotangent = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(dtype)
            found = torch.autograd.grad(y, leaves, change(cotangent), allow_unused=True)
        with torch.no_grad():
            assert torch.equal(GLU[name](leaves, p), y)
        results.append((y, *found))
    for theirs, ours in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs) and ours.is_contiguous())


@BACKENDS
@pytest.mark.parametrize("tables", [(7, 16), (1, 7, 16), (2, 7, 16)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotary_gives_what_python_gives(
    interleaved: bool, tables: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = torch.randn(2, 7, 4, 18, device=device).transpose(1, 2), torch.randn(2, 2, 7, 18, device=device)
    cos, sin = torch.randn(tables, device=device), torch.randn(tables, device=device)
    cotangents = torch.randn(2, 4, 7, 18, device=device), torch.randn(2, 7, 2, 18, device=device).transpose(1, 2)
    results = []
    for change in (every_other, lambda tensor: tensor):
        leaves = [change(tensor).requires_grad_() for tensor in (q, k)]
        with monkeypatch.context() as patch:
            if change is not every_other:
                patch.setattr(rotary_autograd, "rotate", refuse)
            outputs = ops.rotary_embedding(*leaves, cos, sin, interleaved=interleaved)
            found = torch.autograd.grad(outputs, leaves, [*map(change, cotangents)])
        results.append((*outputs, *found))
    assert all(map(torch.equal, *results))
    assert [grad.stride() for grad in found] == [grad.stride() for grad in cotangents]
    with torch.no_grad():
        assert all(map(torch.equal, ops.rotary_embedding(q, k, cos, sin, interleaved=interleaved), outputs))


def test_rotary_of_overlapping_values() -> None:
    """Of which empty_like makes tensors whose columns are not adjacent."""
    q, cos, sin = torch.randn(2, 3, 12).unfold(2, 8, 1), torch.ones(5, 8), torch.zeros(5, 8)
    k = q.clone().requires_grad_()
    for of_backend in ("auto", "reference"):
        with onetrip.use_backend(of_backend):
            assert torch.equal(ops.rotary_embedding(q, q, cos, sin)[0], q)
            outputs = ops.rotary_embedding(q.detach().requires_grad_(), k, cos, sin)
            assert torch.equal(torch.autograd.grad(outputs, k, (q, q))[0], q)


@pytest.mark.slow
def test_compiled_autograd_takes_every_backward() -> None:
    """It takes Python functions alone."""
    x, u, bias = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    q, k, cos, sin = rotary_operands()
    leaves = [tensor.detach().requires_grad_() for tensor in (x, u, bias, q, k)]
    x, u, bias, q, k = leaves
    results = ops.glu(x, u), ops.bias_activation(x, bias, "gelu"), ops.layer_norm(x, bias), ops.softmax(u)
    y = sum(result.square().sum() for result in (*results, *ops.rotary_embedding(q, k, cos, sin)))
    expected = torch.autograd.grad(y, leaves, retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward()
    torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), expected)


@EVERY_GLU
def test_glu_says_that_a_saved_tensor_has_another_shape(name: str) -> None:
    leaves = [tensor.requires_grad_() for tensor in glu_operands(SHAPE, torch.float32, torch.device("cpu"))]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor[:2]):
        y = GLU[name](leaves, 0.0)
    with pytest.raises(RuntimeError, match="glu: what was saved for backward must keep its shape"):
        y.sum().backward()


def rotary_operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = torch.randn(2, 4, 7, 16, requires_grad=True), torch.randn(2, 2, 7, 16, requires_grad=True)
    return q, k, torch.randn(7, 16), torch.randn(7, 16)
