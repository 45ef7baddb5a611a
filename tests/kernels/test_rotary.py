"""What the kernels of rotary embedding must do, the CPU's at every level and Triton's: see test_triton_cases.py."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import BF16, F16, F32, cpu_only, kernels_fixture, kernels_of, triton_only
from onetrip.ops.common.native import read
from onetrip.reference import rotary as reference
from onetrip.reference.rotary import Operands, RotaryPlan
from pairwise import pairwise, short
from rotary_cases import heads, tables
from tolerances import assert_bitwise
from torch import Tensor
from triton_runner import DEVICE, INTERPRETED, RUNS_TRITON, memory_past_2_to_the_31

kernels = kernels_fixture()
every_kernel = pytest.mark.usefixtures("kernels")
module = kernels_of("rotary")
PLAN, INTERLEAVED = RotaryPlan(False, False), RotaryPlan(True, False)
both_plans = pytest.mark.parametrize("plan", [PLAN, INTERLEAVED], ids=["halves", "interleaved"])
# (head_dim, rotated columns): one pair, vectors and halves of them that end inside of one, whole cache lines.
WIDTHS = ((2, 2), (6, 4), (18, 18), (32, 32), (34, 34), (64, 64), (70, 66), (80, 20), (96, 96), (128, 64), (130, 130))
TRITON_WIDTHS = ((64, 64), (6, 4), (80, 20), (96, 96), (2, 2), (40, 34))


def operands(
    dtype: torch.dtype, table_dtype: torch.dtype, head_dim: int, n: int, positions: int = 5, layout: str = "transposed"
) -> Operands:
    q, k = (heads(2, n_heads, positions, head_dim, dtype, str(DEVICE), layout) for n_heads in (5, 2))
    return Operands(q, k, *tables(positions, n, table_dtype, str(DEVICE), batch=2))


def rotate(given: Operands, plan: RotaryPlan = PLAN) -> tuple[Tensor | None, Tensor | None]:
    return module.rotate(given, plan) if RUNS_TRITON else module.rotate(*given, plan)


def check(given: Operands, plan: RotaryPlan = PLAN) -> None:
    """The bits of torch's operators: reference rounds where the kernels do. Interpreted, bfloat16 is truncated and not
    rounded: within an ulp for each of the three times."""
    for result, expected, x in zip(rotate(given, plan), reference.rotate(given, plan), given[:2], strict=True):
        if x is None:
            assert result is None
            continue
        assert result.dtype == (plan.dtype or x.dtype) and result.stride() == torch.empty_like(x).stride()
        if INTERPRETED and result.dtype == BF16:
            assert_truncated(result, expected, given, x)
        else:
            assert_bitwise(result, expected, allow_empty=True)


def assert_truncated(result: Tensor, expected: Tensor, given: Operands, x: Tensor) -> None:
    largest = 2.0 * x.abs().max().double() * max(given.cos.abs().max().double(), given.sin.abs().max().double())
    bound = 3.0 * torch.finfo(BF16).eps * largest
    assert result.isfinite().all()
    assert ((result.double() - expected.double()).abs() <= bound).all()


@every_kernel
@pairwise(
    dtype=(F32, F16, BF16),
    table_dtype=(F32, F16, BF16),
    width={f"D{head_dim}-{n}": (head_dim, n) for head_dim, n in (TRITON_WIDTHS if RUNS_TRITON else WIDTHS)},
    interleaved={"halves": False, "interleaved": True},
    inverse={"": False, "inverse": True},
    out_dtype={"": None, "to_f32": F32, "to_f16": F16, "to_bf16": BF16},
)
def test_every_width_and_dtype(dtype, table_dtype, width, interleaved, inverse, out_dtype):
    check(operands(dtype, table_dtype, *width), RotaryPlan(interleaved, inverse, out_dtype))


@cpu_only
@every_kernel
@pytest.mark.parametrize("table_dtype", [F32, F16, BF16], ids=lambda d: f"cos_{short(d)}")
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=short)
def test_every_mix_of_dtypes(dtype, table_dtype):
    """In rows with and without columns that are copied."""
    for interleaved, inverse in ((False, False), (False, True), (True, False), (True, True)):
        for out_dtype in (None, F32, F16, BF16):
            for width in ((18, 18), (34, 34), (70, 66), (80, 20)):
                check(operands(dtype, table_dtype, *width), RotaryPlan(interleaved, inverse, out_dtype))


@every_kernel
@pytest.mark.parametrize("layout", ["", "transposed", "packed", "expanded", "padded"])
def test_layouts(layout):
    check(operands(F32, F32, 16, 12, layout=layout))


@every_kernel
@both_plans
@pytest.mark.parametrize("positions", [1, 31, 37, 65])
def test_several_blocks_of_positions(positions, plan):
    """A tile of 128 columns has 16 positions in Triton, a task 32 on a CPU."""
    check(operands(F32, F32, 128, 128, positions), plan)


@every_kernel
def test_tables_that_sequences_share():
    q, k, cos, sin = operands(F32, F32, 16, 16)
    for shared in (Operands(q, k, cos[:1], sin[:1]), Operands(q, k, cos[0], sin[0])):
        check(shared)
    check(Operands(q, k, cos[:1].expand(2, -1, -1), sin[:1].expand(2, -1, -1)))


@every_kernel
def test_one_of_the_two_and_nothing():
    q, k, cos, sin = operands(F32, F32, 16, 16)
    check(Operands(q, None, cos, sin))
    check(Operands(None, k, cos, sin))
    check(Operands(q[:0], k[:0], cos[:0], sin[:0]))
    check(Operands(q[:, :0], k, cos, sin))
    check(Operands(q, k[:, :0], cos, sin))
    assert rotate(Operands(None, None, cos, sin)) == (None, None)


@every_kernel
@both_plans
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_special_values_stay_in_their_pair(bad, plan):
    q, k, cos, sin = operands(F32, F32, 12, 8)
    q[1, 2, 3, 1] = q[0, 0, 4, 10] = bad
    q_out, k_out = rotate(Operands(q, k, cos, sin), plan)
    changed = torch.zeros(q.shape, dtype=torch.bool)
    changed[1, 2, 3, 1] = changed[1, 2, 3, 0 if plan.interleaved else 5] = changed[0, 0, 4, 10] = True
    assert torch.equal(~q_out.isfinite().cpu(), changed) and k_out.isfinite().all()


@cpu_only
@every_kernel
@pytest.mark.parametrize("nan_bits", [0x7F81, 0x7FFF, -1, -0x7F], ids=lambda b: f"{b & 0xFFFF:x}")
def test_every_nan_stays_nan(nan_bits):
    """bfloat16 is rounded by carrying into its upper bits, which must never turn a NaN into a number."""
    q = heads(1, 2, 3, 64, BF16)
    q.view(torch.int16)[0, 1, 2, 5] = nan_bits
    for result in rotate(Operands(q, q, *tables(3, 64, BF16))):
        assert result[0, 1, 2, [5, 37]].isnan().all()
        assert result.isnan().sum() == 2


@every_kernel
def test_nothing_is_written_beside_the_result(monkeypatch):
    """The result is made part of a larger tensor, whose other elements stay as they are."""
    q, k, cos, sin = operands(F32, F32, 12, 8)
    buffers = []

    def padded_like(x: Tensor, dtype: torch.dtype | None) -> Tensor:
        buffers.append(torch.full((*x.shape[:2], x.shape[2] + 2, x.shape[3] + 8), 7.0, device=DEVICE))
        return buffers[-1][:, :, 1:-1, 4:-4]

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", padded_like)
        results = rotate(Operands(q, k, cos, sin))
    expected = reference.rotate(Operands(q, k, cos, sin), PLAN)
    for result, wanted, buffer in zip(results, expected, buffers, strict=True):
        assert torch.equal(result, wanted)
        result.fill_(7.0)
        assert (buffer == 7.0).all()


@triton_only
@both_plans
def test_rows_2_to_the_31_elements_apart(plan):
    """Addresses past 2^31, of a view of memory that is not there in between."""
    storage, stride = memory_past_2_to_the_31()
    q = storage.as_strided((2, 1, 2, 4), (stride, 8, 4, 1))
    values = heads(2, 1, 2, 4, F16, str(DEVICE))
    q.copy_(values)
    cos, sin = tables(2, 4, F16, str(DEVICE))
    ours = rotate(Operands(q, None, cos, sin), plan)[0]
    assert torch.equal(ours, reference.rotate(Operands(values, None, cos, sin), plan)[0])


@cpu_only
@every_kernel
@pairwise(
    layout={"contiguous": "", "transposed": "transposed"},
    dtype=[F32, F16, BF16],
    out_dtype=[F32, F16, BF16],
    plan={"halves": PLAN, "interleaved": INTERLEAVED},
)
def test_results_past_the_caches(layout, dtype, out_dtype, plan):
    """From 8 MiB on rows of whole cache lines are streamed; the others are not, and neither is what does not start
    a line."""
    for head_dim, n in ((64, 64), (128, 64), (128, 128), (72, 72)):
        n_positions = (8 << 20) // (2 * 40 * head_dim * out_dtype.itemsize) + 1
        q = heads(2, 40, n_positions, head_dim, dtype, layout=layout)
        check(Operands(q, q[:, :3], *tables(n_positions, n, dtype)), plan._replace(dtype=out_dtype))


@cpu_only
@pytest.mark.parametrize("layout", ["", "transposed", "packed", "expanded", "padded"])
@pytest.mark.parametrize("batch", [None, 1, 3], ids=lambda n: f"B{n}")
def test_an_eager_call_reads_sizes_and_strides_of_tensors(layout, batch):
    q, k = (heads(3, h, 7, 18, BF16, layout=layout) for h in (4, 2))
    cos, sin = tables(7, 16, F32, batch=batch)
    code = read.rotary(q, k, cos, sin)
    if code < 0:
        pytest.skip("torch before 2.10 does not tell what a tensor is")
    for plan in (PLAN, INTERLEAVED, RotaryPlan(False, False, F32)):
        call = module.eager_call(plan, code, "cpu")
        assert call is not None
        expected = rotate(Operands(q, k, cos, sin), plan)
        for result, wanted in zip(call((q, k, cos, sin), None), expected, strict=True):
            assert_bitwise(result, wanted)
            assert result.stride() == wanted.stride()


@cpu_only
def test_what_an_eager_call_cannot_read_as_it_is():
    q, k, (cos, sin) = heads(2, 3, 5, 8, F32), heads(2, 1, 5, 8, F32), tables(5, 8, F32)
    negated = torch.complex(q, q).conj().imag
    for ours in ((negated, k, cos, sin), (q, k, cos, sin.T.contiguous().T), (q.mT.contiguous().mT, k, cos, sin)):
        assert module.eager_call(PLAN, read.rotary(*ours), "cpu") is None
    for ours in (
        (q.double(), k.double(), cos, sin),
        (q, k.half(), cos, sin),
        (q, k, cos, sin.half()),
        (q, k[:, :, :4], cos, sin),
        (q, k[:1], cos, sin),
        (q, k, cos[:4], sin[:4]),
        (q, k, cos, sin[None]),
        (q, k, cos[:, :7], sin[:, :7]),
        (q[..., :6], k[..., :6], cos, sin),
        (q[:0], k[:0], cos, sin),
        (q, k, torch.stack((cos,) * 3), torch.stack((sin,) * 3)),
        (q, k, cos.to("meta"), sin),
        (q[0], k[0], cos, sin),
        (q, k, cos[0], sin[0]),
        (q, k, cos[0, 0], sin[0, 0]),
        (q, None, cos, sin),
    ):
        assert read.rotary(*ours) == -1


@cpu_only
def test_wrong_arguments_raise():
    cos, sin = tables(5, 16, F32)
    launch = module._launcher(PLAN, F32, F32)
    with pytest.raises(TypeError, match="too few"):
        launch(cos, sin, cos.shape, cos.stride(), sin.stride())
    with pytest.raises(TypeError, match="tuple"):
        launch(cos, sin, 5, cos.stride(), sin.stride(), None, None)
    with pytest.raises(TypeError, match="too many"):
        launch(cos, sin, cos.shape, cos.stride(), sin.stride(), None, None, None)
