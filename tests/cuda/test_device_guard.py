"""csrc/cuda/device_guard.h: a launch on another GPU than the thread's makes no context and leaves none changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.gpusim.harness import cuda_includes

ROOT = Path(__file__).resolve().parents[2]


def test_device_guard(tmp_path: Path) -> None:
    folders = cuda_includes()
    if folders is None:
        pytest.skip("no CUDA headers")
    program = tmp_path / "device_guard"
    source = Path(__file__).with_name("device_guard.cpp")
    includes = [f"-I{ROOT / 'csrc'}", *(f"-isystem{folder}" for folder in folders)]
    subprocess.run(["g++", "-std=c++17", *includes, str(source), "-o", str(program), "-ldl"], check=True)
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
