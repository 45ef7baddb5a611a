"""Runs triton_row_norm_cases.py where Triton interprets, and where it compiles for a GPU; and what needs neither."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from onetrip.kernels import interpreter_fault
from triton_runner import COMPILE, INTERPRET, run_cases, run_emulated

CASES = Path(__file__).with_name("triton_row_norm_cases.py")
# Groups of test names of the cases, one process each.
GROUPS = {"forward": "test_forward", "backward": "test_backward", "rest": "not test_forward and not test_backward"}
# Every kernel and dtype, in rows of one tile and in wide ones; all of the cases take eight minutes to compile.
COMPILED = (
    "(test_forward or test_backward) and (-64- or rms-1025) or test_wide_rows or test_cast_orders"
    " or centred or mask_past or threshold or bad_values or dropped or 2_to_the_31 or operators"
)


# Each kernel and norm, in rows of one tile and wide ones: what a change is tried with first.
QUICK = "(test_forward or test_backward) and (-64- or -1025-)"


def test_interpreted_quickly() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group: str) -> None:
    pytest.importorskip("triton")
    run_cases(CASES, INTERPRET, GROUPS[group])


@pytest.mark.promise("T6")
@pytest.mark.slow
def test_compiled() -> None:
    run_emulated(CASES, COMPILED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("group", GROUPS)
def test_on_the_gpu(group: str) -> None:
    pytest.importorskip("triton")
    run_cases(CASES, COMPILE, GROUPS[group])


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
