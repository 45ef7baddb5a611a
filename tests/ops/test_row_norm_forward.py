"""Forward of the row_norm family against float64: widths, ranks, cast orders, extreme values."""

from __future__ import annotations

import inspect
import warnings
from itertools import product

import pytest
import torch
from onetrip import ops
from onetrip.ops.row_norm import norm_of_sum
from pairwise import pairwise
from row_norm_cases import DTYPES, Inputs, call, make, normed, short, sublayer, truth
from tolerances import assert_bitwise, assert_like_torch, assert_ulps, bits
from torch import Tensor
from torch.nn import functional as F

WIDTHS = (1, 3, 63, 1023, 1025, 1536, 4097)
RNG = (1234, 8)


def plain(i: Inputs) -> Tensor:
    """The norm that the options name, without a sum."""
    eps = i.options.get("eps", 1e-5)
    if i.options.get("norm") == "rms":
        return ops.rms_norm(i.x, i.weight, eps)
    return ops.layer_norm(i.x, i.weight, i.norm_bias, eps)


@pytest.mark.promise("N2")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_plain_norm_is_within_one_ulp(target, norm, width, dtype):
    parts = "weight norm_bias" if norm == "layer" else "weight"
    i = make((5, width), dtype, parts, device=target.device, norm=norm)
    y = plain(i)
    assert y.dtype == dtype
    assert_ulps(y, truth(i)[1])


@pytest.mark.promise("N2")
@pytest.mark.promise("B1, B2")
@pytest.mark.parametrize(
    "shape", [(37,), (3, 37), (2, 3, 37), (2, 1, 3, 37), (1,), (1, 1), (1, 5), (5, 1), (1, 1, 1)], ids=str
)
def test_any_rank(target, shape):
    i = make(shape, torch.float32, "residual bias weight norm_bias", device=target.device)
    y, z = call(i, return_residual=True)
    assert_ulps(y, truth(i)[1])
    assert_ulps(z, truth(i)[2])
    assert_ulps(
        ops.rms_norm(i.x, i.weight),
        normed(i.x.double(), make(shape, norm="rms", eps=1e-6, parts="").double()) * i.weight.double(),
    )


OF_ANOTHER_DTYPE = {
    "layer_norm": lambda i, **o: ops.layer_norm(i.x, i.weight, i.norm_bias, **o),
    "rms_norm": lambda i, **o: ops.rms_norm(i.x, i.weight, **o),
    "rms_norm-cast": lambda i, **o: ops.rms_norm(i.x, i.weight, cast_before_weight=True, **o),
    "block": lambda i, **o: norm_of_sum(
        *(i.x, i.residual, i.weight, i.norm_bias),
        bias=i.bias,
        norm="layer",
        eps=1e-5,
        dropout_p=0.25,
        rng=RNG,
        return_residual=True,
        **o,
    ),
}


@pytest.mark.parametrize("out", DTYPES, ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("function", OF_ANOTHER_DTYPE)
def test_result_of_another_dtype(target, function, dtype, out):
    """That of float32, rounded once; gradients those of the cast."""
    compute = OF_ANOTHER_DTYPE[function]
    i = make((6, 33), dtype, "residual bias weight norm_bias", device=target.device)
    found = []
    for out_dtype in (torch.float32, out):
        leaves = i.leaves()
        result = compute(leaves, out_dtype=out_dtype)
        y, *z = result if isinstance(result, tuple) else (result,)
        assert y.dtype == out_dtype
        y = y.to(out)
        (y.float().sin().sum() + sum(each.float().sum() for each in z)).backward()
        gradients = [each.grad for each in (leaves.x, leaves.residual, leaves.bias, leaves.weight, leaves.norm_bias)]
        found.append([y.detach(), *(each.detach() for each in z), *gradients])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_bitwise(other, one)


@pytest.mark.parametrize("parts", ["", "weight", "norm_bias"])
def test_parameters_left_out(target, parts):
    i = make((4, 65), torch.float32, parts, device=target.device)
    assert_ulps(ops.layer_norm(i.x, i.weight, i.norm_bias), truth(i)[1])


@pytest.mark.promise("N4")
@pairwise(
    width=[3, 1025],
    p=[0.0, 0.1, 0.9],
    parts=["residual", "bias", "residual bias"],
    dtype=DTYPES,
    norm=["layer", "rms"],
)
def test_whole_sublayer_with_the_same_mask(target, width, p, parts, dtype, norm):
    i = make(
        (6, width), dtype, f"{parts} weight norm_bias".replace("norm_bias", "norm_bias" * (norm == "layer")), norm=norm
    )
    i = i.map(lambda tensor: tensor.to(target.device))
    keep = ops.dropout_keep_mask(i.x.shape, p, RNG) if p else None
    y, z = call(i, dropout_p=p, rng=RNG if p else None, return_residual=True)
    assert y.dtype == z.dtype == dtype
    assert_ulps(z, sublayer(i.double(), keep, p))
    _, exact, _ = truth(i, keep, p)
    assert_ulps(y, normed(z.double(), i.double()))  # what is normalised is what is returned
    if dtype == torch.float32:
        assert_ulps(y, exact)
    if i.residual is not None:
        assert_bitwise(ops.bias_dropout_residual(i.x, i.residual, i.bias, dropout_p=p, rng=RNG if p else None), z)


@pytest.mark.promise("N3")
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("width", [64, 1000, 4097])
def test_mean_ten_thousand_times_the_deviation(target, width, norm):
    i = make((64, width), torch.float32, "weight", device=target.device, norm=norm)
    i.x += 1e4
    assert_like_torch(plain(i), normed(i.x, i), truth(i)[1])


X_W = [(x, w) for x, w in product(DTYPES, DTYPES)]


def mixed(x_dtype: torch.dtype, w_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    i = make((7, 96), x_dtype, "weight", dtypes={"weight": w_dtype}, seed=3)
    return i.x, i.weight


def transformers_norm(name: str, weight: Tensor, eps: float) -> torch.nn.Module:
    """One of transformers' norm modules with this weight."""
    import importlib

    package = importlib.import_module(f"transformers.models.{name.split('.')[0]}.modeling_{name.split('.')[0]}")
    module = getattr(package, name.split(".")[1])(weight.numel(), eps=eps)
    module.weight = torch.nn.Parameter(weight)
    return module


@pytest.mark.promise("cast orders")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama.LlamaRMSNorm", {"cast_before_weight": True}),
        ("t5.T5LayerNorm", {"cast_before_weight": "weight"}),
        ("gemma.GemmaRMSNorm", {"weight_offset": 1.0}),
        ("olmo2.Olmo2RMSNorm", {}),
        ("cohere.CohereLayerNorm", {}),
    ],
    ids=["llama", "t5", "gemma", "olmo2", "cohere"],
)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), X_W, ids=lambda dtype: short(dtype))
def test_cast_orders_of_transformers(target, name, options, x_dtype, w_dtype):
    x, weight = mixed(x_dtype, w_dtype)
    norm = transformers_norm(name, weight, 1e-6)
    if name.startswith("olmo2") and "self.weight * hidden_states.to(" in inspect.getsource(type(norm)):
        options = {"cast_before_weight": True}  # as in transformers 4.50; 4.53 has the other order
    with torch.no_grad():
        theirs = norm(x)
    ours = ops.layer_norm if name.startswith("cohere") else ops.rms_norm
    y = ours(x.to(target.device), weight.to(target.device), eps=1e-6, **options)
    assert_same_rounding(y.cpu(), theirs)


def assert_same_rounding(ours: Tensor, theirs: Tensor) -> None:
    """Bit for bit but for one value in a hundred a unit away: two float32 values of rstd may differ by a unit or two.

    float32 outputs, which nothing rounds, show those units themselves.
    """
    assert ours.dtype == theirs.dtype and ours.isfinite().all() and ours.numel() > 100
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=2**-21, atol=2**-21)
        return
    apart = (bits(ours).long() - bits(theirs).long()).abs()
    assert apart[theirs.abs() > 1e-3].max() <= 1
    assert (apart > 0).double().mean() < 0.01


@pytest.mark.promise("B6")
@pytest.mark.parametrize(
    ("x", "residual", "bias"),
    [p for p in product(DTYPES, (None, *DTYPES), (None, *DTYPES)) if any(d is not None for d in p[1:])],
    ids=lambda dtype: "none" if dtype is None else short(dtype),
)
def test_output_dtype_is_that_of_the_unfused_expression(target, x, residual, bias):
    given = {name: d for name, d in (("residual", residual), ("bias", bias)) if d is not None}
    i = make((3, 40), x, " ".join([*given, "weight"]), dtypes={**given, "weight": torch.float32}, device=target.device)
    expected = sublayer(i, None, 0.0)
    y, z = call(i, return_residual=True)
    assert z.dtype == y.dtype == expected.dtype
    exact = sublayer(i.double(), None, 0.0)
    assert_ulps(z, exact)
    assert_ulps(y, normed(z.double(), i.double()))
    if residual is not None:
        assert_bitwise(ops.bias_dropout_residual(i.x, i.residual, i.bias), z)


@pytest.mark.promise("B6")
@pairwise(x=DTYPES, norm_bias=DTYPES, weight=DTYPES)
def test_parameters_of_another_dtype_are_never_reinterpreted(target, x, weight, norm_bias):
    i = make((3, 72), x, dtypes={"weight": weight, "norm_bias": norm_bias}, device=target.device)
    y = ops.layer_norm(i.x, i.weight, i.norm_bias)
    assert y.dtype == x
    assert_ulps(y, truth(i)[1])


@pytest.mark.promise("N8")
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("value", ["finfo.max", "-finfo.max", "+0", "-0", "subnormal", "mixed signs of finfo.max"])
def test_extreme_half_values_are_finite_where_float64_is(target, value, norm):
    """float16's largest value squares within float32; bfloat16's and float32's do not, there or in torch."""
    info = torch.finfo(torch.float16)
    row = torch.full(
        (3, 96),
        {"finfo.max": info.max, "-finfo.max": info.min, "+0": 0.0, "-0": -0.0}.get(value, info.smallest_normal / 8),
    )
    if value.startswith("mixed"):
        row = torch.full((3, 96), info.max)
        row[:, ::2] = info.min
    i = Inputs(row.half().to(target.device), options={"norm": norm})
    assert_ulps(plain(i), truth(i)[1])


@pytest.mark.promise("N8")
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-10, 1e10, 1e17])
def test_magnitudes_whose_squares_fit_float32(target, magnitude, dtype, norm):
    x = (make((3, 96)).x * magnitude).to(dtype).to(target.device)
    i = Inputs(x, options={"norm": norm})
    y = plain(i)
    assert y.isfinite().all()
    assert_ulps(y, truth(i)[1])


@pytest.mark.promise("N10")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("column", [0, 17, 63])
def test_nan_and_inf_stay_in_their_row_and_are_of_torchs_classes(target, column, dtype, bad):
    i = make((5, 64), dtype, "weight norm_bias", device=target.device)
    clean = ops.layer_norm(i.x, i.weight, i.norm_bias), ops.rms_norm(i.x, i.weight)
    i.x[2, column] = bad
    found = ops.layer_norm(i.x, i.weight, i.norm_bias), ops.rms_norm(i.x, i.weight)
    # torch's rms_norm on CUDA (2.11) makes the whole row NaN where one infinite value gives zeros by the formula.
    x, weight, norm_bias = (each.double().cpu() for each in (i.x, i.weight, i.norm_bias))
    expected = F.layer_norm(x, (64,), weight, norm_bias), F.rms_norm(x, (64,), weight, 1e-6)
    for was, now, exact in zip(clean, found, expected, strict=True):
        assert_bitwise(torch.cat([now[:2], now[3:]]), torch.cat([was[:2], was[3:]]))
        now = now.cpu()
        assert torch.equal(now[2].isnan(), exact[2].isnan()) and torch.equal(now[2].isinf(), exact[2].isinf())


@pytest.mark.promise("N10")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_dropped_values_are_zero_whatever_they_were(target, bad):
    i = make((4, 64), torch.float32, "residual", device=target.device)
    keep = ops.dropout_keep_mask(i.x.shape, 0.5, RNG).to(target.device)
    i.x[~keep] = bad
    z = ops.bias_dropout_residual(i.x, i.residual, dropout_p=0.5, rng=RNG)
    assert z.isfinite().all()
    assert torch.equal(z[~keep], i.residual[~keep])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_output_dtype_under_cpu_autocast_is_torchs(dtype):
    x = make((3, 32), dtype).x
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ops.layer_norm(x).dtype == F.layer_norm(x, (32,)).dtype
        assert ops.rms_norm(x).dtype == F.rms_norm(x, (32,)).dtype
