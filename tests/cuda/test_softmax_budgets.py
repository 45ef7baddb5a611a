"""Compiles the CUDA kernels of softmax ahead of time for sm_70 to sm_120 and holds them to budgets that need no GPU.

No register spills to memory; 128-bit loads and stores in the machine code of every kernel for aligned rows; and for the
common widths, registers and shared memory that leave half of an SM's threads resident.
"""

from __future__ import annotations

import pytest

from tools.sass.cuda_compile import KIB, MULTIPROCESSORS, Kernel, cluster_threads, print_table, resident_threads

pytestmark = pytest.mark.slow
FAMILY = "softmax"

WIDTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 12288, 16384, 32768, 65536)
TYPES = ("f32", "f16", "bf16")
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def _row_threads(n_cols: int, columns_per_thread: int) -> int:
    wanted = -(-n_cols // columns_per_thread)
    return 1 << (wanted - 1).bit_length() if wanted <= 32 else -(-wanted // 32) * 32


def _launches(n_cols: int, dtype: str, arch: int) -> list[tuple[str, int, int]]:
    """(kernel, threads a block, bytes of dynamic shared memory), by the table of csrc/cuda/softmax.cu."""
    if in_cluster := cluster_threads(n_cols, arch):
        return [(f"{direction}_cluster_kernel<{dtype}>", in_cluster, 0) for direction in ("forward", "backward")]
    if n_cols > 16384:
        limit = (MULTIPROCESSORS[arch].block_bytes // 2 - KIB) // (512 * 8)
        tiles = -(-n_cols // (512 * 8))
        tile_bytes = {"forward": ELEMENT_BYTES[dtype], "backward": 2 * ELEMENT_BYTES[dtype]}
        return [
            (f"{direction}_wide_kernel<{dtype}, fast>", 512, min(tiles, limit // size) * 512 * 8 * size)
            for direction, size in tile_bytes.items()
        ]
    narrow = n_cols <= 256
    threads = _row_threads(n_cols, 8 if narrow else 16)
    chosen = [
        (f"{direction}_kernel<{dtype}, {1 if narrow else 2}, fast>", threads if threads > 32 else 128, 0)
        for direction in ("forward", "backward")
    ]
    if n_cols <= 8192:
        threads = _row_threads(n_cols, 8)
        block = threads * max(1, 256 // threads)
        chosen.append((f"backward_shared_kernel<{dtype}, fast>", block, 4 * 8 * block))
    return chosen


def test_nothing_spills(arch: int, kernels: list[Kernel]) -> None:
    print_table(arch, kernels)
    assert len(kernels) == 3 * (2 * 7 + 2) + 1
    assert not [kernel for kernel in kernels if kernel.spilled_bytes]


def test_aligned_kernels_move_16_bytes_at_once(arch: int, kernels: list[Kernel]) -> None:
    fast = [kernel for kernel in kernels if "fast" in kernel.name]
    assert len(fast) == 3 * 7
    in_clusters = [kernel for kernel in kernels if "cluster" in kernel.name]
    assert len(in_clusters) == 3 * 2
    aligned = fast + (in_clusters if arch >= 90 else [])
    assert not [kernel for kernel in aligned if not (kernel.wide_loads and kernel.wide_stores)]


def test_kernels_of_clusters_are_empty_elsewhere(arch: int, kernels: list[Kernel]) -> None:
    """Launchers know them by their shared memory."""
    for kernel in kernels:
        if "cluster" in kernel.name:
            assert (kernel.static_bytes > 0) == (arch >= 90), kernel


def test_half_of_the_threads_are_resident(arch: int, kernels: list[Kernel]) -> None:
    """As far as whole blocks go: one more of them would pass the half."""
    named = {kernel.name: kernel for kernel in kernels}
    multiprocessor = MULTIPROCESSORS[arch]
    short = []
    for n_cols in WIDTHS:
        for dtype in TYPES:
            for name, threads, dynamic_bytes in _launches(n_cols, dtype, arch):
                resident = resident_threads(named[name], threads, dynamic_bytes, multiprocessor)
                if (resident + threads) * 2 <= multiprocessor.threads:
                    short.append(f"{n_cols}: {name} {named[name].registers} registers, {resident} threads")
    assert not short, "\n".join(short)
