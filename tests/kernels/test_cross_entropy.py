"""What the kernels of cross-entropy must do, the CPU's at every level and Triton's: see test_triton_cases.py."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import (
    BF16,
    F16,
    F32,
    at_levels_with_fused_multiply_add,
    cpu_only,
    kernels_fixture,
    kernels_of,
    normal,
    triton_only,
)
from onetrip.reference import cross_entropy as reference
from onetrip.reference.cross_entropy import CrossEntropyPlan
from pairwise import pairwise, short
from tolerances import assert_bitwise, assert_like_torch, assert_ulps
from torch import Tensor
from triton_runner import DEVICE, RUNS_TRITON, memory_past_2_to_the_31

kernels = kernels_fixture()
every_kernel = pytest.mark.usefixtures("kernels")
module = kernels_of("cross_entropy")
TOLERANCE = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}
PLANS = {
    "plain": CrossEntropyPlan(-100),
    "smoothing": CrossEntropyPlan(-100, label_smoothing=0.1, lse_square_scale=0.01),
    "softcap": CrossEntropyPlan(-100, softcap=2.5),
    "temperature": CrossEntropyPlan(-100, scale=1.7),
    "all": CrossEntropyPlan(-100, 0.2, 4.0, 0.02, 0.6),
}
PLAIN = PLANS["plain"]
WIDTHS = (1, 3, 64, 100) if RUNS_TRITON else (1, 3, 4, 15, 16, 17, 63, 64, 65, 1000, 1023, 1024, 1025, 2049, 5000)
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
every_dtype = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=short)
BLOCKS = ("one-block", "many-blocks") if RUNS_TRITON else ("",)


@pytest.fixture(params=BLOCKS)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernel walks over rows of more than 16 columns, in the second."""
    if request.param == "many-blocks":
        monkeypatch.setattr(module, "_BLOCK_COLS", 16)


def logits_of(*shape: int, dtype: torch.dtype = F32, factor: float = 3.0) -> Tensor:
    return (factor * normal(*shape)).to(dtype).to(DEVICE)


def labels_of(n_rows: int, n_cols: int) -> Tensor:
    labels = torch.arange(n_rows, device=DEVICE) * 7919 % n_cols
    labels[1] = -100
    return labels


def close(found: Tensor, torchs: Tensor | None, exact: Tensor) -> None:
    """found: by a kernel. torchs: a gradient by reference in the same dtype; None of other results."""
    if RUNS_TRITON:
        error = (found.double() - exact).abs().max().item()
        assert error <= TOLERANCE[found.dtype] * max(1.0, exact.abs().max().item()), error
    elif torchs is None:
        assert_ulps(found, exact)
    else:
        assert_like_torch(found, torchs, exact, terms=16)


def check(logits: Tensor, plan: CrossEntropyPlan) -> None:
    n_rows, n_cols = logits.shape
    labels = labels_of(n_rows, n_cols)
    weights, entropy_weights = (normal(n_rows, seed=seed).to(DEVICE) for seed in (2, 3))
    exact = reference.forward(logits.double(), labels, plan, True)
    torchs = reference.forward(logits.float(), labels, plan, True)
    ours = module.forward(logits, labels, plan, True)
    for mine, truth in zip(ours, exact, strict=True):
        close(mine, None, truth)
    assert_bitwise(module.forward(logits, labels, plan).loss, ours.loss)
    for given in (weights, weights[:1].clone()):
        dlogits = module.backward(logits, labels, ours.stats, given, plan)
        truth = reference.backward(logits.double(), labels, exact.stats, given.double(), plan)
        other = reference.backward(logits, labels, torchs.stats, given, plan)
        close(dlogits, other, truth)
        packed = logits.clone(memory_format=torch.contiguous_format)
        module.backward_(packed, labels, ours.stats, given, plan)
        assert_bitwise(packed, dlogits)
        packed.copy_(logits)
        loss = module.forward_backward_(packed, labels, given, None, plan)
        if RUNS_TRITON:
            close(loss, None, exact.loss)
            close(packed, other, truth)
        else:
            assert_bitwise(loss, ours.loss)
            assert_bitwise(packed, dlogits)
    for tensors in (packed, other, truth):
        tensors.copy_(logits)
    module.forward_backward_(packed, labels, weights, entropy_weights, plan)
    reference.forward_backward_(other, labels, weights, entropy_weights, plan)
    reference.forward_backward_(truth, labels, weights.double(), entropy_weights.double(), plan)
    close(packed, other, truth)


@every_kernel
@pairwise(
    ["blocks"],
    blocks=["one-block", "many-blocks"] if RUNS_TRITON else [""],
    n_cols=WIDTHS,
    dtype=[F32, F16, BF16],
    plan=PLANS,
)
def test_losses_and_gradients(blocks, n_cols, dtype, plan):
    check(logits_of(200 if n_cols < 100 and not RUNS_TRITON else 5, n_cols, dtype=dtype), plan)


@every_kernel
def test_rows_apart():
    check(logits_of(5, 90)[:, 3:60], PLANS["all"])
    check(logits_of(9, 1400, dtype=BF16)[:, 3:99], PLANS["all"])


@every_kernel
@every_plan
def test_a_maximum_that_moves(blocks, plan):
    """Each block has a larger value than all before, or none; values whose exponentials would overflow."""
    rising = torch.linspace(-300.0, 300.0, 50 if RUNS_TRITON else 5000, device=DEVICE)
    check(torch.stack([rising, rising.flip(0), torch.zeros_like(rising), rising * 0.01]), plan)


@every_kernel
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_common_offset_takes_no_digits_of_label_smoothing(blocks, offset):
    check(logits_of(5, 100) + offset, CrossEntropyPlan(-100, label_smoothing=0.1))


@every_kernel
@every_dtype
def test_special_rows(blocks, dtype):
    """Wrong labels make NaN of their row, ignored rows are zero whatever they hold, -inf has probability 0."""
    n_cols = 40 if RUNS_TRITON else 1100
    logits = logits_of(6, n_cols, dtype=dtype, factor=1.0)
    logits[0, n_cols - 5], logits[1], logits[2, 5] = torch.nan, torch.nan, -torch.inf
    labels = torch.tensor([3, -100, 7, n_cols, -1, 9], device=DEVICE)
    weights = torch.ones(1, device=DEVICE)
    found = module.forward(logits, labels, PLAIN, True)
    wrong = torch.tensor([True, False, False, True, True, False], device=DEVICE)
    assert torch.equal(found.loss.isnan(), wrong) and found.loss[1] == 0.0 and found.entropy[2].isfinite()
    gradients = [module.backward(logits, labels, found.stats, weights, PLAIN)]
    for entropy_weights in (None, weights.expand(6).contiguous()):
        gradients.append(logits.clone())
        module.forward_backward_(gradients[-1], labels, weights, entropy_weights, PLAIN)
    for gradient in gradients:
        assert gradient[wrong].isnan().all() and gradient[~wrong].isfinite().all()
        assert (gradient[1] == 0.0).all() and gradient[2, 5] == 0.0
    hidden = torch.full((2, 40), -torch.inf, dtype=dtype, device=DEVICE)
    assert module.forward(hidden, torch.zeros(2, dtype=torch.int64, device=DEVICE), PLAIN).loss.isnan().all()


@every_kernel
@pytest.mark.parametrize("of_entropy", [False, True], ids=["loss", "entropy"])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000], ids=hex)
def test_a_weight_that_is_not_finite_reaches_the_gradient(bits, of_entropy):
    weights = torch.tensor([bits], dtype=torch.int32, device=DEVICE).view(F32)
    logits = logits_of(1, 200, dtype=BF16, factor=1.0)
    given = (torch.ones(1, device=DEVICE), weights) if of_entropy else (weights, None)
    module.forward_backward_(logits, torch.tensor([3], device=DEVICE), *given, PLAIN)
    assert not logits.isfinite().any()


@cpu_only
@every_kernel
@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
def test_rows_whose_exponentials_are_not_kept(dtype):
    check(logits_of(2, 66000, dtype=dtype), PLAIN)


@cpu_only
@every_kernel
@pytest.mark.parametrize("n", [1, 31, 64, 70000])
def test_sums_in_two_parts_are_those_of_float32(n):
    nearest, rest = normal(n).to(BF16), torch.full((n,), -1, dtype=torch.int16)
    exact = nearest.float()
    for seed in range(1, 6):
        terms = (normal(n, seed=seed) * 10.0**-seed).to(BF16)
        module.add_to_sums(nearest, rest, terms, seed == 1)
        exact += terms.float()
        whole = (nearest.view(torch.int16).int() << 16) + rest.int()
        assert_bitwise(whole.view(F32), exact)
        assert ((nearest.double() - exact.double()).abs() <= (exact.to(BF16).double() - exact.double()).abs()).all()


@cpu_only
@every_kernel
def test_sums_in_two_parts_of_special_values():
    nearest = torch.tensor([torch.inf, torch.inf, torch.nan, 3.38e38, -0.0, 1.0]).to(BF16)
    terms = torch.tensor([1.0, -torch.inf, 1.0, 3.38e38, -0.0, torch.nan]).to(BF16)
    rest, exact = torch.zeros(6, dtype=torch.int16), nearest + terms
    module.add_to_sums(nearest, rest, terms, False)
    assert torch.equal(nearest.isnan(), exact.isnan()) and torch.equal(nearest.nan_to_num(), exact.nan_to_num())


@cpu_only
def test_levels_with_fma_agree():
    logits, labels = logits_of(7, 1024), labels_of(7, 1024)
    stats = torch.tensor([[4.0, 3.5]]).expand(7, 2).contiguous()

    def results() -> tuple[Tensor, Tensor]:
        largest = module.forward(logits, labels, PLANS["softcap"]).stats[:, 0].clone()
        return largest, module.backward(logits, labels, stats, torch.ones(1), PLANS["all"])

    for mine, other in zip(*at_levels_with_fused_multiply_add(results), strict=True):
        assert_bitwise(mine, other)


@cpu_only
def test_large_outputs_are_streamed_to_the_same_bits():
    logits, labels = normal(1100, 2048), torch.arange(1100)
    found = module.forward(logits, labels, PLAIN)
    whole = module.backward(logits, labels, found.stats, torch.ones(1), PLAIN)
    part = module.backward(logits[:50], labels[:50], found.stats[:50].clone(), torch.ones(1), PLAIN)
    assert_bitwise(whole[:50], part)


@triton_only
def test_rows_past_2_to_the_31_elements():
    storage, stride = memory_past_2_to_the_31()
    logits = storage.as_strided((2, 16), (stride, 1)).copy_(torch.randn(2, 16, device=DEVICE))
    labels = torch.tensor([3, 5], device=DEVICE)
    loss = module.forward(logits, labels, PLAIN).loss
    close(loss, None, reference.forward(logits.double(), labels, PLAIN).loss)


@triton_only
@every_dtype
@pytest.mark.parametrize("n_elements", [1, 1000, 8192, 20001])
def test_multiply(n_elements, dtype):
    values = torch.randn(n_elements, device=DEVICE).to(dtype)
    found = values.clone()
    module.multiply_(found, torch.tensor([0.37], device=DEVICE))
    close(found, None, values.double() * torch.tensor(0.37).double())


@triton_only
def test_nothing_is_multiplied_by_1():
    signalling = torch.tensor([0x7F800001], dtype=torch.int32, device=DEVICE)  # a product would be another NaN
    module.multiply_(signalling.view(F32), torch.ones(1, device=DEVICE))
    assert signalling.item() == 0x7F800001
