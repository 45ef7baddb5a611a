"""Bugs put into the CUDA sources on purpose: each must be caught by what the simulator's tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cudasim_harness import Bug, SimulatorFailure, build, missing_tool, run, sources_with
from cudasim_row_norm import Call, check_backward, check_forward

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

PAIR = (torch.bfloat16, torch.float32)


BUGS = {
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


def caught(driver: Path, folder: Path) -> bool:
    # 1001 columns: rows start inside a Philox group, odd addresses, several warps a row. 70: the warp path.
    block = {"pair": PAIR, "residual": True, "bias": True, "dropout_p": 0.3, "store_z": True}
    chosen = [Call("wide", 21, 1001, **block), Call("aligned", 21, 1024, **block), Call("warp", 70, 70, **block)]
    try:
        outputs = run(driver, [case for call in chosen for case in (call.forward_case(), call.backward_case())], folder)
        for i, call in enumerate(chosen):
            check_forward(call, outputs[2 * i])
            check_backward(call, outputs[2 * i + 1])
    except SimulatorFailure:
        return True
    except AssertionError:
        return True
    return False


@pytest.fixture(scope="session")
def mutants(tmp_path_factory) -> Iterator[dict[str, Future[Path]]]:
    """A driver for each bug, and one without; compiled two at a time, without sanitizers, for one pair of dtypes."""
    pool = ThreadPoolExecutor(max_workers=2)

    def compile_with(name: str, bug: Bug | None) -> Path:
        return build([PAIR], sources_with(bug, tmp_path_factory.mktemp(name)), sanitize=False)

    yield {name: pool.submit(compile_with, name, bug) for name, bug in {"none": None, **BUGS}.items()}
    pool.shutdown(cancel_futures=True)


def test_right_source_passes(mutants: dict[str, Future[Path]], tmp_path: Path) -> None:
    assert not caught(mutants["none"].result(), tmp_path)


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(mutants: dict[str, Future[Path]], name: str, tmp_path: Path) -> None:
    assert caught(mutants[name].result(), tmp_path)
