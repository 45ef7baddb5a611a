"""How linear_cross_entropy gets its gradients, and which operands go to its kernels without Python's checks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from onetrip import ops
from onetrip.measure import saved_bytes
from onetrip.ops import cross_entropy_linear
from onetrip.ops.common.native import read
from onetrip.reference.cross_entropy import CrossEntropyPlan
from tolerances import assert_ulps
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def test_sums_of_many_chunks_of_bfloat16_lose_nothing():
    """The first of 64 chunks gives the gradient of weight most of its size, the others less than bfloat16 could add."""
    hidden, weight = torch.ones(64, 3).bfloat16(), torch.zeros(5, 3).bfloat16().requires_grad_()
    hidden[1:] /= 1024.0
    labels = torch.zeros(64, dtype=torch.int64)
    leaf = weight.detach().double().requires_grad_()
    exact = torch.autograd.grad(F.cross_entropy(F.linear(hidden.double(), leaf), labels, reduction="sum"), leaf)
    loss = ops.linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk_rows=1)
    assert_ulps(torch.autograd.grad(loss, weight)[0], exact[0])


@pytest.mark.parametrize(
    ("n_rows", "n_hidden", "n_classes", "n_chunk"),
    [(8192, 4096, 32000, 8192), (8193, 4096, 32000, 4096), (100000, 4096, 128256, 4096), (512, 64, 32000, 1048)],
)
def test_chunks_on_a_gpu_are_as_large_as_the_sums_allow(n_rows, n_hidden, n_classes, n_chunk):
    """In half precision by Triton: the peak is no higher than that of rounding float32 sums."""
    with FakeTensorMode():
        hidden, weight = (torch.empty(n, n_hidden, device="cuda", dtype=torch.half) for n in (n_rows, n_classes))
        labels = torch.empty(n_rows, device="cuda", dtype=torch.int64)
        call = cross_entropy_linear.Linear(hidden, weight, None, labels, CrossEntropyPlan(), "triton", 0, None)
        assert call.rows_at_once(wants_weight=True) == n_chunk
        least = (64 << 20) // (2 * n_classes)
        assert call.rows_at_once() == call._replace(backend="reference").rows_at_once(wants_weight=True) == least
    logits, gradient = 2 * min(n_chunk, n_rows) * n_classes, 2 * n_classes * n_hidden
    sums = 2 * gradient if n_rows > n_chunk else 0  # to which products are added
    assert max(sums + logits, sums + gradient, logits + gradient) <= 2 * gradient + max(gradient, 64 << 20)


@pytest.mark.parametrize(("reduction", "operator"), [("mean", ""), ("none", "_rows")])
def test_a_trace_holds_for_any_number_of_rows(monkeypatch, reduction, operator):
    """The chunks are chosen when the operator runs: comparing the rows' number in the trace would raise here."""
    calls = []

    def record(*arguments):
        calls.append(arguments)
        return (torch.zeros(()),) * 2

    monkeypatch.setattr(torch.ops.onetrip, f"linear_cross_entropy{operator}", record)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        n_rows = mode.shape_env.create_unbacked_symint()
        hidden, weight = (torch.empty(n, 4, device="cuda", dtype=torch.half) for n in (n_rows, 9))
        labels = torch.empty(n_rows, device="cuda", dtype=torch.int64)
        ops.linear_cross_entropy(hidden, weight.requires_grad_(), labels, reduction=reduction)
    assert len(calls) == 1 and calls[0][5] == 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("n_hidden", "n_saved"), [(24, 2 * 301), (1, 2)], ids=["logits", "operands"])
def test_the_smaller_one_is_kept_for_backward(reduction, n_hidden, n_saved):
    """The gradient of a few rows of logits, or those of hidden and weight; either may be asked for twice."""
    labels = torch.tensor([1, 4])
    hidden, weight = torch.randn(2, n_hidden), torch.randn(301, n_hidden)
    leaves, saved = [hidden.requires_grad_(), weight.requires_grad_()], []

    def save(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = ops.linear_cross_entropy(hidden, weight, labels, reduction=reduction)
    assert sorted(saved) == sorted([hidden.numel(), weight.numel(), n_saved])
    expected = F.cross_entropy(F.linear(hidden, weight), labels, reduction=reduction)
    truth, factor = torch.autograd.grad(3.0 * expected, leaves), torch.tensor(3.0)
    batched = torch.autograd.grad(loss, leaves, factor[None], is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close([loss, *(g[0] for g in batched)], [expected, *truth])
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss, leaves, factor, retain_graph=True), truth)


@pytest.mark.parametrize("n_classes", [10, 30, 500], ids=["few classes", "some classes", "many classes"])
@pytest.mark.parametrize(
    "frozen", [(), ("hidden",), ("weight",), ("hidden", "weight")], ids=lambda names: "+".join(names)
)
def test_no_more_is_kept_than_by_torch(frozen, n_classes):
    """With some rows ignored, as the last token of each text is. What of hidden and weight is frozen needs nothing."""
    operands = {"hidden": torch.randn(40, 24), "weight": torch.randn(n_classes, 24), "bias": torch.randn(n_classes)}
    leaves = [operand.requires_grad_() for name, operand in operands.items() if name not in frozen]
    labels = torch.arange(40) % 10
    labels[::8] = -100

    def fused():
        return ops.linear_cross_entropy(operands["hidden"] * 1, operands["weight"], labels, operands["bias"])

    def plain():
        return F.cross_entropy(F.linear(operands["hidden"] * 1, operands["weight"], operands["bias"]), labels)

    bytes_of_index = 8 * 35
    loss = fused()
    kept = loss.grad_fn.gradients if not loss.grad_fn.keeps_dlogits else ()
    n_bytes = saved_bytes(fused, [*operands.values(), labels]) + sum(4 * g.numel() for g in kept if g is not None)
    assert n_bytes <= saved_bytes(plain, [*operands.values(), labels]) + bytes_of_index
    found, expected = (torch.autograd.grad(loss, leaves) for loss in (loss, plain()))
    torch.testing.assert_close(found, expected)


ALL, FROZEN = (True, True, True), (True, False, False)
CHOICES = {
    "few rows": (True, {}, ALL),
    "ignored rows do not count": (True, {"n_rows": 400, "n_kept": 60}, ALL),
    "all gradients but of rows that count": (False, {"n_rows": 400, "n_kept": 160}, ALL),
    "no rows": (True, {"n_kept": 0}, ALL),
    "many rows": (False, {"n_rows": 200}, ALL),
    "many rows, the bias alone": (True, {"n_rows": 200, "n_classes": 24}, (False, False, True)),
    "a frozen weight": (True, {"n_rows": 60, "n_classes": 48}, FROZEN),
    "a frozen weight of more classes": (False, {"n_rows": 60, "n_classes": 49}, FROZEN),
    "several chunks": (False, {"chunk_rows": 26}, ALL),
    "float16": (False, {"dtype": torch.float16}, ALL),
    "a GPU's": (False, {"backend": "triton"}, ALL),
    "a count that is not known": (False, {"n_kept": None}, ALL),
    "one of several ranks": (False, {"part": object()}, ALL),
}


@pytest.mark.parametrize(("is_kept", "case", "wants"), CHOICES.values(), ids=CHOICES)
def test_which_gradients_are_kept(is_kept, case, wants):
    """24 columns. With all wanted, as many elements of the logits are kept as 24 (rows + classes), and no more."""
    sizes = {
        "n_rows": 27,
        "n_classes": 200,
        "chunk_rows": 0,
        "dtype": torch.float32,
        "backend": "cpu",
        "part": None,
    } | case
    hidden, weight = (torch.empty(sizes[n], 24, dtype=sizes["dtype"]) for n in ("n_rows", "n_classes"))
    labels, n_kept = torch.zeros(sizes["n_rows"], dtype=torch.int64), case.get("n_kept", sizes["n_rows"])
    others = labels, CrossEntropyPlan(-100), sizes["backend"], sizes["chunk_rows"], n_kept, sizes["part"]
    call = cross_entropy_linear.Linear(hidden, weight, None, *others)
    assert cross_entropy_linear.keeps_dlogits(call, wants) == is_kept


def test_rows_without_a_label_are_cheap():
    """As of a text whose prompt fills the window: no gradient of a whole weight is made in forward."""
    hidden, weight = torch.randn(4, 24, requires_grad=True), torch.randn(50, 24, requires_grad=True)
    loss = ops.linear_cross_entropy(hidden, weight, torch.full((4,), -100))
    assert loss == 0.0 and loss.grad_fn.keeps_dlogits
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (hidden, weight)))


def test_operands_that_kernels_can_read_are_known_by_their_headers():
    hidden, weight, bias = torch.randn(2, 3, 4), torch.nn.Parameter(torch.randn(9, 4)), torch.randn(9)
    labels = torch.tensor([[0, -100, 8], [1, -100, 2]])
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("needs the native library and torch 2.10")
    assert read.labels(-100, labels, hidden, weight, bias) == read.labels(-100, labels, hidden, weight, None) == 4
    assert read.labels(-100, labels, torch.randn(2, 3, 9)) == 4
    assert read.labels(-100, torch.tensor(3), torch.randn(9)) == 1
    unfit = {
        "a label": (8, labels, hidden, weight, bias),
        "ignore_index": (2**70, labels, hidden, weight, bias),
        "labels' dtype": (-100, labels.int(), hidden, weight, bias),
        "labels' shape": (-100, labels[0], hidden, weight, bias),
        "labels' strides": (-100, labels.t().contiguous().t(), hidden, weight, bias),
        "negated labels": (-100, torch._neg_view(-labels), hidden, weight, bias),
        "no tensor": (-100, labels.tolist(), hidden, weight, bias),
        "no rows": (-100, labels[:0], hidden[:0], weight, bias),
        "float64": (-100, labels, hidden.double(), weight.double(), None),
        "dtypes": (-100, labels, hidden.half(), weight, bias),
        "bias' dtype": (-100, labels, hidden, weight, bias.half()),
        "bias' shape": (-100, labels, hidden, weight, bias[:8]),
        "weight's shape": (-100, labels, hidden, weight[:, :3].contiguous(), bias),
        "weight's strides": (-100, labels, hidden, weight.detach().t().contiguous().t(), bias),
        "negated hidden": (-100, labels, torch._neg_view(hidden), weight, bias),
        "meta": (-100, labels, hidden.to("meta"), weight, bias),
        "zeros without memory": (-100, labels, torch._efficientzerotensor((2, 3, 4)), weight, bias),
        "a number as hidden": (-100, labels, torch.tensor(1.0), weight, bias),
    }
    for name, operands in unfit.items():
        assert read.labels(*operands) == -1, name
