"""The native CPU kernel of Adam: what tests/kernels/test_adam.py does not ask of every backend's."""

from __future__ import annotations

import hashlib
import itertools
import struct

import pytest
import torch
from adam_cases import (
    ADAMW,
    BF16,
    F16,
    F32,
    StepTable,
    assert_same_bits,
    copied,
    gradients,
    new_slot,
    new_slots,
)
from cpu_cases import with_each_number_of_threads
from onetrip.ops.common.backends import native as native_library
from onetrip.ops.common.backends import use_backend
from onetrip.reference import adam as reference
from onetrip.reference.adam import BLOCK, Slot
from pairwise import short
from torch import Tensor

library = native_library()
pytestmark = [
    pytest.mark.skipif(library is None, reason="the native library was not built"),
    pytest.mark.promise("adam bits"),
]

LEVELS = ("baseline", "avx2", "avx512", "avx512vbmi")
SIZES = (1, 127, 128, 129, 4095, 4096, 4097, 40_003)
"""18 chunks of 4,096: a task has several, and a parameter is in several tasks."""
BITS = pytest.mark.parametrize("is_8bit", [True, False], ids=["8bit", "32bit"])


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=short)
def test_sum_of_squares(level, dtype):
    table, grads = StepTable.of_slots(new_slots(SIZES, F32, True)), gradients(SIZES, dtype, 0)
    with use_backend("cpu"):
        assert table.prepare(grads)
        found = table.sum_of_squares()
    exact = torch.cat([grad.double().view(-1) for grad in grads]).square().sum()
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0)


def stored(values: Tensor) -> Slot:
    """The states after a step without memory: m is the gradient and sqrt(v) its magnitude, exactly."""
    slot = new_slot(torch.zeros_like(values))
    StepTable.of_slots([slot]).step([values], [ADAMW._replace(beta1=0.0, beta2=0.0)])
    return slot


def blocks_of(values: Tensor) -> Tensor:
    """values in blocks that begin with 1, so that the scale is 1."""
    rows = torch.nn.functional.pad(values, (0, -values.numel() % (BLOCK - 1))).view(-1, BLOCK - 1)
    return torch.nn.functional.pad(rows, (1, 0), value=1.0).flatten()


def with_signs(bits: Tensor, signed: bool) -> Tensor:
    """Float32 magnitudes up to 1 of these bits, and their negatives where signed."""
    magnitudes = bits[(bits >= 0) & (bits <= 0x3F800000)].view(F32)
    return torch.cat((magnitudes, -magnitudes)) if signed else magnitudes


def alone(values: Tensor) -> Tensor:
    """Blocks of 1, a value and zeros."""
    blocks = torch.zeros(values.numel(), BLOCK)
    blocks[:, 0], blocks[:, 1] = 1.0, values
    return blocks.flatten()


@pytest.mark.promise("Q2")
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_every_value_gets_the_nearest_code(level, signed):
    """Near each threshold, in a block of its own: kernels may do a block again in another way where one of its values
    needs that. And at both ends of each run of values that share the upper half of their bits."""
    thresholds = torch.tensor(reference.thresholds(signed)).view(torch.int32)
    near = (*range(-8, 9), *(sign << k for k in range(4, 11) for sign in (-1, 1)))
    upper = torch.arange(0x2200, 0x3F80, dtype=torch.int32) << 16
    values = torch.cat(
        [
            blocks_of(with_signs(torch.cat((upper - 1, upper, upper + 1, upper + 0x8000)), signed)),
            alone(with_signs(torch.cat([thresholds[1:] + i for i in near]), signed)),
        ]
    )
    states = stored(values)
    ours = states.exp_avg if signed else states.exp_avg_sq
    expected, _ = reference.quantize(values, signed)
    assert torch.equal(ours, expected)
    entries = torch.tensor(reference.code_map(signed), dtype=torch.float64)
    values, at = values.unique(return_inverse=True)
    codes = ours.new_empty(values.shape).scatter_(0, at, ours)
    distance = (values.double()[:, None] - entries).abs()
    chosen = distance.gather(1, codes.long()[:, None]).squeeze(1)
    is_raised = (codes == 1) & (not signed)  # never code 0
    assert ((chosen == distance.min(dim=1).values) | is_raised).all()


def test_new_gradients_are_read_and_replaced_storage_is_rejected(level):
    slots = new_slots((300, 5000))
    expected, table = copied(slots), StepTable.of_slots(slots)
    kept = gradients((300, 5000))
    for seed in range(4):
        fresh = gradients((300, 5000), seed=seed)
        for old, new in zip(kept, fresh, strict=True):
            old.copy_(new)
        if seed == 2:
            slots[1].param.data = slots[1].param.clone()
            with pytest.raises(ValueError, match="parameters and states must lie where they lay"):
                table.step(fresh, [ADAMW])
            table = StepTable.of_slots(slots)
        grads = kept if seed % 2 else fresh
        table.step(grads, [ADAMW])
        reference.step(expected, grads, [ADAMW])
        assert_same_bits(slots, expected)


@pytest.mark.slow
@BITS
@pytest.mark.parametrize("sizes", [(500,) * 200, (1, 127, 300_000, 129, 70_000)], ids=["many", "large"])
def test_no_bit_depends_on_the_number_of_threads(sizes, is_8bit):
    def run() -> list[Slot]:
        slots = new_slots(sizes, F32, is_8bit)
        table = StepTable.of_slots(slots)
        for seed in range(2):
            table.step(gradients(sizes, seed=seed), [ADAMW])
        return slots

    first, *others = with_each_number_of_threads(run)
    for slots in others:
        assert_same_bits(slots, first)


@pytest.mark.promise("Q1")
@pytest.mark.parametrize(
    ("signed", "digest"),
    [
        (True, "035c4114538df2a03bbcb4d8a39b9325d26d84a00cf6cf29018d1a6608ab14c4"),
        (False, "02a9b523750e21348029626da435f2adadb851b687d86349cd20752f9255de26"),
    ],
    ids=["signed", "unsigned"],
)
def test_the_maps_are_those_of_reference(signed, digest):
    """digest: of the 256 values as little-endian float32."""
    values, thresholds = library.adam_code_maps()[:2] if signed else library.adam_code_maps()[2:]
    codes = reference.code_map(signed)
    assert hashlib.sha256(struct.pack("<256f", *codes)).hexdigest() == digest
    assert all(low < high for low, high in itertools.pairwise(codes))
    assert tuple(values) == tuple(value for value in codes if value >= 0.0)
    assert tuple(thresholds) == (0.0, *reference.thresholds(signed))
