"""Runs triton_softmax_cases.py where Triton interprets, and where it compiles for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_runner import COMPILE, INTERPRET, run_cases, run_emulated

CASES = Path(__file__).with_name("triton_softmax_cases.py")
# Every kernel and dtype, in rows of one tile and in wide ones; all of the cases take six minutes to compile.
COMPILED = (
    "(test_forward or test_backward) and (64- or 1025-) or wide-row and (test_masks or test_mask_gradient) or dropped"
    " or hidden_columns or without_a_visible or bad_values or 2_to_the_31"
)


# Rows of one tile and wide ones: what a change is tried with first.
QUICK = "(test_forward or test_backward) and (64- or 1025-) or test_mask_gradient_widths and f32 or hidden_columns"


def test_interpreted_quickly() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET, QUICK)


@pytest.mark.slow
def test_interpreted() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET)


@pytest.mark.promise("T6")
@pytest.mark.slow
def test_compiled() -> None:
    run_emulated(CASES, COMPILED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, COMPILE)
