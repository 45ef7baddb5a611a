"""Modules of the row_norm family: drop-in for torch's, in state, arguments, copies and results."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from onetrip import nn, ops
from pairwise import pairwise
from row_norm_cases import DTYPES, make, short, torch_has_eps_in_float32
from tolerances import assert_bitwise, assert_like_torch, assert_ulps
from torch.nn import functional as F

pytestmark = pytest.mark.promise("I4")

PAIRS = [
    pytest.param(nn.LayerNorm, torch.nn.LayerNorm, id="LayerNorm"),
    pytest.param(nn.RMSNorm, torch.nn.RMSNorm, id="RMSNorm"),
]
MODULES = {
    "LayerNorm": lambda **k: nn.LayerNorm(12, **k),
    "RMSNorm": lambda **k: nn.RMSNorm(12, **k),
    "BiasDropoutResidual": lambda **k: nn.BiasDropoutResidual(12, 0.4, **k),
    "BiasDropoutResidualNorm": lambda **k: nn.BiasDropoutResidualNorm(12, 0.4, **k),
    "BiasDropoutResidualNorm-rms": lambda **k: nn.BiasDropoutResidualNorm(12, 0.4, "rms", return_residual=True, **k),
}
modules = pytest.mark.parametrize("make_module", MODULES.values(), ids=MODULES.keys())


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def run(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One seeded call, with x for the residual where the module takes one."""
    torch.manual_seed(4)
    out = module(x) if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm) else module(x, 0.5 * x)
    return out[0] if isinstance(out, tuple) else out


@modules
def test_symbolic_trace_names_what_works_in_its_place(make_module):
    with pytest.raises(TypeError, match=r"x must be a Tensor, got Proxy of torch.fx.*torch.export"):
        torch.fx.symbolic_trace(make_module())


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_is_a_torch_module_with_torchs_arguments(ours, theirs):
    assert issubclass(ours, theirs)
    expected = list(inspect.signature(theirs).parameters.values())
    found = list(inspect.signature(ours).parameters.values())[: len(expected)]
    assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in expected]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [12, (3, 12), [2, 3, 2]], ids=str)
def test_state_dicts_load_both_ways(shape, affine, ours, theirs):
    mine, torchs = ours(shape, elementwise_affine=affine), theirs(shape, elementwise_affine=affine)
    assert list(mine.state_dict()) == list(torchs.state_dict())
    randomised(torchs)
    mine.load_state_dict(torchs.state_dict())
    theirs(shape, elementwise_affine=affine).load_state_dict(mine.state_dict())
    x = torch.randn(5, *mine.normalized_shape)
    assert_like_torch(mine(x), torchs(x), torchs.double()(x.double()))


@pairwise(options=[{}, {"bias": False}, {"elementwise_affine": False}], shape=[(12,), (4, 6), (2, 3, 5)], dtype=DTYPES)
def test_layer_norm_over_any_normalized_shape(target, options, shape, dtype):
    mine = randomised(nn.LayerNorm(shape, **options, device=target.device, dtype=dtype))
    torchs = torch.nn.LayerNorm(shape, **options, device=target.device, dtype=dtype)
    torchs.load_state_dict(mine.state_dict())
    x = torch.randn(3, 2, *shape, device=target.device).to(dtype)
    double = copy.deepcopy(torchs).double()
    assert_ulps(mine(x), double(x.double()))
    leaves = [x.clone().requires_grad_() for _ in range(2)] + [x.double().requires_grad_()]
    dy = torch.randn(x.shape, device=target.device).to(dtype)
    for module, leaf in zip((mine, torchs, double), leaves, strict=True):
        module(leaf).backward(dy.to(leaf.dtype))
    assert_like_torch(leaves[0].grad, leaves[1].grad, leaves[2].grad)
    for name, parameter in mine.named_parameters():
        exact = double.get_parameter(name).grad
        assert parameter.grad.shape == parameter.shape
        assert_like_torch(parameter.grad, torchs.get_parameter(name).grad, exact, terms=6)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=short)
@pytest.mark.parametrize("eps", [None, 1e-6, 0.5])
def test_rms_norm_eps_is_torchs(dtype, eps):
    if dtype.itemsize == 2 and not torch_has_eps_in_float32():
        pytest.skip("this torch rounds eps to the input's dtype")
    x = (1e-4 * torch.randn(6, 12)).to(dtype)  # small enough that eps decides
    mine, torchs = nn.RMSNorm(12, eps, dtype=dtype), torch.nn.RMSNorm(12, eps, dtype=dtype)
    assert mine.eps == torchs.eps
    torch.testing.assert_close(mine(x), torchs(x))


def test_rms_norm_options_of_transformers_orders():
    x, weight = make((4, 12), torch.bfloat16).x, torch.randn(12)
    for options in ({"weight_offset": 1.0}, {"cast_before_weight": True}, {"cast_before_weight": "weight"}):
        module = nn.RMSNorm(12, 1e-6, **options)
        module.weight.data.copy_(weight)
        assert_bitwise(module(x), ops.rms_norm(x, weight, 1e-6, **options))
    with pytest.raises(ValueError, match="cast_before_weight must be"):
        nn.RMSNorm(12, cast_before_weight="first")


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 11), (12,), (3, 12, 12), (12, 1)], ids=str)
def test_wrong_shapes_raise_as_in_torch(shape, affine, ours, theirs):
    normalized_shape = (4, 12)
    with pytest.raises((RuntimeError, ValueError)):
        theirs(normalized_shape, elementwise_affine=affine)(torch.randn(shape))
    with pytest.raises(ValueError, match=f"^{ours.__name__}: x must end in the normalized_shape|x must end in"):
        ours(normalized_shape, elementwise_affine=affine)(torch.randn(shape))


@pytest.mark.parametrize("affine", [True, False])
def test_wrong_width_of_a_one_dimensional_norm_raises(affine):
    for module in (nn.LayerNorm(12, elementwise_affine=affine), nn.RMSNorm(12, elementwise_affine=affine)):
        with pytest.raises(ValueError, match=f"^{type(module).__name__}: "):
            module(torch.randn(3, 11))


@pytest.mark.promise("D5")
@modules
def test_dropout_follows_training(make_module):
    module = randomised(make_module())
    x = torch.randn(64, 12)
    training, again = run(module, x), run(module, x)
    assert torch.equal(training, again)
    module.eval()
    evaluated = run(module, x)
    has_dropout = hasattr(module, "p")
    assert torch.equal(training, evaluated) != has_dropout
    state = torch.random.get_rng_state()
    module(x) if not has_dropout else module(x, x)
    assert torch.equal(torch.random.get_rng_state(), state)
    module.train()
    assert torch.equal(run(module, x), training)


@modules
def test_copies_and_pickles_are_equal_and_independent(make_module):
    module = randomised(make_module())
    x = torch.randn(8, 12)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)):
        assert type(other) is type(module) and repr(other) == repr(module)
        assert list(other.state_dict()) == list(module.state_dict())
        assert_bitwise(run(other, x), run(module, x))
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            assert mine.data_ptr() != theirs.data_ptr()


@modules
def test_device_and_dtype_arguments(make_module):
    for dtype in (torch.bfloat16, torch.float64):
        module = make_module(device="meta", dtype=dtype)
        assert all(p.is_meta and p.dtype == dtype for p in module.parameters()) and list(module.parameters())
        module = make_module().to(dtype)
        x = torch.randn(3, 12).to(dtype)
        assert run(module, x).dtype == dtype


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.LayerNorm(8), "LayerNorm((8,), eps=1e-05, elementwise_affine=True"),
        (nn.RMSNorm((2, 4), eps=0.1), "RMSNorm((2, 4), eps=0.1, elementwise_affine=True)"),
        (
            nn.RMSNorm(8, weight_offset=1.0, cast_before_weight="weight"),
            "RMSNorm((8,), eps=None, elementwise_affine=True, weight_offset=1.0, cast_before_weight='weight')",
        ),
        (nn.BiasDropoutResidual(8, 0.2, bias=False), "BiasDropoutResidual(8, p=0.2, bias=False)"),
        (
            nn.BiasDropoutResidualNorm(8, norm="rms"),
            "BiasDropoutResidualNorm(8, p=0.1, norm='rms', eps=1e-05, bias=True",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_repr(module, text):
    assert repr(module).startswith(text)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_bias_dropout_residual_norm_is_the_function(target, norm):
    module = randomised(nn.BiasDropoutResidualNorm(12, 0.3, norm, return_residual=True, device=target.device))
    x, residual = torch.randn(2, 5, 12, device=target.device)
    torch.manual_seed(0)
    y, z = module(x, residual)
    torch.manual_seed(0)
    expected = ops.bias_dropout_residual_norm(
        x, residual, module.weight, module.norm_bias, bias=module.bias, dropout_p=0.3, norm=norm, return_residual=True
    )
    assert_bitwise(y, expected[0])
    assert_bitwise(z, expected[1])
    assert y.requires_grad and z.requires_grad


@pytest.mark.parametrize("reset", [False, True], ids=["fresh", "reset"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_starts_with_a_gain_of_one(offset, reset):
    """The gain is weight + weight_offset: Gemma's weights start at 0."""
    module, x = nn.RMSNorm((3, 4), weight_offset=offset), torch.randn(5, 3, 4)
    if reset:
        torch.nn.init.normal_(module.weight)
        module.reset_parameters()
    assert_bitwise(module.weight.detach(), torch.full((3, 4), 1.0 - offset))
    torch.testing.assert_close(module(x), torch.nn.RMSNorm((3, 4))(x))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fresh_modules_only_normalise(offset):
    module = nn.BiasDropoutResidualNorm(12, 0.0, weight_offset=offset, norm="rms")
    x = torch.randn(5, 12)
    torch.testing.assert_close(module(x, x), F.rms_norm(2 * x, (12,), eps=1e-5))
    assert_bitwise(nn.BiasDropoutResidual(12, 0.0)(x, x), 2 * x)
    assert_bitwise(nn.LayerNorm(12)(x), ops.layer_norm(x))


@pytest.mark.parametrize(
    ("module", "keys"),
    [
        (nn.BiasDropoutResidual(8), ["bias"]),
        (nn.BiasDropoutResidual(8, bias=False), []),
        (nn.BiasDropoutResidualNorm(8), ["bias", "weight", "norm_bias"]),
        (nn.BiasDropoutResidualNorm(8, norm="rms"), ["bias", "weight"]),
        (nn.BiasDropoutResidualNorm(8, bias=False, elementwise_affine=False), []),
    ],
    ids=repr,
)
def test_state_dict_keys(module, keys):
    assert list(module.state_dict()) == keys


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.BiasDropoutResidual(8, 1.1),
        lambda: nn.BiasDropoutResidualNorm(8, -0.1),
        lambda: nn.BiasDropoutResidualNorm(8, norm="batch"),
        lambda: nn.BiasDropoutResidualNorm(8, eps=-1.0),
        lambda: nn.BiasDropoutResidualNorm(8, cast_before_weight=True),
        lambda: nn.BiasDropoutResidualNorm(8, norm="rms", cast_before_weight="x"),
    ],
    ids=["p-above", "p-below", "norm", "eps", "cast-of-layer", "cast"],
)
def test_wrong_constructor_arguments_raise_at_construction(build):
    with pytest.raises(ValueError, match=r"^BiasDropoutResidual(Norm)?: \w+ must be"):
        build()


@pytest.mark.slow
def test_compiled_modules_have_no_graph_break():
    model = torch.nn.Sequential(nn.LayerNorm((3, 4)), nn.RMSNorm(4))
    x = torch.randn(2, 3, 4)
    assert_bitwise(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
