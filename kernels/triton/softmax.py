"""softmax in Triton: `forward` and `backward` as every backend has them.

The formulas stand in softmax_kernels.py and softmax_backward_kernels.py; here are the sizes of tiles, the way into the
mask, the partition of the rows for its gradient, and the launches.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton.language as tl

from ..reference.philox import dropout_scale
from ..reference.softmax import BackwardOperands, MaskLayout, Operands, SoftmaxPlan
from . import softmax_backward_kernels as backward_kernels
from . import softmax_kernels as kernels
from .launch import LAUNCHES, Launch, cdiv, next_power_of_2, on_device_of
from .philox import dropout_arguments, rng_arguments
from .sum_partials import sum_partials
from .tiles import Tile, TileRule, aligned, common_divisor, tile, tile_arguments

# The one table of tile sizes; tests/kernels/test_triton_budgets.py compiles what it leads to and holds it to this:
# MAX_REGISTERS a lane, and nothing spills. Forward has 16 values a lane in registers, 32 in the widest rows that fit;
# those would spill with more beside them: about 150 bytes a lane with Philox, 8 to 16 on sm_100 and sm_120 with what
# hides columns. A causal row reads half of its columns at the mean, so two trips read as much as one.
# Backward keeps two values for each element.
# A tile of a wide row is one row, so elements <= wide_cols.
FORWARD = TileRule(elements=2048, elements_per_lane=16, max_cols=32768, wide_cols=8192)
FORWARD_BUSY = FORWARD._replace(max_cols=16384, wide_cols=4096)  # causal, or with dropout
BACKWARD = TileRule(elements=2048, elements_per_lane=8, max_cols=16384, wide_cols=8192)
BACKWARD_MASK = TileRule(elements=1024, elements_per_lane=8, max_cols=8192, wide_cols=2048)

# How the rows that share a row of the mask are shared out among programs, by the sizes alone: dmask has the same bits
# on every GPU. No partial sums where there are 512 programs without, 4 for each of an H100's 132 multiprocessors; else
# up to 16 tiles a program, because its partial sums cost 4 bytes a column, written and read once.
_FEW_PROGRAMS, _ENOUGH_TILES, _MANY_PROGRAMS = 512, 16, 1024


def _index_dtype(n_rows: int) -> Any:
    """Dtype of row numbers where they are divided: 32 bits take a fifth of the instructions of 64."""
    return tl.uint32 if n_rows < 2**32 else tl.int64


def _mask_arguments(layout: MaskLayout | None, bytes_of_score: int, n_cols: int) -> dict[str, Any]:
    """The forward kernel's arguments for the mask."""
    sizes, strides, col_stride = layout or ((), (), 0)
    inner_sizes, inner_strides = sizes[:0:-1], strides[:0:-1]  # fastest first, without the slowest
    arguments: dict[str, Any] = {"mask_outer_stride": strides[0] if strides else 0, "mask_col_stride": col_stride}
    for i in range(3):
        arguments[f"mask_size{i}"] = inner_sizes[i] if i < len(inner_sizes) else 1
        arguments[f"mask_stride{i}"] = inner_strides[i] if i < len(inner_strides) else 0
    align = math.gcd(common_divisor(n_cols), 16 // bytes_of_score, *strides) if col_stride == 1 else 1
    return arguments | {
        "MASK_DIMS": max(1, len(sizes)),
        "MASK_COLS": col_stride if col_stride in (0, 1) else kernels.ANY_STRIDE.value,
        "MASK_ALIGN": align,
    }


def forward(
    operands: Operands, rng: tuple[int, int] | Tensor | None, plan: SoftmaxPlan
) -> tuple[Tensor, Tensor | None]:
    """reference.softmax.forward for scores of last stride 1 and a mask read in place by its layout; y, p: contiguous.

    Dtypes are float32, float16 or bfloat16; none is empty. rng: (seed, offset), or an int64 tensor of the two on the
    device of scores.
    """
    scores, mask, layout, n_queries = operands
    n_rows, n_cols = scores.shape
    y = scores.new_empty((n_rows, n_cols))
    p = scores.new_empty((n_rows, n_cols)) if plan.store_p else None
    with on_device_of(scores):
        scores = aligned(scores, common_divisor(n_cols))
        read = None if mask is None else layout
        launch = _forward_launch(plan, scores.shape, scores.stride(0), scores.itemsize, read, n_queries)
        launch(scores, mask, y, p, *rng_arguments(rng, plan.dropout_p > 0.0))
    return y, p


@lru_cache(maxsize=LAUNCHES)
def _forward_launch(
    plan: SoftmaxPlan,
    shape: torch.Size,
    row_stride: int,
    bytes_of_score: int,
    layout: MaskLayout | None,
    n_queries: int,
) -> Launch:
    """layout: of the mask, if there is one."""
    n_rows, n_cols = shape
    block = tile(FORWARD_BUSY if plan.causal or plan.dropout_p > 0.0 else FORWARD, n_cols)
    n_programs = cdiv(n_rows, block.rows)
    return Launch(
        kernels._softmax_fwd_kernel,
        (n_programs,),
        **dropout_arguments(plan.dropout_p, n_cols),
        scale=plan.scale,
        n_rows=n_rows,
        n_cols=n_cols,
        n_queries=n_queries,
        scores_row_stride=row_stride,
        **_mask_arguments(layout, bytes_of_score, n_cols),
        CAUSAL=plan.causal,
        INDEX=_index_dtype(n_programs * block.rows),
        ROW_IN_TILE=block.cols >= n_cols,
        **tile_arguments(block, n_cols),
    )


class _Groups(NamedTuple):
    """How the rows of the scores are the pairs of n_mask_rows rows of a mask and the n_shared rows sharing each.

    Member m of the mask's rows stands at (m // mask_inner) * mask_outer_stride + (m % mask_inner) * mask_inner_stride,
    and likewise for the sharing rows; the sum of a pair is its row.
    """

    n_mask_rows: int
    n_shared: int
    mask_inner: int
    mask_inner_stride: int
    mask_outer_stride: int
    shared_inner: int
    shared_inner_stride: int
    shared_outer_stride: int


def _groups(sizes: tuple[int, ...], strides: tuple[int, ...]) -> _Groups:
    """Groups of rows in at most 4 dimensions: neighbours of one kind are merged, at most two of each kind remain."""
    merged: list[tuple[bool, int]] = []  # (is shared, size), slowest first
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        is_shared = stride == 0
        if merged and merged[-1][0] == is_shared:
            size *= merged.pop()[1]
        merged.append((is_shared, size))
    walks = []
    for kind in (False, True):
        own = [
            (size, math.prod(other for _, other in merged[i + 1 :]))
            for i, (is_shared, size) in enumerate(merged)
            if is_shared == kind
        ]
        (outer, outer_stride), (inner, inner_stride) = [(1, 0), (1, 0), *own][-2:]
        walks.append((outer * inner, inner, inner_stride, outer_stride))
    (n_mask_rows, *mask_walk), (n_shared, *shared_walk) = walks
    return _Groups(n_mask_rows, n_shared, *mask_walk, *shared_walk)


def shared_rows_per_tile(n_mask_rows: int, block: Tile) -> int:
    """Rows of a tile that share a row of the mask: one, unless the mask has too few rows to fill a tile."""
    return max(1, block.rows // next_power_of_2(n_mask_rows))


def steps_per_program(n_tiles: int, n_steps: int) -> int:
    """Over how many of its n_steps a program of the mask's gradient sums, where n_tiles programs would do all."""
    if n_tiles >= _FEW_PROGRAMS:
        return n_steps
    steps = min(max(n_tiles * n_steps // _FEW_PROGRAMS, 1), _ENOUGH_TILES)
    return min(n_steps, max(steps, cdiv(n_tiles * n_steps, _MANY_PROGRAMS)))


def backward(
    operands: BackwardOperands, plan: SoftmaxPlan, wants_dscores: bool, wants_dmask: bool
) -> tuple[Tensor | None, Tensor | None]:
    """reference.softmax.backward for dy and p of last stride 1; dscores: contiguous, dmask: float32."""
    dy, p, layout, n_queries = operands
    n_rows, n_cols = dy.shape
    dscores = dy.new_empty((n_rows, n_cols)) if wants_dscores else None
    dmask = dy.new_empty((layout.n_mask_rows, n_cols), dtype=torch.float32) if wants_dmask else None
    divisor = common_divisor(n_cols)
    with on_device_of(dy):
        dy, p = aligned(dy, divisor), aligned(p, divisor)
        sizes = _Sizes(dy.shape, n_queries, dy.stride(0), p.stride(0))
        if dmask is not None:
            n_partials, launch_dots, launch = _backward_mask_launches(plan, sizes, layout)
            row_dots = None
            if launch_dots is not None:
                row_dots = dmask.new_empty(n_rows)
                launch_dots(dy, p, row_dots)
            partials = dmask if n_partials == 1 else dmask.new_empty((n_partials, *dmask.shape))
            launch(dy, p, row_dots, dscores, partials)
            if n_partials > 1:
                sum_partials(partials.view(1, n_partials, -1), [dmask.view(-1)])
        elif dscores is not None:
            _backward_launch(plan, sizes)(dy, p, dscores)
    return dscores, dmask


class _Sizes(NamedTuple):
    shape: torch.Size
    n_queries: int
    dy_row_stride: int
    p_row_stride: int


def _common(plan: SoftmaxPlan, sizes: _Sizes) -> dict[str, Any]:
    """What all kernels of backward are launched with."""
    n_rows, n_cols = sizes.shape
    return {
        "dropout_scale": dropout_scale(plan.dropout_p),
        "n_cols": n_cols,
        "n_queries": sizes.n_queries,
        "dy_row_stride": sizes.dy_row_stride,
        "p_row_stride": sizes.p_row_stride,
        "HAS_DROPOUT": plan.dropout_p > 0.0,
        "CAUSAL": plan.causal,
        "INDEX": _index_dtype(2 * (n_rows + BACKWARD.elements)),  # tiles reach past the last row
    }


@lru_cache(maxsize=LAUNCHES)
def _backward_launch(plan: SoftmaxPlan, sizes: _Sizes) -> Launch:
    n_rows, n_cols = sizes.shape
    block = tile(BACKWARD, n_cols)
    return Launch(
        backward_kernels._softmax_bwd_kernel,
        (cdiv(n_rows, block.rows),),
        scale=plan.scale,
        n_rows=n_rows,
        ROW_IN_TILE=block.cols >= n_cols,
        **tile_arguments(block, n_cols),
        **_common(plan, sizes),
    )


@lru_cache(maxsize=LAUNCHES)
def _backward_mask_launches(plan: SoftmaxPlan, sizes: _Sizes, layout: MaskLayout) -> tuple[int, Launch | None, Launch]:
    """How many partial sums a number of dmask has; the row dots' launch, for rows wider than a tile; the gradients'."""
    n_rows, n_cols = sizes.shape
    common = _common(plan, sizes)
    groups = _groups(layout.sizes, layout.strides)
    block = tile(BACKWARD_MASK, n_cols)
    n_col_tiles = cdiv(n_cols, block.cols)
    launch_dots = None
    if n_col_tiles > 1:
        wide = tile(BACKWARD, n_cols)
        launch_dots = Launch(
            backward_kernels._row_dots_kernel,
            (n_rows,),
            n_rows=n_rows,
            ALIGN=common_divisor(n_cols),
            BLOCK_COLS=wide.cols,
            num_warps=wide.num_warps,
            **common,
        )
    shared_rows = shared_rows_per_tile(groups.n_mask_rows, block)
    n_mask_tiles = cdiv(groups.n_mask_rows * shared_rows, block.rows)
    n_steps = cdiv(groups.n_shared, shared_rows)
    steps = steps_per_program(n_mask_tiles * n_col_tiles, n_steps)
    n_chunks = cdiv(n_steps, steps)
    launch = Launch(
        backward_kernels._softmax_bwd_mask_kernel,
        (n_mask_tiles, n_chunks, n_col_tiles),
        scale=plan.scale,
        **groups._asdict(),
        shared_per_program=steps * shared_rows,
        MASK_SPLIT=groups.mask_inner < groups.n_mask_rows,
        SHARED_SPLIT=groups.shared_inner < groups.n_shared,
        SHARED_ROWS=shared_rows,
        **tile_arguments(block, n_cols),
        **common,
    )
    return n_chunks * shared_rows, launch_dots, launch
