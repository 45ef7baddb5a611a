"""Runs triton_softmax_cases.py where Triton interprets, and where it compiles for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_runner import COMPILE, INTERPRET, run_cases

CASES = Path(__file__).with_name("triton_softmax_cases.py")


def test_interpreted() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, COMPILE)
