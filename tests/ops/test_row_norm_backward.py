"""Gradients of the row_norm family: every input against float64 autograd, any strides, what is kept for them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from onetrip import ops
from onetrip.measure import saved_bytes
from operator_cases import Watching
from pairwise import pairwise
from row_norm_cases import DTYPES, Inputs, call, gradients, make, short, truth, unfused
from tolerances import aliases, assert_bitwise, assert_like_torch
from torch import Tensor
from torch.nn import functional as F

RNG = (77, 4)
ALL = "residual bias weight norm_bias"


def assert_gradients_like_torch(i: Inputs, used: str = "y", p: float = 0.0) -> None:
    """Every gradient of call(i) against float64 autograd, with torch's unfused expression as the measure."""
    keep = ops.dropout_keep_mask(i.x.shape, p, RNG).to(i.x.device) if p else None
    torchs, exact = unfused(i, keep, p), truth(i, keep, p)
    grads = {name: torch.randn(i.x.shape, device=i.x.device).to(torchs[2].dtype) for name in used}

    def of(leaves: Inputs, y: Tensor, z: Tensor) -> dict[str, Tensor]:
        outputs = {"y": y, "z": z}
        return gradients(leaves, [outputs[name] for name in used], list(grads.values()))

    leaves, options = i.leaves(), {"dropout_p": p, "rng": RNG if p else None}
    y, z = call(leaves, **options, return_residual=True) if "z" in used else (call(leaves, **options), i.x)
    ours, torchs, exact = of(leaves, y, z), of(*torchs), of(*exact)
    for name, gradient in ours.items():
        rows = i.x.numel() // i.x.shape[-1] if gradient.dim() == 1 and i.x.dim() > 1 else 1
        assert gradient.dtype == i.tensors()[name].dtype, name
        assert_like_torch(gradient, torchs[name], exact[name], terms=rows)


@pytest.mark.promise("N6")
@pairwise(
    shape=[(33, 63), (4, 5, 1025), (1, 65)], used=["y", "yz", "z"], p=[0.0, 0.2], norm=["layer", "rms"], dtype=DTYPES
)
def test_every_gradient_of_the_sublayer(target, shape, used, p, norm, dtype):
    parts = ALL if norm == "layer" else "residual bias weight"
    i = make(shape, dtype, parts, device=target.device, norm=norm)
    if used == "z":
        leaves = i.leaves()
        _, z = call(leaves, dropout_p=p, rng=RNG if p else None, return_residual=True)
        got = torch.autograd.grad(z, [leaves.weight, leaves.x], torch.ones_like(z), allow_unused=True)
        assert got[0] is None or not got[0].any()
        i.weight = i.norm_bias = None
    assert_gradients_like_torch(i, used, p)


@pytest.mark.promise("N6")
@pairwise(width=[1, 3, 64, 1023, 1536, 4097], norm=["layer", "rms"], dtype=DTYPES)
def test_every_gradient_of_a_plain_norm(target, width, norm, dtype):
    i = make((9, width), dtype, "weight norm_bias" if norm == "layer" else "weight", device=target.device, norm=norm)
    assert_gradients_like_torch(i)


@pytest.mark.promise("N6")
@pytest.mark.parametrize("parts", ["", "residual", "bias", "weight", "norm_bias", "residual weight", "bias norm_bias"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_every_gradient_with_parts_left_out(target, norm, parts):
    if norm == "rms" and "norm_bias" in parts:
        parts = parts.replace("norm_bias", "weight")
    assert_gradients_like_torch(make((17, 40), torch.float32, parts, device=target.device, norm=norm))


MIXES = {
    "bf16-x-f32-weight": {"weight": torch.float32, "norm_bias": torch.float32},
    "bf16-x-f32-residual": {"residual": torch.float32},
    "bf16-x-f16-bias": {"bias": torch.float16},
    "bf16-x-f32-bias-f16-weight": {"bias": torch.float32, "weight": torch.float16},
    "f32-x-bf16-residual": {"x": torch.float32},
    "f32-x-bf16-all-else-f16-bias": {"x": torch.float32, "bias": torch.float16},
}


@pytest.mark.promise("N6")
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("used", ["y", "yz"])
def test_gradients_of_mixed_dtypes(target, used, p, mix):
    i = make((12, 65), torch.bfloat16, ALL, dtypes=mix, device=target.device)
    assert_gradients_like_torch(i, used, p)


@pairwise(cast=[False, True, "weight"], weight=DTYPES, x=DTYPES)
def test_gradients_of_every_cast_order(target, cast, weight, x):
    """The same gradients up to the roundings that the order itself makes."""
    i = make((16, 80), x, "weight", dtypes={"weight": weight}, device=target.device, norm="rms")
    leaves, (double, y64, _) = i.leaves(), truth(i)
    y = ops.rms_norm(leaves.x, leaves.weight, 1e-5, cast_before_weight=cast)
    dy = torch.randn(i.x.shape, device=target.device).to(y.dtype)
    y.backward(dy)
    y64.backward(dy.double())
    for name in ("x", "weight"):
        gradient, exact = leaves.tensors()[name].grad, double.tensors()[name].grad
        assert_like_torch(gradient, exact.to(gradient.dtype), exact, terms=16)


@pytest.mark.promise("N3")
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gradients_at_a_mean_of_ten_thousand_deviations(target, norm):
    i = make((48, 512), torch.float32, "residual weight", device=target.device, norm=norm)
    i.residual += 1e4
    assert_gradients_like_torch(i)


@pytest.mark.slow
@pytest.mark.promise("N7")
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_parameter_gradients_over_a_million_bf16_rows(target, norm):
    n_rows, n_cols = 1 << 20, 8
    i = make((n_rows, n_cols), torch.bfloat16, "bias weight norm_bias" if norm == "layer" else "bias weight", norm=norm)
    i = i.map(lambda tensor: tensor.to(target.device))
    i.norm_bias = None if i.norm_bias is None else i.norm_bias.float()
    i.weight, i.bias = i.weight.float(), i.bias.float()
    i.x = i.x.bfloat16()
    leaves, (double, y64, _) = i.leaves(), truth(i)
    dy = (torch.randn(n_rows, n_cols, device=target.device) + 0.5).bfloat16()
    y = call(leaves)
    y.backward(dy.to(y.dtype))
    y64.backward(dy.double())
    for name in ("bias", "weight", "norm_bias"):
        if name not in leaves.tensors():
            continue
        gradient, exact = leaves.tensors()[name].grad.double(), double.tensors()[name].grad
        assert ((gradient - exact).abs().max() / exact.abs().max()).item() < 1e-3, name


@pytest.mark.promise("B11")
@pytest.mark.parametrize("used", ["y", "z", "yz"])
def test_gradients_share_no_memory_and_grad_outputs_are_left_alone(target, used):
    leaves = make((6, 32), torch.float32, ALL, device=target.device).leaves()
    y, z = call(leaves, return_residual=True)
    outputs = [output for name, output in (("y", y), ("z", z)) if name in used]
    grads = [torch.randn_like(output) for output in outputs]
    copies = [gradient.clone() for gradient in grads]
    torch.autograd.backward(outputs, grads)
    for gradient, copy in zip(grads, copies, strict=True):
        assert_bitwise(gradient, copy)
    found = [tensor.grad for tensor in leaves.tensors().values() if tensor.grad is not None]
    for index, gradient in enumerate(found):
        assert not any(aliases(gradient, other) for other in [*found[:index], *grads])


@pytest.mark.promise("saved")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
@pytest.mark.parametrize("return_residual", [False, True])
def test_saved_for_backward_is_z_and_one_or_two_numbers_a_row(target, return_residual, norm, p, dtype):
    n_rows, n_cols = 64, 256
    leaves = make((n_rows, n_cols), dtype, ALL, device=target.device, norm=norm).leaves()
    leaves.norm_bias = None if norm == "rms" else leaves.norm_bias

    def run() -> Any:
        if norm == "none":
            return ops.bias_dropout_residual(leaves.x, leaves.residual, leaves.bias, dropout_p=p)
        return call(leaves, dropout_p=p, return_residual=return_residual)

    numbers_a_row = 1 if norm == "rms" or (dtype == torch.float32 and not return_residual) else 2
    expected = 0 if norm == "none" else n_rows * (n_cols * leaves.x.element_size() + 4 * numbers_a_row)
    assert saved_bytes(run, [leaves.weight]) == expected


@pytest.mark.promise("saved")
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_plain_norm_saves_its_input_and_no_copy_of_it(target, norm):
    leaves = make((64, 256), torch.bfloat16, "weight", device=target.device).leaves()

    def run() -> Tensor:
        return ops.layer_norm(leaves.x, leaves.weight) if norm == "layer" else ops.rms_norm(leaves.x, leaves.weight)

    statistics = 64 * 4 * (2 if norm == "layer" else 1)
    assert saved_bytes(run, [leaves.x, leaves.weight]) == statistics
    assert saved_bytes(run, [leaves.weight]) == statistics + leaves.x.nbytes


def test_nothing_is_saved_without_gradients(target):
    i = make((8, 16), torch.float32, ALL, device=target.device)
    leaves = i.leaves()
    assert not saved_bytes(lambda: call(i, dropout_p=0.1))
    with torch.no_grad():
        assert not saved_bytes(lambda: call(leaves, dropout_p=0.1))
        assert not call(leaves).requires_grad
    with torch.inference_mode():
        assert not call(leaves, dropout_p=0.1).requires_grad


def test_input_changed_in_place_before_backward_raises(target):
    leaves = make((4, 8), torch.float32, "weight", device=target.device).leaves()
    x = leaves.x * 1.0
    y = ops.layer_norm(x, leaves.weight)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_beyond_float16_are_infinite_where_float64_says_so(target):
    leaves = make((4, 16), torch.float16, device=target.device).leaves()
    x, double = (leaves.x * 1e-3).detach().requires_grad_(), (leaves.x * 1e-3).detach().double().requires_grad_()
    dy = torch.full_like(x, torch.finfo(torch.float16).max)
    dy[:, ::2] = 1.0
    ops.rms_norm(x, eps=0.0).backward(dy)
    F.rms_norm(double, (16,), eps=0.0).backward(dy.double())
    expected = double.grad.half()
    assert expected.isinf().any() and torch.equal(x.grad.isinf(), expected.isinf())
    assert torch.equal(x.grad.sign(), expected.sign())


@pytest.mark.parametrize("mode", [nullcontext, Watching], ids=["eager", "traced"])
def test_z_requires_grad_where_x_residual_or_bias_does(target, mode) -> None:
    """A frozen trunk with trainable norms had one that did, and all that read it computed gradients for nothing."""
    i = make((5, 8), torch.float32, ALL, device=target.device)
    parts = {"x": True, "residual": True, "bias": True, "weight": False, "norm_bias": False}
    for name, moves_z in parts.items():
        given = replace(i, **{name: getattr(i, name).requires_grad_()})
        with mode():
            y, z = call(given, return_residual=True)
        assert y.requires_grad and z.requires_grad == moves_z, name
        (gradient,) = torch.autograd.grad(y.square().sum(), getattr(given, name))
        assert gradient.any()
        getattr(i, name).requires_grad_(False)


def test_z_may_be_edited_in_place_if_y_is_not_used() -> None:
    """As torch.add's result may: its gradient needs no saved tensor."""
    x, residual = torch.randn(2, 3, 8).requires_grad_(), torch.randn(2, 3, 8).requires_grad_()
    _, z = ops.bias_dropout_residual_norm(x, residual, return_residual=True)
    z.mul_(3.0).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0)) and torch.equal(residual.grad, x.grad)


def test_z_edited_in_place_raises_if_y_is_used() -> None:
    x, residual = torch.randn(2, 3, 8).requires_grad_(), torch.randn(2, 3, 8).requires_grad_()
    y, z = ops.bias_dropout_residual_norm(x, residual, return_residual=True)
    z.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (y + z).sum().backward()
