"""Bugs put into the CUDA sources on purpose: each must be caught by what the simulator's tests look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import cudasim_row_norm
import cudasim_softmax
import pytest
import torch
from cudasim_harness import Bug, build, missing_tool, run, sources_with

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

ROW_NORM_BUGS = {
    "no_barrier_in_the_sum": Bug("reduce.cuh", "named_barrier(1 + group, row_threads_);", ";"),
    "one_buffer_for_every_sum": Bug("reduce.cuh", "turn_ ^= 1;", ";"),
    "sum_leaves_out_half_a_warp": Bug("reduce.cuh", "lane_mask = kThreads / 2;", "lane_mask = kThreads / 4;"),
    "one_column_too_many": Bug("vec.cuh", "const Col left = n_cols - col;", "const Col left = n_cols - col + 1;"),
    "halves_of_a_word_exchanged": Bug("vec.cuh", "<< (i % 2 * 16)", "<< ((i + 1) % 2 * 16)"),
    "philox_lane_off_by_one": Bug("dropout.cuh", "first % 4)", "(first + 1) % 4)"),
    "philox_group_missing": Bug("dropout.cuh", "(shift != 0 ? 1 : 0)", "0"),
    "variance_counts_padding": Bug(
        "row_norm_forward.cuh", "inside(i, valid, kVectorAccess) ? value[i] - mean : 0.0f", "value[i] - mean"
    ),
    "mean_and_rstd_exchanged": Bug(
        "row_norm_forward.cuh", "store_statistics(args, row, mean, rstd);", "store_statistics(args, row, rstd, mean);"
    ),
    "last_rows_dropped": Bug("launch.cuh", "ceil_div(n_rows, rows_per_block)", "(n_rows / rows_per_block)"),
    "groups_added_without_barrier": Bug(
        "row_norm_backward.cuh",
        "buffer = sums.publish();\n    __syncthreads();",
        "buffer = sums.publish();",
    ),
    "sums_of_the_last_group_lost": Bug("row_norm_backward.cuh", "j < n_groups; ++j)", "j < n_groups - 1; ++j)"),
    "gradient_means_exchanged": Bug("row_norm_backward.cuh", "n[i] * means.x - means.y", "n[i] * means.y - means.x"),
}

FORWARD, BACKWARD = "softmax_forward.cuh", "softmax_backward.cuh"
SOFTMAX_BUGS = {
    "no_barrier_between_warps": Bug(
        FORWARD, "make_float2(largest, sum);\n    __syncthreads();", "make_float2(largest, sum);"
    ),
    "hidden_rows_divide_by_zero": Bug(FORWARD, "sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum"),
    "masked_rows_subtract_infinity": Bug(FORWARD, "largest == minus_infinity() ? 0.0f : largest", "largest"),
    "causal_off_by_one": Bug(FORWARD, "divide(query) + 1 - args.n_queries", "divide(query) - args.n_queries"),
    "mask_dimensions_exchanged": Bug(FORWARD, "divide(rest) * rows.strides[k]", "divide(rest) * rows.strides[4 - k]"),
    "sign_set_where_kept": Bug(FORWARD, "!= 0 ? value[i] : -value[i]", "== 0 ? value[i] : -value[i]"),
    "wide_sum_not_rescaled": Bug(FORWARD, "fmaf(sum, exponential(before, subtrahend), chunk_sum)", "sum + chunk_sum"),
    "sums_read_without_barrier": Bug(BACKWARD, "= sum[j];\n  __syncthreads();", "= sum[j];"),
    "last_part_lost": Bug(BACKWARD, "part < n_parts; part += n_warps", "part + 1 < n_parts; part += n_warps"),
    "sharing_rows_do_not_wrap": Bug(BACKWARD, "    inner_ = 0;\n", ""),
    "dropped_gradient_kept": Bug(BACKWARD, "< 0 ? 0.0f : __fmul_rn", "< 0 ? dp[i] : __fmul_rn"),
}


def _check_pairs(driver: Path, calls: Sequence, family, folder: Path) -> None:
    """Forward and backward of each call."""
    outputs = run(driver, [case for call in calls for case in (call.forward_case(), call.backward_case())], folder)
    for i, call in enumerate(calls):
        family.check_forward(call, outputs[2 * i])
        family.check_backward(call, outputs[2 * i + 1])


ROW_NORM_PAIR = (torch.bfloat16, torch.float32)


def check_row_norm(driver: Path, folder: Path) -> None:
    # 1001 columns: rows start inside a Philox group, odd addresses, several warps a row. 70: the warp path.
    Call = cudasim_row_norm.Call
    block = {"pair": ROW_NORM_PAIR, "residual": True, "bias": True, "dropout_p": 0.3, "store_z": True}
    chosen = [Call("wide", 21, 1001, **block), Call("aligned", 21, 1024, **block), Call("warp", 70, 70, **block)]
    _check_pairs(driver, chosen, cudasim_row_norm, folder)


def check_softmax(driver: Path, folder: Path) -> None:
    Call = cudasim_softmax.Call
    padding = {"dtype": torch.bfloat16, "mask": torch.bool, "mask_has": (True, False, True, True), "dropout_p": 0.3}
    bias = {"dtype": torch.bfloat16, "mask": torch.float32, "mask_has": (False, True, False, True), "dropout_p": 0.3}
    chosen = [
        Call("causal", (2, 3, 5), 1001, **padding, causal=True),
        Call("bias", (5, 2, 69), 300, **bias),
        Call("wide", (2, 1, 1), 16392, **padding, orders=(0,)),
    ]
    _check_pairs(driver, chosen, cudasim_softmax, folder)


class Family(NamedTuple):
    """What a family's drivers are compiled for, its bugs, and what must catch them."""

    dtypes: tuple[torch.dtype, ...]
    bugs: dict[str, Bug]
    check: Callable[[Path, Path], None]


FAMILIES = {
    "row_norm": Family(ROW_NORM_PAIR, ROW_NORM_BUGS, check_row_norm),
    "softmax": Family((torch.bfloat16,), SOFTMAX_BUGS, check_softmax),
}
Mutants = Callable[[str, str | None], Path]


@pytest.fixture(scope="session")
def mutants(tmp_path_factory) -> Iterator[Mutants]:
    """The driver of a family with one of its bugs, or with none. A family's are compiled from the first use on, two at
    a time, without sanitizers, for one kind of dtypes."""
    pool = ThreadPoolExecutor(max_workers=2)
    drivers: dict[tuple[str, str | None], Future[Path]] = {}

    def compile_with(family: str, bug: Bug | None) -> Path:
        return build(
            family, [FAMILIES[family].dtypes], sources_with(bug, tmp_path_factory.mktemp(family)), sanitize=False
        )

    def of(family: str, name: str | None) -> Path:
        if (family, None) not in drivers:
            for other, bug in {None: None, **FAMILIES[family].bugs}.items():
                drivers[family, other] = pool.submit(compile_with, family, bug)
        return drivers[family, name].result()

    yield of
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_right_source_passes(mutants: Mutants, family: str, tmp_path: Path) -> None:
    FAMILIES[family].check(mutants(family, None), tmp_path)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in FAMILIES for name in FAMILIES[family].bugs])
def test_bug_is_caught(mutants: Mutants, family: str, name: str, tmp_path: Path) -> None:
    driver = mutants(family, name)
    with pytest.raises(AssertionError):
        FAMILIES[family].check(driver, tmp_path)
