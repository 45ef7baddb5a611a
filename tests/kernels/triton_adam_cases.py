"""What the Triton kernels of Adam must do, on whatever device they run: the bits of the reference.

test_triton_cases.py runs this file on the CPU, interpreted and as machine code, and on a GPU where there is one: in
processes of their own, because Triton decides at its import whether it interprets. The interpreter truncates float32 to
bfloat16, where it is to round to nearest; on a GPU codes may be one apart. Nothing else differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from adam_cases import ADAMW, GROUPS, RESIDUALS, ROUNDINGS, assert_same_bits
from onetrip import use_backend
from onetrip.kernels.adam import code_table
from onetrip.optim.table import StepTable
from onetrip.reference import adam as reference
from onetrip.reference.adam import Group, Slot
from onetrip.reference.rounding import Rounding, join
from pairwise import pairwise
from tolerances import assert_bitwise
from torch import Tensor
from triton_runner import DEVICE, INTERPRETED

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = float("inf"), float("nan")
PLAIN = ADAMW._replace(beta1=0.0, beta2=0.0, weight_decay=0.0)
"""m becomes the gradient, and v its square, whatever they were."""
KEY = 0x1234_5678_9ABC_DEF0


def _rounding_id(case: tuple[torch.dtype, Rounding]) -> str:
    dtype, rounding = case
    return f"{'f16' if dtype == F16 else 'bf16'}-{rounding.name.lower()}"


every_rounding = pytest.mark.parametrize(
    ("dtype", "rounding"), [pytest.param(*case, id=_rounding_id(case)) for case in ROUNDINGS]
)
every_residual = pytest.mark.parametrize(
    ("dtype", "rounding"),
    [pytest.param(*case, id=_rounding_id(case)) for case in ROUNDINGS if case[1] in RESIDUALS],
)


class Guarded(NamedTuple):
    """A tensor between elements that must not be written."""

    tensor: Tensor
    buffer: Tensor
    before: Tensor


_guarded: list[Guarded] = []


@pytest.fixture(autouse=True)
def nothing_is_written_beside_the_tensors():
    _guarded.clear()
    yield
    assert _guarded
    for tensor, buffer, before in _guarded:
        begin = tensor.storage_offset()
        for part in (slice(0, begin), slice(begin + tensor.numel(), None)):
            assert_bitwise(buffer[part], before[part])


def guarded(values: Tensor, shift: int = 0) -> Tensor:
    """On the device, `shift` elements after a multiple of 16 bytes."""
    buffer = torch.full((values.numel() + 64,), 77, dtype=values.dtype, device=DEVICE)
    tensor = buffer[32 + shift : 32 + shift + values.numel()]
    tensor.copy_(values)
    _guarded.append(Guarded(tensor, buffer, buffer.clone()))
    return tensor


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
    n_blocks = -(-n // reference.BLOCK)
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


def on_cpu(slots: Sequence[Slot]) -> list[Slot]:
    """Copies; what they share stays shared."""
    copies: dict[int, Tensor] = {}

    def copy(field: object) -> object:
        return copies.setdefault(id(field), field.detach().cpu().clone()) if isinstance(field, Tensor) else field

    return [Slot(*map(copy, slot)) for slot in slots]


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
    for slot, expected in zip(on_cpu(slots), truth, strict=True):
        if slot.rounding is not Rounding.NEAREST and DEVICE.type == "cpu":
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
) -> list[Slot]:
    """A step of both; returns the reference's slots."""
    truth = on_cpu(slots)
    numbers = [None if x is None else torch.tensor(x) for x in (grad_scale, found_inf)]
    reference.step(truth, [grad.cpu() for grad in grads], groups, *numbers)
    with use_backend("triton"):
        StepTable.of_slots(slots).step(grads, groups, *(None if x is None else x.to(DEVICE) for x in numbers))
    assert_same_slots(slots, truth)
    return truth


def randn(n: int, dtype: torch.dtype = F32, shift: int = 0) -> Tensor:
    return guarded(torch.randn(n).to(dtype), shift)


@pairwise(dtype=[F32, F16, BF16], grad_dtype=[F32, F16, BF16], is_8bit={"8bit": True, "32bit": False})
def test_dtypes(dtype, grad_dtype, is_8bit):
    """Two whole blocks and a part of one."""
    step_and_compare([make_slot(300, dtype, is_8bit)], [randn(300, grad_dtype)])


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1023, 1025, 4095, 4096, 4097])
@pytest.mark.parametrize(
    ("dtype", "is_8bit"), [(F32, True), (F16, True), (F32, False)], ids=["f32-8bit", "f16-8bit", "f32-32bit"]
)
def test_sizes(n, dtype, is_8bit):
    step_and_compare([make_slot(n, dtype, is_8bit)], [randn(n, dtype)])


@pytest.mark.parametrize("shifted", ["param", "exp_avg", "exp_avg_sq", "grad", "all"])
@pytest.mark.parametrize(("dtype", "is_8bit"), [(F32, True), (BF16, True), (F32, False)], ids=["f32", "bf16", "32bit"])
def test_misaligned_by_an_element(shifted, dtype, is_8bit):
    shifts = [int(shifted in (name, "all")) for name in ("param", "exp_avg", "exp_avg_sq", "grad")]
    step_and_compare([make_slot(300, dtype, is_8bit, shifts=tuple(shifts[:3]))], [randn(300, dtype, shifts[3])])


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
    ]
    table = StepTable.of_slots(slots)
    truth = on_cpu(slots)
    for _ in range(3):
        grads = [randn(slot.param.numel(), slot.param.dtype) for slot in slots]
        reference.step(truth, [grad.cpu() for grad in grads], groups)
        with use_backend("triton"):
            table.step(grads, groups)
    assert_same_slots(slots, truth)
    assert shared.item() == 10.0


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("is_8bit", [True, False], ids=["8bit", "32bit"])
def test_groups(name, is_8bit):
    group = GROUPS[name]
    if isinstance(group.lr, Tensor):
        group = group._replace(lr=group.lr.to(DEVICE))
    step_and_compare([make_slot(150, is_8bit=is_8bit)], [randn(150)], [group])


@pytest.mark.parametrize("grad_scale", [None, 1024.0, 3.0, 1e-45])
def test_gradients_are_divided_by_their_scale(grad_scale):
    """The last one's reciprocal is infinite, and 0 times it, past the end of the tensor, not a number."""
    step_and_compare([make_slot(150)], [randn(150)], grad_scale=grad_scale, found_inf=0.0)


@pytest.mark.parametrize("found_inf", [1.0, 0.5])
def test_a_step_with_found_inf_changes_nothing(found_inf):
    slots = [make_slot(300), make_slot(20, F16, False), make_slot(20, BF16, rounding=Rounding.RESIDUAL_16)]
    grads = [randn(300), randn(20, F16), randn(20, BF16)]
    grads[0][7] = NAN
    before = on_cpu(slots)
    step_and_compare(slots, grads, grad_scale=2.0, found_inf=found_inf)
    for slot, old in zip(slots, before, strict=True):
        for actual, wanted in zip(slot, old, strict=True):
            if isinstance(wanted, Tensor):
                assert_bitwise(actual.cpu(), wanted)


@pytest.mark.parametrize("is_8bit", [True, False], ids=["8bit", "32bit"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_gradient_that_is_not_finite_spoils_its_block_and_no_other(bad, is_8bit):
    slot, grad = make_slot(300, is_8bit=is_8bit), randn(300)
    grad[[130, 131]] = bad
    step_and_compare([slot], [grad])
    assert slot.param.isfinite().logical_not().nonzero().flatten().tolist() == [130, 131]
    if is_8bit:
        assert slot.exp_avg_scale.isfinite().tolist() == [True, False, True]
        assert slot.exp_avg_sq_scale.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("is_8bit", [True, False], ids=["8bit", "32bit"])
def test_a_parameter_that_is_infinite_leaves_its_states_finite(is_8bit):
    """Decoupled decay: nothing of the parameter, not even 0 times it, goes into the gradient."""
    slot = make_slot(150, is_8bit=is_8bit)
    slot.param[3] = INF
    step_and_compare([slot], [randn(150)])
    assert (slot.exp_avg_scale if is_8bit else slot.exp_avg).isfinite().all()


@pytest.mark.parametrize("is_8bit", [True, False], ids=["8bit", "32bit"])
def test_zero_gradients_of_a_new_parameter(is_8bit):
    slot = make_slot(150, is_8bit=is_8bit, t=0.0)
    slot.exp_avg.fill_(127 if is_8bit else 0)
    slot.exp_avg_sq.zero_()
    for scale in (slot.exp_avg_scale, slot.exp_avg_sq_scale) if is_8bit else ():
        scale.zero_()
    before = slot.param.clone()
    step_and_compare([slot], [guarded(torch.zeros(150))], [ADAMW._replace(weight_decay=0.0)])
    assert_bitwise(slot.param, before)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-39, 2.0**-126, 1e-30, 1e-19, 1e10, 1e19, 3e38])
def test_tiny_and_huge_gradients(magnitude):
    """Scales below 2^-126, squares below the least number and above the largest."""
    step_and_compare([make_slot(128)], [guarded(magnitude * torch.randn(128).clamp(-1.0, 1.0))], [PLAIN])


@every_rounding
@pytest.mark.parametrize("is_8bit", [True, False], ids=["8bit", "32bit"])
def test_roundings(dtype, rounding, is_8bit):
    """Sizes on both sides of a block, of two, and of a program's part of a chunk."""
    sizes = (127, 257, 1023, 1025)
    slots = [make_slot(n, dtype, is_8bit, t=float(n), rounding=rounding) for n in sizes]
    step_and_compare(slots, [randn(n, dtype) for n in sizes], [ADAMW._replace(weight_decay=0.5, decoupled=is_8bit)])


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


@every_residual
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


@pytest.mark.parametrize(
    ("rounding", "shifted"),
    [
        (Rounding.RESIDUAL_8, "residual"),
        (Rounding.RESIDUAL_16, "residual"),
        (Rounding.RESIDUAL_16, "param"),
        (Rounding.STOCHASTIC, "param"),
    ],
    ids=["int8", "int16", "int16-param", "stochastic-param"],
)
def test_roundings_misaligned_by_an_element(rounding, shifted):
    shifts = {"residual_shift": 1} if shifted == "residual" else {"shifts": (1, 0, 0)}
    step_and_compare([make_slot(300, BF16, rounding=rounding, **shifts)], [randn(300, BF16)])


@pytest.mark.parametrize("is_8bit", [True, False], ids=["8bit", "32bit"])
def test_random_bits_past_2_to_the_35_elements(is_8bit):
    """Part of a parameter, which starts there."""
    first = 2**38 + 3 * 128
    slot, grad = make_slot(300, BF16, is_8bit, t=99.0, rounding=Rounding.STOCHASTIC), randn(300, BF16)
    truth = [slot._replace(random_bits=(KEY, first)) for slot in on_cpu([slot])]
    reference.step(truth, [grad.cpu()], [ADAMW])
    table = StepTable.of_slots([slot])
    with use_backend("triton"):
        assert table.prepare([grad])
        table.tables.tensors[0, 8] = first
        table.launch([ADAMW])
    assert_same_slots([slot._replace(random_bits=(KEY, first))], truth)


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


def test_every_code_comes_back_from_what_it_stands_for():
    """Q2: a block's scale is its largest, 1, which takes the place of the 0 among the lower half of the codes."""
    signed, unsigned = torch.tensor(reference.code_map(True)), torch.tensor(reference.code_map(False))
    signed[127], unsigned[0] = 1.0, 1.0
    slot = make_slot(640)
    step_and_compare([slot], [guarded(torch.cat([signed, unsigned, torch.ones(128)]))], [PLAIN])
    assert slot.exp_avg[:256].tolist() == [*range(127), 255, *range(128, 256)]
    assert slot.exp_avg_sq[256:512].tolist() == [255, *range(1, 256)]


def test_a_square_root_above_zero_never_gets_code_zero():
    """Q5."""
    grad = guarded(torch.full((256,), 1e-12))
    grad[3], grad[200], grad[9] = 1.0, 1e3, 0.0
    slot = make_slot(256)
    step_and_compare([slot], [grad], [PLAIN])
    assert (slot.exp_avg_sq == 0).nonzero().flatten().tolist() == [9]


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_the_table_of_codes_is_exact(signed):
    """At every bucket's first and last number, near every threshold, and for ten thousand others in [0, 1]."""
    guarded(torch.zeros(1))
    shift, first, entries = code_table(signed)
    edges = (first + torch.arange(entries.numel(), dtype=torch.int32)) << shift
    edges = torch.cat([edges, edges + ((1 << shift) - 1)]).view(F32)
    limits = torch.tensor(reference.thresholds(signed))
    x = torch.cat([edges, near(limits), torch.rand(5000), 10.0 ** (-8.0 * torch.rand(5000)), torch.zeros(1)])
    bits = x.view(torch.int32)
    bucket = (bits >> shift) - first
    known = (bucket >= 0) & (bucket < entries.numel())
    entry = torch.where(known, entries[bucket.clamp(0, entries.numel() - 1)], 0)
    assert_bitwise((entry + (bits & ((1 << shift) - 1))) >> shift, torch.bucketize(x, limits, right=True).int())


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
    with use_backend("triton"):
        table.step([slot.param for slot in slots], [group], torch.tensor(8.0, device=DEVICE))
    expected = torch.tensor([reference.scalars(group, t + 1.0, 8.0) for t in counts])
    if DEVICE.type == "cpu":
        assert_bitwise(table.tables.scalars, expected)
    else:
        torch.testing.assert_close(table.tables.scalars.cpu(), expected, rtol=1.2e-7, atol=0.0)
    assert [slot.step.item() for slot in slots] == [t + 1.0 for t in counts]
