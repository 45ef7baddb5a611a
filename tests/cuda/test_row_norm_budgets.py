"""Compiles the CUDA kernels ahead of time for sm_70 to sm_120 and holds them to budgets that need no GPU.

No register spills to memory; 128-bit loads and stores in the machine code of every kernel for aligned rows; and for the
common widths, registers and shared memory (static and dynamic) that leave half of an SM's threads resident.
sm_70 is compiled by NVRTC 12.9 (CUDA 13 dropped it), the others by nvcc where there is one, else by NVRTC as well.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tools.sass.cuda_compile import (
    KIB,
    MULTIPROCESSORS,
    Kernel,
    cluster_threads,
    compiled,
    disassembled,
    disassembler,
    print_table,
    resident_threads,
)

pytestmark = pytest.mark.slow
FAMILY = "row_norm"

WIDTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
FORWARD_WIDTHS = (64, 128, *WIDTHS)
BACKWARD_WIDTHS = (*WIDTHS, 4104, 10240, 20480, 49152)
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}

# The known shortfalls in spills, bytes by architecture and kernel: forward blocks of 1024 threads have 64 registers,
# sm_70 has no uniform ones beside them. Rows that are read element by element need a few more. From sm_100 on, float16
# rows without a norm need a few more for their dropout.
SPILLED_BYTES = {
    (70, "forward_kernel<bf16, f32, 0, 2, elements>"): 8,
    (70, "forward_kernel<f16, f32, 0, 2, elements>"): 8,
    (70, "forward_kernel<f32, f32, 0, 2, elements>"): 80,
    (120, "backward_kernel<f16, f16, 0, fast>"): 8,
}


class Call(NamedTuple):
    """A launch of an aligned kernel, with the widths' gradients that take shared memory."""

    n_cols: int
    x: str
    z: str
    y: str
    backward: bool
    shared_sums: int = 0
    """Gradients with sums in shared memory, of dbias and dweight; dnorm_bias stays in registers."""
    norm: bool = True


PAIRS = [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("f16", "f32"), ("bf16", "f32")]
CALLS = [
    Call(n_cols, x, z, x, *rest)
    for x, z in PAIRS
    for widths, rest in [
        (FORWARD_WIDTHS, (False,)),
        (BACKWARD_WIDTHS, (True, 1)),
        (BACKWARD_WIDTHS, (True, 2)),
        (BACKWARD_WIDTHS, (True, 1, False)),
    ]
    for n_cols in widths
] + [
    Call(n_cols, x, z, "f32", True, shared_sums)
    for x, z in PAIRS
    if x != "f32"
    for shared_sums in (1, 2)
    for n_cols in BACKWARD_WIDTHS
]


class Launch(NamedTuple):
    kernel: str
    threads: int
    """A block."""
    dynamic_bytes: int = 0
    """Bytes of dynamic shared memory, a block."""
    bytes_in_flight: int = 0
    """Bytes of dy and z on their way to shared memory, a block."""
    columns: int = 16
    """A thread's."""


def _has_body(name: str, arch: int) -> bool:
    """Kernels of clusters are empty before sm_90, those that copy rows ahead before sm_80."""
    return arch >= (90 if "cluster" in name or "-1>" in name else 80 if "pipelined" in name else 0)


def _pipelined_launch(call: Call, arch: int, kernels: dict[str, Kernel]) -> Launch | None:
    n_blocks = next(n for n in (1, 2, 4, 8) if n == 8 or n * 8192 >= call.n_cols)
    if call.n_cols <= 256:
        kind = row_threads = 8 if call.n_cols <= 128 else 16
        n_groups = 16
    else:
        kind = 0 if n_blocks == 1 else -1
        row_threads = -(-call.n_cols // (16 * 32 * n_blocks)) * 32
        n_groups = max(1, 256 // row_threads)
    name = f"backward_pipelined_kernel<{call.x}, {call.z}, {call.y}, {kind}>"
    if not _has_body(name, arch):
        return None
    threads = row_threads * n_groups
    weights = 64 * row_threads
    dbias = 64 * threads * (call.shared_sums - 1)  # dweight and dnorm_bias stay in registers
    stage = 16 * threads * (ELEMENT_BYTES[call.y] + ELEMENT_BYTES[call.z])
    limits = MULTIPROCESSORS[arch]
    for resident in (4, 2, 1):
        free_bytes = (
            min(limits.block_bytes, limits.shared_bytes // resident - limits.reserved_bytes)
            - kernels[name].static_bytes
        )
        stages = min(4, (free_bytes - weights - dbias) // stage)
        if resident * threads <= 512 and stages > 0:
            return Launch(name, threads, weights + dbias + stages * stage, stages * stage)
    return None


def _forward_shape(n_cols: int, most: int) -> tuple[int, int]:
    """(threads a row, chunks a thread)"""
    n_chunks = -(-n_cols // 8)
    for lanes in (8, 16, 32):
        if n_chunks <= lanes * most:
            return lanes, max(2, -(-n_chunks // lanes))
    threads = {chunks: -(-n_chunks // (32 * chunks)) * 32 for chunks in range(most, 1, -1)}
    fewer_idle = most == 4 and n_cols <= 8192 and 3 * threads[3] < 4 * threads[4]
    chunks = 3 if fewer_idle else most
    return threads[chunks], chunks


def _launches(call: Call, arch: int, kernels: dict[str, Kernel]) -> list[Launch]:
    """By the rules of csrc/cuda/row_norm.cu."""
    types = f"{call.x}, {call.z}"
    if not call.backward:
        most = 2 if call.z == "f32" else 4  # chunks a thread
        if in_cluster := cluster_threads(call.n_cols, arch, 8 * most):
            return [Launch(f"forward_cluster_kernel<{types}>", in_cluster, columns=8 * most)]
        if call.n_cols > 16384:
            tile = 4096 * ELEMENT_BYTES[call.z]
            tiles = min(-(-call.n_cols // 4096), (MULTIPROCESSORS[arch].block_bytes // 2 - KIB) // tile)
            return [Launch(f"forward_wide_kernel<{types}, fast>", 512, tiles * tile)]
        row_threads, chunks = _forward_shape(call.n_cols, most)
        access = "uniform" if call.z != "f32" else "vectors"
        lanes, threads = (row_threads, 128) if row_threads <= 32 else (0, row_threads)
        return [Launch(f"forward_kernel<{types}, {lanes}, {chunks}, {access}>", threads, columns=8 * chunks)]
    if call.norm and (pipelined := _pipelined_launch(call, arch, kernels)) is not None:
        return [pipelined]
    if call.y != call.x:
        return []  # by kernels for any dtype of dy, which are held to nothing
    lanes = 32 if call.n_cols <= 256 else 0
    if call.n_cols > 4096:
        columns = Launch(f"backward_columns_kernel<{types}, fast>", 512, 4 * call.shared_sums * 4096)
        return [Launch(f"backward_means_kernel<{types}, fast>", 512), columns] if call.norm else [columns]
    limit = MULTIPROCESSORS[arch].block_bytes - KIB  # less what static arrays may take
    row_threads = lanes or -(-call.n_cols // 256) * 32
    shared = 4 * (8 * row_threads * call.norm + call.shared_sums * 4096)  # the weights and the sums
    name = "fast" if shared <= limit else "any"
    n_groups = 512 // row_threads if lanes else 256 // (-(-call.n_cols // 512) * 32)
    threads = n_groups * row_threads
    return [Launch(f"backward_kernel<{types}, {lanes}, {name}>", threads, shared if name == "fast" else 4 * 4096)]


def _known_shortfall(arch: int, call: Call) -> str | None:
    """Why a call leaves less than half of an SM's threads resident; None where nothing excuses it."""
    if arch == 70 and call.backward and call.x == "f32":
        return "no uniform registers: 64 would spill; a thread moves twice the bytes of the 16-bit kernels"
    if call.backward and call.x == "f32" and not call.norm and call.n_cols <= 4096:
        return "64 registers would spill; a thread moves twice the bytes of the 16-bit kernels"
    if arch == 70 and call.backward and call.n_cols == 4096 and call.shared_sums == 2:
        return "weights and two sums of 512 threads are 48 KiB, and static arrays come on top"
    few_blocks = {70: call.z == "f32", 100: call.z != "f32"}  # lane_blocks() of csrc/cuda/row_norm_forward.cuh
    if few_blocks.get(arch) and not call.backward and call.n_cols <= 512:
        return "64 registers would spill: three eighths of the threads, of 32 bytes or more each"
    if arch == 120 and call.backward and call.n_cols > 4096:
        return "a block's 99 KiB hold one row more, of fewer bytes; reading it twice would cost more"
    return None


def test_nothing_spills(arch: int, kernels: list[Kernel]) -> None:
    print_table(arch, kernels)
    forward = 5 * 2 + 3 * 4 + 2 * 2 * 9  # element by element; float32 and 16-bit rows: pairs, kinds of access, shapes
    pipelined = (5 + 4 + 2) * 4  # pairs, a 16-bit x with a float32 dy, a float32 x with a 16-bit dy; shapes
    assert len(kernels) == 5 * 13 + pipelined + forward + 1
    spills = {kernel.name: kernel.spilled_bytes for kernel in kernels if kernel.spilled_bytes}
    assert all(spilled <= SPILLED_BYTES.get((arch, name), 0) for name, spilled in spills.items()), spills


def test_aligned_kernels_move_16_bytes_at_once(arch: int, kernels: list[Kernel]) -> None:
    kinds = ("fast", "vectors", "uniform", "cluster", "pipelined")
    aligned = [kernel for kernel in kernels if any(kind in kernel.name for kind in kinds)]
    assert len(aligned) == 5 * 7 + 11 * 4 + 3 * 4 + 2 * 2 * 9
    moving = [kernel for kernel in aligned if _has_body(kernel.name, arch)]
    assert not [kernel for kernel in moving if not kernel.wide_loads]
    assert not [kernel for kernel in moving if not kernel.wide_stores and "means" not in kernel.name]


def test_kernels_have_bodies_where_the_card_has_what_they_need(arch: int, kernels: list[Kernel]) -> None:
    """Launchers tell by the static shared memory."""
    for kernel in kernels:
        if "cluster" in kernel.name or "pipelined" in kernel.name:
            assert (kernel.static_bytes > 0) == _has_body(kernel.name, arch), kernel


def test_gradients_are_the_same_bits_in_every_kernel(arch: int, kernels: list[Kernel]) -> None:
    """No product but those of fmaf is fused with a sum, or may be: 8 columns a chunk."""
    fused = {"backward_kernel": 3, "backward_means_kernel": 1, "backward_columns_kernel": 2}
    fused["backward_pipelined_kernel"] = 2 * 3
    for kernel in kernels:
        kind = kernel.name.partition("<")[0]
        if kind in fused and _has_body(kernel.name, arch):
            assert kernel.loose_products == 8 * fused[kind], kernel


@pytest.mark.parametrize("arch", [90, 100, 120], ids=lambda arch: f"sm_{arch}", indirect=True)
def test_partial_sums_are_read_after_the_kernel_before_has_ended(arch: int) -> None:
    """Programmatic dependent launch: the kernel that adds them up starts early, waits, and does not read them as
    constants. The one before lets it."""
    if disassembler(arch) is None:
        pytest.skip(f"no nvdisasm that knows sm_{arch}")
    bodies = disassembled(compiled(FAMILY, arch).disassembly.read_text())
    opcodes = {name: re.findall(r"\b(ACQBULK|PREEXIT|LDG\S*)", body) for name, body in bodies}
    (partials,) = (found for name, found in opcodes.items() if "partials_kernel" in name)
    assert partials[0] == "ACQBULK" and len(partials) > 1
    assert not any("CONSTANT" in opcode for opcode in partials)
    before = [name for name in opcodes if "backward" in name and "means" not in name]
    assert before and all("PREEXIT" in opcodes[name] for name in before)


def test_half_of_the_threads_are_resident(arch: int, kernels: list[Kernel]) -> None:
    """As far as whole blocks go: one more of them would pass the half. (Blocks of 384 threads: 38% or 56%.)

    Fewer threads, where forward's take more than 16 columns each.

    A kernel that copies rows ahead needs fewer threads: as many bytes in flight as half of the SM's, a chunk of dy and
    of z each, would load into registers.
    """
    named = {kernel.name: kernel for kernel in kernels}
    multiprocessor = MULTIPROCESSORS[arch]
    short = []
    for call in CALLS:
        for launch in _launches(call, arch, named):
            kernel = named[launch.kernel]
            resident = resident_threads(kernel, launch.threads, launch.dynamic_bytes, multiprocessor)
            line = f"{call}: {launch}, {kernel.registers} registers, {resident} threads"
            assert resident > 0, line
            if launch.bytes_in_flight:
                of_threads = multiprocessor.threads // 2 * 8 * (ELEMENT_BYTES[call.y] + ELEMENT_BYTES[call.z])
                too_few = resident // launch.threads * launch.bytes_in_flight < of_threads
                if too_few and _known_shortfall(arch, call) is None:
                    short.append(line)
                continue
            least = multiprocessor.threads // 2 * 16
            if resident * launch.columns < least:
                print(line, _known_shortfall(arch, call) or "")
            too_few = (resident + launch.threads) * launch.columns <= least
            if too_few and _known_shortfall(arch, call) is None:
                short.append(line)
    assert not short, "\n".join(short)
