"""Runs a file of cases for Triton's kernels in a process of its own: Triton decides at its import whether it
interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from onetrip.kernels import interpreter_fault

ROOT = Path(__file__).parents[1]
INTERPRET = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
COMPILE = {"TRITON_INTERPRET": "0"}


def run_cases(file: Path, environment: dict[str, str], selection: str = "") -> None:
    """selection: as pytest's -k. Fails where a case fails, and shows its output."""
    if environment is INTERPRET and interpreter_fault():
        pytest.skip(interpreter_fault())
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-x", "-p", "no:cacheprovider", "-k", selection]
    outcome = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True)
    print(outcome.stdout)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
