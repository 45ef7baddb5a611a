"""The simulators of tools/, as the tests of the product use them. tests/cuda and tests/tools import tools/ directly."""

from __future__ import annotations

from tools.gpusim.adam import ADAM, ADAMW, Parameter, Step
from tools.gpusim.harness import assert_same_bits
from tools.sass.cuda_compile import MULTIPROCESSORS

__all__ = [
    "ADAM",
    "ADAMW",
    "MULTIPROCESSORS",
    "Parameter",
    "Step",
    "assert_same_bits",
    "run_triton_on_the_emulator",
    "triton_emulator_missing",
]


def triton_emulator_missing() -> str | None:
    """Why Triton's machine code cannot be executed here, or None."""
    from tools.sass import triton_machine

    return triton_machine.missing_tool()


def run_triton_on_the_emulator() -> None:
    """From now on Triton compiles for sm_90, and its kernels take CPU tensors."""
    from tools.sass import triton_machine

    triton_machine.install()
