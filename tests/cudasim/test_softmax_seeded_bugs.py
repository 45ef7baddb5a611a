"""Bugs put into the CUDA sources of softmax on purpose: each must be caught by what the simulator's tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cudasim_harness import Bug, SimulatorFailure, build_softmax, missing_tool, run, sources_with
from cudasim_softmax import Call, check_backward, check_forward

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

FORWARD, BACKWARD = "softmax_forward.cuh", "softmax_backward.cuh"
BUGS = {
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


def caught(driver: Path, folder: Path) -> bool:
    padding = {"dtype": torch.bfloat16, "mask": torch.bool, "mask_has": (True, False, True, True), "dropout_p": 0.3}
    bias = {"dtype": torch.bfloat16, "mask": torch.float32, "mask_has": (False, True, False, True), "dropout_p": 0.3}
    chosen = [
        Call("causal", (2, 3, 5), 1001, **padding, causal=True),
        Call("bias", (5, 2, 69), 300, **bias),
        Call("wide", (2, 1, 1), 16392, **padding, orders=(0,)),
    ]
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
    """A driver for each bug, and one without; compiled two at a time, without sanitizers, for one dtype."""
    pool = ThreadPoolExecutor(max_workers=2)

    def compile_with(name: str, bug: Bug | None) -> Path:
        return build_softmax([torch.bfloat16], sources_with(bug, tmp_path_factory.mktemp(name)), sanitize=False)

    yield {name: pool.submit(compile_with, name, bug) for name, bug in {"none": None, **BUGS}.items()}
    pool.shutdown(cancel_futures=True)


def test_right_source_passes(mutants: dict[str, Future[Path]], tmp_path: Path) -> None:
    assert not caught(mutants["none"].result(), tmp_path)


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(mutants: dict[str, Future[Path]], name: str, tmp_path: Path) -> None:
    assert caught(mutants[name].result(), tmp_path)
