"""cross_entropy, linear_cross_entropy and linear_logprobs against float64: options, gradients, special values, memory,
compilation, errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from cross_entropy_cases import OPTIONS, make_labels, unfused
from onetrip import nn, ops, use_backend
from onetrip.ops import cross_entropy_linear
from onetrip.reference.cross_entropy import CrossEntropyPlan
from operator_cases import Watching
from targets import TARGETS_WITHOUT_CUDA_KERNELS, Target, target_fixture, without_synchronising
from tolerances import assert_bitwise, assert_like_torch, max_error

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
ALL_OPTIONS = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
N_HIDDEN, N_CLASSES = 24, 301


target = target_fixture(TARGETS_WITHOUT_CUDA_KERNELS)


def linear_operands(target, dtype, n_rows=(3, 14)):
    hidden = torch.randn(*n_rows, N_HIDDEN, device=target.device).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(N_CLASSES, N_HIDDEN, device=target.device)).to(dtype).requires_grad_()
    bias = torch.randn(N_CLASSES, device=target.device).to(dtype).requires_grad_()
    return hidden, weight, bias, make_labels(*n_rows, n_classes=N_CLASSES, device=target.device)


def in_dtype(dtype, *tensors):
    return [None if t is None else t.detach().to(dtype).requires_grad_(t.requires_grad) for t in tensors]


def run(function, leaves, dloss=None):
    loss = function(*leaves)
    gradients = torch.autograd.grad(loss, leaves, None if dloss is None else dloss.to(loss.dtype))
    return loss, *gradients


@ALL_OPTIONS
@ALL_DTYPES
@pytest.mark.parametrize("width", [3, 64, 1025])
def test_loss_and_gradient_of_logits(target, width, dtype, options):
    logits = (3.0 * torch.randn(2, 9, width, device=target.device)).to(dtype).requires_grad_()
    labels = make_labels(2, 9, n_classes=width, device=target.device)
    if "ignore_index" in options:
        labels = labels.masked_fill(labels == -100, options["ignore_index"])
    before = logits.detach().clone()
    dloss = torch.randn(labels.shape if options.get("reduction") == "none" else (), device=target.device)
    ours = run(lambda x: ops.cross_entropy(x, labels, **options), [logits], dloss)
    truth = run(lambda x: unfused(x, labels, **options), in_dtype(torch.float64, logits), dloss)
    torchs = run(lambda x: unfused(x, labels, **options), in_dtype(torch.float32, logits), dloss)
    assert_like_torch(ours[0], torchs[0], truth[0], terms=18)
    same = run(lambda x: unfused(x, labels, **options), in_dtype(dtype, logits), dloss)
    assert_like_torch(ours[1], same[1], truth[1])
    assert_bitwise(logits.detach(), before)


def test_labels_of_any_stride(target):
    x, labels = torch.randn(5, 12, device=target.device), torch.arange(10, device=target.device)
    assert_bitwise(ops.cross_entropy(x, labels[::2]), ops.cross_entropy(x, labels[::2].clone()))


@ALL_OPTIONS
@ALL_DTYPES
def test_linear(target, dtype, options):
    """Chunks of 11 rows of which the last is shorter, and one chunk for all: like torch on whole logits."""
    *leaves, labels = linear_operands(target, dtype)
    if "ignore_index" in options:
        labels = labels.masked_fill(labels == -100, options["ignore_index"])
    dloss = torch.randn(labels.shape if options.get("reduction") == "none" else (), device=target.device)

    def torchs(h, w, b):
        return unfused(F.linear(h, w, b), labels, **options)

    truth = run(torchs, in_dtype(torch.float64, *leaves), dloss)
    expected = run(torchs, leaves, dloss)
    for chunk_rows in (11, None):
        ours = run(
            lambda h, w, b, n=chunk_rows: ops.linear_cross_entropy(h, w, labels, b, chunk_rows=n, **options),
            leaves,
            dloss,
        )
        assert ours[0].dtype == torch.float32
        assert (
            max_error(ours[0], truth[0]) <= 2.0 * max_error(expected[0].float(), truth[0]) + 1e-5 * truth[0].abs().max()
        )
        for mine, other, exact in zip(ours[1:], expected[1:], truth[1:], strict=True):
            assert_like_torch(mine, other, exact, terms=labels.numel())


@ALL_DTYPES
def test_logprobs_and_entropy(target, dtype):
    *leaves, _ = linear_operands(target, dtype)
    tokens = torch.randint(0, N_CLASSES, (3, 14), device=target.device)
    factors = torch.randn(2, 3, 14, device=target.device)

    def torchs(h, w, b):
        log_p = torch.log_softmax(F.linear(h, w, b) / 0.7, -1)
        picked = log_p.gather(-1, tokens[..., None])[..., 0]
        return torch.stack([picked, -(log_p.exp() * log_p).sum(-1)])

    def ours(h, w, b):
        return torch.stack(ops.linear_logprobs(h, w, tokens, b, temperature=0.7, return_entropy=True))

    truth, expected = run(torchs, in_dtype(torch.float64, *leaves), factors), run(torchs, leaves, factors)
    found = run(ours, leaves, factors)
    assert found[0].dtype == torch.float32
    assert max_error(found[0], truth[0]) <= 2.0 * max_error(expected[0].float(), truth[0]) + 2e-5
    for mine, other, exact in zip(found[1:], expected[1:], truth[1:], strict=True):
        assert_like_torch(mine, other, exact, terms=42)
    only = ops.linear_logprobs(leaves[0], leaves[1], tokens, leaves[2], temperature=0.7)
    assert_bitwise(only.detach(), found[0][0].detach())


def test_impossible_tokens_have_no_part_in_the_entropy(target):
    """A bias of -inf: probability 0, and 0 * log(0) is 0, in the gradient too."""
    hidden, weight, _, _ = linear_operands(target, torch.float32)
    bias = torch.zeros(N_CLASSES, device=target.device)
    bias[7:] = -torch.inf
    tokens = torch.randint(0, 7, (3, 14), device=target.device)
    logprobs, entropy = ops.linear_logprobs(hidden, weight, tokens, bias, return_entropy=True)
    dhidden, dweight = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    log_p = torch.log_softmax(F.linear(hidden, weight[:7]).double(), -1)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1).float())
    assert dhidden.isfinite().all() and (dweight[7:] == 0.0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_hidden_columns(target, reduction):
    """All classes are as likely; the bias decides, where there is one."""
    hidden, weight, bias = (torch.randn(s, device=target.device) for s in ((2, 3, 0), (5, 0), (5,)))
    labels = torch.arange(6, device=target.device).view(2, 3) % 5
    for given in (bias, torch.zeros_like(bias), None):
        expected = unfused((torch.zeros_like(bias) if given is None else given).expand(2, 3, 5), labels)

        def loss(h, given=given):
            return ops.linear_cross_entropy(h, weight, labels, given, reduction=reduction)

        found = loss(hidden.requires_grad_())
        torch.testing.assert_close(found.sum() if reduction == "sum" else 6 * found.mean(), 6 * expected)
        assert found.requires_grad and torch.autograd.grad(found.sum(), hidden)[0].shape == hidden.shape
        with use_backend("auto"):
            torch.testing.assert_close(torch.vmap(loss)(hidden[None])[0], found)
    assert ops.linear_logprobs(hidden, weight, labels).shape == labels.shape


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored(target, reduction):
    *leaves, labels = linear_operands(target, torch.float32)
    labels = torch.full_like(labels, -100)
    loss = ops.linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], reduction=reduction)
    assert (loss == 0.0).all()
    assert all((g == 0.0).all() for g in torch.autograd.grad(loss.sum(), leaves))
    logits = torch.randn(3, 14, 9, device=target.device, requires_grad=True)
    loss = ops.cross_entropy(logits, labels, reduction=reduction)
    assert (loss == 0.0).all() and (torch.autograd.grad(loss.sum(), logits)[0] == 0.0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
@ALL_DTYPES
def test_a_bad_row_spoils_itself_only(target, dtype, bad):
    labels = torch.tensor([0, 1, 2, 3, -100, 5], device=target.device)
    others = torch.tensor([0, 1, 3, 4, 5], device=target.device)
    hidden = torch.randn(6, N_HIDDEN, device=target.device).to(dtype)
    hidden[2, 3] = hidden[4, 3] = bad
    hidden.requires_grad_()
    weight = torch.randn(200, N_HIDDEN, device=target.device).to(dtype)
    loss = ops.linear_cross_entropy(hidden, weight, labels, reduction="none")
    (dhidden,) = torch.autograd.grad(loss.sum(), hidden)
    assert loss[2].isnan() and loss[others].isfinite().all() and loss[4] == 0.0
    assert dhidden[2].isnan().any() and dhidden[others].isfinite().all() and not dhidden[4].any()


def test_only_the_gradients_that_are_wanted(target):
    hidden, weight, bias, labels = linear_operands(target, torch.float32)
    both = torch.autograd.grad(ops.linear_cross_entropy(hidden, weight, labels, bias), (hidden, bias))
    loss = ops.linear_cross_entropy(hidden, weight.detach(), labels, bias)
    for mine, other in zip(torch.autograd.grad(loss, (hidden, bias)), both, strict=True):
        assert_bitwise(mine, other)
    assert not ops.linear_cross_entropy(hidden.detach(), weight.detach(), labels).requires_grad
    with torch.no_grad():
        assert not ops.linear_cross_entropy(hidden, weight, labels, bias).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_second_backward_gives_the_same(target, reduction):
    *leaves, labels = linear_operands(target, torch.float32)
    loss = ops.linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], reduction=reduction)
    first = torch.autograd.grad(loss, leaves, torch.tensor(0.5, device=target.device), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    second = torch.autograd.grad(loss, leaves, torch.tensor(0.5, device=target.device))
    for mine, other in zip(second, kept, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("chunk_rows", [None, 300], ids=["one_chunk", "chunks"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("way", ["eager", "batched", "compiled"])
def test_float16_gradients_do_not_underflow_before_the_factor_of_a_loss_scaler(target, way, reduction, chunk_rows):
    """Every row gives its label 0.98: of a mean the others' gradients, 1e-5 / 1024 each, are 0 in float16."""
    hidden, weight = (torch.randn(n, 16, device=target.device).half() for n in (1024, 2048))
    weight += 1.0
    bias = torch.zeros(2048, device=target.device).half()
    hidden, bias[0], labels = hidden / 100.0, 11.5, torch.zeros(1024, dtype=torch.int64, device=target.device)
    labels[::7] = -100
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]
    dloss = torch.tensor(2.0**15 / (1 if reduction == "mean" else 800), device=target.device)

    def ours(h, w, b):
        return ops.linear_cross_entropy(h, w, labels, b, reduction=reduction, chunk_rows=chunk_rows)

    def torchs(h, w, b):
        return unfused(F.linear(h, w, b), labels, reduction=reduction)

    if way == "compiled":
        torch._dynamo.reset()
    call = torch.compile(ours, backend="aot_eager") if way == "compiled" else ours
    if way == "batched":
        found = [g[0] for g in torch.autograd.grad(call(*leaves), leaves, dloss[None], is_grads_batched=True)]
    else:
        found = run(call, leaves, dloss)[1:]
    truth, expected = run(torchs, in_dtype(torch.float64, *leaves), dloss)[1:], run(torchs, leaves, dloss)[1:]
    for mine, other, exact in zip(found, expected, truth, strict=True):
        assert mine.dtype == torch.float16
        assert (mine - exact).norm() <= 2.0 * (other - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.parametrize("chunk_rows", [None, 300], ids=["one_chunk", "chunks"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_gradients_whose_sum_over_rows_is_too_large_do_not_overflow(target, reduction, chunk_rows):
    """The sum over 2048 rows of 100 is infinite in float16; the mean is not."""
    hidden = torch.full((2048, 16), 100.0, device=target.device).half().requires_grad_()
    weight, bias = (torch.zeros(s, device=target.device).half().requires_grad_() for s in ((50, 16), (50,)))
    labels = torch.zeros(2048, dtype=torch.int64, device=target.device)
    dloss = torch.tensor(1.0 if reduction == "mean" else 1.0 / 2048, device=target.device)
    leaves = [hidden, weight, bias]

    def ours(h, w, b):
        return ops.linear_cross_entropy(h, w, labels, b, reduction=reduction, chunk_rows=chunk_rows)

    truth = run(lambda h, w, b: unfused(F.linear(h, w, b), labels), in_dtype(torch.float64, *leaves))[1:]
    for mine, exact in zip(run(ours, leaves, dloss)[1:], truth, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-3, atol=0.0)


def test_ignored_rows_are_not_multiplied(target):
    """On a CPU: rows of NaN that are ignored reach no product; and no more logits than a chunk's exist."""
    hidden, weight, _, labels = linear_operands(target, torch.float32)
    spoilt = hidden.detach().masked_fill((labels == -100)[..., None], torch.nan).requires_grad_()
    loss = ops.linear_cross_entropy(hidden, weight, labels)
    if target.device == "cpu":
        again = ops.linear_cross_entropy(spoilt, weight, labels)
        assert_bitwise(again, loss)
        for mine, other in zip(
            torch.autograd.grad(again, (spoilt, weight)), torch.autograd.grad(loss, (hidden, weight)), strict=True
        ):
            assert_bitwise(mine, other)


@pytest.mark.parametrize("is_mean", [True, False], ids=["mean", "sum"])
def test_nothing_is_read_back_from_another_device(is_mean):
    """Meta tensors hold no values: torch raises where a value, or a size that depends on values, is asked for."""
    hidden, weight, bias, labels = (torch.empty(s, device="meta") for s in ((64, 32), (100, 32), (100,), (64,)))
    plan = CrossEntropyPlan(-100, 0.1, 5.0, 0.01)
    call = cross_entropy_linear.Linear(hidden, weight, bias, labels.long(), plan, "reference", 16, None)
    loss, gradients, factors = cross_entropy_linear.reduced(call, is_mean, (True, True, True))
    cross_entropy_linear.multiply_(gradients, loss, factors, "reference")
    assert loss.shape == () and [g.shape for g in gradients] == [(64, 32), (100, 32), (100,)]
    losses, entropies = cross_entropy_linear.by_row(call, True)
    gradients = cross_entropy_linear.by_row_backward(call, losses, entropies, (True, True, True))
    assert losses.shape == (64,) and [g.shape for g in gradients] == [(64, 32), (100, 32), (100,)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_does_not_synchronise_the_gpu():
    *leaves, labels = linear_operands(Target("cuda", "auto"), torch.float32)

    def step(hidden, weight, bias):
        losses = [ops.cross_entropy(hidden, labels.clamp(-100, N_HIDDEN - 1))]
        losses += ops.linear_logprobs(hidden, weight, labels.clamp_min(0), bias, return_entropy=True)
        for reduction in ("mean", "sum", "none"):
            losses.append(ops.linear_cross_entropy(hidden, weight, labels, bias, chunk_rows=16, reduction=reduction))
        return torch.stack([loss.sum() for loss in losses]).sum()

    run(step, leaves)  # compiles
    with without_synchronising():
        run(step, leaves)


@pytest.mark.parametrize("options", [{}, {"chunk_rows": 2}, {"reduction": "none"}], ids=str)
def test_autocast_casts_as_for_a_linear_layer(options):
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((6, 5), (11, 5), (11,))]
    halves, labels = [leaf.detach().bfloat16() for leaf in leaves], torch.tensor([3, 10, -100, 0, 4, 4])
    for given in (halves, leaves):
        hidden, weight, bias = (leaf.requires_grad_() for leaf in given)
        with torch.autocast("cpu", torch.bfloat16):
            given.append(ops.linear_cross_entropy(hidden, weight, labels, bias, **options).sum())
        given[3].backward()
    assert_bitwise(leaves[3].detach(), halves[3].detach())
    for ours, theirs in zip(leaves[:3], halves, strict=False):
        assert ours.grad.dtype == torch.float32
        assert_bitwise(ours.grad.bfloat16(), theirs.grad)


H, W, Y = torch.ones(2, 3), torch.ones(5, 3), torch.zeros(2, dtype=torch.int64)
BAD = {
    "labels-large": ((H, W, torch.tensor([0, 5])), {}, ValueError, r"labels must be in \[0, 5\) or ignore_index"),
    "labels-negative": ((H, W, torch.tensor([0, -1])), {}, ValueError, r"labels must be in .*got -1"),
    "labels-int32": ((H, W, Y.int()), {}, TypeError, "labels must be int64, got int32"),
    "labels-shape": ((H, W, Y[:1]), {}, ValueError, r"labels must have the shape .*\(2,\), got \(1,\)"),
    "labels-device": ((H, W, Y.to("meta")), {}, ValueError, "labels must be on the device of hidden"),
    "labels-list": ((H, W, [0, 1]), {}, TypeError, "labels must be a Tensor"),
    "hidden-integer": ((H.int(), W, Y), {}, TypeError, "hidden must be float32"),
    "weight-shape": ((H, W[:, :2], Y), {}, ValueError, r"weight must have shape \(n_classes, 3\)"),
    "weight-no-class": ((H, W[:0], Y), {}, ValueError, "weight must have shape"),
    "weight-dtype": ((H, W.half(), Y), {}, TypeError, "weight must have the dtype of hidden, float32, got float16"),
    "bias-shape": ((H, W, Y, W[0]), {}, ValueError, r"bias must have shape \(5,\), got \(3,\)"),
    "smoothing": ((H, W, Y), {"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\]"),
    "softcap": ((H, W, Y), {"softcap": 0.0}, ValueError, "softcap must be > 0, normal and finite in float32, got 0"),
    "softcap-overflow": ((H, W, Y), {"softcap": 1e300}, ValueError, "softcap must be > 0, normal and finite"),
    "z-loss": ((H, W, Y), {"lse_square_scale": math.nan}, ValueError, "lse_square_scale must be finite"),
    "reduction": ((H, W, Y), {"reduction": "max"}, ValueError, "reduction must be one of"),
    "ignore_index": ((H, W, Y), {"ignore_index": None}, TypeError, "ignore_index must be an int"),
    "ignore_index-2^63": ((H, W, Y), {"ignore_index": 2**63}, ValueError, "ignore_index must be an int64, got 9223"),
    "ignore_index-low": ((H, W, Y), {"ignore_index": -(2**63) - 1}, ValueError, "ignore_index must be an int64, got -"),
    "chunk_rows": ((H, W, Y), {"chunk_rows": 0}, ValueError, "chunk_rows must be None or an int >= 1, got 0"),
    "unknown": ((H, W, Y), {"weights": 1}, TypeError, "unknown argument 'weights'"),
}


@pytest.mark.parametrize(("arguments", "options", "error", "message"), BAD.values(), ids=BAD.keys())
def test_wrong_arguments(arguments, options, error, message):
    with pytest.raises(error, match=f"^linear_cross_entropy: {message}"):
        ops.linear_cross_entropy(*arguments, **options)
    if options and "unknown" not in message:
        with pytest.raises(error, match=f"^LinearCrossEntropyLoss: {message}"):
            nn.LinearCrossEntropyLoss(**options)


def test_wrong_arguments_of_the_others():
    with pytest.raises(ValueError, match=r"^cross_entropy: labels must be in \[0, 3\)"):
        ops.cross_entropy(H, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"^cross_entropy: logits must have at least one class"):
        ops.cross_entropy(H[:, :0], Y)
    with pytest.raises(ValueError, match=r"^linear_logprobs: tokens must be in \[0, 5\), got -100"):
        ops.linear_logprobs(H, W, Y - 100)
    with Watching(), pytest.raises(ValueError, match=r"^linear_logprobs: tokens must be in \[0, 5\), got -100"):
        ops.linear_logprobs(H, W, Y - 100)
    with pytest.raises(TypeError, match=r"^linear_logprobs: return_entropy must be a bool, got 'x'"):
        ops.linear_logprobs(H, W, Y, return_entropy="x")
    with pytest.raises(ValueError, match=r"^linear_logprobs: temperature must be > 0"):
        ops.linear_logprobs(H, W, Y, temperature=0.0)
    with pytest.raises(ValueError, match=r"^linear_logprobs: temperature must be > 0, normal and finite in float32"):
        ops.linear_logprobs(H, W, Y, temperature=1e-40)


def test_module():
    module = nn.LinearCrossEntropyLoss(label_smoothing=0.1, reduction="sum")
    hidden, weight, labels = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 4, -100, 2])
    assert_bitwise(
        module(hidden, weight, labels),
        ops.linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, reduction="sum"),
    )
    assert not module.state_dict() and "label_smoothing=0.1" in repr(module)
