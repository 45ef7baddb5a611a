"""Compiles the CUDA kernels of Adam ahead of time for sm_70 to sm_120 and holds them to budgets that need no GPU.

No register spills to memory; 128-bit loads and stores in the machine code; half of an SM's threads resident; and every
float32 operation rounded by itself, as the formulas have it.
"""

from __future__ import annotations

import pytest

from tools.sass.cuda_compile import MULTIPROCESSORS, Kernel, print_table, resident_threads

pytestmark = pytest.mark.slow
FAMILY = "adam"

THREADS = 512
TYPES = ("f32", "f16", "bf16")
STEPS = {
    f"step_kernel<{param}, {grad}, {bits}, {rounding}>"
    for param in TYPES
    for grad in TYPES
    for bits in (8, 32)
    for rounding in ("nearest", "other rounding")
    if param != "f32" or rounding == "nearest"
}
SQUARES = {f"squares_kernel<{grad}>" for grad in TYPES}


def test_nothing_spills(arch: int, kernels: list[Kernel]) -> None:
    print_table(arch, kernels)
    assert {kernel.name for kernel in kernels} == STEPS | SQUARES | {"prepare_kernel<4>", "prepare_kernel<64>"}
    assert not [kernel for kernel in kernels if kernel.spilled_bytes]


def test_steps_move_16_bytes_at_once(arch: int, kernels: list[Kernel]) -> None:
    """Parameters are stored, and parameters, gradients and 32-bit states loaded, 16 bytes at a time."""
    for kernel in kernels:
        if kernel.name in STEPS:
            wide = [2 if dtype == "f32" else 1 for dtype in TYPES if f"<{dtype}" in kernel.name]
            states = 4 if ", 32, " in kernel.name else 0
            assert kernel.wide_stores >= wide[0] + states, kernel
            assert kernel.wide_loads >= wide[0] + 1 + states, kernel


def test_half_of_the_threads_are_resident(arch: int, kernels: list[Kernel]) -> None:
    multiprocessor = MULTIPROCESSORS[arch]
    for kernel in kernels:
        if kernel.name in STEPS | SQUARES:
            assert 2 * resident_threads(kernel, THREADS, 0, multiprocessor) >= multiprocessor.threads, kernel


def test_every_operation_is_rounded_by_itself(arch: int, kernels: list[Kernel]) -> None:
    assert not [kernel for kernel in kernels if kernel.name in STEPS and kernel.loose_operations]
