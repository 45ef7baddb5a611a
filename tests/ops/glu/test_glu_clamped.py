"""SwiGLU with bounds (gpt-oss, DeepSeek-V4) and interleaved columns: ops.glu and ops.glu_packed against float64."""

from __future__ import annotations

import math

import pytest
import torch
from glu_cases import DTYPES, check, randn, short, with_gradients
from onetrip import ops
from onetrip.measure import saved_tensors
from targets import TARGETS_WITHOUT_CUDA_KERNELS, target_fixture
from tolerances import assert_bitwise, assert_ulps
from torch import Tensor

F64 = torch.float64
SHAPE = (3, 5, 70)
FORMS = {
    "gpt-oss": {"limit": 1.5, "alpha": 1.702, "up_offset": 1.0},
    "deepseek-v4": {"limit": 1.5},
    "no-limit": {"alpha": 1.702, "up_offset": -0.5},
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


target = target_fixture(TARGETS_WITHOUT_CUDA_KERNELS)


def clamp(x: Tensor, least: float, largest: float) -> Tensor:
    """torch.clamp, with the gradient 1 at a bound: torch 2.14's is 0 there."""
    return torch.where((least <= x) & (x <= largest), x, x.detach().clamp(least, largest))


def unfused(gate: Tensor, up: Tensor, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    """As models write it, with the gradients of torch's clamp up to torch 2.13."""
    if limit is not None:
        gate, up = clamp(gate, -math.inf, limit), clamp(up, -limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + up_offset)


def operands(target, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and dy: a sixth of the values is beyond 1.5, some are at it."""
    gate, up, dy = (randn(*SHAPE, device=target.device, dtype=dtype) for _ in range(3))
    gate[0, :, :3], up[0, :, 1:4], up[0, :, 4:7] = 1.5, 1.5, -1.5
    return gate, up, dy


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate, up), -1).flatten(-2)


@EVERY_FORM
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_glu(target, dtype, form):
    gate, up, dy = operands(target, dtype)
    check(lambda g, u: ops.glu(g, u, **form), lambda g, u: unfused(g, u, **form), dy, gate, up)


@EVERY_FORM
def test_layouts_have_the_bits_of_two_tensors(target, form):
    for dtype in DTYPES:
        gate, up, dy = operands(target, dtype)
        y, dgate, dup = with_gradients(lambda g, u: ops.glu(g, u, **form), dy, gate, up)
        for make, options in (
            (interleaved, {"interleaved": True}),
            (lambda g, u: torch.cat((g, u), -1), {}),
            (lambda g, u: torch.cat((u, g), -1), {"gate_first": False}),
        ):
            packed = with_gradients(lambda x: ops.glu_packed(x, **options, **form), dy, make(gate, up))  # noqa: B023
            assert_bitwise(packed[0], y)
            assert_bitwise(packed[1], make(dgate, dup))


def test_interleaved_without_bounds_is_silu(target):
    gate, up, dy = operands(target)
    expected = with_gradients(ops.glu, dy, gate, up)
    found = with_gradients(lambda x: ops.glu_packed(x, interleaved=True), dy, interleaved(gate, up))
    assert_ulps(found[0], expected[0].double())
    torch.testing.assert_close(found[1], interleaved(*expected[1:]))


def test_gradients_at_the_bounds_and_beyond(target):
    """1 at a bound, 0 beyond it and where a value is NaN, which stays in the result."""
    x = torch.tensor([1.0, 1.5, 1.5000001, -1.5, -1.6, torch.inf, -torch.inf, torch.nan], device=target.device)
    for gate, up in ((x, torch.ones_like(x)), (torch.ones_like(x), x)):
        ours = with_gradients(lambda g, u: ops.glu(g, u, limit=1.5, alpha=2.0), torch.ones_like(x), gate, up)
        torchs = with_gradients(lambda g, u: unfused(g, u, 1.5, 2.0), torch.ones_like(x), gate, up)
        for one, other in zip(ours, torchs, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


def test_dropout_and_its_gradient(target):
    gate, up, dy = operands(target)
    options = {"dropout_p": 0.5, "rng": (3, 4)}
    keep = ops.dropout_keep_mask(SHAPE, 0.5, (3, 4), torch.device(target.device))
    for form in FORMS.values():

        def plain(g: Tensor, u: Tensor, form: dict[str, float] = form) -> Tensor:
            return torch.where(keep, 2.0 * unfused(g, u, **form), 0.0)

        check(lambda g, u: ops.glu(g, u, **form, **options), plain, dy, gate, up)  # noqa: B023
        y = ops.glu_packed(interleaved(gate, up), interleaved=True, **form, **options)
        assert_bitwise(y, ops.glu(gate, up, **form, **options))


def test_saves_its_inputs_only(target):
    x = randn(6, 10, device=target.device).requires_grad_()
    _, saved = saved_tensors(lambda: ops.glu_packed(x, interleaved=True, limit=7.0))
    assert [each.tensor.data_ptr() for each in saved] == [x.data_ptr()]


TENSOR = torch.zeros(4, 6)
BAD = {
    "limit": ({"limit": 0.0}, ValueError, r"limit must be > 0, got 0.0"),
    "limit-type": ({"limit": "7"}, TypeError, r"limit must be a number, got str"),
    "limit-nan": ({"limit": torch.nan}, ValueError, r"limit must be > 0, got nan"),
    "alpha": ({"alpha": torch.inf}, ValueError, r"alpha must be finite in float32, got inf"),
    "alpha-tensor": ({"alpha": torch.tensor(1.0)}, TypeError, r"alpha must be a number, got Tensor"),
    "alpha-type": ({"alpha": None}, TypeError, r"alpha must be a number, got NoneType"),
    "up_offset": ({"up_offset": -torch.inf}, ValueError, r"up_offset must be finite in float32, got -inf"),
    "activation": (
        {"activation": "gelu", "limit": 7.0},
        ValueError,
        r"limit, alpha and up_offset must be left out for",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_bad_numbers(case):
    options, error, message = case
    for name, call in (("glu", lambda: ops.glu(TENSOR, TENSOR, **options)),
                       ("glu_packed", lambda: ops.glu_packed(TENSOR, **options))):  # fmt: skip
        with pytest.raises(error, match=f"^{name}: {message}"):
            call()


def test_bad_layouts():
    with pytest.raises(TypeError, match=r"^glu_packed: interleaved must be a bool, got 1"):
        ops.glu_packed(TENSOR, interleaved=1)
    for options in ({"gate_first": False}, {"activation": "gelu"}):
        with pytest.raises(ValueError, match=r"^glu_packed: interleaved needs activation 'silu' and gate_first=True"):
            ops.glu_packed(TENSOR, interleaved=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_where_the_sigmoid_s_argument_overflows(dtype):
    large = torch.finfo(dtype).max
    gate = torch.tensor([large, -large, 1.0], dtype=dtype, requires_grad=True)
    ops.glu(gate, torch.ones(3, dtype=dtype), alpha=1e38).sum().backward()
    torch.testing.assert_close(gate.grad, torch.tensor([1.0, 0.0, 1.0], dtype=dtype))


def test_an_infinite_limit_is_none():
    gate, up = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ops.glu(gate, up, limit=torch.inf), ops.glu(gate, up))
