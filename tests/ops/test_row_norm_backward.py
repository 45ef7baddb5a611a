"""Gradients of the row_norm family: every input against float64 autograd, any strides, what is kept for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip import ops
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
@pairwise(shape=[(33, 63), (4, 5, 1025)], used=["y", "yz", "z"], p=[0.0, 0.2], norm=["layer", "rms"], dtype=DTYPES)
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


@pytest.mark.parametrize("wanted", ["x", "residual", "bias", "weight", "norm_bias", "x bias", "residual weight"])
@pytest.mark.parametrize(("shape", "p"), [((19, 70), 0.0), ((19, 70), 0.4), ((3, 1024), 0.0)], ids=str)
def test_a_gradient_does_not_depend_on_which_others_are_wanted(target, shape, p, wanted):
    i = make(shape, torch.float32, ALL, device=target.device)
    together, alone = i.leaves(), i.leaves()
    for name, tensor in alone.tensors().items():
        tensor.requires_grad_(name in wanted.split())
    dy = torch.randn(i.x.shape, device=target.device)
    for leaves in (together, alone):
        call(leaves, dropout_p=p, rng=RNG if p else None).backward(dy)
    for name, tensor in alone.tensors().items():
        assert (tensor.grad is not None) == (name in wanted.split())
        if tensor.grad is not None:
            assert_bitwise(tensor.grad, together.tensors()[name].grad)


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


def grad_outputs(shape: tuple[int, ...], device: str) -> dict[str, Tensor]:
    wide = torch.randn(*shape[:-1], 2 * shape[-1], device=device)
    return {
        "expanded from a scalar": torch.randn((), device=device).expand(shape),
        "expanded over rows": torch.randn(shape[-1], device=device).expand(shape),
        "expanded over columns": torch.randn(*shape[:-1], 1, device=device).expand(shape),
        "transposed": torch.randn(*shape[:-2], shape[-1], shape[-2], device=device).transpose(-1, -2),
        "every other column": wide[..., ::2],
        "left half": wide[..., : shape[-1]],
        "right half, offset by one": torch.randn(wide.numel() + 1, device=device)[1:].view(wide.shape)[
            ..., shape[-1] :
        ],
        "rows reversed in memory": torch.randn(shape, device=device).flip(0),
    }


@pytest.mark.promise("N9")
@pytest.mark.parametrize("kind", grad_outputs((2, 3, 4), "cpu"))
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_strides_of_grad_output_change_no_bit(target, p, kind):
    i = make((3, 5, 66), torch.float32, ALL, device=target.device)
    dy = grad_outputs((3, 5, 66), target.device)[kind]
    dz = grad_outputs((3, 5, 66), target.device)[kind]
    results = []
    for grads in (
        (dy, dz),
        (dy.clone(memory_format=torch.contiguous_format), dz.clone(memory_format=torch.contiguous_format)),
    ):
        leaves = i.leaves()
        outputs = call(leaves, dropout_p=p, rng=RNG if p else None, return_residual=True)
        results.append(torch.autograd.grad(outputs, list(leaves.tensors().values()), grads))
    for ours, materialised in zip(*results, strict=True):
        assert_bitwise(ours, materialised)


def test_sum_backward_has_an_expanded_gradient(target):
    i = make((6, 33), torch.float32, ALL, device=target.device)
    leaves, (double, y64, z64) = i.leaves(), truth(i)
    y, z = call(leaves, return_residual=True)
    (y.sum() + z.sum()).backward()
    (y64.sum() + z64.sum()).backward()
    for name, tensor in leaves.tensors().items():
        torch.testing.assert_close(tensor.grad.double(), double.tensors()[name].grad, rtol=1e-5, atol=1e-4)


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


@pytest.mark.promise("N5")
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("return_residual", [False, True])
def test_gradcheck_in_float64(norm, p, return_residual):
    parts = ALL if norm == "layer" else "residual bias weight"
    i = make((3, 2, 5), torch.float64, parts, norm=norm).leaves()

    def function(*tensors: Tensor) -> Any:
        return call(
            Inputs(**dict(zip(i.tensors(), tensors, strict=True)), options=i.options),
            dropout_p=p,
            rng=RNG,
            return_residual=return_residual,
        )

    assert torch.autograd.gradcheck(function, list(i.tensors().values()))


@pytest.mark.promise("N5")
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradcheck_of_the_sublayer_without_a_norm(p):
    i = make((3, 5), torch.float64, "residual bias").leaves()
    assert torch.autograd.gradcheck(
        lambda x, residual, bias: ops.bias_dropout_residual(x, residual, bias, dropout_p=p, rng=RNG),
        (i.x, i.residual, i.bias),
    )


@pytest.mark.promise("N5")
@pytest.mark.parametrize(
    "options", [{}, {"weight_offset": 1.0}, {"cast_before_weight": True}, {"cast_before_weight": "weight"}], ids=str
)
def test_gradcheck_of_rms_norm(options):
    i = make((4, 6), torch.float64, "weight").leaves()
    assert torch.autograd.gradcheck(lambda x, weight: ops.rms_norm(x, weight, **options), (i.x, i.weight))


@pytest.mark.promise("N5")
def test_double_backward_raises(target):
    leaves = make((3, 8), torch.float32, ALL, device=target.device).leaves()
    with pytest.raises(RuntimeError, match="differentiated again"):
        (dx,) = torch.autograd.grad(call(leaves).square().sum(), leaves.x, create_graph=True)
        # With a first-order term beside it, the engine would leave a raising node without inputs out.
        torch.autograd.grad(dx.square().sum() + leaves.x.square().sum(), leaves.x)


@pytest.mark.parametrize("operands", [ALL, "weight"], ids=["all", "norm_alone"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_batched_gradients(target, norm, operands):
    """By the reference, from what another backend saved: its statistics may share one tensor."""
    leaves = make((3, 8), torch.float32, operands, device=target.device).leaves()
    y = call(leaves, norm=norm)
    batch = torch.randn(4, *y.shape, device=target.device)
    (batched,) = torch.autograd.grad(y, leaves.x, batch, is_grads_batched=True, retain_graph=True)
    for one, dy in zip(batched, batch, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(y, leaves.x, dy, retain_graph=True)[0])


def test_lazy_negation_is_seen(target):
    negated = torch._neg_view(torch.randn(4, 8, device=target.device))
    weight = torch._neg_view(torch.randn(8, device=target.device))
    torch.testing.assert_close(ops.layer_norm(negated, weight), ops.layer_norm(negated.clone(), weight.clone()))
    x = torch.randn(4, 8, device=target.device, requires_grad=True)
    torch.testing.assert_close(*(torch.autograd.grad(ops.layer_norm(x), x, dy)[0] for dy in (negated, negated.clone())))


def saved(function: Any) -> list[Tensor]:
    """Every tensor that the calls inside keep for backward."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        function()
    return kept


@pytest.mark.promise("saved")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
@pytest.mark.parametrize("return_residual", [False, True])
def test_saved_for_backward_is_z_and_one_or_two_numbers_a_row(target, return_residual, norm, p, dtype):
    n_rows, n_cols = 64, 256
    leaves = make((n_rows, n_cols), dtype, ALL, device=target.device, norm=norm).leaves()
    leaves.norm_bias = None if norm == "rms" else leaves.norm_bias
    outputs: list[Tensor] = []

    def run() -> None:
        if norm == "none":
            outputs.append(ops.bias_dropout_residual(leaves.x, leaves.residual, leaves.bias, dropout_p=p))
        else:
            outputs.append(call(leaves, dropout_p=p, return_residual=return_residual))

    kept = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in saved(run)
        if t is not leaves.weight and not aliases(t, leaves.weight)
    }
    numbers_a_row = 1 if norm == "rms" or (dtype == torch.float32 and not return_residual) else 2
    expected = 0 if norm == "none" else n_rows * (n_cols * leaves.x.element_size() + 4 * numbers_a_row)
    assert sum(kept.values()) == expected


@pytest.mark.promise("saved")
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_plain_norm_saves_its_input_and_no_copy_of_it(target, norm):
    leaves = make((64, 256), torch.bfloat16, "weight", device=target.device).leaves()
    kept = saved(
        lambda: ops.layer_norm(leaves.x, leaves.weight) if norm == "layer" else ops.rms_norm(leaves.x, leaves.weight)
    )
    new = [t for t in kept if not aliases(t, leaves.x) and not aliases(t, leaves.weight)]
    assert any(aliases(t, leaves.x) for t in kept)
    assert sum(t.untyped_storage().nbytes() for t in new) == 64 * 4 * (2 if norm == "layer" else 1)


def test_nothing_is_saved_without_gradients(target):
    i = make((8, 16), torch.float32, ALL, device=target.device)
    leaves = i.leaves()
    assert not saved(lambda: call(i, dropout_p=0.1))
    with torch.no_grad():
        assert not saved(lambda: call(leaves, dropout_p=0.1))
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
