"""torch.library registrations: opcheck, torch.compile without graph breaks, fake tensors, dynamic shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onetrip
import pytest
import torch
from onetrip import ops
from onetrip.reference.row_norm import NORM_LAYER, NORM_NONE, NORM_RMS, RowNormPlan
from row_norm_cases import Inputs, call, make, normed, sublayer
from tolerances import assert_bitwise, assert_compiles_once, assert_compiles_to_the_same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = [pytest.mark.promise("I6"), pytest.mark.usefixtures("fresh_compiler")]

ALL = "residual bias weight norm_bias"
RNG = (21, 4)


def plan(norm: int, dtype: torch.dtype, p: float, **changes: Any) -> RowNormPlan:
    fields = {
        "norm": norm, "eps": 1e-5, "weight_offset": 0.0, "dropout_p": p, "z_dtype": dtype, "n_dtype": torch.float32,
        "y_dtype": dtype, "store_z": True, "center_z": norm == NORM_LAYER and dtype == torch.float32,
        "store_stats": norm != NORM_NONE,
    }  # fmt: skip
    return RowNormPlan(**{**fields, **changes})


CASES = {
    "layer-f32-dropout": ((3, 4, 10), torch.float32, ALL, plan(NORM_LAYER, torch.float32, 0.4)),
    "layer-bf16": ((5, 12), torch.bfloat16, ALL, plan(NORM_LAYER, torch.bfloat16, 0.0)),
    "rms-f32-returned": ((5, 12), torch.float32, "residual weight", plan(NORM_RMS, torch.float32, 0.0)),
    "rms-plain": ((12,), torch.float32, "weight", plan(NORM_RMS, torch.float32, 0.0, store_z=False)),
    "sublayer": ((5, 12), torch.float32, "residual bias", plan(NORM_NONE, torch.float32, 0.4)),
    "empty": ((0, 12), torch.float32, ALL, plan(NORM_LAYER, torch.float32, 0.4)),
    "no-columns": ((3, 0), torch.float32, ALL, plan(NORM_LAYER, torch.float32, 0.0)),
    "layer-f64": ((5, 12), torch.float64, ALL, plan(NORM_LAYER, torch.float64, 0.4)),
    "empty-f64": ((0, 12), torch.float64, ALL, plan(NORM_LAYER, torch.float64, 0.4)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_opcheck_of_the_forward_operator(case):
    shape, dtype, parts, fields = case
    i = make(shape, dtype, parts).leaves()
    rng = torch.tensor(RNG) if fields.dropout_p else None
    torch.library.opcheck(
        torch.ops.onetrip.row_norm.default, (i.x, i.residual, i.bias, i.weight, i.norm_bias, rng, *fields)
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("wanted", [(True,) * 5, (False, True, False, True, False)], ids=["all", "some"])
def test_opcheck_of_the_backward_operator(case, wanted):
    shape, dtype, parts, fields = case
    i = make(shape, dtype, parts)
    rng = torch.tensor(RNG) if fields.dropout_p else None
    _, z, mean, rstd = torch.ops.onetrip.row_norm(i.x, i.residual, i.bias, i.weight, i.norm_bias, rng, *fields)
    has_mean = fields.norm == NORM_LAYER and not fields.center_z
    dy = torch.randn(shape).to(dtype) if fields.norm else None
    dz = torch.randn(shape).to(dtype) if fields.norm != NORM_LAYER or not fields.center_z else None
    if fields.norm == NORM_NONE:
        wanted = (*wanted[:3], False, False)
        stored: tuple[Any, ...] = (None, None, None)
    else:
        stored = (z if fields.store_z else i.x, mean if has_mean else None, rstd)
    args = (dy, dz, *stored, i.weight, rng, *(dtype if flag else None for flag in wanted), *fields)
    torch.library.opcheck(torch.ops.onetrip.row_norm_backward.default, args)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_the_forward_operator_does_not_return_has_no_gradient(case):
    """Nor has a centred z: its gradient would not be that of z."""
    shape, dtype, parts, fields = case
    i = make(shape, dtype, parts).leaves()
    rng = torch.tensor(RNG) if fields.dropout_p else None
    y, z, mean, rstd = torch.ops.onetrip.row_norm(i.x, i.residual, i.bias, i.weight, i.norm_bias, rng, *fields)
    assert y.requires_grad == (fields.norm != NORM_NONE)
    assert z.requires_grad == (fields.store_z and not fields.center_z)
    assert not mean.requires_grad and not rstd.requires_grad


FUNCTIONS = {
    "layer_norm": lambda i: ops.layer_norm(i.x, i.weight, i.norm_bias),
    "rms_norm": lambda i: ops.rms_norm(i.x, i.weight, cast_before_weight=True),
    "bias_dropout_residual": lambda i: ops.bias_dropout_residual(i.x, i.residual, i.bias, dropout_p=0.3, rng=RNG),
    "bias_dropout_residual_norm": lambda i: call(i, dropout_p=0.3, rng=RNG),
    "return_residual": lambda i: call(i, dropout_p=0.3, rng=RNG, return_residual=True),
    "return_residual-z-is-x": lambda i: call(Inputs(i.x, weight=i.weight), return_residual=True, norm="rms"),
    "p=1": lambda i: call(i, dropout_p=1.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["f32", "bf16"]
)
def test_compiled_equals_eager_without_a_graph_break(target, dtype, name):
    function = FUNCTIONS[name]
    leaves = make((3, 5, 20), dtype, ALL, device=target.device).leaves()
    assert_compiles_to_the_same(lambda *tensors: function(Inputs(*tensors)), list(leaves.tensors().values()))


@pytest.mark.slow
def test_inductor_compiles_forward_and_backward(target):
    def step(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.relu(call(Inputs(*tensors), dropout_p=0.3, rng=RNG)) * 2

    leaves = list(make((4, 24), torch.float32, ALL, device=target.device).leaves().tensors().values())
    assert_compiles_to_the_same(step, leaves, backend="inductor", compare=torch.testing.assert_close)


def test_compiled_masks_change_between_calls_and_follow_the_seed(target):
    x = torch.ones(64, 64, device=target.device)
    compiled = torch.compile(
        lambda x: ops.bias_dropout_residual(x, torch.zeros_like(x), dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    again = compiled(x)
    assert not torch.equal(first, second) and torch.equal(first, again)
    assert abs((first != 0).double().mean().item() - 0.5) < 0.05


def test_compiled_backward_uses_the_mask_of_its_forward(target):
    x = torch.ones(32, 32, device=target.device, requires_grad=True)
    compiled = torch.compile(
        lambda x: ops.bias_dropout_residual(x, torch.zeros_like(x), dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    z = compiled(x)
    compiled(x)
    z.sum().backward()
    assert torch.equal(x.grad != 0, z != 0)


def test_dynamic_shapes_compile_once(target):
    shapes = ((4, 24), (5, 24), (9, 31), (130, 7))
    calls = (make(shape, torch.float32, "weight", device=target.device) for shape in shapes)
    assert_compiles_once(lambda x, weight: ops.layer_norm(x, weight), ((i.x, i.weight) for i in calls))


def test_wrong_arguments_raise_when_compiled():
    compiled = torch.compile(lambda x, w: ops.layer_norm(x, w), backend="eager")
    with pytest.raises(ValueError, match=r"layer_norm: weight must have shape \(6,\), got \(5,\)"):
        compiled(torch.randn(2, 6), torch.randn(5))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones(function):
    i = make((3, 5, 20), torch.bfloat16, ALL, dtypes={"residual": torch.float32})
    i.x = i.x.transpose(0, 1).contiguous().transpose(0, 1)
    real = function(i)
    with FakeTensorMode() as mode:
        fake = function(i.map(mode.from_tensor))
    for ours, expected in zip(*((o if isinstance(o, tuple) else (o,)) for o in (fake, real)), strict=True):
        assert (ours.shape, ours.dtype, ours.stride(), ours.device) == (
            expected.shape, expected.dtype, expected.stride(), expected.device,
        )  # fmt: skip


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


def test_double_backward_of_the_traced_operators_raises():
    leaves = make((3, 8), torch.float32, ALL).leaves()
    fields = plan(NORM_LAYER, torch.float32, 0.0)
    y = torch.ops.onetrip.row_norm(*leaves.tensors().values(), None, *fields)[0]
    (dx,) = torch.autograd.grad(y.square().sum(), leaves.x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


@pytest.mark.parametrize("return_residual", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_function_transforms_equal_those_of_torchs_operators(norm, return_residual):
    """A kernel under torch.func.jvp or forward_ad.dual_level gave a tangent of zero without a word."""
    i = make((3, 4, 8), torch.float64, "residual bias weight", norm=norm)
    keep = ops.dropout_keep_mask(i.x.shape, 0.3, RNG)

    def ours(x: torch.Tensor) -> torch.Tensor:
        out = call(replace(i, x=x), dropout_p=0.3, rng=RNG, return_residual=return_residual)
        return (out[0] * out[1] if return_residual else out).square().sum()

    def theirs(x: torch.Tensor) -> torch.Tensor:
        z = sublayer(replace(i, x=x), keep, 0.3)
        y = normed(z, i)
        return (y * z if return_residual else y).square().sum()

    tangent = torch.randn_like(i.x)
    for transform in (
        lambda f: torch.func.grad(f)(i.x),
        lambda f: torch.func.jvp(f, (i.x,), (tangent,))[1],
        lambda f: torch.func.vjp(f, i.x)[1](torch.ones((), dtype=torch.float64))[0],
        lambda f: torch.func.hessian(f)(i.x),
        lambda f: forward_mode(f, i.x, tangent),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))


def forward_mode(function: Any, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_vmap_maps_every_operator(function):
    i = make((3, 4, 8), torch.float32, ALL)

    def outputs(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = function(replace(i, x=x, residual=residual))
        return found if isinstance(found, tuple) else (found,)

    mapped = torch.func.vmap(outputs)(i.x, i.residual)
    one_by_one = [outputs(x, residual) for x, residual in zip(i.x, i.residual, strict=True)]
    for ours, expected in zip(mapped, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(expected))


def test_a_kernel_asked_for_by_name_refuses_transforms():
    if "cpu" not in onetrip.available_backends():
        pytest.skip("the native library was not built")
    with onetrip.use_backend("cpu"), pytest.raises(TypeError, match="layer_norm: backend 'cpu' was asked for"):
        torch.func.grad(lambda x: ops.layer_norm(x).sum())(torch.randn(2, 8))
