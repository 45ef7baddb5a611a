"""The native CPU kernel of Adam against reference, bit for bit, at every level this machine has."""

from __future__ import annotations

import hashlib
import itertools
import struct

import pytest
import torch
from adam_cases import (
    ADAMW,
    BF16,
    DTYPE_IDS,
    F16,
    F32,
    GROUPS,
    ROUNDINGS,
    assert_same_bits,
    copied,
    gradients,
    new_slot,
    new_slots,
)
from cpu_cases import with_each_number_of_threads
from onetrip.ops.common.backends import native as native_library
from onetrip.ops.common.backends import use_backend
from onetrip.optim.table import StepTable
from onetrip.reference import adam as reference
from onetrip.reference.adam import BLOCK, ZERO_CODE, Slot
from onetrip.reference.rounding import Rounding
from pairwise import pairwise
from torch import Tensor

library = native_library()
pytestmark = [
    pytest.mark.skipif(library is None, reason="the native library was not built"),
    pytest.mark.promise("adam bits"),
]

LEVELS = ("baseline", "avx2", "avx512", "avx512vbmi")
SIZES = (1, 127, 128, 129, 4095, 4096, 4097, 40_003)
"""18 chunks of 4,096: a task has several, and a parameter is in several tasks."""
INF, NAN = torch.inf, torch.nan
STOCHASTIC = Rounding.STOCHASTIC
BITS = pytest.mark.parametrize("is_8bit", [True, False], ids=["8bit", "32bit"])


def check(slots, all_grads, groups=(ADAMW,), grad_scale=None, found_inf=None) -> None:
    """A step of slots for each of all_grads: natively, and in copies by reference."""
    expected, table = copied(slots), StepTable.of_slots(slots)
    with use_backend("cpu"):
        for grads in all_grads:
            table.step(grads, groups, grad_scale, found_inf)
            reference.step(expected, grads, groups, grad_scale, found_inf)
            assert_same_bits(slots, expected)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=DTYPE_IDS.get)
def test_sum_of_squares(level, dtype):
    table, grads = StepTable.of_slots(new_slots(SIZES, F32, True)), gradients(SIZES, dtype, 0)
    with use_backend("cpu"):
        assert table.prepare(grads)
        found = table.sum_of_squares()
    exact = torch.cat([grad.double().view(-1) for grad in grads]).square().sum()
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0)


@BITS
@pytest.mark.parametrize("grad_dtype", [F32, F16, BF16], ids=lambda d: f"grad_{DTYPE_IDS[d]}")
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=DTYPE_IDS.get)
def test_the_bits_of_reference(level, dtype, grad_dtype, is_8bit):
    check(new_slots(SIZES, dtype, is_8bit), [gradients(SIZES, grad_dtype, seed) for seed in range(2)])


@pairwise(
    kind={f"{DTYPE_IDS[dtype]}-{rounding.name.lower()}": (dtype, rounding) for dtype, rounding in ROUNDINGS},
    grad_dtype={f"grad_{name}": dtype for dtype, name in DTYPE_IDS.items()},
    is_8bit={"8bit": True, "32bit": False},
)
def test_the_bits_of_reference_with_each_rounding(level, kind, grad_dtype, is_8bit):
    """With L2 decay, which reads the parameter twice, one element off; and after weights were set to 0."""
    dtype, rounding = kind
    for shift, group in ((0, ADAMW), (1, ADAMW._replace(decoupled=False))):
        slots = new_slots(SIZES, dtype, is_8bit, shift, rounding)
        check(slots, [gradients(SIZES, grad_dtype, seed, shift) for seed in range(2)], (group,))
        for slot in slots:
            slot.param[::3] = 0.0
        check(slots, [gradients(SIZES, grad_dtype, 2, shift)], (group,))


@BITS
@pytest.mark.parametrize("dtype, rounding", ROUNDINGS)
def test_extremes_with_each_rounding(level, dtype, rounding, is_8bit):
    """Updates that overflow, underflow, and are not finite."""
    sizes = (300, 300, 300)
    slots = new_slots(sizes, dtype, is_8bit, 0, rounding)
    grads = gradients(sizes)
    grads[0][[5, 200]] = torch.tensor([NAN, INF])
    grads[0].view(torch.int32)[6] = 0x7FFF_FFFF  # a NaN that a sum of bits makes a number of
    slots[1].param.mul_(3e37 if dtype is BF16 else 2e4)
    slots[2].param.mul_(1e-39 if dtype is BF16 else 1e-7)
    check(slots, [grads, gradients(sizes, seed=1)], (ADAMW._replace(lr=1e-7, weight_decay=-3e7), ADAMW))


def test_random_bits_beyond_what_32_bits_count(level):
    slots = [
        slot._replace(random_bits=(2**31 + 7, 2**35 - 128)) for slot in new_slots((70_000,), BF16, True, 0, STOCHASTIC)
    ]
    check(slots, [gradients((70_000,), BF16)])


@BITS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=DTYPE_IDS.get)
def test_addresses_one_element_off(level, dtype, is_8bit):
    sizes = (129, 1000, 4097)
    check(new_slots(sizes, dtype, is_8bit, shift=1), [gradients(sizes, dtype, seed, shift=1) for seed in range(2)])


@BITS
@pytest.mark.parametrize("name", GROUPS)
def test_the_numbers_of_a_group(level, name, is_8bit):
    sizes = (130, 5000)
    check(new_slots(sizes, F32, is_8bit), [gradients(sizes, seed=seed) for seed in range(3)], (GROUPS[name],))


@BITS
def test_gradients_are_divided_by_grad_scale(level, is_8bit):
    scale = torch.tensor(1024.0)
    slots, grads = new_slots(SIZES, F32, is_8bit), gradients(SIZES)
    scaled = copied(slots)
    check(slots, [grads])
    check(scaled, [[grad * scale for grad in grads]], grad_scale=scale, found_inf=torch.tensor(0.0))
    assert_same_bits(scaled, slots)


@BITS
@pytest.mark.parametrize("scale", [INF, NAN], ids=str)
def test_a_grad_scale_that_is_not_a_number_to_divide_by(level, scale, is_8bit):
    """The lanes behind the end of a parameter have no part in the scale of its last block."""
    sizes = (5, 200)
    check(new_slots(sizes, F32, is_8bit), [gradients(sizes)], grad_scale=torch.tensor(scale))


@BITS
@pytest.mark.parametrize("found", [1.0, 0.5, NAN], ids=str)
def test_found_inf_leaves_everything_as_it_was(level, found, is_8bit):
    slots = new_slots(SIZES, F32, is_8bit)
    check(slots, [gradients(SIZES)])
    before = copied(slots)
    StepTable.of_slots(slots).step([grad * NAN for grad in gradients(SIZES)], (ADAMW,), None, torch.tensor(found))
    assert_same_bits(slots, before)


@BITS
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF], ids=["nan", "-nan", "inf", "-inf"])
def test_a_gradient_that_is_not_finite_is_not_swallowed(level, bad, is_8bit):
    positions = (0, 17, 127, 200, 256, 259)
    sizes = (260,) * len(positions)
    slots, grads = new_slots(sizes, F32, is_8bit), gradients(sizes)
    for grad, position in zip(grads, positions, strict=True):
        grad[position] = bad
    check(slots, [grads, gradients(sizes, seed=1)])
    for slot, position in zip(slots, positions, strict=True):
        block = position // BLOCK
        hit = torch.arange(260) // BLOCK == block if is_8bit else torch.arange(260) == position
        if is_8bit:
            assert not slot.exp_avg_scale[block].isfinite() and not slot.exp_avg_sq_scale[block].isfinite()
        assert slot.param[hit].isnan().all()  # of 8 bits in the second step, from the block's scale
        assert slot.param[~hit].isfinite().all()


@BITS
def test_nothing_divided_by_nothing_is_nan(level, is_8bit):
    """As in torch.optim, where eps is 0 and the gradient always was."""
    slots, grads = new_slots((1000,), F32, is_8bit), gradients((1000,))
    grads[0][::5] = 0.0
    check(slots, [grads], (GROUPS["no_eps"],))
    assert slots[0].param[::5].isnan().all() and slots[0].param[1::5].isfinite().all()


@pytest.mark.parametrize("eps", [INF, 1e39, 3e38], ids=str)
def test_an_eps_that_is_infinite_in_float32(level, eps):
    """Infinity / infinity is NaN, not the largest update."""
    slots = new_slots((300,))
    slots[0].exp_avg.fill_(255)
    slots[0].exp_avg_scale.fill_(3e38)
    check(slots, [gradients((300,))], (ADAMW._replace(eps=eps),))
    assert slots[0].param.isnan().all() == (eps != 3e38)


@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
def test_l2_decay_of_a_parameter_that_is_not_finite(level, bad):
    slots = new_slots((300,))
    slots[0].param[[5, 256]] = bad
    check(slots, [gradients((300,), seed=seed) for seed in range(2)], (GROUPS["l2"],))


@pytest.mark.parametrize("scale", [NAN, INF], ids=str)
@pytest.mark.parametrize("name", ["exp_avg_scale", "exp_avg_sq_scale"])
def test_a_scale_that_is_not_finite_spoils_its_block_alone(level, name, scale):
    slots = new_slots((300,))
    check(slots, [gradients((300,))])
    getattr(slots[0], name)[1] = scale
    check(slots, [gradients((300,), seed=1)])
    assert not getattr(slots[0], name)[1].isfinite()
    assert slots[0].param[:128].isfinite().all() and slots[0].param[256:].isfinite().all()


EXTREMES = {
    "zeros": lambda g: torch.zeros_like(g),
    "negative_zeros": lambda g: -torch.zeros_like(g),
    "subnormals": lambda g: g * 1e-42,
    "squares_underflow": lambda g: g * 1e-25,
    "huge": lambda g: g * 1e20,
    "squares_overflow": lambda g: g * 1e30,
    "near_the_largest": lambda g: g.sign() * torch.finfo(F32).max,
    "one_in_a_block": lambda g: torch.where(torch.arange(g.numel()) % 128 == 77, g, 0.0),
    "one_outlier": lambda g: torch.where(torch.arange(g.numel()) % 128 == 5, g * 1e12, g),
}


@BITS
@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_gradients(level, kind, is_8bit):
    sizes = (129, 1000)
    rows = [[EXTREMES[kind](grad) for grad in gradients(sizes, seed=seed)] for seed in range(4)]
    check(new_slots(sizes, F32, is_8bit), rows)


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
@pytest.mark.parametrize("scale", [1.0, 3e-9, 7e11], ids=lambda s: f"scale{s:g}")
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_every_code_is_stored_as_itself(level, signed, scale):
    entries, codes = torch.tensor(reference.code_map(signed)), torch.arange(256, dtype=torch.uint8)
    states = stored(blocks_of(entries) * scale)
    ours = states.exp_avg if signed else states.exp_avg_sq
    assert torch.equal(ours.view(-1, BLOCK)[:, 1:].flatten()[:256], codes)
    assert (states.exp_avg_scale == torch.tensor(scale)).all()


@pytest.mark.promise("Q2")
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_every_value_gets_the_nearest_code(level, signed):
    """Near each threshold, in a block of its own: kernels may do a block again in another way where one of its values
    needs that. And at both ends of each run of values that share the upper half of their bits."""
    thresholds = torch.tensor(reference.thresholds(signed)).view(torch.int32)
    near = (*range(-8, 9), *(sign << k for k in range(4, 11) for sign in (-1, 1)))
    upper = torch.arange(0x3000, 0x3F80, dtype=torch.int32) << 16
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


@pytest.mark.promise("Q5")
def test_what_is_greater_than_0_never_gets_code_0(level):
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(10_000_000, generator=generator).mul_(-40).exp_()
    states = stored(values)
    assert (states.exp_avg_sq > 0).all()
    assert (reference.dequantize(states.exp_avg_sq, states.exp_avg_sq_scale, signed=False) > 0).all()
    zeros = stored(torch.where(torch.arange(1000) % 2 == 0, 0.0, values[:1000]))
    assert (zeros.exp_avg_sq[::2] == 0).all() and (zeros.exp_avg[::2] == ZERO_CODE).all()


@BITS
def test_many_parameters_have_the_bits_of_one_at_a_time(level, is_8bit):
    sizes = (1, 127, 129, 4095, 128, 20_000)
    together = new_slots(sizes, F32, is_8bit)
    apart = copied(together)
    tables = [StepTable.of_slots([slot]) for slot in apart]
    table = StepTable.of_slots(together)
    for seed in range(3):
        grads = gradients(sizes, seed=seed)
        table.step(grads, [ADAMW])
        for one, grad in zip(tables, grads, strict=True):
            one.step([grad], [ADAMW])
    assert_same_bits(together, apart)


def test_parameters_of_every_kind_in_one_step(level):
    """8 and 32 bits, three dtypes of parameters and of gradients that change; neighbours of one group that took as many
    steps, of two groups that did, and of one group that did not."""
    groups = [ADAMW, ADAMW._replace(lr=0.5, beta1=0.5, decoupled=False), ADAMW._replace(maximize=True)]
    dtypes = [F32, F16, BF16]
    slots = [
        new_slot(torch.randn(100 + 37 * i).to(dtypes[i % 3]), i % 4 < 2, i // 2 % 3, torch.tensor(float(i // 3)))
        for i in range(30)
    ]
    shared = torch.tensor(7.0)  # two parts of a parameter: one count, which goes up once a step
    slots += [new_slot(torch.randn(n), True, 0, shared) for n in (256, 300)]
    expected, table = copied(slots), StepTable.of_slots(slots)
    for step in range(4):
        sizes = [slot.param.numel() for slot in slots]
        grads = [g.to(dtypes[(i + step // 2) % 3]) for i, g in enumerate(gradients(sizes, seed=step))]
        table.step(grads, groups)
        reference.step(expected, grads, groups)
        assert_same_bits(slots, expected)
    assert float(shared) == 11.0


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


def test_nothing_to_do(level):
    empty = new_slots((0, 0))
    check(empty, [[slot.param.clone() for slot in empty]])
    check(new_slots((0, 5, 0)), [gradients((0, 5, 0))])


@BITS
@pytest.mark.parametrize("n", [1, 127, 129, 4097], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=DTYPE_IDS.get)
def test_nothing_is_written_outside(level, dtype, n, is_8bit):
    zone, slot = 64, new_slots((n,), dtype, is_8bit)[0]
    memory = [None if t is None else torch.full((t.numel() + 2 * zone,), 77, dtype=t.dtype) for t in slot[:5]]
    inner = [None if m is None else m[zone : m.numel() - zone].copy_(t) for m, t in zip(memory, slot, strict=False)]
    check([Slot(*inner, slot.step, 0)], [gradients((n,), dtype)])
    for whole in memory:
        assert whole is None or ((whole[:zone] == 77).all() and (whole[-zone:] == 77).all())


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
