"""row_norm under tracers and transforms, beside what test_contract_compile.py asks of every operator."""

from __future__ import annotations

from typing import Any

import onetrip
import pytest
import torch
from cpu_cases import row_norm_plan
from onetrip import ops
from onetrip.reference.row_norm import NORM_LAYER, NORM_NONE, NORM_RMS, RowNormPlan
from row_norm_cases import Inputs, call, make
from tolerances import assert_bitwise
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = [pytest.mark.promise("I6"), pytest.mark.usefixtures("fresh_compiler")]

ALL = "residual bias weight norm_bias"
RNG = (21, 4)


@pytest.mark.parametrize(
    ("norm", "store_z", "center_z"),
    [(NORM_LAYER, True, True), (NORM_LAYER, True, False), (NORM_RMS, False, False), (NORM_NONE, True, False)],
)
def test_what_the_forward_operator_does_not_return_has_no_gradient(norm, store_z, center_z):
    """Nor has a centred z: its gradient would not be that of z."""
    leaves = make((3, 8), torch.float32, ALL).leaves().tensors().values()
    plan = row_norm_plan(norm, store_z=store_z, center_z=center_z)
    y, z, mean, rstd = torch.ops.onetrip.row_norm(*leaves, None, *plan)
    assert y.requires_grad == (norm != NORM_NONE) and z.requires_grad == (store_z and not center_z)
    assert not mean.requires_grad and not rstd.requires_grad


def test_wrong_arguments_raise_when_compiled():
    compiled = torch.compile(lambda x, w: ops.layer_norm(x, w), backend="eager")
    with pytest.raises(ValueError, match=r"layer_norm: weight must have shape \(6,\), got \(5,\)"):
        compiled(torch.randn(2, 6), torch.randn(5))


def test_compiled_without_gradients_it_saves_nothing():
    """Unlike exported programs: another graph is compiled where gradients are wanted."""
    plans = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        plans.extend(RowNormPlan(*node.args[6:]) for node in graph.graph.nodes if "row_norm" in str(node.target))
        return graph

    compiled = torch.compile(lambda *t: ops.bias_dropout_residual_norm(*t), backend=keep, fullgraph=True)
    with torch.no_grad():
        compiled(torch.ones(3, 8), torch.ones(3, 8), torch.ones(8))
    assert [(plan.store_stats, plan.store_z) for plan in plans] == [(False, False)]


def test_make_fx_shows_one_operator_each_way():
    i = make((3, 8), torch.float32, ALL)

    def step(*tensors: torch.Tensor) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        y = call(Inputs(*leaves), dropout_p=0.3, rng=RNG)
        return torch.autograd.grad(y.sum(), leaves)

    graph = make_fx(step)(*i.tensors().values())
    called = [str(node.target) for node in graph.graph.nodes if "onetrip" in str(node.target)]
    assert called == ["onetrip.row_norm.default", "onetrip.row_norm_backward.default"]
    for ours, eager in zip(graph(*i.tensors().values()), step(*i.tensors().values()), strict=True):
        assert_bitwise(ours, eager)


def test_traced_float64_norm_bias_beside_float32(target):
    """The gradient of a float64 parameter is computed by reference, whatever the dtype of x."""
    if target.backend != "reference":
        pytest.skip("a named kernel backend rejects float64")
    i = make((3, 8), torch.float32, "weight norm_bias", dtypes={"norm_bias": torch.float64})
    with onetrip.use_backend("auto"):
        compiled = torch.compile(lambda *t: ops.layer_norm(*t), fullgraph=True, backend="aot_eager")
        found = []
        for run in (compiled, ops.layer_norm):
            leaves = list(i.leaves().tensors().values())
            found.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
    for ours, eager in zip(*found, strict=True):
        assert ours.dtype == eager.dtype
        torch.testing.assert_close(ours, eager)
