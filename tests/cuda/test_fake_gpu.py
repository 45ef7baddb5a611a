"""All of onetrip on the fake GPU of tools/fake_gpu: the tests marked gpu, and the self-check of every kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fake_gpu import build as fake_gpu

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu() -> dict[str, str]:
    """Variables of a process that sees the fake GPU."""
    reason = fake_gpu.missing_tool()
    if reason:
        pytest.skip(reason)
    return os.environ | fake_gpu.environment() | {"OMP_NUM_THREADS": "1"}


def run(gpu: dict[str, str], *command: str) -> str:
    outcome = subprocess.run(command, env=gpu, cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
    return outcome.stdout


def test_a_look_up_of_torch_before_its_import_keeps_the_device(gpu: dict[str, str]) -> None:
    look_up = "import importlib.util; importlib.util.find_spec('torch'); import torch; torch.ones(1, device='cuda')"
    run(gpu, sys.executable, "-c", look_up)


def run_gpu_tests(gpu: dict[str, str], files: str, keywords: str, least: int) -> None:
    """files: patterns below tests/. keywords: pytest's -k. least: how many pass, so that none is lost unseen."""
    paths = [str(path) for pattern in files.split() for path in sorted((ROOT / "tests").glob(pattern))]
    # Not a million rows, one thread after another; nor repeats and leaks, which only a GPU and its allocator have; nor
    # the widest rows and the bits of what tests/cuda shows at every alignment and of every kind.
    left_out = "many_rows or million or thousand_calls or hundred_repeats or row_norm_gpu and 262144"
    left_out += " or replay and 65536 or rows_begin and (4096 or 8192 or 16384)"
    left_out += " or bits_of_the_reference and (l2 or not_finite)"
    chosen = ["-m", "gpu", "-k", f"({keywords}) and not ({left_out})"]
    output = run(gpu, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *paths)
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) >= least, output[-2000:]


GPU_TESTS = {
    "row_norm": ("ops/test_row_norm_[bf]*.py", "", 360),
    "row_norm, the rest": ("ops/test_row_norm_[dcg]*.py nn/test_row_norm.py", "", 85),
    "softmax, adam, tracing": ("ops/test_softmax*.py ops/test_adam_gpu.py ops/test_jit_trace.py", "", 134),
    "operators": ("ops/test_contract*.py", "", 290),
    # A training loop of each dtype.
    "models": ("patching/test_models_gpu.py", " and (gradients or bert or llama and bf16)", 8),
}


@pytest.mark.parametrize("files, chosen, least", GPU_TESTS.values(), ids=GPU_TESTS.keys())
def test_gpu_tests_with_the_cuda_backend(gpu: dict[str, str], files: str, chosen: str, least: int) -> None:
    # Not those of Inductor's own kernels: a launcher of torch's CUDA build runs them.
    run_gpu_tests(gpu, files, f"not triton and not inductor{chosen}", least)


@pytest.mark.parametrize("capability", [7, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_gpus_without_clusters(gpu: dict[str, str], capability: int) -> None:
    """What chooses a kernel by its GPU; Adam's does not."""
    files = "ops/test_row_norm_gpu.py ops/test_softmax_gpu.py patching/test_models_gpu.py"
    chosen = "not triton and not fp16 and (row_norm or softmax or gradients and (bert or llama))"
    run_gpu_tests(gpu | fake_gpu.environment(capability), files, chosen, 40)


# Compiled and emulated: slow. What its choice of layouts and of fused products changes shows nowhere else, nor what a
# backend other than the automatic one loses in a backward, which runs in another thread.
TRITON = {
    "row_norm": (
        "ops/test_row_norm_g*.py ops/test_contract*.py",
        "triton and (replay and (256 or 8192) or rms_block and checkpoint"
        " or (rms_block or layer_norm-alone) and (each_gradient_alone or compiled_equals))",
        8,
    ),
    "models": ("patching/test_models_gpu.py", "triton and bert and (gradients or fp16)", 2),
}


@pytest.mark.parametrize("files, keywords, least", TRITON.values(), ids=TRITON.keys())
def test_gpu_tests_with_the_triton_backend(gpu: dict[str, str], files: str, keywords: str, least: int) -> None:
    reason = triton_machine_missing()
    if reason:
        pytest.skip(reason)
    run_gpu_tests(gpu, files, keywords, least)


def triton_machine_missing() -> str | None:
    pytest.importorskip("triton")
    from tools.sass import triton_machine

    return triton_machine.missing_tool()


# Triton's kernels are compiled and emulated: one of each family here, the others in tests/kernels.
SELF_CHECK = """
import sys
from onetrip import selfcheck
from onetrip.cli import main

cases = selfcheck.cases
once = {kernel.family: (kernel, "fp32") for kernel in reversed(selfcheck.KERNELS)}
selfcheck.cases = lambda backend: [case for case in cases(backend) if backend != "triton" or case in once.values()]
sys.argv = ["onetrip", "doctor"]
main()
"""


def test_the_self_check_of_every_backend(gpu: dict[str, str]) -> None:
    output = " ".join(run(gpu, sys.executable, "-c", SELF_CHECK).split())  # a narrow table's title takes two lines
    backends = ["cpu on cpu", "cuda on cuda:0", "reference on cuda:0"]
    for backend in [*backends, *([] if triton_machine_missing() else ["triton on cuda:0"])]:
        assert f"Self-check of {backend}" in output
    assert re.search(r"all \d+ checks passed", output), output[-2000:]
