"""The CUDA kernels of Adam, run thread by thread on the CPU under AddressSanitizer and UBSan: the reference's bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adam_cases import DTYPE_IDS, ROUNDINGS
from onetrip.reference.adam import Group, thresholds
from onetrip.reference.rounding import Rounding

from tools.gpusim.adam import ADAM, ADAMW, Parameter, Step
from tools.gpusim.harness import assert_same_bits, assert_same_outputs, build, missing_tool, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool())),
    pytest.mark.promise("adam bits"),
]

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SIZES = (1, 7, 8, 9, 127, 128, 129, 255, 257, 1000, 4095, 4096, 4097)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
EXTREMES = (0.0, -0.0, 1e-45, 1e-38, 1e-30, -1e-20, 1e19, -3e38)


@pytest.fixture
def driver() -> Callable[[str], Path]:
    """The driver of a parameter dtype, for every gradient dtype. Compiled when asked for."""
    return lambda name: build("adam", [(DTYPES[name], grad) for grad in DTYPES.values()])


def _check(driver: Path, steps: list[Step], folder: Path) -> None:
    for step, outputs in zip(steps, run(driver, [step.case() for step in steps], folder), strict=True):
        step.check(outputs)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("param", DTYPES)
def test_matches_reference(driver, param: str, grad: str, bits: int, tmp_path: Path) -> None:
    """AdamW and Adam with L2 decay, at sizes on both sides of every boundary."""
    common = {"param": DTYPES[param], "grad": DTYPES[grad], "is_8bit": bits == 8}
    steps = [Step([Parameter(numel, **common)], groups=[group]) for numel in SIZES for group in (ADAMW, ADAM)]
    _check(driver(param), steps, tmp_path)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("special", [NOT_FINITE, EXTREMES], ids=["not_finite", "extreme"])
@pytest.mark.parametrize("param", DTYPES)
def test_special_gradients(driver, param: str, special: tuple[float, ...], bits: int, tmp_path: Path) -> None:
    """NaN, Inf, subnormals and squares that overflow come through as the reference has them, block by block."""
    common = {"param": DTYPES[param], "is_8bit": bits == 8}
    steps = [
        Step([Parameter(1000, **common, special=special[:n])], groups=[group])
        for n in range(1, len(special) + 1)
        for group in (ADAMW, ADAM)
    ]
    _check(driver(param), steps, tmp_path)


@pytest.mark.parametrize("param", DTYPES)
def test_same_bits_wherever_tensors_lie(driver, param: str, tmp_path: Path) -> None:
    for bits in (8, 32):
        aligned = Parameter(4500, DTYPES[param], DTYPES[param], bits == 8)
        steps = [Step([replace(aligned, shift=shift)]) for shift in (0, 1, 3, 8)]
        outputs = run(driver(param), [step.case() for step in steps], tmp_path)
        for step, other in zip(steps[1:], outputs[1:], strict=True):
            assert_same_outputs(f"shift {step.parameters[0].shift}", other, outputs[0])


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    ROUNDINGS,
    ids=[f"{DTYPE_IDS[dtype]}-{rounding.name.lower()}" for dtype, rounding in ROUNDINGS],
)
def test_roundings(driver, dtype: torch.dtype, rounding: Rounding, bits: int, tmp_path: Path) -> None:
    """Residuals and random bits: at the ends of parts, off aligned addresses, with L2 decay, of gradients that are zero
    or not finite, of weights that were set since, of updates that overflow, and chunk after chunk."""
    common = {"param": dtype, "grad": dtype, "is_8bit": bits == 8, "rounding": rounding}
    steps = [
        Step([Parameter(n, **common | fields)], groups=[group], orders=orders)
        for n, fields, group, orders in (
            (1, {}, ADAMW, (0,)),
            (255, {"grad": torch.float32}, ADAM, (0, 5)),
            (4097, {}, ADAMW, (0, 4)),
            (520, {"grad": torch.float32}, ADAMW, (0, 3)),
            (777, {"shift": 1}, ADAM, (0,)),
            (776, {"shift": 8}, ADAMW, (0,)),
            (512, {"special": (0.0, *NOT_FINITE)}, ADAM, (0, 5)),
            (1000, {"special": EXTREMES}, ADAMW, (0,)),
            (512, {}, ADAMW._replace(lr=torch.finfo(dtype).max / 4), (0, 5)),
            (512, {}, ADAM, (0,)),
        )
    ]
    if bits == 8:  # more chunks than there are blocks
        steps.append(Step([Parameter(9 * 4096, **common)], orders=(4,)))
    steps[3].grads[0].view(torch.int32)[7] = 0x7FFF_FFFF  # the NaN that GPUs compute
    for step in steps[-2:]:
        slot = step.slots[0]
        for i, weight in enumerate((0.0, -0.0, 0.0, -0.0, float("inf"), float("nan"))):
            slot.param[i] = weight
            if slot.residual is not None:
                slot.residual[i] = (-1, 1, -77, 77)[i % 4]
    _check(driver(DTYPE_IDS[dtype]), steps, tmp_path)


def _around(values: list[float]) -> list[float]:
    """Each number, the one below it and the one above it."""
    middle = torch.tensor(values)
    zero, infinity = torch.zeros_like(middle), torch.full_like(middle, float("inf"))
    return torch.stack((torch.nextafter(middle, zero), middle, torch.nextafter(middle, infinity)), 1).view(-1).tolist()


@pytest.mark.promise("Q2")
@pytest.mark.parametrize("signed", [True, False], ids=["exp_avg", "exp_avg_sq"])
def test_codes_change_exactly_at_the_thresholds(driver, signed: bool, tmp_path: Path) -> None:
    """Gradients on both sides of every threshold, in blocks of scale 1; betas 0 pass them through as the moments."""
    edges = _around([value for value in thresholds(signed) if value < 1.0])
    edges = edges + [-value for value in edges]
    gradients: list[float] = []
    for i in range(0, len(edges), 127):
        gradients += [1.0, *edges[i : i + 127]]
    group = Group(1e-2, 0.0, 0.0, 1e-8, 0.0, decoupled=True, maximize=False)
    step = Step([Parameter(len(gradients), grads=tuple(gradients))], groups=[group])
    (outputs,) = run(driver("f32"), [step.case()], tmp_path)
    codes = set((outputs["exp_avg.0"] if signed else outputs["exp_avg_sq.0"]).tolist())
    assert len(codes) >= (255 if signed else 254)
    step.check(outputs)


def test_many_parameters_groups_and_kinds_in_one_call(driver, tmp_path: Path) -> None:
    """Every gradient dtype and state at once; more groups than one launch prepares; an lr in memory; one counter for
    parts of a parameter; an empty parameter."""
    groups = [ADAMW._replace(lr=1e-3 * (i + 1), beta1=0.5 + i / 200, maximize=i % 2 == 1) for i in range(70)]
    groups[1] = ADAM._replace(lr=torch.tensor(0.03))
    groups[69] = ADAM._replace(weight_decay=0.0)
    parameters = [
        Parameter(1 + 61 * i, torch.bfloat16, grad, is_8bit, counter=i)
        for i, (grad, is_8bit) in enumerate(itertools.product(3 * [*DTYPES.values()], (True, False)))
    ]
    parameters += [Parameter(40, torch.bfloat16, counter=i) for i in range(18, 70)]
    parameters += [Parameter(n, torch.bfloat16, counter=counter) for n, counter in ((9000, 5), (1280, 5), (0, 6))]
    step = Step(parameters, groups, counters=range(70), steps_before=0.0, orders=(0, 5))
    _check(driver("bf16"), [step], tmp_path)


@pytest.mark.parametrize("bits", [8, 32])
def test_found_inf_leaves_everything(driver, bits: int, tmp_path: Path) -> None:
    parameters = [Parameter(1000, is_8bit=bits == 8, special=NOT_FINITE)]
    skipped = Step(parameters, found_inf=1.0)
    before = {name: tensor.clone() for name, (tensor, _) in skipped.updated().items()}
    (outputs,) = run(driver("f32"), [skipped.case()], tmp_path)
    for name, tensor in before.items():
        assert_same_bits(name, outputs[name], tensor)
    _check(driver("f32"), [Step([Parameter(1000, is_8bit=bits == 8)], found_inf=0.0, grad_scale=1024.0)], tmp_path)


def test_steps_follow_one_another(driver, tmp_path: Path) -> None:
    """Ten steps from nothing: the states that one leaves are what the next begins with."""
    step = Step([Parameter(300, torch.bfloat16, torch.bfloat16)], steps_before=0.0, orders=(4,))
    for tensor in (step.slots[0].exp_avg_scale, step.slots[0].exp_avg_sq_scale):
        assert tensor is not None
        tensor.zero_()
    for i in range(10):
        step.grads[0].copy_(torch.randn(300, generator=torch.Generator().manual_seed(i)))
        (outputs,) = run(driver("bf16"), [step.case()], tmp_path)
        step.check(outputs)


def test_nothing_to_do(driver, tmp_path: Path) -> None:
    _check(driver("f32"), [Step([], counters=()), Step([Parameter(0)])], tmp_path)
