"""onetrip.ops.glu, glu_packed and bias_activation against float64: results, gradients, layouts, errors, tracing."""

from __future__ import annotations

import math

import pytest
import torch
from glu_cases import ACTIVATIONS, DTYPES, check, randn, short, unfused, with_gradients
from onetrip import ops
from onetrip.measure import saved_tensors
from pairwise import pairwise
from targets import TARGETS_WITHOUT_CUDA_KERNELS, target_fixture
from tolerances import assert_bitwise, assert_ulps
from torch._subclasses.fake_tensor import FakeTensorMode

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
SHAPE = (3, 5, 70)
EVERY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=short)


target = target_fixture(TARGETS_WITHOUT_CUDA_KERNELS)


@EVERY_ACTIVATION
@EVERY_DTYPE
def test_glu(target, dtype, activation):
    gate, up, dy = (randn(*SHAPE, device=target.device, dtype=dtype) for _ in range(3))
    check(lambda g, u: ops.glu(g, u, activation), lambda g, u: unfused(g, u, activation=activation), dy, gate, up)


@pytest.mark.parametrize("gate_first", [True, False])
@EVERY_ACTIVATION
def test_glu_packed(target, activation, gate_first):
    """The bits of glu of the two halves; one gradient."""
    for dtype in DTYPES:
        x = randn(*SHAPE[:-1], 2 * SHAPE[-1], device=target.device, dtype=dtype)
        dy = randn(*SHAPE, device=target.device, dtype=dtype)

        def by_halves(x):
            first, second = x.chunk(2, -1)
            return ops.glu(*((first, second) if gate_first else (second, first)), activation)

        packed = with_gradients(lambda x: ops.glu_packed(x, activation, gate_first=gate_first), dy, x)
        for ours, expected in zip(packed, with_gradients(by_halves, dy, x), strict=True):
            assert_bitwise(ours, expected)


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@EVERY_ACTIVATION
@EVERY_DTYPE
def test_bias_activation(target, dtype, activation, with_bias):
    x, dy = (randn(40, 130, device=target.device, dtype=dtype) for _ in range(2))
    bias = [randn(130, device=target.device, dtype=dtype)] if with_bias else []
    check(
        lambda x, bias=None: ops.bias_activation(x, bias, activation),
        lambda x, bias=None: unfused(x, None, bias, activation),
        dy,
        x,
        *bias,
    )


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, BF16), (F16, BF16)], ids=lambda d: "-".join(map(short, d)))
def test_dtypes_are_promoted_as_torch_does(dtypes):
    one, other = (randn(8, 40, dtype=dtype) for dtype in dtypes)
    dy = randn(8, 40)
    check(ops.glu, unfused, dy, one, other)
    check(
        lambda x, bias: ops.bias_activation(x, bias, "gelu"),
        lambda x, b: unfused(x, None, b, "gelu"),
        dy,
        one,
        other[0],
    )


def test_float64_is_computed_in_float64():
    gate, up, dy = randn(8, 40, dtype=F64), randn(8, 40), randn(8, 40, dtype=F64)
    for ours, expected in zip(
        with_gradients(ops.glu, dy, gate, up), with_gradients(unfused, dy, gate, up), strict=True
    ):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=1e-14 if ours.dtype == F64 else 1e-6, atol=1e-13)


def test_every_float16(target):
    """Every activation at every float16 there is, computed in float32: the tails are as exact as the middle."""
    x = torch.arange(-(2**15), 2**15, device=target.device).short().view(F16)
    x = x[x.isfinite()].float()
    exact = x.double()
    truth = {  # torch's own gelu and gelu_tanh cancel in the tail
        "silu": exact * torch.sigmoid(exact),
        "gelu": 0.5 * exact * torch.special.erfc(-exact * 0.5**0.5),
        "gelu_tanh": exact * torch.sigmoid(2.0 * (2.0 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3)),
        "relu2": exact.relu().square(),
        "relu": exact.relu(),
    }
    # A kernel rounds what it exponentiates once; the formula rounds x^2 too.
    relative = 1e-6 if target.backend == "cpu" else 2e-7 * (4.0 + exact.square())
    for activation, expected in truth.items():
        y = ops.bias_activation(x, None, activation).double()
        is_normal = expected.abs() > 1e-36
        excess = (y - expected).abs() - relative * expected.abs()
        if activation == "gelu_tanh":  # the logistic function of a rounded cubic
            excess -= 2e-7 * exact.abs().pow(3).clamp(1.0, 1e3) * expected.abs()
        assert (excess[is_normal] <= 0.0).all(), activation
        assert (y[~is_normal].abs() <= 1e-35).all(), activation


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_value_of_half_precision(target, dtype):
    """gelu, its slope and silu are rounded once: half a unit in the last place, and little more."""
    x = torch.arange(-(2**15), 2**15, device=target.device).short().view(dtype)
    x = x[x.isfinite()].requires_grad_()
    exact = x.detach().double()
    cumulative = 0.5 * torch.special.erfc(-exact * 0.5**0.5)
    y = ops.bias_activation(x, None, "gelu")
    assert_ulps(y.detach(), exact * cumulative, 0.55)
    assert_ulps(ops.bias_activation(x.detach(), None, "silu"), exact * torch.sigmoid(exact), 0.55)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert_ulps(slope, cumulative + exact * torch.exp(-0.5 * exact.square()) / (2.0 * torch.pi) ** 0.5, 0.55)


@EVERY_DTYPE
@pytest.mark.parametrize("cap", [0.5, 30.0, 50])
def test_softcap(target, dtype, cap):
    x, dy = (randn(40, 130, device=target.device, dtype=dtype, scale=cap) for _ in range(2))
    check(lambda x: ops.softcap(x, cap), lambda x: cap * torch.tanh(x / cap), dy, x)
    small = torch.logspace(-8, 2, 1001, device=target.device)
    exact = cap * torch.tanh(small.double() / cap)
    assert ((ops.softcap(small, cap) - exact).abs() <= 4e-7 * exact).all()
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0], device=target.device).requires_grad_()
    y = ops.softcap(x, cap)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert y[:2].tolist() == [cap, -cap] and y[2].isnan() and y[3] == 0.0
    assert (slope[:2] == 0.0).all() and slope[2].isnan() and slope[3] == 1.0


@pytest.mark.parametrize("cap", [0.0, -1.0, math.inf, math.nan, 1e300, 1e-40, "1", None])
def test_caps_that_are_none(cap):
    with pytest.raises((ValueError, TypeError), match="softcap: cap must be"):
        ops.softcap(torch.ones(2, 3), cap)


def test_slopes_of_the_tails(target):
    x = torch.linspace(-20, 20, 4001, device=target.device).requires_grad_()
    for activation in ACTIVATIONS:
        (ours,) = torch.autograd.grad(ops.bias_activation(x, None, activation).sum(), x)
        exact = x.detach().double().requires_grad_()
        (truth,) = torch.autograd.grad(unfused(exact, activation=activation).sum(), exact)
        assert ((ours.double() - truth).abs() <= 1e-6).all(), activation


@EVERY_ACTIVATION
def test_special_values(target, activation):
    """NaN stays in its place, and neither Inf nor the largest numbers become NaN."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, -3e38, 1e20, -1e20, 0.0, -0.0], device=target.device)
    x = x.requires_grad_()
    y = ops.bias_activation(x, None, activation)
    assert y[0].isnan() and y[1] == torch.inf and not y[3:].isnan().any()
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx[0].isnan() != (activation == "relu") and dx[3:].isfinite().all()  # torch's relu passes the gradient
    for n in (40, 1000):
        gate, up = torch.randn(3, n, device=target.device), torch.randn(3, n, device=target.device)
        gate[1, n // 2] = torch.nan
        y = ops.glu(gate.bfloat16(), up.bfloat16(), activation)
        assert y[1, n // 2].isnan() and int(y.isnan().sum()) == 1


# Memory of a tensor of 4 dimensions, and its dimensions in the order of the view.
PERMUTED = {"heads": (0, 2, 1, 3), "columns": (0, 1, 3, 2), "channels_last": (0, 3, 1, 2), "reversed": (3, 2, 1, 0)}


@pairwise(way=["eager", "compiled", "fake"], dtypes={"f32": (F32, F32), "mixed": (BF16, F32)}, order=PERMUTED)
def test_the_result_of_a_permuted_input_has_its_layout_as_torchs_has(target, order, dtypes, way):
    """Code after it views the result through the inverse permutation, which raises for another layout."""
    memory, others = (randn(2, 4, 6, 8, device=target.device, dtype=dtype) for dtype in dtypes)
    wide = randn(*(16 if d == order[3] else n for d, n in enumerate((2, 4, 6, 8))), device=target.device)
    bias = randn(memory.permute(order).shape[3], device=target.device, dtype=dtypes[1])
    inverse = [order.index(d) for d in range(4)]
    x, up = memory.permute(order), others.permute(order)
    halves = wide.permute(order).chunk(2, -1)
    cases = {
        "glu": (lambda x, u: ops.glu(x, u, "gelu"), lambda x, u: unfused(x, u, activation="gelu"), x, up),
        "other layout": (ops.glu, unfused, x, up.contiguous()),
        "halves": (ops.glu, unfused, *halves),
        "glu_packed": (ops.glu_packed, lambda x: unfused(*x.chunk(2, -1)), wide.permute(order)),
        "no bias": (lambda x: ops.bias_activation(x, None, "gelu"), lambda x: unfused(x, activation="gelu"), x),
        "bias": (lambda x, b: ops.bias_activation(x, b, "relu2"), lambda x, b: unfused(x, None, b, "relu2"), x, bias),
    }
    for name, (fused, plain, *inputs) in cases.items():
        if way == "eager":
            dy = randn(*plain(*inputs).shape, device=target.device)
            for mine, exact in zip(
                with_gradients(fused, dy, *inputs),
                with_gradients(plain, dy, *(tensor.double() for tensor in inputs)),
                strict=True,
            ):
                torch.testing.assert_close(mine.double(), exact, rtol=2e-2, atol=2e-2)
            y = fused(*inputs)
        elif way == "compiled":
            torch._dynamo.reset()
            y = torch.compile(fused, fullgraph=True, backend="aot_eager", dynamic=name == "glu")(*inputs)
        else:
            with FakeTensorMode() as mode:
                y = fused(*map(mode.from_tensor, inputs))
        like = inputs[0].chunk(2, -1)[0] if name == "glu_packed" else inputs[0]
        assert y.stride() == torch.empty_like(like).stride() == plain(*inputs).stride(), name
        assert y.permute(inverse).is_contiguous(), name


def test_permuted_memory_is_read_without_a_copy(target):
    gate, up, dy = (randn(2, 5, 8, device=target.device).transpose(1, 2) for _ in range(3))
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.grad(ops.glu(*leaves), leaves, dy)
    operators = {event.key for event in profile.key_averages()}
    assert "aten::permute" in operators
    if target.backend != "reference":
        assert not operators & {"aten::copy_", "aten::clone", "aten::contiguous"}


def test_ranks_and_widths(target):
    for shape in ((1,), (8,), (1, 1), (2, 3, 4, 5, 6), (3, 1023), (2, 40000)):
        gate, up = randn(*shape, device=target.device), randn(*shape, device=target.device)
        assert_ulps(ops.glu(gate, up), unfused(gate.double(), up.double()))


@pytest.mark.parametrize("name", ["glu", "glu_packed", "bias_activation"])
def test_saves_its_inputs_only(target, name):
    a, b = (randn(6, 10, device=target.device).requires_grad_() for _ in range(2))
    bias = randn(10, device=target.device).requires_grad_()
    inputs = {"glu": (a, b), "glu_packed": (a,), "bias_activation": (a, bias)}[name]
    _, saved = saved_tensors(lambda: getattr(ops, name)(*inputs, activation="gelu"))
    assert [each.tensor.data_ptr() for each in saved] == [t.data_ptr() for t in inputs]


TENSOR = torch.zeros(4, 6)
BAD = {
    "gate": (lambda: ops.glu([1.0], TENSOR), TypeError, r"^glu: gate must be a Tensor, got list"),
    "up": (lambda: ops.glu(TENSOR, None), TypeError, r"^glu: up must be a Tensor, got NoneType"),
    "shape": (
        lambda: ops.glu(TENSOR, TENSOR[:1]),
        ValueError,
        r"^glu: up must have the shape of gate, \(4, 6\), got \(1, 6\)",
    ),
    "device": (
        lambda: ops.glu(TENSOR, TENSOR.to("meta")),
        ValueError,
        r"^glu: up must be on the device of gate, cpu, got meta",
    ),
    "dtype": (lambda: ops.glu(TENSOR.long(), TENSOR), TypeError, r"^glu: gate must be float32, .*got int64"),
    "rank": (lambda: ops.glu(TENSOR[0, 0], TENSOR[0, 0]), ValueError, r"^glu: gate must have at least one dimension"),
    "sparse": (lambda: ops.glu(TENSOR.to_sparse(), TENSOR), TypeError, r"^glu: gate must be a dense"),
    "activation": (
        lambda: ops.glu(TENSOR, TENSOR, "tanh"),
        ValueError,
        r"^glu: activation must be one of .*got 'tanh'",
    ),
    "activation-type": (
        lambda: ops.glu(TENSOR, TENSOR, None),
        ValueError,
        r"^glu: activation must be one of .*got None",
    ),
    "odd": (lambda: ops.glu_packed(TENSOR[:, :5]), ValueError, r"^glu_packed: gate_up must have an even last .* got 5"),
    "gate_first": (lambda: ops.glu_packed(TENSOR, gate_first=1), TypeError, r"^glu_packed: gate_first must be a bool"),
    "bias": (
        lambda: ops.bias_activation(TENSOR, TENSOR[0, :3], "gelu"),
        ValueError,
        r"^bias_activation: bias must have shape \(6,\), got \(3,\)",
    ),
    "dropout_p": (
        lambda: ops.glu(TENSOR, TENSOR, dropout_p=1.5),
        ValueError,
        r"^glu: dropout_p must be .*got 1.5",
    ),
    "rng": (
        lambda: ops.bias_activation(TENSOR, None, "relu", dropout_p=0.5, rng=3),
        TypeError,
        r"^bias_activation: rng must be None or a \(seed, offset\) pair",
    ),
    "bias-rank": (
        lambda: ops.bias_activation(TENSOR, TENSOR, "gelu"),
        ValueError,
        r"^bias_activation: bias must have shape",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_bad_input(case):
    call, error, message = case
    with pytest.raises(error, match=message):
        call()
