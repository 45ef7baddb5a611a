"""Runs Triton's kernels interpreted, as machine code on the CPU, and on a GPU, each in processes of their own: Triton
decides at its import whether it interprets.

triton_<family>_cases.py are for Triton alone; the files test_<family>.py run the CPU's kernels where they are not run
from here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from onetrip.kernels import interpreter_fault
from simulators import triton_emulator_missing
from triton_runner import COMPILE, INTERPRET, run_cases, run_emulated


class Cases(NamedTuple):
    """Selections of a file of cases, as pytest's -k."""

    quick: str
    """Each kernel, in rows of one tile and wide ones: what a change is tried with first."""
    compiled: str
    """Run as machine code: every kernel and dtype; all of the cases take minutes to compile."""
    parts: tuple[str, ...] = ("test",)
    """Parts of all cases on a GPU: one process each."""


FAMILIES = {
    "row_norm": Cases(
        "(test_forward or test_backward) and (-64- or -1025-)",
        "(test_forward or test_backward) and (-64- or rms-1025) or test_wide_rows and (129 or 320) or test_cast_orders"
        " or centred or mask_past or threshold or bad_values or dropped or 2_to_the_31",
        ("test_forward or test_backward", "not test_forward and not test_backward"),
    ),
    "softmax": Cases(
        "(test_forward or test_backward) and (64- or 1025-) or test_mask_gradient_widths and f32 or hidden_columns",
        "(test_forward or test_backward) and (64- or 1025-) or wide-row and (test_masks or test_mask_gradient)"
        " or dropped or hidden_columns or without_a_visible or bad_values or 2_to_the_31",
        ("test_mask", "not test_mask"),
    ),
    "adam": Cases(
        "test_dtypes or test_tensors_groups or (test_sizes and 129) or (test_roundings and 8bit and bf16)", "test"
    ),
    "cross_entropy": Cases(
        "test_losses and many and (-3- or -100-) or special_rows and one and f32 or test_multiply and 1000 or by_1",
        "test_losses and (-64- or -100-) or special_rows and f32 or test_multiply and 20001",
    ),
    "glu": Cases(
        "test_widths and (64-f32 or 1030-bf16) or test_dropout and 64-f32 or test_clamped and 1030-bf16"
        " or test_one_gradient or test_partition",
        # Every activation and every dtype, in rows of one tile and of two.
        "test_widths and (64-f32 or 64-bf16 or 1030-) or test_dropout and 64-f32 or test_strides"
        " or test_packed and 64 or test_clamped and 1030-bf16 or test_one_gradient or special_values or partial_sums",
    ),
    "rotary": Cases(
        "D6-4 or test_one_of_the_two",
        # Both forms of a pair, columns that are copied, sizes that are no multiples of a tile's.
        "test_every_width_and_dtype and f32 and (D6-4 or D80-20) or special_values or beside_the_result",
    ),
    "moe": Cases(
        "test_widths_and_dtypes and (N33 or N64) or test_one_gradient",
        # Rows of one tile and of several; each dtype.
        "test_widths_and_dtypes and (N64 or N2100) or test_one_gradient or out_of_range or 2_to_the_31",
    ),
}
EAGER_CALLS = Path(__file__).parents[1] / "ops" / "test_eager_backward.py"
CALLS = "test_eager_backward and triton and not bf16"
QUICK_CALLS = "(dropout and 5 or alone or 2 and 7 and 16)"
"""With more dimensions than one."""
EACH_PART = pytest.mark.parametrize(
    ("family", "part"),
    [
        pytest.param(family, part, id=f"{family}-{i}")
        for family, cases in FAMILIES.items()
        for i, part in enumerate(cases.parts)
    ],
)


def file_of(family: str) -> Path:
    pytest.importorskip("triton")
    for_all = Path(__file__).with_name(f"test_{family}.py")
    return for_all if for_all.exists() else for_all.with_name(f"triton_{family}_cases.py")


@pytest.mark.promise("adam bits")
def test_interpreted_quickly() -> None:
    """In one process: importing takes as long as the cases of a family."""
    chosen = " or ".join(f"{file_of(family).name} and ({cases.quick})" for family, cases in FAMILIES.items())
    files = [*(file_of(family) for family in FAMILIES), EAGER_CALLS]
    run_cases(files, INTERPRET, f"{chosen} or {CALLS} and {QUICK_CALLS}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "families", [("row_norm", "adam", "rotary"), ("softmax", "cross_entropy", "glu", "moe")], ids="-".join
)
def test_the_rest_interpreted(families: tuple[str, ...]) -> None:
    """What the machine code is tried with as well is not interpreted again."""
    files = [*(file_of(family) for family in families), EAGER_CALLS]
    is_emulated = triton_emulator_missing() is None
    chosen = [
        f"{file_of(family).name} and not ({cases.quick})" + f" and not ({cases.compiled})" * is_emulated
        for family, cases in FAMILIES.items()
    ]
    calls = f"{CALLS} and ({' or '.join(families)}) and not {QUICK_CALLS}"
    run_cases(files, INTERPRET, " or ".join([*chosen, calls]))


@pytest.mark.promise("adam bits")
@pytest.mark.promise("T6")
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(family: str) -> None:
    run_emulated(file_of(family), FAMILIES[family].compiled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@EACH_PART
def test_on_the_gpu(family: str, part: str) -> None:
    run_cases([file_of(family)], COMPILE, part)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_eager_calls_on_the_gpu() -> None:
    run_cases([EAGER_CALLS], COMPILE, "triton")


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "fault"),
    [
        ("3.2.0", "2.3.5", ""),
        ("3.6.0", "2.4.0rc1", "the interpreter of triton 3.6.0 needs NumPy below 2.4, got 2.4.0rc1"),
        ("3.7.0", "2.4.6", ""),
        ("3.10.0+git1", "2.10.0", ""),
    ],
)
def test_numpy_that_the_interpreter_cannot_use(
    triton_version: str, numpy_version: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel whose loops end at loaded numbers raised a TypeError."""
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", triton_version)
    monkeypatch.setattr(pytest.importorskip("numpy"), "__version__", numpy_version)
    assert interpreter_fault() == fault


@pytest.mark.slow
def test_unavailable_in_plain_words() -> None:
    """Needs a process of its own as well: this one may be interpreting, and has imported Triton."""
    script = """
import sys, torch
before = "triton" in sys.modules
import onetrip.kernels
assert before or "triton" not in sys.modules, "importing onetrip.kernels imports triton"
assert "TRITON_INTERPRET=1" in onetrip.kernels.unavailable_reason(torch.device("cpu"))
assert "no usable CUDA device" in onetrip.kernels.unavailable_reason(torch.device("cuda"))
sys.modules["triton"] = None
assert "triton cannot be imported" in onetrip.kernels.unavailable_reason(torch.device("cpu"))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    outcome = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
