"""The machine code that nvcc makes of the CUDA kernels, run on the CPU: the bits of their source in the simulator,
which other tests hold against the reference. What the simulator has in words of its own is looked at here alone:
instructions written as assembly, approximations, byte barriers, asynchronous copies, what ptxas makes of it all."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from adam_cases import ROUNDINGS
from onetrip.reference.adam import ZERO_CODE
from onetrip.reference.row_norm import NORM_NONE
from pairwise import pairwise

from tools.gpusim import row_norm as cudasim_row_norm
from tools.gpusim import softmax as cudasim_softmax
from tools.gpusim.adam import ADAM, ADAMW, Parameter, Step
from tools.gpusim.harness import Bug, Case, Pair, RowsCall, SimulatorFailure, cases_of, sources_with
from tools.sass import count_instructions
from tools.sass.machine_code import ARCHITECTURES, WARPS_FORWARD, WARPS_REVERSE, MachineCode, machine_code, missing_tool

pytestmark = [pytest.mark.slow, pytest.mark.promise("T7"), pytest.mark.promise("T6")]

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Every kernel once: rows of some lanes and of a block, in two, three and four chunks a thread; of groups of a block, of
# a cluster of 2 and of 8; wide; aligned and not. Both sides of every boundary between them are for the simulator.
ROW_NORM_SIZES = {
    "bf16": [
        (19, 64), (7, 100), (9, 192), (40, 256), (9, 257), (20, 512), (7, 768), (5, 1000), (2, 2304), (2, 4096),
        (3, 4097), (2, 10240), (2, 16391), (1, 33280),
    ],
    "f32": [(19, 64), (40, 256), (9, 512), (5, 1023), (5, 1024), (2, 9216), (1, 16391)],
    # 20 rows of 8 lanes: whole warps, as some lanes alone vote here, which the emulator rejects.
    "bf16-f32": [(20, 64), (40, 256), (20, 512), (7, 768), (2, 9216)],
}  # fmt: skip
EARLIER_ROW_NORM_SIZES = {  # of GPUs before Hopper
    "bf16": [(7, 100), (40, 256), (20, 512), (9, 1024), (2, 8200), (2, 16391)],
    "f32": [(9, 512), (5, 1023)],
    "bf16-f32": [(40, 256), (20, 512)],
}
SOFTMAX_SIZES = [
    ((2, 2, 9), 3), ((2, 3, 7), 49), ((2, 2, 9), 64), ((2, 2, 9), 256), ((1, 3, 5), 257), ((2, 1, 9), 512),
    ((1, 2, 5), 1000), ((2, 2, 3), 1024), ((1, 2, 2), 2049), ((2, 1, 2), 5000), ((2, 1, 1), 8200), ((2, 1, 2), 16392),
    ((1, 2, 2), 16391), ((1, 1, 2), 32768),
]  # fmt: skip
EARLIER_SOFTMAX_SIZES = [size for size in SOFTMAX_SIZES if size[1] not in (3, 64, 512, 8200, 32768)]
ADAM_SIZES = (1, 8, 127, 129, 1000, 4097)
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, 1e-38, 1e-30, -1e-20, 1e19, -3e38)


def _id(value: object) -> str:
    return f"sm_{value}" if value in ARCHITECTURES else str(value)


of_every_architecture = pytest.mark.parametrize("arch", ARCHITECTURES, ids=_id)


def _skip_unless_runnable(arch: int) -> None:
    reason = missing_tool(arch)
    if reason is not None:
        pytest.skip(reason)


def _pair(dtype: str) -> Pair:
    """The dtypes of row_norm's x and z: "bf16-f32", or one name for both."""
    x, _, z = dtype.partition("-")
    return DTYPES[x], DTYPES[z or x]


@functools.cache
def _code(family: str, dtype: str, arch: int) -> MachineCode:
    _skip_unless_runnable(arch)
    x_dtype, z_dtype = _pair(dtype)
    return machine_code(family, x_dtype, arch, z_dtype=z_dtype)


def _check_rows(code: MachineCode, calls: Sequence[RowsCall], folder: Path) -> None:
    found = code.outputs(cases_of(calls), folder)
    for call, forward, backward in zip(calls, found[::2], found[1::2], strict=True):
        call.check_forward(forward)
        call.check_backward(backward)


def _row_norm_calls(dtype: str, n_rows: int, n_cols: int) -> list[cudasim_row_norm.Call]:
    pair = _pair(dtype)
    calls = cudasim_row_norm.calls(pair, n_rows, n_cols)
    if n_cols > 4097:
        return [replace(calls[3], parameter_dtype=pair[0])] if n_cols > 16384 else [calls[0], calls[3]]
    return [*calls, replace(calls[3], shift=1)]


@pytest.mark.parametrize(
    ("arch", "dtype", "n_rows", "n_cols"),
    [
        (arch, dtype, *size)
        for arch in ARCHITECTURES
        for dtype, sizes in (ROW_NORM_SIZES if arch == 90 else EARLIER_ROW_NORM_SIZES).items()
        for size in sizes
    ],
    ids=_id,
)
def test_row_norm(arch: int, dtype: str, n_rows: int, n_cols: int, tmp_path: Path) -> None:
    calls = _row_norm_calls(dtype, n_rows, n_cols)
    _check_rows(_code("row_norm", dtype, arch), calls, tmp_path)


@pytest.mark.parametrize(
    ("arch", "size", "dtype"),
    [(90, size, dtype) for size in SOFTMAX_SIZES for dtype in ("f32", "bf16")]
    + [
        (arch, size, ("f32", "bf16")[(i + j) % 2])
        for i, arch in enumerate((70, 75, 80))
        for j, size in enumerate(EARLIER_SOFTMAX_SIZES)
    ],
    ids=_id,
)
def test_softmax(arch: int, dtype: str, size: tuple[tuple[int, int, int], int], tmp_path: Path) -> None:
    calls = cudasim_softmax.calls(DTYPES[dtype], *size)
    _check_rows(_code("softmax", dtype, arch), calls, tmp_path)


@of_every_architecture
@pytest.mark.parametrize("family", ["row_norm", "softmax"])
def test_float16(family: str, arch: int, tmp_path: Path) -> None:
    half = torch.float16
    calls = (
        cudasim_row_norm.calls((half, half), 5, 520)
        if family == "row_norm"
        else cudasim_softmax.calls(half, (2, 1, 3), 520)
    )
    _code(family, "f16", arch).outputs(cases_of(calls), tmp_path)


def _steps(dtype: torch.dtype, sizes: Sequence[int] = ADAM_SIZES) -> list[Step]:
    common = {"param": dtype, "grad": dtype}
    orders = (WARPS_FORWARD, WARPS_REVERSE)
    return [
        Step([Parameter(numel, **common, is_8bit=is_8bit, special=special)], groups=[group], orders=orders)
        for is_8bit in (True, False)
        for numel in sizes
        for group in (ADAMW, ADAM)
        for special in ((), SPECIAL)
    ]


def _check_steps(adam: MachineCode, steps: list[Step], folder: Path, error_ulps: int = 0) -> None:
    found, _ = adam.run([step.case() for step in steps], folder, error_ulps)
    for step, outputs in zip(steps, found, strict=True):
        step.check(outputs)


@pairwise(dtype=[*DTYPES], error_ulps=[0, 1, -1], arch={f"sm_{arch}": arch for arch in ARCHITECTURES})
def test_adam(dtype: str, error_ulps: int, arch: int, tmp_path: Path) -> None:
    """The reference's bits, however the GPU rounds its approximations: roots and quotients are exact all the same."""
    _check_steps(_code("adam", dtype, arch), _steps(DTYPES[dtype]), tmp_path, error_ulps)


@of_every_architecture
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_adam_roundings(name: str, arch: int, tmp_path: Path) -> None:
    """Residuals and random bits, in several chunks of a block and at the end of a tensor, with gradients not finite."""
    dtype = DTYPES[name]
    steps = [
        Step(
            [Parameter(n, dtype, grad, is_8bit, special=special, rounding=rounding)],
            groups=[group],
            orders=(WARPS_FORWARD, WARPS_REVERSE),
        )
        for of_dtype, rounding in ROUNDINGS
        if of_dtype == dtype
        for n, grad, is_8bit, special, group in (
            (9 * 4096 + 300, dtype, True, (), ADAMW),
            (4096, torch.float32, True, (), ADAM),
            (1000, dtype, True, SPECIAL, ADAM),
            (777, dtype, False, (), ADAM),
        )
    ]
    for step in steps:
        slot = step.slots[0]
        if slot.residual is not None:
            slot.param[::300], slot.residual[::300] = 0.0, -1
    _check_steps(_code("adam", name, arch), steps, tmp_path)


@of_every_architecture
def test_several_parameters(arch: int, tmp_path: Path) -> None:
    """One launch over tensors with groups, counters and learning rates of their own; all is skipped where a gradient is
    not finite."""
    _check_parameters(_code("adam", "bf16", arch), (7, 300, 4097), (0.0, 1.0), tmp_path)


@of_every_architecture
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_chunks_of_a_block(dtype: str, arch: int, tmp_path: Path) -> None:
    """Blocks that take several chunks each, of one tensor and of the next, with zeros between: 4 blocks, 37 chunks."""
    sizes = (70000, 1, 256, 12345, 8, 4096, 8192, 4096, 12288, 4096, 4097, 129)
    _check_parameters(_code("adam", dtype, arch), sizes, (0.0,), tmp_path, zeros=True, dtype=DTYPES[dtype])


def _check_parameters(
    adam: MachineCode,
    sizes: Sequence[int],
    found_inf: Sequence[float],
    folder: Path,
    zeros: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    parameters = [Parameter(n, dtype, dtype, True, counter=k % 2) for k, n in enumerate(sizes)]
    for found in found_inf:
        step = Step(
            parameters,
            groups=[ADAMW, ADAM._replace(lr=torch.tensor(0.02))],
            counters=(0, 1),
            grad_scale=8.0,
            found_inf=found,
            orders=(WARPS_FORWARD, WARPS_REVERSE),
        )
        if zeros:  # in a chunk amid others: of both moments, and of the gradient
            slot, grad = step.slots[0], step.grads[0]
            grad[20000:20300] = 0
            slot.exp_avg[20000:20300], slot.exp_avg_sq[20000:20300] = ZERO_CODE, 0
        _check_steps(adam, [step], folder)


def _aligned_softmax_cases(dtype: torch.dtype) -> list[Case]:
    """Cases of every path of aligned rows, with every tensor that a call may have. Some rows end within a thread's
    chunk."""
    calls = [
        cudasim_softmax.Call("sectors", (2, 1, 3), n_cols, dtype, dropout_p=0.1, orders=(WARPS_FORWARD,), **mask)
        for n_cols in (48, 256, 624, 4096, 9216)
        for mask in ({}, {"mask": dtype, "causal": True})
    ]
    # The gradient of a mask is float32, whatever the rows are.
    backward = [call for call in calls if call.mask is None or dtype == torch.float32]
    return [call.forward_case() for call in calls] + [call.backward_case() for call in backward]


def _sector_shares(code: MachineCode, cases: list[Case], folder: Path) -> list[dict[str, float]]:
    _, counts = code.run(cases, folder)
    return [count_instructions.sector_shares(count) for count in counts]


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_touches_whole_sectors(dtype: str, tmp_path: Path) -> None:
    """With every access of a warp that loads or stores vectors."""
    cases = _aligned_softmax_cases(DTYPES[dtype])
    shares = _sector_shares(_code("softmax", dtype, 90), cases, tmp_path)
    found = {(case.direction, case.numbers["n_cols"]): share for case, share in zip(cases, shares, strict=True)}
    assert all(set(share.values()) == {1.0} for share in shares), found


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_norm_touches_whole_sectors(dtype: str, backward: bool, tmp_path: Path) -> None:
    """As above; with parameters of the rows' dtype. Rows that no cluster takes are wide."""
    z = DTYPES[dtype]
    tensors = {"residual": True, "bias": True, "parameter_dtype": z, "store_z": True, "dropout_p": 0.1, "dz": True}
    calls = [
        cudasim_row_norm.Call("sectors", 5, n_cols, (z, z), orders=(WARPS_FORWARD,), clusters=clusters, **tensors)
        for n_cols, clusters in ((48, True), (256, True), (624, True), (4096, True), (10240, True), (16400, False))
    ]
    # Without a norm nothing is pipelined.
    calls += [replace(calls[2], norm=NORM_NONE, dz=False)]
    cases = [call.backward_case() if backward else call.forward_case() for call in calls]
    shares = _sector_shares(_code("row_norm", dtype, 90), cases, tmp_path)
    assert all(set(share.values()) == {1.0} for share in shares), shares


@pytest.mark.parametrize(
    ("pair", "dy"), [("bf16", torch.float32), ("bf16-f32", torch.float32), ("f32", torch.bfloat16)], ids=str
)
def test_gradients_of_another_dtype_than_the_rows_are_prefetched(pair: str, dy: torch.dtype, tmp_path: Path) -> None:
    """As those of the rows' dtype are, in every pipelined kernel: autocast mixes them."""
    calls = [
        cudasim_row_norm.Call("dy", 4, n_cols, _pair(pair), y_dtype=dy, orders=(WARPS_FORWARD,))
        for n_cols in (64, 256, 512, 9216)
    ]
    _, counts = _code("row_norm", pair, 90).run([call.backward_case() for call in calls], tmp_path)
    for call, count in zip(calls, counts, strict=True):
        assert any(opcode.startswith("LDGSTS") for opcode in count["instructions"]), call


@pytest.mark.parametrize("dtype", DTYPES)
def test_adam_touches_whole_sectors(dtype: str, tmp_path: Path) -> None:
    common = {"param": DTYPES[dtype], "grad": DTYPES[dtype]}
    steps = [
        Step([Parameter(8192, **common, is_8bit=is_8bit)], groups=[ADAMW], orders=(WARPS_FORWARD,))
        for is_8bit in (True, False)
    ]
    shares = _sector_shares(_code("adam", dtype, 90), [step.case() for step in steps], tmp_path)
    # The rest of the loads: what describes the chunks.
    assert all(share["stores"] == 1.0 and share["loads"] <= 1.01 for share in shares), shares


def test_counts_are_those_of_the_record(tmp_path: Path) -> None:
    """What a kernel takes does not grow unnoticed: within 2%, by the compiler of the record."""
    _skip_unless_runnable(90)
    record = json.loads(count_instructions.RECORDED.read_text())
    if record["nvcc"] != count_instructions.nvcc_version():
        pytest.skip(f"recorded with {record['nvcc']}")
    recorded = {tuple(row[key] for key in ("operator", "direction", "n_cols")): row for row in record["kernels"]}
    for counted in count_instructions.cases():
        if counted.n_cols in (512, None):
            row = count_instructions.count(counted, tmp_path)
            before = recorded[row["operator"], row["direction"], row["n_cols"]]
            for key in ("instructions", "loaded_bytes", "stored_bytes", "shared_cycles"):
                assert row[key] <= 1.02 * before[key], (before["operator"], before["direction"], key)


# --- Bugs put on purpose into code that only a GPU runs.


class DeviceBug(NamedTuple):
    family: str
    bug: Bug
    arch: int


def _platform(family: str, right: str, wrong: str, arch: int = 90) -> DeviceBug:
    return DeviceBug(family, Bug("platform.cuh", right, wrong), arch)


BUGS = {
    "root_not_corrected": _platform("adam", "fma.rn.f32 %0, rest, half, %0;", ""),
    "quotient_not_corrected": _platform("adam", "fma.rn.f32 %0, %3, rest, %0;", ""),
    "clamp_loses_the_sign": _platform("adam", "min.NaN.xorsign.abs.f32", "min.NaN.f32"),
    "clamp_drops_nan": _platform("adam", "min.NaN.xorsign.abs.f32", "min.xorsign.abs.f32"),
    "kept_and_dropped_exchanged": _platform("row_norm", "setp.ne.u32 kept", "setp.eq.u32 kept"),
    "copies_in_no_group": _platform("row_norm", '"cp.async.commit_group;"', '""'),
    "copies_not_waited_for": _platform("row_norm", '"cp.async.wait_group %0;" ::"n"(kPending)', '"" ::"n"(kPending)'),
    "barrier_for_two": _platform(
        "row_norm", "mbarrier.init.shared::cta.b64 [%0], 1;", "mbarrier.init.shared::cta.b64 [%0], 2;"
    ),
    "own_barrier_told": _platform("row_norm", '"r"(remote_address(barrier, rank))', '"r"(shared_address(barrier))'),
    "cluster_does_not_meet": _platform("row_norm", '"barrier.cluster.wait.acquire;"', '""'),
    "sm_80_clamp_loses_the_sign": _platform("adam", "copysignf(largest, value) : value", "largest : value", 80),
    "sm_80_copies_not_waited_for": _platform(
        "row_norm", '"cp.async.wait_group %0;" ::"n"(kPending)', '"" ::"n"(kPending)', 80
    ),
    "sm_75_largest_of_fewer_lanes": DeviceBug(
        "adam", Bug("reduce.cuh", "lane_mask = kWarpThreads / 4;", "lane_mask = kWarpThreads / 8;"), 75
    ),
    "no_power": _platform("softmax", '"ex2.approx.ftz.f32 %0, %1;"', '"mov.f32 %0, %1;"'),
}


def _bug_cases(family: str, arch: int) -> list[Case]:
    bf16 = torch.bfloat16
    if family == "softmax":
        return [cudasim_softmax.calls(bf16, (2, 1, 3), 512)[0].forward_case()]
    block, wide = (cudasim_row_norm.calls((bf16, bf16), 3, n_cols)[3] for n_cols in (512, 9216))
    return [block.forward_case(), block.backward_case(), *([wide.backward_case()] if arch >= 90 else [])]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name: str, tmp_path: Path) -> None:
    family, bug, arch = BUGS[name]
    _skip_unless_runnable(arch)
    # What is stored in 16 bits hides the last bits of what was computed.
    dtype = torch.float32 if family == "adam" else torch.bfloat16
    broken = machine_code(family, dtype, arch, sources_with(bug, tmp_path))
    with pytest.raises((SimulatorFailure, AssertionError)) as caught:
        if family == "adam":
            _check_steps(broken, _steps(dtype, (1000,)), tmp_path, error_ulps=1)
        else:
            broken.outputs(_bug_cases(family, arch), tmp_path)
    assert not any(words in str(caught.value) for words in ("unknown instruction", "no kernel"))
