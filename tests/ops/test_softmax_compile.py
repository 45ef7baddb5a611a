"""torch.library registrations of softmax: opcheck, torch.compile without graph breaks, fake tensors."""

from __future__ import annotations

import pytest
import torch
from onetrip import ops
from onetrip.reference.softmax import SoftmaxPlan
from softmax_cases import RNG
from tolerances import assert_bitwise, assert_compiles_once, assert_compiles_to_the_same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytestmark = [pytest.mark.promise("softmax I6"), pytest.mark.usefixtures("fresh_compiler")]


CASES = {
    "plain": ((3, 4, 6), None, torch.float32, 0.0),
    "bias-dropout": ((2, 3, 4, 6), (3, 1, 6), torch.float32, 0.3),
    "bf16": ((2, 4, 6), (4, 6), torch.bfloat16, 0.3),
    "f64": ((2, 4, 6), (4, 6), torch.float64, 0.3),
    "empty": ((0, 6), (6,), torch.float32, 0.3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_opcheck(case):
    shape, mask_shape, dtype, p = case
    scores = torch.randn(shape).to(dtype).requires_grad_()
    mask = None if mask_shape is None else torch.randn(mask_shape).requires_grad_()
    rng = torch.tensor(RNG) if p else None
    plan = SoftmaxPlan(0.5, True, p, store_p=p > 0.0)
    torch.library.opcheck(torch.ops.onetrip.softmax.default, (scores, mask, rng, *plan))
    y, stored = torch.ops.onetrip.softmax(scores.detach(), mask, rng, *plan)
    args = (torch.randn(shape).to(dtype), stored.detach() if p else y.detach(), mask_shape, True, *plan)
    torch.library.opcheck(torch.ops.onetrip.softmax_backward.default, args)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_a_break_to_the_same_bits(backend):
    def function(scores, bias):
        return ops.softmax(scores, bias, scale=0.5, causal=True, dropout_p=0.2, rng=RNG)

    leaves = [torch.randn(shape, requires_grad=True) for shape in ((2, 3, 5, 7), (3, 5, 7))]
    assert_compiles_to_the_same(function, leaves, backend=backend)


def test_compiled_dropout_draws_anew():
    compiled = torch.compile(lambda s: ops.softmax(s, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    scores = torch.randn(4, 100)
    torch.manual_seed(3)
    first, second = compiled(scores), compiled(scores)
    torch.manual_seed(3)
    assert_bitwise(compiled(scores), first)
    assert (first != second).any()


def test_a_mask_of_symbolic_shape():
    """Sizes that are not numbers yet: exported, traced and faked."""

    class Masked(torch.nn.Module):
        def forward(self, scores, mask):
            return ops.softmax(scores, mask, scale=0.5)

    scores, mask = torch.randn(4, 8, 8), torch.randn(8, 8)
    dynamic = {"scores": {0: torch.export.Dim("batch")}, "mask": None}
    exported = torch.export.export(Masked(), (scores, mask), dynamic_shapes=dynamic, strict=False)
    traced = make_fx(Masked(), tracing_mode="symbolic")(scores, mask)
    for graph in (exported.module(), traced):
        assert_bitwise(graph(scores, mask), ops.softmax(scores, mask, scale=0.5))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = [mode.from_tensor(tensor, static_shapes=False) for tensor in (scores, mask)]
        assert ops.softmax(*fake).dim() == 3


def test_compiling_a_mask_warns_of_nothing(recwarn):
    torch.compile(lambda s, m: ops.softmax(s, m), fullgraph=True, backend="aot_eager")(
        torch.randn(4, 8), torch.randn(8)
    )
    assert not [str(warning.message) for warning in recwarn if "onetrip" in str(warning.message)]


def test_fake_tensors():
    with FakeTensorMode() as mode:
        scores = mode.from_tensor(torch.randn(2, 4, 6)).requires_grad_()
        y = ops.softmax(scores, dropout_p=0.1, causal=True)
        assert y.shape == (2, 4, 6)
        assert torch.autograd.grad(y.sum(), scores)[0].shape == (2, 4, 6)


def test_dynamic_shapes_compile_once():
    calls = ((torch.randn(rows, cols), torch.randn(cols)) for rows, cols in ((3, 5), (7, 9), (2, 33)))
    assert_compiles_once(lambda s, m: ops.softmax(s, m), calls)
