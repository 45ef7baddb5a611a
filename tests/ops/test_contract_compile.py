"""torch.library registrations of every operator: opcheck, torch.compile without graph breaks, sizes that vary, fake and
meta tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from onetrip import ops
from operator_cases import (
    CPU,
    LAYOUTS,
    OPERATORS,
    Watching,
    assert_same,
    cotangents_of,
    each_operator,
    outputs_of,
    results_and_gradients,
)
from pairwise import pairwise
from targets import TARGETS, Target, target_fixture
from tolerances import assert_compiles_once, assert_compiles_to_the_same
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = [
    pytest.mark.promise("I6"),
    pytest.mark.promise("softmax I6"),
    pytest.mark.usefixtures("fresh_compiler"),
]

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
META = Target("meta", "auto")
IN_MEMORY = {"contiguous": lambda t: t, **{name: LAYOUTS[name] for name in ("permuted", "column_major")}}

# A graph is the same whichever backend runs its operators.
target = target_fixture([each for each in TARGETS if each.id != "cpu/reference"])


@pytest.mark.parametrize("wanted", [slice(None), slice(1, None, 2)], ids=["all", "some"])
@pairwise(dtype=[F32, BF16, F64], rows=[3, 0], layout=IN_MEMORY, operator=OPERATORS)
def test_opcheck_of_each_torch_library_operator(operator, dtype, rows, layout, wanted):
    """As a call and its backward, for all gradients or for some, pass through them."""
    leaves = [layout(leaf.detach()) for leaf in operator.leaves(CPU, rows, 6, dtype)]
    chosen = [leaf.requires_grad_() for leaf in leaves[wanted] or leaves]
    with Watching() as watching:
        outputs = [y for y in outputs_of(operator.call(*leaves)) if y.requires_grad]
        torch.autograd.grad(outputs, chosen, cotangents_of(outputs))
    assert watching.calls
    for function, args in watching.calls:
        is_backward = "backward" in function.__name__

        def leaf_of(value: Any, argument: Any, is_backward: bool = is_backward) -> Any:
            if not isinstance(value, Tensor):
                return value
            is_constant = is_backward or argument.name in ("cos", "sin")  # whose gradients raise
            return value.detach().clone().requires_grad_(value.is_floating_point() and not is_constant)

        torch.library.opcheck(function, tuple(map(leaf_of, args, function._schema.arguments)))


@each_operator()
def test_compiled_equals_eager_without_a_graph_break(target, operator):
    assert_compiles_to_the_same(operator.call, operator.leaves(target), compare=operator.compare)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="torch 2.6 breaks its graph at NamedTuple._replace"
)
@each_operator()
def test_transforms_of_torch_func_in_a_compiled_function(operator):
    """The operator in the graph gave jvp a tangent of zero without an error, and raised under grad."""
    values = tuple(leaf.detach() for leaf in operator.leaves(dtype=F64))

    def loss(*values: Tensor) -> Tensor:
        return sum(y.square().sum() for y in outputs_of(operator.call(*values)))

    def transformed(*values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.grad(loss)(*values), torch.func.jvp(loss, values, values)[1]

    compiled = torch.compile(transformed, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*values), transformed(*values))


def test_forward_mode_differentiation_of_a_compiled_function():
    """Other graphs are compiled for dual tensors, and for calls without them again."""
    compiled = torch.compile(ops.layer_norm, backend="aot_eager")
    x, tangent = torch.randn(2, 3, 8)
    for _ in range(2):
        assert_same([compiled(x)], [ops.layer_norm(x)])
        with forward_ad.dual_level():
            found, expected = (
                forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent))).tangent
                for call in (compiled, ops.layer_norm)
            )
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@each_operator()
def test_inductor_compiles_forward_and_backward(target, operator):
    def step(*leaves: Tensor) -> Tensor:
        return sum(torch.relu(y).sum() for y in outputs_of(operator.call(*leaves)))

    leaves = operator.leaves(target)
    assert_compiles_to_the_same(step, leaves, backend="inductor", compare=torch.testing.assert_close)


@each_operator(but="attention")  # whose graph is of many operators, and compiles for seconds
def test_dynamic_shapes_compile_once(target, operator):
    calls = (operator.leaves(target, *size) for size in ((7, 6), (9, 6), (13, 11), (130, 7)))
    assert_compiles_once(operator.call, calls, operator.compare)


def exported(strict: bool, call: Any, leaves: tuple[Tensor, ...]) -> Any:
    class Module(torch.nn.Module):
        def forward(self, *leaves: Tensor) -> Any:
            return call(*leaves)

    if strict and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("torch 2.6 does not tell that it exports")
    return torch.export.export(Module(), leaves, strict=strict).module()


def made_by_fx(call: Any, leaves: tuple[Tensor, ...]) -> Any:
    return make_fx(lambda *leaves: call(*leaves))(*leaves)


@pytest.mark.parametrize(
    "recorded",
    [partial(exported, False), partial(exported, True), made_by_fx],
    ids=["export", "strict-export", "make_fx"],
)
@pytest.mark.promise("export")
@each_operator()
def test_a_graph_recorded_without_gradients_has_those_of_eager_calls(target, operator, recorded):
    """As torch's: its operators saved nothing for backward, and gradients were wrong, None, or an exception."""
    leaves = operator.leaves(target)
    with torch.no_grad():
        graph = recorded(operator.call, tuple(leaf.detach() for leaf in leaves))
    expected = results_and_gradients(operator.call, leaves)
    assert_same(results_and_gradients(lambda *t: graph(*t), leaves), expected, operator.compare)


@pytest.mark.promise("B12")
@pairwise(dtype=[F32, BF16], layout=IN_MEMORY, operator=OPERATORS)
def test_fake_and_meta_tensors_give_the_shapes_dtypes_and_strides_of_real_ones(operator, layout, dtype):
    def leaves(target: Target) -> list[Tensor]:
        return [layout(leaf.detach()).requires_grad_() for leaf in operator.leaves(target, dtype=dtype)]

    real_ones = results_and_gradients(operator.call, leaves(CPU))
    meta = results_and_gradients(operator.call, leaves(META))
    with FakeTensorMode() as mode:
        fake = results_and_gradients(operator.call, [mode.from_tensor(leaf) for leaf in leaves(CPU)])
    for one, other, real in zip(fake, meta, real_ones, strict=True):
        assert other.is_meta and one.device == real.device
        for each in (one, other):
            assert (each.shape, each.dtype, each.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.promise("D1")
@pytest.mark.promise("softmax D1, D5")
@each_operator(trait="drops")
def test_compiled_dropout_follows_the_seed_and_backward_its_mask(target, operator):
    def step(*leaves: Tensor) -> Any:
        return operator.call(*leaves, dropout_p=0.5, rng=None)

    leaves, found = operator.leaves(target, 32, 34), []
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for draws_again in (False, True):
        torch.manual_seed(3)
        outputs = outputs_of(compiled(*leaves))
        if draws_again:
            assert not torch.equal(outputs_of(compiled(*leaves))[0], outputs[0])
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, cotangents_of(outputs))])
    assert_same(*found)
