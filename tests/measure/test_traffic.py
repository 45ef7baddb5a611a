"""Bytes that operators move, against counts by hand."""

import pytest
import torch
from onetrip import ops
from onetrip.measure.traffic import ATTENTION, LOSS, OUTSIDE, PRODUCT, TrafficMode, traffic
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

ROWS, COLS = 6, 8
T = 4 * ROWS * COLS
"""Bytes of one float32 tensor of the tests."""
ROW, COLUMN = 4 * COLS, 4 * ROWS


def randn(*shape, **options):
    return torch.randn(*(shape or (ROWS, COLS)), **options)


def moved(run, kind=None, phase=None):
    return traffic(run).bytes(kind, phase)


X, Y, WEIGHT, BIAS = randn(), randn(), randn(COLS), randn(COLS)
IDS = torch.tensor([1, 3, 3, 0])


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        pytest.param(lambda: X + Y, 3 * T, id="add"),
        pytest.param(lambda: X * X, 2 * T, id="an-operand-twice-is-read-once"),
        pytest.param(lambda: X + WEIGHT, 2 * T + ROW, id="a-broadcast-operand"),
        pytest.param(lambda: X + WEIGHT.expand(ROWS, COLS), 2 * T + ROW, id="an-expanded-operand-counts-its-storage"),
        pytest.param(lambda: X.t().contiguous(), 2 * T, id="a-transposed-copy"),
        pytest.param(lambda: X.view(-1).t().reshape(ROWS, COLS)[1:].detach(), 0, id="views"),
        pytest.param(lambda: torch.empty_like(X).new_empty(3), 0, id="allocations"),
        pytest.param(lambda: torch.zeros_like(X), T, id="zeros-like-does-not-read"),
        pytest.param(lambda: X.clone().add_(Y), 2 * T + 3 * T, id="in-place-reads-and-writes"),
        pytest.param(lambda: torch.empty_like(X).copy_(Y), 2 * T, id="copy-does-not-read-its-target"),
        pytest.param(lambda: torch.empty_like(X).fill_(1.0), T, id="fill-writes"),
        pytest.param(lambda: torch.add(X, Y, out=torch.empty_like(X)), 3 * T, id="out-is-written-once"),
        pytest.param(lambda: X.bfloat16(), T + T // 2, id="a-cast"),
        pytest.param(lambda: torch.cat([X, Y]), 4 * T, id="lists-of-tensors"),
        pytest.param(lambda: F.layer_norm(X, (COLS,), WEIGHT, BIAS), 2 * T + 2 * ROW + 2 * COLUMN, id="layer-norm"),
        pytest.param(lambda: F.embedding(IDS, X), 8 * 4 + 2 * 4 * ROW, id="an-embedding-reads-rows"),
        pytest.param(lambda: X.clone().index_add_(0, IDS[:3], Y[:3]), 2 * T + 9 * ROW + 3 * 8, id="added-rows"),
        pytest.param(lambda: ops.layer_norm(X, WEIGHT, BIAS), 2 * T + 2 * ROW, id="fused-layer-norm"),
        pytest.param(
            lambda: ops.bias_dropout_residual_norm(X, Y, WEIGHT, BIAS, bias=BIAS, dropout_p=0.1, rng=(1, 2)),
            3 * T + 2 * ROW + 2 * 8,
            id="fused-block-without-gradients",
        ),
        pytest.param(lambda: ops.softmax(X, Y), 3 * T, id="fused-softmax"),
    ],
)
def test_bytes_by_hand(run, expected):
    assert moved(run, OUTSIDE) == moved(run) == expected


def test_backward_is_counted_and_told_from_forward():
    x, y = randn(requires_grad=True), randn(requires_grad=True)
    found = traffic(lambda: (x * y).backward(torch.ones(ROWS, COLS)))
    assert found.operators["forward", "aten::mul"].bytes == 3 * T
    assert found.operators["backward", "aten::mul"].bytes == 2 * 3 * T
    assert found.operators["backward", "aten::mul"].calls == 2
    assert found.operators["forward", "aten::ones"].bytes == T
    assert found.bytes(phase="backward") == 2 * 3 * T


def test_fused_backward_is_counted():
    """Eager calls go past the dispatcher; a mode must see them."""
    x, weight = randn(requires_grad=True), randn(COLS, requires_grad=True)
    dy = randn()
    found = traffic(lambda: ops.rms_norm(x, weight).backward(dy))
    assert found.operators["forward", "onetrip::row_norm"].bytes == 2 * T + ROW + COLUMN  # x, y, weight, rstd
    # dy, x, rstd, weight; dx, dweight
    assert found.operators["backward", "onetrip::row_norm_backward"].bytes == 3 * T + COLUMN + 2 * ROW


@pytest.mark.parametrize("mask_grad", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_softmax_s_backward_makes_no_zeros(p, mask_grad):
    """As gradients of results that have none."""
    scores, mask, dy = randn(requires_grad=True), randn(requires_grad=mask_grad), randn()
    found = traffic(lambda: ops.softmax(scores, mask, dropout_p=p).backward(dy))
    assert {name for phase, name in found.operators if phase == "backward"} == {"onetrip::softmax_backward"}
    assert found.bytes(phase="backward") == (4 if mask_grad else 3) * T  # dy, the probabilities, dscores, dmask


def test_products_attention_and_loss_are_apart():
    a, b = randn(16, 32, requires_grad=True), randn(32, 8, requires_grad=True)
    labels = torch.zeros(16, dtype=torch.long)

    def run():
        F.cross_entropy(a @ b, labels).backward()

    found = traffic(run)
    assert found.bytes(PRODUCT) == 3 * 4 * (16 * 32 + 32 * 8 + 16 * 8)
    assert found.flops() == 3 * 2 * 16 * 32 * 8
    logits = 4 * 16 * 8
    # log_softmax: 2. nll_loss: 16 numbers and labels, two results. Backward: written once; log_softmax's three.
    assert found.bytes(LOSS) == 2 * logits + (16 * (4 + 8) + 8) + (logits + 16 * 8 + 8) + 3 * logits
    assert found.bytes(ATTENTION) == 0
    q = randn(2, 4, 16, 8)
    attention = traffic(lambda: F.scaled_dot_product_attention(q, q, q))
    assert attention.bytes(ATTENTION) > 0 and attention.outside() == 0
    assert attention.flops() == 2 * 2 * (2 * 4) * 16 * 16 * 8


@pytest.mark.parametrize(("dtype", "chunk_rows"), [(torch.float32, 16), (torch.float32, 4), (torch.bfloat16, 4)])
def test_linear_cross_entropy_is_products_and_passes_over_logits(dtype, chunk_rows):
    """The logits are read once and written once. Chunks in half precision add up weight's gradient in float32."""
    size, n_chunks = dtype.itemsize, 16 // chunk_rows
    hidden, weight = (torch.randn(n, 32, dtype=dtype, requires_grad=True) for n in (16, 8))
    labels = torch.zeros(16, dtype=torch.long)
    found = traffic(lambda: ops.linear_cross_entropy(hidden, weight, labels, chunk_rows=chunk_rows))
    logits, n_hidden, n_weight = 16 * 8 * size, 16 * 32 * size, 8 * 32 * size
    sums = 0 if dtype == torch.float32 else n_chunks * (n_weight + 2 * 4 * 8 * 32) + n_weight
    assert found.bytes(LOSS) == 2 * logits + sums == found.outside()
    added = (n_chunks - 1) * n_weight if dtype == torch.float32 else 0
    products = 3 * logits + 3 * n_hidden + 3 * n_chunks * n_weight + added
    assert found.bytes(PRODUCT) == products and found.flops() == 3 * 2 * 16 * 32 * 8
    if chunk_rows == 16:  # all rows: also where the call leaves it open
        assert traffic(lambda: ops.linear_cross_entropy(hidden, weight, labels)).bytes(PRODUCT) == products
    plain = traffic(lambda: ops.linear_cross_entropy(hidden.detach(), weight.detach(), labels, chunk_rows=chunk_rows))
    assert plain.outside() == logits and plain.bytes(PRODUCT) == logits + n_hidden + n_chunks * n_weight


def test_the_optimizer_is_apart():
    w = randn(requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    with TrafficMode() as mode:
        w.grad = torch.ones_like(w)
        with mode.optimizer():
            optimizer.step()
    assert mode.traffic.bytes(phase="optimizer") == 3 * T  # reads weight and gradient, writes weight
    assert mode.traffic.outside() == T


def test_fake_tensors_move_the_same_bytes_as_real_ones():
    def run(x, weight, bias):
        y = ops.bias_dropout_residual_norm(F.gelu(x), x, weight, bias, dropout_p=0.1)
        y.sum().backward()

    real = traffic(lambda: run(randn(requires_grad=True), WEIGHT, BIAS))
    with FakeTensorMode():
        x = torch.empty(ROWS, COLS, requires_grad=True)
        fake = traffic(lambda: run(x, torch.empty(COLS), torch.empty(COLS)))
    assert fake.by_operator() == {name: n for name, n in real.by_operator().items() if name != "aten::randn"}


def test_report_is_ready_for_json():
    described = traffic(lambda: X @ Y.t() + 1.0).to_dict()
    assert described["products"] == 2 * T + 4 * ROWS * ROWS
    assert described["outside"] == 2 * 4 * ROWS * ROWS
    assert [each["name"] for each in described["operators"]] == ["aten::mm", "aten::add"]
