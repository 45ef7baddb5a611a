"""What the Triton kernel of rotary embedding must do, on whatever device it runs.

test_triton_cases.py runs this file on the CPU, interpreted and as machine code, and on a GPU where there is one: in
processes of their own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import pytest
import torch
from onetrip.kernels import rotary
from onetrip.reference import rotary as reference
from onetrip.reference.rotary import Operands, RotaryPlan
from pairwise import pairwise
from rotary_cases import heads, tables
from torch import Tensor
from triton_runner import DEVICE, INTERPRETED, memory_past_2_to_the_31, uninitialised_memory_is_nan  # noqa: F401

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
PLAN = RotaryPlan(False, False)


def operands(
    dtype: torch.dtype, table_dtype: torch.dtype, head_dim: int, n: int, positions: int = 5, layout: str = "transposed"
) -> Operands:
    q, k = (heads(2, n_heads, positions, head_dim, dtype, str(DEVICE), layout) for n_heads in (5, 2))
    return Operands(q, k, *tables(positions, n, table_dtype, str(DEVICE), batch=2))


def check(given: Operands, plan: RotaryPlan) -> None:
    """The bits of torch's operators. Interpreted, bfloat16 is truncated and not rounded: within an ulp for each of the
    three times."""
    results = rotary.rotate(given, plan)
    for result, expected, x in zip(results, reference.rotate(given, plan), given[:2], strict=True):
        if x is None:
            assert result is None
            continue
        assert result.dtype == (plan.dtype or x.dtype) and result.stride() == torch.empty_like(x).stride()
        if INTERPRETED and result.dtype == BF16:
            assert_truncated(result, expected, given, x)
        else:
            assert torch.equal(result, expected), f"off by {(result.double() - expected.double()).abs().max()}"


def assert_truncated(result: Tensor, expected: Tensor, given: Operands, x: Tensor) -> None:
    largest = 2.0 * x.abs().max().double() * max(given.cos.abs().max().double(), given.sin.abs().max().double())
    bound = 3.0 * torch.finfo(BF16).eps * largest
    assert result.isfinite().all()
    assert ((result.double() - expected.double()).abs() <= bound).all()


@pairwise(
    dtype=(F32, F16, BF16),
    table_dtype=(F32, F16, BF16),
    width={"D64": (64, 64), "D6-4": (6, 4), "D80-20": (80, 20), "D96": (96, 96), "D2": (2, 2), "D40-34": (40, 34)},
    interleaved={"halves": False, "interleaved": True},
    inverse={"": False, "inverse": True},
    out_dtype={"": None, "to_f32": F32, "to_f16": F16, "to_bf16": BF16},
)
def test_every_width_and_dtype(dtype, table_dtype, width, interleaved, inverse, out_dtype):
    check(operands(dtype, table_dtype, *width), RotaryPlan(interleaved, inverse, out_dtype))


@pytest.mark.parametrize("layout", ["", "packed", "expanded", "padded"])
def test_layouts(layout):
    check(operands(F32, F32, 16, 12, layout=layout), RotaryPlan(False, False))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_several_blocks_of_positions(interleaved):
    """A tile of 128 columns has 16 positions, 37 are two and a part."""
    check(operands(F32, F32, 128, 128, positions=37), RotaryPlan(interleaved, False))


def test_tables_that_sequences_share():
    q, k, cos, sin = operands(F32, F32, 16, 16)
    for shared in (Operands(q, k, cos[:1], sin[:1]), Operands(q, k, cos[0], sin[0])):
        check(shared, PLAN)
    check(Operands(q, k, cos[:1].expand(2, -1, -1), sin[:1].expand(2, -1, -1)), PLAN)


def test_one_of_the_two_and_nothing():
    q, k, cos, sin = operands(F32, F32, 16, 16)
    check(Operands(q, None, cos, sin), PLAN)
    check(Operands(None, k, cos, sin), PLAN)
    for empty in (
        Operands(q[:0], k[:0], cos[:0], sin[:0]),
        Operands(q[:, :0], k, cos, sin),
        Operands(q, k[:, :0], cos, sin),
    ):
        check(empty, PLAN)
    assert rotary.rotate(Operands(None, None, cos, sin), PLAN) == (None, None)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_special_values_stay_in_their_pair(bad, interleaved):
    q, k, cos, sin = operands(F32, F32, 12, 8)
    q[1, 2, 3, 1] = q[0, 0, 4, 10] = bad
    q_out, k_out = rotary.rotate(Operands(q, k, cos, sin), RotaryPlan(interleaved, False))
    changed = torch.zeros(q.shape, dtype=torch.bool)
    changed[1, 2, 3, 1] = changed[1, 2, 3, 0 if interleaved else 5] = changed[0, 0, 4, 10] = True
    assert torch.equal(~q_out.isfinite().cpu(), changed) and k_out.isfinite().all()


def test_nothing_is_written_beside_the_result(monkeypatch):
    """The result is made part of a larger tensor, whose other elements stay as they are."""
    q, k, cos, sin = operands(F32, F32, 12, 8)
    buffers = []

    def padded_like(x: Tensor, dtype: torch.dtype | None) -> Tensor:
        buffers.append(torch.full((*x.shape[:2], x.shape[2] + 2, x.shape[3] + 8), 7.0, device=DEVICE))
        return buffers[-1][:, :, 1:-1, 4:-4]

    with monkeypatch.context() as patched:
        patched.setattr(rotary.torch, "empty_like", padded_like)
        results = rotary.rotate(Operands(q, k, cos, sin), PLAN)
    expected = reference.rotate(Operands(q, k, cos, sin), PLAN)
    for result, wanted, buffer in zip(results, expected, buffers, strict=True):
        assert torch.equal(result, wanted)
        result.fill_(7.0)
        assert (buffer == 7.0).all()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rows_2_to_the_31_elements_apart(interleaved):
    """Addresses past 2^31, of a view of memory that is not there in between."""
    storage, stride = memory_past_2_to_the_31()
    q = storage.as_strided((2, 1, 2, 4), (stride, 8, 4, 1))
    values = heads(2, 1, 2, 4, F16, str(DEVICE))
    q.copy_(values)
    cos, sin = tables(2, 4, F16, str(DEVICE))
    plan = RotaryPlan(interleaved, False)
    ours = rotary.rotate(Operands(q, None, cos, sin), plan)[0]
    assert torch.equal(ours, reference.rotate(Operands(values, None, cos, sin), plan)[0])
