"""What the tests of the native CPU kernels share, and which kernels those of every backend run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, TypeVar

import pytest
import torch
from onetrip import use_backend
from onetrip.ops.common.backends import native
from onetrip.reference.row_norm import NORM_LAYER, NORM_NONE, NORM_RMS, RowNormPlan
from tolerances import bits
from torch import Tensor
from triton_runner import RUNS_TRITON

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPSILON = {F32: 1e-6, F16: 2**-10, BF16: 2**-7}
Result = TypeVar("Result")
NORM_IDS = {NORM_NONE: "none", NORM_LAYER: "layer", NORM_RMS: "rms"}


def row_norm_plan(norm: int = NORM_LAYER, **changes) -> RowNormPlan:
    plan = RowNormPlan(
        norm=norm,
        eps=1e-5,
        weight_offset=0.0,
        dropout_p=0.0,
        z_dtype=F32,
        n_dtype=F32,
        y_dtype=F32,
        store_z=True,
        center_z=False,
        store_stats=norm != NORM_NONE,
    )
    return plan._replace(**changes)


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + shape[-1])
    return torch.randn(shape, generator=generator).to(dtype)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


@contextmanager
def cpu_level(name: str) -> Iterator[None]:
    """With the kernels of one instruction-set level; skips the test where there are none."""
    library = native()
    if library is None:
        pytest.skip("the native library was not built")
    best = library.cpu_level()
    if not library.set_cpu_level(name):
        pytest.skip(f"this machine or build lacks {name}")
    assert library.cpu_level() == name
    try:
        yield
    finally:
        assert library.set_cpu_level(best)


cpu_only = pytest.mark.skipif(RUNS_TRITON or native() is None, reason="of the CPU kernels")
triton_only = pytest.mark.skipif(not RUNS_TRITON, reason="of Triton's kernels, which test_triton_cases.py runs")


def kernels_fixture(*more_levels: str) -> Any:
    """A fixture: the CPU kernels at each level, or Triton's in the processes of test_triton_cases.py; in use during the
    test. more_levels: for which the family has kernels of its own."""

    @pytest.fixture(params=["triton"] if RUNS_TRITON else ["baseline", "avx2", "avx512", *more_levels])
    def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
        in_use = nullcontext() if RUNS_TRITON else cpu_level(request.param)
        with in_use, use_backend("triton" if RUNS_TRITON else "cpu"):
            yield request.param

    return kernels


def kernels_of(family: str) -> Any:
    """Their module, with the functions of reference."""
    return import_module(f"onetrip.kernels.{family}" if RUNS_TRITON else f"onetrip.ops.{family}_native")


def at_levels_with_fused_multiply_add(run: Callable[[], Result]) -> list[Result]:
    """What `run` gives at each of them: they have the same bits."""
    results = []
    for name in ("avx2", "avx512"):
        with cpu_level(name):
            results.append(run())
    return results


def with_each_number_of_threads(run: Callable[[], Result]) -> list[Result]:
    """What `run` gives with 1, 2, 3 and 65 threads, one more than run_tasks has parts."""
    before, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 65):
            torch.set_num_threads(n)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    return results
