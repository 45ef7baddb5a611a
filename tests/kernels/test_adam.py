"""What the kernels of Adam must do, the CPU's at every level and Triton's: the bits of the reference.

test_triton_cases.py runs this file for Triton, interpreted, as machine code and on a GPU. The interpreter truncates
float32 to bfloat16, where it is to round to nearest; on a GPU codes may be one apart. Nothing else differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from adam_cases import ADAMW, GROUPS, RESIDUALS, ROUNDINGS, StepTable, assert_same_bits, copied, gradients
from cpu_cases import kernels_fixture, triton_only
from onetrip.reference import adam as reference
from onetrip.reference.adam import BLOCK, Group, Slot
from onetrip.reference.rounding import Rounding, join
from pairwise import pairwise, short
from tolerances import assert_bitwise
from torch import Tensor
from triton_runner import DEVICE, INTERPRETED

pytestmark = pytest.mark.promise("adam bits")
kernels = kernels_fixture("avx512vbmi")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = float("inf"), float("nan")
PLAIN = ADAMW._replace(beta1=0.0, beta2=0.0, weight_decay=0.0)  # m becomes the gradient, v its square
KEY = 0x1234_5678_9ABC_DEF0


def _id(value: torch.dtype | Rounding) -> str:
    return value.name.lower() if isinstance(value, Rounding) else short(value)


every_rounding = pytest.mark.parametrize(("dtype", "rounding"), ROUNDINGS, ids=_id)
bits = pytest.mark.parametrize("is_8bit", [True, False], ids=["8bit", "32bit"])

_guarded: list[tuple[Tensor, Tensor]] = []
"""Tensors, and the memory that each is a part of, which holds 77 around it."""


@pytest.fixture(autouse=True)
def nothing_is_written_beside_the_tensors(kernels):  # which may skip
    _guarded.clear()
    yield
    assert _guarded
    for tensor, memory in _guarded:
        begin = tensor.storage_offset()
        assert (memory[:begin] == 77).all() and (memory[begin + tensor.numel() :] == 77).all()


def guarded(values: Tensor, shift: int = 0) -> Tensor:
    """On the device, `shift` elements after a multiple of 16 bytes."""
    memory = torch.full((values.numel() + 64,), 77, dtype=values.dtype, device=DEVICE)
    _guarded.append((memory[32 + shift : 32 + shift + values.numel()].copy_(values), memory))
    return _guarded[-1][0]


def make_slot(
    n: int,
    dtype: torch.dtype = F32,
    is_8bit: bool = True,
    group: int = 0,
    t: float = 3.0,
    shifts: tuple[int, int, int] = (0, 0, 0),
    counter: Tensor | None = None,
    rounding: Rounding = Rounding.NEAREST,
    residual_shift: int = 0,
) -> Slot:
    """Random, after t steps. shifts: of param, exp_avg, exp_avg_sq, in elements."""
    n_blocks = -(-n // BLOCK)
    if is_8bit:
        m, v = torch.randint(0, 256, (n,), dtype=torch.uint8), torch.randint(0, 256, (n,), dtype=torch.uint8)
        scales = (guarded(0.1 + torch.rand(n_blocks)), guarded(1.0 + torch.rand(n_blocks)))
    else:
        m, v, scales = torch.randn(n), torch.rand(n), (None, None)
    param = guarded(torch.randn(n).to(dtype), shifts[0])
    counter = torch.tensor(t, device=DEVICE) if counter is None else counter
    residual, stream = None, (KEY, 0) if rounding is Rounding.STOCHASTIC else None
    if rounding in RESIDUALS:
        info = torch.iinfo(RESIDUALS[rounding])
        residual = guarded(torch.randint(info.min, info.max + 1, (n,)).to(RESIDUALS[rounding]), residual_shift)
    return Slot(param, guarded(m, shifts[1]), guarded(v, shifts[2]), *scales, counter, group, residual, stream)


def emptied(slot: Slot) -> Slot:
    """With the states of a new parameter."""
    slot.exp_avg.fill_(reference.ZERO_CODE if slot.exp_avg_scale is not None else 0)
    for states in (slot.exp_avg_sq, slot.exp_avg_scale, slot.exp_avg_sq_scale):
        if states is not None:
            states.zero_()
    return slot


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """See above."""
    assert actual.dtype == expected.dtype
    actual = actual.cpu()
    differ = ~((actual == expected) | (actual.isnan() & expected.isnan()))
    if not differ.any():
        return
    example = (what, int(differ.sum()), actual[differ][:4], expected[differ][:4])
    if actual.dtype == torch.uint8:
        assert DEVICE.type == "cuda" and (actual.int() - expected.int()).abs().max() <= 1, example
    elif actual.dtype == BF16 and INTERPRETED:
        # Towards zero of the same float32 number: the same bits, or those one below.
        steps = expected.view(torch.int16).int() - actual.view(torch.int16).int()
        assert what == "param" and ((steps == 0) | (steps == 1))[~expected.isnan()].all(), example
    else:
        assert DEVICE.type == "cuda", example
        # 2^-16 is a unit of an int8 residual of bfloat16.
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-7, equal_nan=True)


def assert_same_slots(slots: Sequence[Slot], truth: Sequence[Slot]) -> None:
    """See above. On a GPU a master weight is compared as a whole: its last bits decide how it is split."""
    for slot, expected in zip(copied(slots), truth, strict=True):
        is_truncated = INTERPRETED and slot.param.dtype == BF16 and slot.rounding is Rounding.NEAREST
        if DEVICE.type == "cpu" and not is_truncated:
            assert_same_bits([slot], [expected])
            continue
        if slot.residual is not None:
            slot, expected = (x._replace(param=join(x.param, x.residual), residual=None) for x in (slot, expected))
        for what, actual, wanted in zip(Slot._fields, slot, expected, strict=True):
            if isinstance(wanted, Tensor):
                assert_same(actual, wanted, what)


def step_and_compare(
    slots: Sequence[Slot],
    grads: Sequence[Tensor],
    groups: Sequence[Group] = (ADAMW,),
    grad_scale: float | None = None,
    found_inf: float | None = None,
) -> None:
    """A step of both."""
    truth = copied(slots)
    numbers = [None if x is None else torch.tensor(x) for x in (grad_scale, found_inf)]
    reference.step(truth, [grad.cpu() for grad in grads], groups, *numbers)
    StepTable.of_slots(slots).step(grads, groups, *(None if x is None else x.to(DEVICE) for x in numbers))
    assert_same_slots(slots, truth)


def randn(n: int, dtype: torch.dtype = F32, shift: int = 0) -> Tensor:
    return guarded(torch.randn(n).to(dtype), shift)


@pairwise(dtype=[F32, F16, BF16], grad_dtype=[F32, F16, BF16], is_8bit={"8bit": True, "32bit": False})
def test_dtypes(kernels, dtype, grad_dtype, is_8bit):
    """Whole blocks and a part of one; on a CPU also parameters of several chunks, and tasks of several parameters."""
    sizes = (300,) if kernels == "triton" else (1, 127, 128, 129, 4095, 4096, 4097, 40_003)
    step_and_compare([make_slot(n, dtype, is_8bit) for n in sizes], [randn(n, grad_dtype) for n in sizes])


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1023, 1025, 4095, 4096, 4097])
@pytest.mark.parametrize(
    ("dtype", "is_8bit"), [(F32, True), (F16, True), (F32, False)], ids=["f32-8bit", "f16-8bit", "f32-32bit"]
)
def test_sizes(n, dtype, is_8bit):
    step_and_compare([make_slot(n, dtype, is_8bit)], [randn(n, dtype)])


@pairwise(
    shifted=["param", "exp_avg", "exp_avg_sq", "grad", "residual", "all"],
    is_8bit={"8bit": True, "32bit": False},
    kind={"-".join(map(_id, case)): case for case in [(F32, Rounding.NEAREST), (BF16, Rounding.NEAREST), *ROUNDINGS]},
)
def test_misaligned_by_an_element(kernels, shifted, is_8bit, kind):
    dtype, rounding = kind
    *shifts, grad, residual = (
        int(shifted in (name, "all")) for name in ("param", "exp_avg", "exp_avg_sq", "grad", "residual")
    )
    slot = make_slot(300, dtype, is_8bit, shifts=tuple(shifts), rounding=rounding, residual_shift=residual)
    step_and_compare([slot], [randn(300, dtype, grad)])


def test_tensors_groups_and_kinds_in_one_step_after_another():
    """Kinds in turn, every rounding, groups with numbers of their own, parts of one parameter that share a count, an
    empty one."""
    groups = [
        ADAMW,
        Group(torch.tensor(3e-3, device=DEVICE), 0.8, 0.99, 1e-6, 0.1, decoupled=False, maximize=True),
        PLAIN._replace(lr=0.5),
    ]
    shared = torch.tensor(7.0, device=DEVICE)
    slots = [
        make_slot(200, F32, True, 0),
        make_slot(130, F16, True, 1, t=0.0),
        make_slot(128, F32, True, 1, counter=shared),
        make_slot(5, F32, True, 1, counter=shared),
        make_slot(77, F32, False, 2),
        make_slot(0, F32, False, 0),
        make_slot(140, F32, True, 2, t=1000.0),
        make_slot(70, F16, True, 0, rounding=Rounding.RESIDUAL_8),
        make_slot(140, BF16, True, 1, rounding=Rounding.RESIDUAL_16),
        make_slot(60, BF16, True, 2, rounding=Rounding.STOCHASTIC),
        *(make_slot(130, F32, i < 20, i % 3, t=float(i)) for i in range(40)),  # several for one task of a CPU thread
    ]
    table = StepTable.of_slots(slots)
    truth = copied(slots)
    for _ in range(3):
        grads = [randn(slot.param.numel(), slot.param.dtype) for slot in slots]
        reference.step(truth, [grad.cpu() for grad in grads], groups)
        table.step(grads, groups)
    assert_same_slots(slots, truth)
    assert shared.item() == 10.0


@pytest.mark.parametrize("name", GROUPS)
@bits
def test_groups(name, is_8bit):
    group = GROUPS[name]
    if isinstance(group.lr, Tensor):
        group = group._replace(lr=group.lr.to(DEVICE))
    step_and_compare([make_slot(150, is_8bit=is_8bit)], [randn(150)], [group])


@bits
@pytest.mark.parametrize("grad_scale", [None, 1024.0, 3.0, 1e-45, INF, NAN])
def test_gradients_are_divided_by_their_scale(grad_scale, is_8bit):
    """Past the end of a tensor 0 times an infinite reciprocal is not a number, which no block's scale may see."""
    sizes = (5, 200)
    step_and_compare(
        [make_slot(n, is_8bit=is_8bit) for n in sizes], [randn(n) for n in sizes], (ADAMW,), grad_scale, 0.0
    )


@pytest.mark.parametrize("found_inf", [1.0, 0.5, NAN])
def test_a_step_with_found_inf_changes_nothing(found_inf):
    slots = [make_slot(300), make_slot(20, F16, False), make_slot(20, BF16, rounding=Rounding.RESIDUAL_16)]
    grads = [randn(300), randn(20, F16), randn(20, BF16)]
    grads[0][7] = NAN
    before = copied(slots)
    step_and_compare(slots, grads, grad_scale=2.0, found_inf=found_inf)
    for slot, old in zip(slots, before, strict=True):
        for actual, wanted in zip(slot, old, strict=True):
            if isinstance(wanted, Tensor):
                assert_bitwise(actual.cpu(), wanted)


@bits
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF], ids=["nan", "-nan", "inf", "-inf"])
def test_a_gradient_that_is_not_finite_spoils_its_block_and_no_other(bad, is_8bit):
    """A block of 8 bits in the second step: by its scale."""
    positions = (0, 17, 127, 259)
    slots, grads = [make_slot(260, is_8bit=is_8bit) for _ in positions], [randn(260) for _ in positions]
    for grad, position in zip(grads, positions, strict=True):
        grad[position] = bad
    step_and_compare(slots, grads)
    for slot, position in zip(slots, positions, strict=True):
        assert slot.param.isfinite().logical_not().nonzero().flatten().tolist() == [position]
    step_and_compare(slots, [randn(260) for _ in positions])
    for slot, position in zip(slots, positions, strict=True):
        block = position // BLOCK
        hit = torch.arange(260) // BLOCK == block if is_8bit else torch.arange(260) == position
        assert torch.equal(slot.param.isnan().cpu(), hit) and slot.param[~hit].isfinite().all()
        if is_8bit:
            spoilt = [i == block for i in range(3)]
            assert slot.exp_avg_scale.isfinite().logical_not().tolist() == spoilt
            assert slot.exp_avg_sq_scale.isfinite().logical_not().tolist() == spoilt


@bits
def test_a_parameter_that_is_infinite_leaves_its_states_finite(is_8bit):
    """Decoupled decay: nothing of the parameter, not even 0 times it, goes into the gradient."""
    slot = make_slot(150, is_8bit=is_8bit)
    slot.param[3] = INF
    step_and_compare([slot], [randn(150)])
    assert (slot.exp_avg_scale if is_8bit else slot.exp_avg).isfinite().all()


@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
def test_l2_decay_of_a_parameter_that_is_not_finite(bad):
    slot = make_slot(300)
    slot.param[[5, 256]] = bad
    for _ in range(2):
        step_and_compare([slot], [randn(300)], [GROUPS["l2"]])


@pytest.mark.parametrize("scale", [NAN, INF], ids=str)
@pytest.mark.parametrize("name", ["exp_avg_scale", "exp_avg_sq_scale"])
def test_a_scale_that_is_not_finite_spoils_its_block_alone(name, scale):
    slot = make_slot(300)
    getattr(slot, name)[1] = scale
    step_and_compare([slot], [randn(300)])
    assert not getattr(slot, name)[1].isfinite()
    assert slot.param[:128].isfinite().all() and slot.param[256:].isfinite().all()


@bits
def test_nothing_divided_by_nothing_is_nan(is_8bit):
    """As in torch.optim, where eps is 0 and the gradient always was."""
    slot, grad = make_slot(300, is_8bit=is_8bit), randn(300)
    grad[::5] = 0.0
    step_and_compare([slot], [grad], [PLAIN._replace(eps=0.0)])
    assert slot.param[::5].isnan().all() and slot.param[1::5].isfinite().all()


@pytest.mark.parametrize("eps", [INF, 1e39, 3e38], ids=str)
def test_an_eps_that_is_infinite_in_float32(eps):
    """Infinity / infinity is NaN, not the largest update."""
    slot = make_slot(300, t=0.0)
    slot.exp_avg.fill_(255)
    slot.exp_avg_scale.fill_(3e38)
    step_and_compare([slot], [randn(300)], [ADAMW._replace(eps=eps)])
    assert slot.param.isnan().all() == (eps != 3e38)


@bits
def test_zero_gradients_of_a_new_parameter(is_8bit):
    slot = emptied(make_slot(150, is_8bit=is_8bit, t=0.0))
    before = slot.param.clone()
    step_and_compare([slot], [guarded(torch.zeros(150))], [ADAMW._replace(weight_decay=0.0)])
    assert_bitwise(slot.param, before)


EXTREMES = {
    "zeros": lambda g: torch.zeros_like(g),
    "negative_zeros": lambda g: -torch.zeros_like(g),
    "near_the_largest": lambda g: g.sign() * torch.finfo(F32).max,
    "one_in_a_block": lambda g: torch.where(torch.arange(g.numel()) % 128 == 77, g, 0.0),
    "one_outlier": lambda g: torch.where(torch.arange(g.numel()) % 128 == 5, g * 1e12, g),
    # Subnormal scales, squares below the least number and above the largest.
    **{
        f"{size:g}": lambda g, size=size: size * g.clamp(-1.0, 1.0)
        for size in (1e-45, 1e-42, 1e-39, 2.0**-126, 1e-30, 1e-25, 1e-19, 1e10, 1e19, 1e30, 3e38)
    },
}


@bits
@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_gradients(kind, is_8bit):
    slot = make_slot(300, is_8bit=is_8bit)
    for seed, group in enumerate((PLAIN, ADAMW)):
        step_and_compare([slot], [guarded(EXTREMES[kind](100.0 * gradients((300,), seed=seed)[0]))], [group])


@pairwise(
    kind={"-".join(map(_id, case)): case for case in ROUNDINGS},
    grad_dtype={f"grad_{short(dtype)}": dtype for dtype in (F32, F16, BF16)},
    is_8bit={"8bit": True, "32bit": False},
)
def test_roundings(kernels, kind, grad_dtype, is_8bit):
    """Sizes on both sides of a block, of two, and of a program's part of a chunk; L2 decay reads the parameter twice,
    here an element off."""
    dtype, rounding = kind
    large = () if kernels == "triton" else (4097, 40_003)
    for shift, sizes, group in ((0, (127, 1025), ADAMW._replace(weight_decay=0.5)), (1, (257, 1023), GROUPS["l2"])):
        sizes += large
        slots = [
            make_slot(n, dtype, is_8bit, 0, float(n), (shift,) * 3, rounding=rounding, residual_shift=shift)
            for n in sizes
        ]
        step_and_compare(slots, [randn(n, grad_dtype, shift) for n in sizes], [group])


@every_rounding
@bits
def test_roundings_of_extremes(dtype, rounding, is_8bit):
    """Updates that overflow, underflow, and are not finite."""
    slots = [make_slot(300, dtype, is_8bit, rounding=rounding) for _ in range(3)]
    first, second = (gradients((300,) * 3, seed=seed) for seed in range(2))
    first[0][[5, 200]] = torch.tensor([NAN, INF])
    first[0].view(torch.int32)[6] = 0x7FFF_FFFF  # a NaN that a sum of bits makes a number of
    slots[1].param.mul_(3e37 if dtype is BF16 else 2e4)
    slots[2].param.mul_(1e-39 if dtype is BF16 else 1e-7)
    for grads, group in ((first, ADAMW._replace(lr=1e-7, weight_decay=-3e7)), (second, ADAMW)):
        step_and_compare(slots, [guarded(grad) for grad in grads], [group])


@every_rounding
def test_roundings_of_special_values(dtype, rounding):
    """Every weight with every residual and every gradient. Some masters round to infinity, some residuals would change
    the sign."""
    info = torch.finfo(dtype)
    positive = [0.0, info.smallest_normal / 4, info.smallest_normal, 1.0, 1.5, info.max, INF]
    weights = torch.tensor([*positive, *(-x for x in positive), NAN], dtype=torch.float64)
    residual = torch.iinfo(RESIDUALS.get(rounding, torch.int8))
    residuals = torch.tensor([residual.min, -1, 0, 1, residual.max], dtype=torch.float64)
    gradients = torch.tensor([0.0, 1e-3, -1.0, INF, NAN], dtype=torch.float64)
    weight, rest, grad = torch.cartesian_prod(weights, residuals, gradients).unbind(1)
    slot = make_slot(len(weight), dtype, False, rounding=rounding)
    slot.param.copy_(weight)
    if slot.residual is not None:
        slot.residual.copy_(rest)
    grad = grad.float()
    grad.view(torch.int32)[grad.isnan()] = 0x7FFFFFFF  # a GPU's NaN: one more in its bits is -0
    step_and_compare([slot], [guarded(grad)], [PLAIN])


@pytest.mark.parametrize(("dtype", "rounding"), [case for case in ROUNDINGS if case[1] in RESIDUALS], ids=_id)
def test_a_residual_of_a_weight_that_was_set_to_zero(dtype, rounding):
    """Where it would change the sign of a bfloat16, it is dropped. Without an update everything else stays."""
    slot = make_slot(300, dtype, rounding=rounding)
    slot.param[:200] = 0.0
    slot.param[100:200] *= -1.0
    master, residual = join(slot.param, slot.residual), slot.residual.clone()
    step_and_compare([slot], [randn(300, dtype)], [ADAMW._replace(lr=0.0)])
    assert torch.equal(join(slot.param, slot.residual), master)
    if dtype == BF16:
        assert_bitwise(slot.residual[:200], residual[:200].clamp(min=0))


@bits
@pytest.mark.parametrize("first", [2**35 - 128, 2**38 + 3 * 128], ids=["2^35", "2^38"])
def test_random_bits_past_2_to_the_35_elements(first, is_8bit):
    """Part of a parameter, which starts there."""
    slot = make_slot(300, BF16, is_8bit, t=99.0, rounding=Rounding.STOCHASTIC)
    step_and_compare([slot._replace(random_bits=(KEY, first))], [randn(300, BF16)])


def near(values: Tensor) -> Tensor:
    """Each, and its neighbours among float32 numbers."""
    infinity = torch.tensor(INF)
    return torch.cat([values, torch.nextafter(values, infinity), torch.nextafter(values, -infinity)])


def test_codes_of_everything_near_a_threshold():
    """m is the gradient, in blocks whose scale is 1 or 2^-20; so is the square root of v, up to its rounding."""
    limits = near(torch.tensor([*reference.thresholds(True), *reference.thresholds(False)]))
    blocks = torch.zeros(math.ceil(limits.numel() / 127), 128)
    blocks[:, 0] = 1.0
    blocks[:, 1:] = torch.nn.functional.pad(limits, (0, -limits.numel() % 127)).view(-1, 127)
    blocks[::2] *= -1.0
    blocks[1::4] *= 2.0**-20
    slot = make_slot(blocks.numel())
    step_and_compare([slot], [guarded(blocks.flatten())], [PLAIN])
    assert slot.exp_avg[::128].tolist() == [0, 255] * (slot.exp_avg.numel() // 256)


@pytest.mark.promise("Q2")
@pytest.mark.parametrize("scale", [1.0, 3e-9, 7e11], ids=lambda s: f"scale{s:g}")
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_every_code_is_stored_as_itself(signed, scale):
    blocks = torch.full((3, BLOCK), scale)  # its largest is the scale of a block
    blocks[:, 1:] *= torch.nn.functional.pad(torch.tensor(reference.code_map(signed)), (0, 125)).view(3, 127)
    slot = emptied(make_slot(blocks.numel()))
    step_and_compare([slot], [guarded(blocks.flatten())], [PLAIN])
    codes = slot.exp_avg if signed else slot.exp_avg_sq
    assert codes.view(3, BLOCK)[:, 1:].flatten()[:256].tolist() == list(range(256))
    assert (slot.exp_avg_scale == torch.tensor(scale)).all()


@pytest.mark.promise("Q5")
def test_a_square_root_above_zero_never_gets_code_zero():
    """Beside a 1, at every size whose square is no subnormal number."""
    roots = torch.cat([torch.zeros(4), 10.0 ** torch.linspace(-18.0, 0.0, 124)])
    slot = make_slot(128)
    step_and_compare([slot], [guarded(roots)], [PLAIN])
    assert (slot.exp_avg_sq == 0).nonzero().flatten().tolist() == [0, 1, 2, 3]


@triton_only
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_the_table_of_codes_is_exact(signed):
    """At every bucket's first and last number, near every threshold, and for ten thousand others in [0, 1]."""
    guarded(torch.zeros(1))
    shift, first, entries = pytest.importorskip("onetrip.kernels.adam").code_table(signed)
    edges = (first + torch.arange(entries.numel(), dtype=torch.int32)) << shift
    edges = torch.cat([edges, edges + ((1 << shift) - 1)]).view(F32)
    limits = torch.tensor(reference.thresholds(signed))
    x = torch.cat([edges, near(limits), torch.rand(5000), 10.0 ** (-8.0 * torch.rand(5000)), torch.zeros(1)])
    values, last = x.view(torch.int32), entries.numel() - 1
    bucket = (values >> shift) - first
    entry = torch.where((bucket >= 0) & (bucket <= last), entries[bucket.clamp(0, last)], 0)
    assert_bitwise((entry + (values & ((1 << shift) - 1))) >> shift, torch.bucketize(x, limits, right=True).int())


@pytest.mark.parametrize(
    "betas",
    [(0.9, 0.999), (0.95, 0.95), (0.0, 0.999), (0.9, 0.0), (0.0, 0.0), (0.5, 0.25), (0.999, 0.99), (0.9999, 0.99999)],
    ids=str,
)
def test_scalars(betas):
    """Scalars at counts up to a million. beta^t by another route in float64 leaves no trace in float32."""
    counts = [0.0, 1.0, 2.0, 9.0, 31.0, 999.0, 54321.0, 999999.0]
    group = ADAMW._replace(beta1=betas[0], beta2=betas[1])
    slots = [make_slot(0, t=t) for t in counts]
    table = StepTable.of_slots(slots)
    table.step([slot.param for slot in slots], [group], torch.tensor(8.0, device=DEVICE))
    expected = torch.tensor([reference.scalars(group, t + 1.0, 8.0) for t in counts])
    if DEVICE.type == "cpu":
        assert_bitwise(table.tables.scalars, expected)
    else:
        torch.testing.assert_close(table.tables.scalars.cpu(), expected, rtol=1.2e-7, atol=0.0)
    assert [slot.step.item() for slot in slots] == [t + 1.0 for t in counts]
