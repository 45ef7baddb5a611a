"""How the backward of row_norm shares out its rows: one wave of blocks that run at the same time, on every GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import pytest

GPUS = {"V100": (80, 7), "A100": (108, 8), "H100": (132, 9), "H100 PCIe": (114, 9), "B200": (148, 10)}
WIDTHS = (128, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class Part(NamedTuple):
    n_parts: int
    rows: int
    n_groups: int


Shared = list[tuple[Part, Part, int]]
"""One element a shape: the part on this GPU, on any GPU, and the floats of workspace."""


@pytest.fixture(scope="module")
def partition(host_program) -> Callable[[str, list[tuple[int, int]]], Shared]:
    program = host_program("row_norm_partition", simulated=True)

    def ask(gpu: str, shapes: list[tuple[int, int]]) -> Shared:
        arguments = [*GPUS[gpu], *(size for shape in shapes for size in shape)]
        ran = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True)
        lines = [[int(word) for word in line.split()] for line in ran.stdout.splitlines()]
        return [(Part(*line[:3]), Part(*line[3:6]), line[6]) for line in lines]

    return ask


@pytest.mark.parametrize("gpu", GPUS)
def test_large_tensors_take_one_wave_that_fills_the_gpu(partition, gpu):
    n_multiprocessors, major = GPUS[gpu]
    shapes = [(ceil(2**26 * times / 2 / n_cols), n_cols) for n_cols in WIDTHS for times in (1, 1.3, 4)]
    for (n_rows, n_cols), (part, _, _) in zip(shapes, partition(gpu, shapes), strict=True):
        if major >= 9 or (major == 8 and n_cols <= 8192):  # 512 threads of 16 columns an SM; wider rows: several SMs
            row_threads = 8 if n_cols == 128 else ceil(n_cols / 16 / 32) * 32
            at_once = n_multiprocessors * max(1, 512 // (row_threads * part.n_groups)) / max(1, n_cols // 8192)
        else:  # two blocks an SM, of 4096 columns
            at_once = 2 * n_multiprocessors / ceil(n_cols / 4096)
        assert part.n_parts <= at_once
        turns = ceil(n_rows / (part.n_parts * part.n_groups))
        assert part.rows == turns * part.n_groups
        efficiency = n_rows / (turns * part.n_groups * at_once)
        assert efficiency >= (0.94 if n_cols > 8192 else 0.95), (n_rows, n_cols, part, efficiency)
        assert turns >= 16, "rows enough to prefetch four ahead four times"


@pytest.mark.parametrize("gpu", GPUS)
def test_few_rows_are_shared_out_down_to_one_a_group(partition, gpu):
    shapes = [(n_rows, n_cols) for n_rows in (1, 3, 7, 64, 1000) for n_cols in WIDTHS]
    for (n_rows, _), (part, anywhere, _) in zip(shapes, partition(gpu, shapes), strict=True):
        for each in (part, anywhere):
            n_steps = ceil(n_rows / each.n_groups)
            assert 1 <= each.n_parts <= n_steps and each.rows == ceil(n_steps / each.n_parts) * each.n_groups


def test_the_partition_for_any_gpu_is_one_for_all_and_fits_into_every_workspace(partition):
    shapes = [(n_rows, n_cols) for n_rows in (5, 4096, 100_003) for n_cols in WIDTHS]
    found = [partition(gpu, shapes) for gpu in GPUS]
    for (_, n_cols), *rows in zip(shapes, *found, strict=True):
        assert len({anywhere for _, anywhere, _ in rows}) == 1
        assert all(3 * max(part.n_parts, anywhere.n_parts) * n_cols <= floats for part, anywhere, floats in rows)
