"""The native CPU kernel of rotary embedding against reference, at every level this machine has."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import BF16, DTYPE_IDS, F16, F32
from onetrip.ops import rotary_native as native
from onetrip.ops.common.backends import native as native_library
from onetrip.ops.common.native import read
from onetrip.reference import rotary as reference
from onetrip.reference.rotary import Operands, RotaryPlan
from pairwise import pairwise
from rotary_cases import heads, tables
from tolerances import assert_bitwise

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="the native library was not built")

PLANS = [RotaryPlan(interleaved, inverse) for interleaved in (False, True) for inverse in (False, True)]
PLAN_IDS = ["halves", "halves-inverse", "interleaved", "interleaved-inverse"]
# (head_dim, rotated columns): one pair, vectors and halves of them that end inside of one, whole cache lines.
WIDTHS = ((2, 2), (6, 4), (18, 18), (32, 32), (34, 34), (64, 64), (70, 66), (80, 20), (96, 96), (128, 64), (130, 130))


def check(q, k, cos, sin, plan) -> None:
    """The same bits as torch's operators: reference rounds where the kernel does."""
    expected = reference.rotate(Operands(q, k, cos, sin), plan)
    for result, wanted, given in zip(native.rotate(q, k, cos, sin, plan), expected, (q, k), strict=True):
        assert result.dtype == (plan.dtype or given.dtype)
        assert_bitwise(result, wanted)
        assert result.stride() == torch.empty_like(given).stride()


@pytest.mark.parametrize("plan", PLANS, ids=PLAN_IDS)
@pytest.mark.parametrize("table_dtype", [F32, F16, BF16], ids=lambda d: f"cos_{DTYPE_IDS[d]}")
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=DTYPE_IDS.get)
def test_every_width_and_dtype(level, dtype, table_dtype, plan):
    for head_dim, n in WIDTHS:
        q = heads(2, 3, 5, head_dim, dtype, layout="transposed")
        k = heads(2, 1, 5, head_dim, dtype)
        check(q, k, *tables(5, n, table_dtype, batch=2), plan)


@pytest.mark.parametrize("out_dtype", [F32, F16, BF16], ids=lambda d: f"to_{DTYPE_IDS[d]}")
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=DTYPE_IDS.get)
def test_results_of_another_dtype(level, dtype, out_dtype):
    """Rows with and without columns that are copied; the last ones are streamed."""
    for plan in PLANS:
        for head_dim, n in WIDTHS:
            q, k = heads(2, 3, 5, head_dim, dtype, layout="transposed"), heads(2, 1, 5, head_dim, dtype)
            check(q, k, *tables(5, n, F32, batch=2), plan._replace(dtype=out_dtype))
    q = heads(2, 40, (8 << 20) // (2 * 40 * 128 * out_dtype.itemsize) + 1, 128, dtype)
    check(q, q[:, :3], *tables(q.shape[2], 128, dtype), RotaryPlan(False, False, out_dtype))


@pytest.mark.parametrize("layout", ["", "transposed", "packed", "expanded", "padded"])
@pytest.mark.parametrize("positions", [1, 31, 65], ids=lambda n: f"P{n}")
def test_layouts_and_blocks_of_positions(level, layout, positions):
    for batch in (None, 1, 3):
        q, k = (heads(3, h, positions, 64, F32, layout=layout) for h in (4, 2))
        check(q, k, *tables(positions, 64, F32, batch=batch), RotaryPlan(False, False))


@pytest.mark.parametrize("layout", ["", "transposed", "packed", "expanded", "padded"])
@pytest.mark.parametrize("batch", [None, 1, 3], ids=lambda n: f"B{n}")
def test_an_eager_call_reads_sizes_and_strides_of_tensors(layout, batch):
    q, k = (heads(3, h, 7, 18, BF16, layout=layout) for h in (4, 2))
    cos, sin = tables(7, 16, F32, batch=batch)
    code = read.rotary(q, k, cos, sin)
    if code < 0:
        pytest.skip("this torch cannot be asked")
    for plan in (RotaryPlan(False, False), RotaryPlan(True, False), RotaryPlan(False, False, F32)):
        call = native.eager_call(plan, code, "cpu")
        assert call is not None
        expected = native.rotate(q, k, cos, sin, plan)
        for result, wanted in zip(call((q, k, cos, sin), None), expected, strict=True):
            assert_bitwise(result, wanted)
            assert result.stride() == wanted.stride()


def test_what_an_eager_call_cannot_read_as_it_is():
    q, k, (cos, sin) = heads(2, 3, 5, 8, F32), heads(2, 1, 5, 8, F32), tables(5, 8, F32)
    negated = torch.complex(q, q).conj().imag
    for ours in ((negated, k, cos, sin), (q, k, cos, sin.T.contiguous().T), (q.mT.contiguous().mT, k, cos, sin)):
        assert native.eager_call(PLANS[0], read.rotary(*ours), "cpu") is None
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


@pairwise(
    layout={"contiguous": "", "transposed": "transposed"},
    dtype=[F32, F16, BF16],
    plan=dict(zip(PLAN_IDS[::2], PLANS[::2], strict=True)),
)
def test_results_past_the_caches(level, layout, dtype, plan):
    """From 8 MiB on rows of whole cache lines are streamed; the others are not, and neither is what does not start
    a line."""
    for head_dim, n in ((64, 64), (128, 64), (72, 72)):
        n_positions = (8 << 20) // (2 * 40 * head_dim * dtype.itemsize) + 1
        q = heads(2, 40, n_positions, head_dim, dtype, layout=layout)
        k = q[:, :3]
        check(q, k, *tables(q.shape[2], n, dtype), plan)


@pytest.mark.parametrize("nan_bits", [0x7F81, 0x7FFF, -1, -0x7F], ids=lambda b: f"{b & 0xFFFF:x}")
def test_every_nan_stays_nan(level, nan_bits):
    """bfloat16 is rounded by carrying into its upper bits, which must never turn a NaN into a number."""
    q = heads(1, 2, 3, 64, BF16)
    q.view(torch.int16)[0, 1, 2, 5] = nan_bits
    q_out, k_out = native.rotate(q, q, *tables(3, 64, BF16), RotaryPlan(False, False))
    for result in (q_out, k_out):
        assert result[0, 1, 2, [5, 37]].isnan().all()
        assert result.isnan().sum() == 2


def test_only_one_of_the_two_and_nothing(level):
    q, (cos, sin) = heads(2, 3, 5, 16, F32), tables(5, 16, F32)
    whole = native.rotate(q, q, cos, sin, RotaryPlan(False, False))
    assert_bitwise(native.rotate(q, None, cos, sin, RotaryPlan(False, False))[0], whole[0])
    none, k_out = native.rotate(None, q, cos, sin, RotaryPlan(False, False))
    assert none is None
    assert_bitwise(k_out, whole[0])
    assert native.rotate(q[:0], q[:0], cos, sin, RotaryPlan(False, False))[0].shape == (0, 3, 5, 16)
    assert_bitwise(native.rotate(q[:, :0], q, cos, sin, RotaryPlan(False, False))[1], whole[0])


def test_nothing_is_written_beside_the_result(level):
    """Results are carved out of a larger buffer by the strides of what is given: here, of a padded tensor."""
    buffer = torch.full((2, 3, 5, 24), 7.0)
    q, y = heads(2, 3, 5, 16, F32), buffer[..., 4:20]
    cos, sin = tables(5, 12, F32)
    launch = native._launcher(RotaryPlan(False, False), F32, F32)
    table = cos, sin, cos.shape, cos.stride(), sin.stride()
    assert launch(*table, q, y, q.shape, q.stride(), y.stride(), None) == 0
    assert_bitwise(y.contiguous(), native.rotate(q, None, cos, sin, RotaryPlan(False, False))[0])
    assert (buffer[..., :4] == 7.0).all() and (buffer[..., 20:] == 7.0).all()


def test_wrong_arguments_raise():
    cos, sin = tables(5, 16, F32)
    launch = native._launcher(RotaryPlan(False, False), F32, F32)
    with pytest.raises(TypeError, match="too few"):
        launch(cos, sin, cos.shape, cos.stride(), sin.stride())
    with pytest.raises(TypeError, match="tuple"):
        launch(cos, sin, 5, cos.stride(), sin.stride(), None, None)
    with pytest.raises(TypeError, match="too many"):
        launch(cos, sin, cos.shape, cos.stride(), sin.stride(), None, None, None)
