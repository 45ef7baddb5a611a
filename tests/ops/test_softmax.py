"""onetrip.ops.softmax against float64: widths, masks, causal, dropout, gradients, special values, memory, errors."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onetrip import nn, ops
from onetrip.measure import saved_tensors
from operator_cases import Watching
from pairwise import pairwise
from softmax_cases import DTYPES, MASKS, RNG, exact, masks, short, unfused
from tolerances import HALF_ROUNDING, assert_bitwise, assert_like_torch, assert_ulps
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

SHAPE = (2, 3, 5, 67)
WIDTHS = (1, 3, 63, 64, 1023, 1025, 4097, 16385, 65537)


@pytest.mark.promise("softmax N1")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(target, width, dtype):
    scores = (3.0 * torch.randn(3, width, device=target.device)).to(dtype)
    y = ops.softmax(scores)
    assert y.dtype == dtype
    assert_ulps(y, exact(scores))
    if dtype == torch.float32:
        truth = exact(scores)
        assert ((y.double() - truth).abs() <= 1e-7 + 2e-6 * truth).all()


@pytest.mark.promise("softmax N6")
@pairwise(name=MASKS, dtype=DTYPES, dropout_p={"p0": 0.0, "p0.3": 0.3}, causal={"": False, "causal": True})
def test_result_and_gradients(target, name, dtype, dropout_p, causal):
    """Within one ulp of float64; gradients within twice the error of torch in the same dtype."""
    mask = masks(SHAPE, target.device)[name]
    scores = torch.randn(SHAPE, device=target.device).to(dtype)
    dy = torch.randn(SHAPE, device=target.device).to(dtype)
    options = {"scale": 0.6, "causal": causal, "dropout_p": dropout_p, "rng": RNG}

    def run(function, dtype):
        leaf = scores.detach().clone().to(dtype).requires_grad_()
        bias = None
        if mask is not None and mask.is_floating_point():
            bias = mask.detach().to(torch.float64 if dtype == torch.float64 else mask.dtype).requires_grad_()
        y = function(leaf, mask if bias is None else bias, **options)
        y.backward(dy.to(y.dtype))
        return y, leaf.grad, None if bias is None else bias.grad

    ours, torchs, truth = run(ops.softmax, dtype), run(unfused, dtype), run(unfused, torch.float64)
    assert_ulps(ours[0], truth[0])
    assert_like_torch(ours[1], torchs[1], truth[1])
    if name in ("bias-queries", "bias-scalar"):
        # Softmax does not see what a whole row has in common: exactly 0, less the rounding of what is summed.
        summed = (truth[1].abs() / options["scale"]).sum_to_size(mask.shape)
        assert (ours[2].abs() <= 2.0 * HALF_ROUNDING[dtype] * summed).all()
    elif truth[2] is not None:
        assert_like_torch(ours[2], torchs[2], truth[2], terms=scores.numel() // ours[2].numel())


@pytest.mark.promise("softmax N6")
@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 6, 7), (2, 3, 2, 3, 2, 3, 7)], ids=["rank6", "rank7"])
def test_masks_of_many_alternating_dimensions(target, shape):
    """More dimensions than a kernel walks along: here, and only here, the mask is written out."""
    mask = torch.randn([size if i % 2 else 1 for i, size in enumerate(shape)], device=target.device).requires_grad_()
    scores = torch.randn(shape, device=target.device)
    y = ops.softmax(scores, mask)
    assert_ulps(y, exact(scores, mask).detach())
    dy = torch.randn_like(y)
    (ours,) = torch.autograd.grad(y, mask, dy)
    (truth,) = torch.autograd.grad(exact(scores, mask), mask, dy.double())
    (torchs,) = torch.autograd.grad(unfused(scores, mask), mask, dy)
    assert_like_torch(ours, torchs, truth.double(), terms=scores.numel() // mask.numel())


@pytest.mark.promise("softmax N11")
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (9, 1), (4, 9), (9, 4)], ids=str)
def test_causal_aligns_the_last_query_with_the_last_key(target, queries, keys):
    scores = torch.randn(2, queries, keys, device=target.device, requires_grad=True)
    y = ops.softmax(scores, causal=True)
    assert_ulps(y, exact(scores, causal=True).detach())
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    assert (y[:, ~visible] == 0.0).all()
    (dx,) = torch.autograd.grad(y, scores, torch.randn_like(y))
    assert (dx[:, ~visible] == 0.0).all() and dx.isfinite().all()


@pytest.mark.promise("softmax N11")
@pytest.mark.parametrize("kind", ["bool", "-inf", "both"])
def test_fully_masked_rows_are_zero(target, kind):
    """And so are their gradients, whatever their neighbours are."""
    mask = torch.ones(2, 1, 4, 33, dtype=torch.bool, device=target.device)
    mask[1, 0, 2] = False
    scores = torch.randn(2, 3, 4, 33, device=target.device, requires_grad=True)
    given_mask = mask if kind == "bool" else torch.where(mask, 0.0, -torch.inf)
    if kind == "both":
        given_mask, scores = mask, scores.detach().masked_fill(~mask, -torch.inf).requires_grad_()
    y = ops.softmax(scores, given_mask, dropout_p=0.2, rng=RNG)
    assert (y[1, :, 2] == 0.0).all()
    assert_ulps(y, exact(scores, given_mask, dropout_p=0.2).detach())
    (dx,) = torch.autograd.grad(y, scores, torch.randn_like(y))
    assert (dx[1, :, 2] == 0.0).all() and dx.isfinite().all() and (dx[0] != 0.0).any()


@pytest.mark.promise("softmax N11")
@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_fully_masked_rows_have_no_gradient_under_torch_func(kind):
    """Where -inf was added it was NaN, from -inf less the largest value."""
    mask = torch.tensor([[True, False, True], [False, False, False]])
    scores, dy = torch.randn(2, 2, 3, dtype=torch.float64)
    given_mask = mask if kind == "bool" else torch.where(mask, 0.0, -torch.inf)

    def loss(scores):
        return (ops.softmax(scores, given_mask) * dy).sum()

    leaf = scores.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert not expected[1].any()
    torch.testing.assert_close(torch.func.grad(loss)(scores), expected)
    torch.testing.assert_close(torch.func.jvp(loss, (scores,), (dy,))[1], (expected * dy).sum())


@pytest.mark.promise("softmax N8")
def test_finite_mask_is_an_ordinary_number(target):
    """A row whose every position has finfo.min gives what the plain formula gives, not zeros."""
    lowest = torch.finfo(torch.float32).min
    scores = torch.randn(3, 17, device=target.device)
    y = ops.softmax(scores, torch.full((17,), lowest, device=target.device))
    assert_ulps(y, torch.softmax(scores + lowest, -1).double())
    assert_ulps(y.sum(-1), torch.ones(3, dtype=torch.float64, device=target.device))


@pytest.mark.promise("softmax N10")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_special_values(target, dtype):
    """NaN and +inf fill their row with NaN, neighbours stay; under a bool mask NaN is not seen; -inf gives 0."""
    scores = torch.randn(5, 40, device=target.device).to(dtype)
    scores[1, 3], scores[2, 7], scores[3, 11] = torch.nan, torch.inf, -torch.inf
    y = ops.softmax(scores)
    assert y[1].isnan().all() and y[2].isnan().all()
    assert y[3, 11] == 0.0 and y[[0, 3, 4]].isfinite().all()
    mask = torch.ones(5, 40, dtype=torch.bool, device=target.device)
    mask[1, 3] = mask[2, 7] = False
    y = ops.softmax(scores, mask)
    assert y.isfinite().all() and y[1, 3] == 0.0 and y[2, 7] == 0.0
    mask[1, 3], mask[1, 20:] = True, False
    y = ops.softmax(scores, mask)
    assert y[1].isnan().all(), "what a mask hides is of the row, as in torch"
    hidden = torch.where(mask, 0.0, -torch.inf)
    assert ops.softmax(scores, hidden)[2].isnan().all(), "an added -inf does not hide NaN"


@pytest.mark.promise("softmax N10")
@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=lambda p: f"p{p:g}")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_what_causality_hides_is_zero_and_in_no_result(target, dtype, dropout_p):
    """NaN there in scores and in the gradient of y is not looked at; a visible one fills what its row sees."""
    hidden = torch.ones(40, 45, dtype=torch.bool, device=target.device).triu(6)
    scores, dy = (torch.randn(3, 40, 45, device=target.device).to(dtype) for _ in range(2))
    bias = torch.randn(40, 45, device=target.device).requires_grad_()
    options = {"causal": True, "dropout_p": dropout_p, "rng": RNG}

    def results(scores, dy):
        leaves = scores.clone().requires_grad_(), bias
        y = ops.softmax(*leaves, **options)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    clean = results(scores, dy)
    for a, b in zip(clean, results(*(t.masked_fill(hidden, torch.nan) for t in (scores, dy))), strict=True):
        assert_bitwise(a, b)
        assert (a[..., hidden] == 0.0).all() and a.isfinite().all()
    kept = ops.dropout_keep_mask(scores.shape, dropout_p, RNG, target.device)[1, 30]
    column = (kept & ~hidden[30]).nonzero()[0]
    scores[1, 30, column] = torch.nan
    y, _, _ = results(scores, dy)
    assert y[1, 30][kept & ~hidden[30]].isnan().all() and (y[..., hidden] == 0.0).all()
    scores[1, 30, column], dy[1, 30, column] = 0.0, torch.nan
    for row in (each[..., 30, :].reshape(-1, 45)[-2 if each.dim() == 3 else 0] for each in results(scores, dy)[1:]):
        assert row[~hidden[30]].isnan().all() and (row[hidden[30]] == 0.0).all()


@pytest.mark.promise("softmax N8")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_largest_and_smallest_numbers(target, dtype):
    info = torch.finfo(dtype)
    rows = torch.tensor(
        [[info.max, -info.max, 0.0], [info.max, info.max, 1.0], [info.tiny, -info.tiny, 0.0], [-info.max] * 3],
        device=target.device,
    ).to(dtype)
    assert_ulps(ops.softmax(rows), torch.softmax(rows.double(), -1))


@pytest.mark.promise("softmax D1, D5")
@pytest.mark.promise("softmax saved")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_dropout(target, dtype):
    """The mask is dropout_keep_mask's, dropped elements are exactly 0, and nothing but one tensor is saved."""
    scores = torch.randn(4, 6, 130, device=target.device).to(dtype).requires_grad_()
    y, (saved,) = saved_tensors(lambda: ops.softmax(scores, dropout_p=0.4, rng=RNG))
    keep = ops.dropout_keep_mask((4, 6, 130), 0.4, RNG, target.device)
    assert (y[~keep] == 0.0).all() and (y[keep] > 0.0).all()
    assert saved.tensor.dtype == dtype and saved.tensor.shape == scores.shape
    assert_ulps(saved.tensor.abs(), exact(scores).detach())


@pytest.mark.promise("softmax saved")
def test_without_dropout_the_result_itself_is_saved(target):
    scores = torch.randn(4, 30, device=target.device, requires_grad=True)
    y, (saved,) = saved_tensors(lambda: ops.softmax(scores))
    assert saved.tensor.data_ptr() == y.data_ptr()


@pytest.mark.promise("softmax T5")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_and_broadcast(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5), label="shape")
    shape[-1] = data.draw(st.integers(1, 40), label="n_cols")
    rank = data.draw(st.integers(0, len(shape)), label="rank of the mask")
    mask_shape = [size if data.draw(st.booleans()) else 1 for size in shape[len(shape) - rank :]]
    is_bool = data.draw(st.booleans(), label="bool")
    scores = torch.randn(shape)
    mask = torch.rand(mask_shape) > 0.3 if is_bool else torch.randn(mask_shape)
    assert_ulps(ops.softmax(scores, mask), exact(scores, mask))


BAD = {
    "scores-list": ([1.0], {}, TypeError, "scores must be a Tensor, got list"),
    "scores-integer": (torch.ones(2, 3, dtype=torch.int32), {}, TypeError, "scores must be float32.*got int32"),
    "scores-0d": (torch.tensor(1.0), {}, ValueError, "scores must have at least one dimension"),
    "scores-sparse": (torch.eye(3).to_sparse(), {}, TypeError, "scores must be a dense"),
    "mask-integer": (torch.ones(2, 3), {"mask": torch.ones(2, 3, dtype=torch.int64)}, TypeError, "mask must be bool"),
    "mask-shape": (
        torch.ones(2, 3),
        {"mask": torch.ones(2, 4)},
        ValueError,
        r"mask must broadcast to the shape of scores, \(2, 3\), got \(2, 4\)",
    ),
    "mask-larger": (torch.ones(2, 3), {"mask": torch.ones(4, 2, 3)}, ValueError, "mask must broadcast"),
    "mask-device": (torch.ones(2, 3), {"mask": torch.ones(3, device="meta")}, ValueError, "mask must be on the device"),
    "mask-list": (torch.ones(2, 3), {"mask": [1.0]}, TypeError, "mask must be a Tensor"),
    "scale-nan": (torch.ones(2, 3), {"scale": math.nan}, ValueError, "scale must be finite in float32, got nan"),
    "scale-inf": (torch.ones(2, 3), {"scale": math.inf}, ValueError, "scale must be finite"),
    "scale-overflow": (torch.ones(2, 3), {"scale": 1e39}, ValueError, "scale must be finite in float32"),
    "scale-text": (torch.ones(2, 3), {"scale": "1"}, TypeError, "scale must be a number"),
    "causal-1d": (torch.ones(3), {"causal": True}, ValueError, "scores must have at least two dimensions"),
    "causal-int": (torch.ones(2, 3), {"causal": 1}, TypeError, "causal must be a bool"),
    "p-above-1": (torch.ones(2, 3), {"dropout_p": 1.1}, ValueError, r"dropout_p must be in \[0, 1\], got 1.1"),
    "p-nan": (torch.ones(2, 3), {"dropout_p": math.nan}, ValueError, "dropout_p must be in"),
    "rng-float": (torch.ones(2, 3), {"rng": (1.0, 2)}, TypeError, "rng must be None or a"),
}


@pytest.mark.promise("softmax B7, B8, B11")
@pytest.mark.parametrize(("scores", "options", "error", "message"), BAD.values(), ids=BAD.keys())
def test_wrong_arguments(scores, options, error, message):
    with pytest.raises(error, match=f"^softmax: {message}"):
        ops.softmax(scores, **options)


def test_module():
    module = nn.Softmax(scale=0.5, causal=True, p=0.4)
    scores = torch.randn(2, 4, 6)
    torch.manual_seed(1)
    trained = module(scores)
    assert (trained == 0.0).sum() > (module.eval()(scores) == 0.0).sum()
    assert_bitwise(module(scores), ops.softmax(scores, scale=0.5, causal=True))
    assert not module.state_dict() and "p=0.4" in repr(module)
    for error, bad in ((ValueError, {"p": 1.5}), (ValueError, {"scale": math.nan}), (TypeError, {"causal": 1})):
        with pytest.raises(error, match=r"^Softmax: "):
            nn.Softmax(**bad)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Watching], ids=["eager", "traced"])
def test_a_result_whose_gradient_never_comes(mode):
    """autograd gives None for it."""
    scores = torch.randn(2, 5, requires_grad=True)
    with mode():
        (_NoGradient.apply(ops.softmax(scores)) + 2.0 * scores.sum()).backward()
    assert torch.equal(scores.grad, torch.full_like(scores, 2.0))


@pytest.mark.promise("softmax I6")
@pytest.mark.usefixtures("fresh_compiler")
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


@pytest.mark.promise("softmax I6")
@pytest.mark.usefixtures("fresh_compiler")
def test_compiling_a_mask_warns_of_nothing(recwarn):
    torch.compile(lambda s, m: ops.softmax(s, m), fullgraph=True, backend="aot_eager")(
        torch.randn(4, 8), torch.randn(8)
    )
    assert not [str(warning.message) for warning in recwarn if "onetrip" in str(warning.message)]
