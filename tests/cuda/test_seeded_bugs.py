"""Bugs put into the CUDA sources on purpose: each must be caught by what the simulator's tests look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from onetrip.reference.adam import thresholds
from onetrip.reference.rounding import Rounding

from tools.gpusim import row_norm as cudasim_row_norm
from tools.gpusim import softmax as cudasim_softmax
from tools.gpusim.adam import ADAM, ADAMW, Parameter, Step
from tools.gpusim.harness import Bug, build, check_calls, missing_tool, run, sources_with

pytestmark = [pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool())), pytest.mark.promise("T7")]

PIPELINED, WIDE = "row_norm_backward_pipelined.cuh", "row_norm_backward_wide.cuh"
ROW_NORM_BUGS = {
    "no_barrier_in_the_sum": Bug("reduce.cuh", "named_barrier(1 + group, row_threads_);", ";"),
    "one_buffer_for_every_sum": Bug("reduce.cuh", "turn_ ^= 1;", ";"),
    "sum_leaves_out_half_a_warp": Bug("reduce.cuh", "lane_mask = kThreads / 2;", "lane_mask = kThreads / 4;"),
    "other_rows_of_the_warp_added": Bug("reduce.cuh", "lane_mask < lanes ? value + other : value", "value + other"),
    "one_column_too_many": Bug("vec.cuh", "const Col left = n_cols - col;", "const Col left = n_cols - col + 1;"),
    "halves_of_a_word_exchanged": Bug(
        "vec.cuh", "<< (i % kPerWord * 8 * kBytes)", "<< ((i + 1) % kPerWord * 8 * kBytes)"
    ),
    "philox_lane_off_by_one": Bug("dropout.cuh", "first % kPhiloxElements)", "(first + 1) % kPhiloxElements)"),
    "philox_group_missing": Bug("dropout.cuh", "(shift != 0 ? 2 : 1)", "1"),
    "halves_of_a_mask_not_exchanged": Bug("dropout.cuh", "other >> kHalfColumns :", "other :"),
    "one_philox_group_for_two_lanes": Bug("dropout.cuh", "kHalfStep<true> / kPhiloxElements : 0", "0 : 0"),
    "variance_counts_padding": Bug(
        "row_norm_forward.cuh", "inside<kApart>(i, valid, kVectorAccess) ? value[i] - mean : 0.0f", "value[i] - mean"
    ),
    "last_chunk_left_out": Bug("row_norm_forward.cuh", "&& col >= n_cols", "&& col + kChunkColumns > n_cols"),
    "mean_and_rstd_exchanged": Bug(
        "row_norm_forward.cuh", "store_statistics(args, row, mean, rstd);", "store_statistics(args, row, rstd, mean);"
    ),
    "last_rows_dropped": Bug("launch.cuh", "ceil_div(n_rows, rows_per_block)", "(n_rows / rows_per_block)"),
    "groups_added_without_barrier": Bug(
        "row_norm_backward.cuh",
        "buffer = sums.publish();\n    __syncthreads();",
        "buffer = sums.publish();",
    ),
    "last_partial_rows_lost": Bug(
        "row_norm.cu",
        "ceil_div(n_parts, kWholeWarps) * kWholeWarps",
        "at_least_one(n_parts / kWholeWarps) * kWholeWarps",
    ),
    "sums_of_the_last_group_lost": Bug("row_norm_backward.cuh", "j < n_groups; ++j)", "j < n_groups - 1; ++j)"),
    "gradient_means_exchanged": Bug(
        "row_norm_backward.cuh", "means.x, wdy[i]) - means.y", "means.y, wdy[i]) - means.x"
    ),
    "one_half_for_every_cluster_sum": Bug("reduce.cuh", "shared_ + turn_ % 2 * kMaxClusterWarps", "shared_"),
    "every_phase_of_a_cluster_even": Bug("reduce.cuh", "turn_ / 2 % 2;", "0;"),
    "second_chunks_not_added": Bug(
        "reduce.cuh", "sum_of_warps(sums, 2 * ClusterExchange", "sum_of_warps(sums, ClusterExchange"
    ),
    "copies_not_waited_for": Bug(PIPELINED, "wait_for_stage(plan.dy_z);", ""),
    "dz_not_waited_for": Bug(PIPELINED, "if (plan.dz != 0) wait_for_stage(plan.dz);", ""),
    "wait_one_group_short": Bug(PIPELINED, "copy_async_wait<3>", "copy_async_wait<4>"),
    "wait_for_dz_one_group_short": Bug(PIPELINED, "copy_async_wait<1>", "copy_async_wait<2>"),
    "stage_filled_before_it_is_read": Bug(
        PIPELINED, "if (copies) copy_dy_z(stage, k);", "if (copies) copy_dy_z((stage + 1) % plan.dy_z, k);"
    ),
    "stage_too_many": Bug(PIPELINED, "stage + 1 < plan.dy_z ? stage + 1 : 0", "stage < plan.dy_z ? stage + 1 : 0"),
    "copies_a_row_late": Bug(
        PIPELINED, "copy_dz(dz_stage, r + plan.dz * n_groups);", "copy_dz(dz_stage, r + (plan.dz + 1) * n_groups);"
    ),
    "copies_the_row_of_the_next_group": Bug(PIPELINED, "next_dy += plan.dy_step", "next_dy += args.dy_row_stride"),
    "statistics_of_the_row_before": Bug(PIPELINED, "load_statistics(r + n_groups);", "load_statistics(r);"),
    "last_row_of_a_part_lost": Bug(PIPELINED, ": r < n_rows; r += n_groups", ": r + 1 < n_rows; r += n_groups"),
    "columns_past_the_row_taken": Bug(
        PIPELINED, "if (!has_row || !has_columns(k)) continue;", "if (!has_row) continue;"
    ),
    "lanes_without_a_row_go_on": Bug(
        PIPELINED, "if (!has_row || !has_columns(k)) continue;", "if (!has_columns(k)) continue;"
    ),
    "halves_past_the_row_not_zeroed": Bug(PIPELINED, "if (valid_of(k) != kHalfColumns) continue;", "continue;"),
    "lanes_past_the_row_keep_their_masks": Bug(
        PIPELINED, "valid = has_row ? valid_of(k) : 0;", "if ((valid = has_row ? valid_of(k) : 0) == 0) continue;"
    ),
    "halves_past_the_row_copied": Bug(PIPELINED, "if (valid <= half * kHalfColumns) continue;", ""),
    "first_halves_added_twice": Bug(PIPELINED, "place.element / 4", "0"),
    "dy_read_as_x": Bug(PIPELINED, "DTypeOf<Y>::value", "DTypeOf<X>::value"),
    "dy_copied_as_x": Bug(
        "row_norm.cu",
        "return launch_backward_pipelined<X, Z, decltype(y)>",
        "return launch_backward_pipelined<X, Z, X>",
    ),
    "weights_without_barrier": Bug(PIPELINED, "if (args.weight != nullptr) __syncthreads();", ""),
    "sums_of_the_last_group_not_added": Bug(PIPELINED, "j < n_groups; ++j)", "j < n_groups - 1; ++j)"),
    "groups_added_before_all_have_ended": Bug(
        PIPELINED, "const auto add_groups = [&] {\n      __syncthreads();", "const auto add_groups = [&] {"
    ),
    "next_sums_overwrite_those_read": Bug(PIPELINED, "      }\n      __syncthreads();\n    };", "      }\n    };"),
    "second_values_of_lanes_not_added": Bug(
        "reduce.cuh", "warp_sum<kRowThreads>(add(first, second))", "warp_sum<kRowThreads>(first)"
    ),
    "second_group_drawn_as_the_first": Bug("dropout.cuh", "kept_of_group(group + g)", "kept_of_group(group)"),
    "every_other_round_left_out": Bug("dropout.cuh", "philox_round(random, next_key);", ""),
    "tiles_share_their_places": Bug(WIDE, "n_warps % kMaxClusterWarps + warp", "warp"),
    "means_without_barrier": Bug(WIDE, "__syncthreads();\n  if (warp != 0) return;", "if (warp != 0) return;"),
    "last_row_of_a_tile_lost": Bug(WIDE, "row < args.n_rows;", "row + 1 < args.n_rows;"),
    "rows_after_the_last_taken": Bug("row_norm_backward.cuh", "left < n_groups ? left : n_groups", "n_groups"),
    "parts_take_rows_of_others": Bug("row_norm_backward.cuh", "(r - group) * partition.n_parts", "(r - group)"),
}

# What blocks of a cluster tell each other.
CLUSTER_BUGS = {
    "values_of_the_cluster_not_awaited": Bug("reduce.cuh", "byte_barrier_wait(barrier, parity);", ";"),
    "start_of_the_cluster_not_awaited": Bug("reduce.cuh", "if (turn_ == 0) cluster_wait();", ";"),
    "values_stay_in_their_block": Bug(
        "reduce.cuh", "(slot, lane % kLanes, value, barrier)", "(slot, cluster_rank(), value, barrier)"
    ),
    "blocks_share_slots": Bug(
        "reduce.cuh", "(cluster_rank() * kValues + lane / kLanes) * warps", "lane / kLanes * warps"
    ),
    "last_block_left_out": Bug("reduce.cuh", "return cluster_size() *", "return (cluster_size() - 1) *"),
    "warps_past_32_left_out": Bug("reduce.cuh", "i < n_warps; i += kWarpThreads)", "i < 0; i += kWarpThreads)"),
    "threads_of_a_cluster_counted_by_block": Bug("launch.cuh", "thread = cluster_rank() * threads +", "thread ="),
    "a_cluster_takes_every_second_row": Bug("launch.cuh", "(blockIdx.x >> log2_size)", "blockIdx.x"),
}
ROW_NORM_BUGS |= CLUSTER_BUGS | {
    "kept_tiles_exchanged": Bug(
        "row_norm_forward.cuh", "held.z[0].word[i] = kept_word(tile, i);", "held.z[0].word[i] = kept_word(0, i);"
    ),
}

COMMON, FORWARD, BACKWARD = "softmax_common.cuh", "softmax_forward.cuh", "softmax_backward.cuh"
SOFTMAX_BUGS = {
    "no_barrier_between_warps": Bug(
        FORWARD, "make_float2(largest, sum);\n  __syncthreads();", "make_float2(largest, sum);"
    ),
    "hidden_rows_divide_by_zero": Bug(FORWARD, "sum == 0.0f ? 0.0f : quick_reciprocal(sum)", "quick_reciprocal(sum)"),
    "masked_rows_subtract_infinity": Bug(FORWARD, "largest == minus_infinity() ? 0.0f : largest", "largest"),
    "causal_off_by_one": Bug(COMMON, "n_queries.divisor) - 1 - query", "n_queries.divisor) - query"),
    "hidden_gradient_in_the_sum": Bug(BACKWARD, "    hide(chunk.dy, seen);\n", ""),
    "hidden_columns_share_nan": Bug(BACKWARD, "hide_columns<kApart>(dp[k], first_col + k * step, visible, 0.0f);", ";"),
    "columns_past_the_row_are_zero": Bug(FORWARD, "columns.visible, minus_infinity()", "columns.visible, 0.0f"),
    "hidden_probabilities_written": Bug(FORWARD, "hide_columns<kApart>(value[k], columns.col(k), visible, 0.0f);", ";"),
    "other_rows_of_the_warp_added": ROW_NORM_BUGS["other_rows_of_the_warp_added"],
    "dropout_taken_for_plain": Bug("softmax.cu", "args.p == nullptr && args.dropout.threshold == 0 &&", "true &&"),
    "causal_taken_for_plain": Bug("softmax.cu", " && !launch.causality.on", ""),
    "mask_taken_for_plain": Bug("softmax.cu", "launch.plain = args.mask == nullptr &&", "launch.plain ="),
    "second_group_drawn_as_the_first": ROW_NORM_BUGS["second_group_drawn_as_the_first"],
    "every_other_round_left_out": ROW_NORM_BUGS["every_other_round_left_out"],
    "last_bits_kept": Bug("dropout.cuh", "(dropout.threshold << 16) - 1;", "(dropout.threshold << 16) - (1 << 28);"),
    "hidden_columns_dropped": Bug(FORWARD, "left < kChunkColumns ? dropped & ~(~0u << left) : dropped", "dropped"),
    "signs_of_the_first_chunk": Bug(FORWARD, "dropped >> (8 * k), args", "dropped, args"),
    "mask_dimensions_exchanged": Bug(FORWARD, "divide(rest) * rows.strides[k]", "divide(rest) * rows.strides[4 - k]"),
    "sign_set_where_kept": Bug(FORWARD, "== 0 ? value[i] : -value[i]", "!= 0 ? value[i] : -value[i]"),
    "wide_sum_not_rescaled": Bug(FORWARD, "fmaf(sum, exponential(before, subtrahend), chunk_sum)", "sum + chunk_sum"),
    "sums_read_without_barrier": Bug(BACKWARD, "= sum[j];\n  __syncthreads();", "= sum[j];"),
    "last_part_lost": Bug(BACKWARD, "part < n_parts; part += n_warps", "part + 1 < n_parts; part += n_warps"),
    "sharing_rows_do_not_wrap": Bug(BACKWARD, "    inner_ = 0;\n", ""),
    "values_of_a_cluster_not_awaited": CLUSTER_BUGS["values_of_the_cluster_not_awaited"],
    "values_stay_in_their_block": CLUSTER_BUGS["values_stay_in_their_block"],
    "warps_past_32_left_out": Bug(FORWARD, "kSlots > 1 && n_warps > kWarpThreads;", "false;"),
    "dropped_gradient_kept": Bug(BACKWARD, "< 0 ? 0.0f : __fmul_rn", "< 0 ? dp[i] : __fmul_rn"),
}

# The least number that the signed map rounds to magnitude 100.
THRESHOLD = thresholds(True)[99]
TABLES, STEP = "adam_tables.cuh", "adam_step.cuh"
ADAM_BUGS = {
    "maximum_of_the_other_half": Bug("reduce.cuh", "upper ? of_upper : of_lower", "of_lower"),
    "maximum_swallows_nan": Bug(
        STEP, "return __float_as_uint(x) & 0x7FFFFFFFu;", "return x != x ? 0u : __float_as_uint(fabsf(x));"
    ),
    "padding_counts_in_the_maximum": Bug(STEP, "if (j >= valid) m[j] = root[j] = 0.0f;", ";"),
    "threshold_itself_keeps_the_lower_code": Bug(TABLES, "(0x10000 - threshold)", "(0xFFFF - threshold)"),
    "positive_root_becomes_zero": Bug(TABLES, "x > 0.0f ? threshold :", "x < 0.0f ? threshold :"),
    "zeros_get_code_one": Bug(
        TABLES, "x > 0.0f ? threshold : __uint_as_float(UnsignedBuckets::kFirst << 16)", "threshold"
    ),
    "zeros_leave_the_quick_range_unseen": Bug(STEP, "? bits - 1 : bits", "? bits | 1 << 30 : bits"),
    "quick_range_not_looked_at": Bug(STEP, "if (__any_sync(kFullWarp, !right)) return false;", ""),
    "quick_range_of_scalars_not_looked_at": Bug(STEP, "&& in_quick_range(scalars[counter])", ""),
    "small_moments_look_ordinary": Bug(STEP, "all_have_codes<SignedBuckets>(m_size, m_scale)", "true"),
    "small_roots_look_ordinary": Bug(STEP, "all_have_codes<UnsignedBuckets>(root_size, v_scale)", "true"),
    "quick_range_forgets_the_root": Bug(STEP, "root.least >= kOne - 49 * kExponent &&", ""),
    "quick_range_forgets_the_moment": Bug(STEP, "m.least >= kOne - 100 * kExponent &&", ""),
    "quick_range_forgets_large_moments": Bug(STEP, "m.largest <= kOne + 40 * kExponent &&", ""),
    "negative_codes_off_by_one": Bug(TABLES, "word = kMirror - 1 - word", "word = kMirror + 0xFFFF - word"),
    "minus_one_gets_code_255": Bug(
        TABLES, "word < 0 ? 0u : static_cast<uint32_t>(word)", "static_cast<uint32_t>(word)"
    ),
    "tables_read_without_barrier": Bug(TABLES, "  __syncthreads();\n", ""),
    "clamp_swallows_nan": Bug(
        STEP,
        "clamp_magnitude(u, s.largest_update)",
        "fabsf(u) <= s.largest_update ? u : copysignf(s.largest_update, u)",
    ),
    "l2_factor_lost": Bug(STEP, "g[j] = __fadd_rn(g[j], __fmul_rn(p[j], s.l2));", "g[j] = __fadd_rn(g[j], p[j]);"),
    "l2_lost_without_a_factor": Bug(STEP, "s.grad_factor != 1.0f || s.l2 != 0.0f", "s.grad_factor != 1.0f"),
    "subnormal_scale_kept": Bug(STEP, "scale < kSmallestAdamScale ? 0.0f : scale", "scale"),
    "found_inf_ignored": Bug(STEP, "if (scalars[0].step == 0.0f) return;", ""),
    "later_groups_not_prepared": Bug("adam.cu", "first += kManyGroups", "first += args.n_groups"),
    "last_chunk_of_a_share_lost": Bug(STEP, "share + (blockIdx.x < n_larger ? 1 : 0)", "share"),
    "chunk_after_a_tensor_lost": Bug(STEP, "--i;", ""),
    "squares_of_warps_read_without_barrier": Bug(STEP, "= sum;\n    __syncthreads();", "= sum;"),
    "squares_of_the_first_warp_lost": Bug(
        STEP, "for (int warp = 1; warp < kAdamWarps", "for (int warp = 2; warp < kAdamWarps"
    ),
    "squares_past_the_end": Bug(
        STEP, "tensor.numel - chunk.first, int64_t{kAdamChunk}", "tensor.numel, int64_t{kAdamChunk}"
    ),
}

ROUNDED = "adam_rounding.cuh"
ROUNDING_BUGS = {
    "residual_changes_the_sign": Bug(ROUNDED, "kExact && static_cast<int>(bits ^ upper) < 0", "false"),
    "stale_residuals_not_seen": Bug(STEP, "if (kQuick && __any_sync(kFullWarp, !all_finite(p))) return false;", ""),
    "residual_of_an_overflow": Bug(STEP, "if constexpr (!kQuick) settle_infinite(p, to.rest.rounding);", ""),
    "residual_rounds_past_its_end": Bug(
        ROUNDED, "min((sum[j] & 0xFFFFu) + 0x80u, 0xFFFFu)", "(sum[j] & 0xFFFFu) + 0x80u"
    ),
    "residuals_of_the_chunk_before": Bug(ROUNDED, "{ place += kAdamChunk * step(); }", "{}"),
    "second_lane_keeps_its_random_half": Bug(
        ROUNDED, "(is_second ? block.word[i] : block.word[i + 2]) = other;", "block.word[i + 2] = other;"
    ),
    "random_bits_of_the_low_word": Bug(
        ROUNDED, "rest.place / kPhiloxElements", "static_cast<uint32_t>(rest.place) / 8"
    ),
    "same_random_bits_each_step": Bug(ROUNDED, "static_cast<uint64_t>(step)", "uint64_t{1}"),
}


ROW_NORM_PAIR = (torch.bfloat16, torch.float32)


def check_row_norm(driver: Path, folder: Path) -> None:
    # 1001 columns: rows start inside a Philox group, odd addresses, several warps a row. 70: the warp path.
    Call = cudasim_row_norm.Call
    block = {"pair": ROW_NORM_PAIR, "residual": True, "bias": True, "dropout_p": 0.3, "store_z": True}
    chosen = [Call("wide", 21, 1001, **block), Call("aligned", 21, 1024, **block), Call("warp", 70, 70, **block)]
    chosen += [Call("lanes", 70, 104, **block), Call("odd", 70, 1544, **block, shared_limit=64 * 1024, orders=(0, 3))]
    chosen += [Call("not ahead", 21, 1024, **block, copies=False)]
    chosen += [Call("float32 dy", 21, 1024, **block, y_dtype=torch.float32)]
    chosen += [Call("cluster", 2, 16896, **block, orders=(0, 4))]
    chosen += [Call("kept", 1, 16392, **block, clusters=False, orders=(0,))]
    for call in chosen:  # until one is wrong
        check_calls(driver, [call], folder)
    # Blocks in clusters, more than 32 warps a row, two rows of dy and z and one of dz copied ahead; two kernels a row.
    cluster = Call("cluster", 20, 8456, **block, dz=True, shared_limit=112 * 1024, orders=(3, 5))
    for call in (cluster, replace(cluster, name="split", clusters=False)):
        (outputs,) = run(driver, [call.backward_case()], folder)
        call.check_backward(outputs)


def check_softmax(driver: Path, folder: Path) -> None:
    Call = cudasim_softmax.Call
    padding = {"dtype": torch.bfloat16, "mask": torch.bool, "mask_has": (True, False, True, True), "dropout_p": 0.3}
    bias = {"dtype": torch.bfloat16, "mask": torch.float32, "mask_has": (False, True, False, True), "dropout_p": 0.3}
    chosen = [
        Call("causal", (2, 3, 5), 1001, **padding, causal=True, special=(float("nan"),)),
        Call("causal vectors", (2, 3, 5), 1008, **padding, causal=True),
        Call("bias", (5, 2, 69), 300, **bias),
        Call("plain", (2, 3, 5), 1000, torch.bfloat16, scale=-0.7),
        Call("plain lanes", (2, 3, 5), 104, torch.bfloat16),
        Call("dropout alone", (2, 3, 5), 1000, torch.bfloat16, dropout_p=0.3),
        Call("dropout of lanes, causal", (2, 3, 7), 40, torch.bfloat16, dropout_p=0.3, causal=True),
        Call("causal alone", (2, 3, 5), 1000, torch.bfloat16, causal=True),
        Call("mask alone", (2, 3, 5), 104, torch.bfloat16, mask=torch.float16),
        Call("wide", (2, 1, 1), 16392, **padding, orders=(0,), clusters=False),
        Call("cluster", (2, 1, 1), 20000, **padding, orders=(0, 4)),
    ]
    for call in chosen:
        check_calls(driver, [call], folder)


def check_adam(driver: Path, folder: Path) -> None:
    groups = [ADAM._replace(lr=1e-3 * (i + 1)) for i in range(66)]
    nan = float("nan")
    steps = [
        # The largest magnitude negative; exactly on a threshold, and close to 0; NaN; subnormal; ragged; chunks.
        Step([Parameter(256, grads=tuple(torch.linspace(-1.0, 1.0, 256).tolist()))], [ADAM._replace(beta1=0.0)]),
        Step([Parameter(384, grads=(1.0, 1e-9, *382 * (THRESHOLD,)))], [ADAM._replace(beta1=0.0, weight_decay=0.0)]),
        Step(
            [
                Parameter(200, special=(nan,)),
                Parameter(130, grads=130 * (1e-39,)),
                Parameter(9000),
                Parameter(1000, shift=1),
            ]
        ),
        Step([Parameter(50, counter=i) for i in range(66)], groups, counters=range(66)),
        # Zeros among ordinary numbers; too small, and too large, for quick arithmetic.
        Step([Parameter(512, grads=(*300 * (0.0,), *212 * (0.5,)))]),
        Step([Parameter(256, grads=(*100 * (0.0,), *156 * (value,))) for value in (1e-33, 3e-15, 1e-16, 1e18)]),
        Step([Parameter(300, special=(nan,))], found_inf=1.0),
    ]
    overflowing = Step([Parameter(256, grads=256 * (0.0,))], [ADAM._replace(eps=1e-12, weight_decay=0.0)])
    overflowing.slots[0].exp_avg.fill_(200)
    overflowing.slots[0].exp_avg_scale.fill_(1e30)
    steps.append(overflowing)
    # A denominator too large for quick arithmetic; a moment, and a root, tiny beside the others of its block.
    steps.append(Step([Parameter(256)], [ADAM._replace(eps=2e6, lr=1e4)]))
    one_tiny = (1.0, 1e-9, *254 * (0.5,))
    tiny_moment = Step([Parameter(256, grads=one_tiny)], [ADAM._replace(beta1=0.0, weight_decay=0.0)])
    tiny_moment.slots[0].exp_avg_sq.fill_(200)
    tiny_moment.slots[0].exp_avg_sq_scale.fill_(1.0)
    tiny_root = Step([Parameter(256, grads=one_tiny)], [ADAM._replace(weight_decay=0.0)])
    tiny_root.slots[0].exp_avg.fill_(200)
    tiny_root.slots[0].exp_avg_scale.fill_(1.0)
    whole_chunks = Step([Parameter(n * 4096) for n in (2, 1, 3, 1, 1, 2, 4, 1, 1)])  # several to each of 4 blocks
    steps += [tiny_moment, tiny_root, whole_chunks]
    for step in steps:
        (outputs,) = run(driver, [step.case()], folder)
        step.check(outputs)


def check_roundings(driver: Path, folder: Path) -> None:
    bf16 = torch.bfloat16
    for rounding in (Rounding.RESIDUAL_8, Rounding.RESIDUAL_16, Rounding.STOCHASTIC):
        common = {"param": bf16, "grad": bf16, "rounding": rounding}
        # Weights set to 0 since the last step; updates that bfloat16 cannot hold, and float32 can.
        stale = [Step([Parameter(512, **common)], [group]) for group in (ADAM, ADAMW)]
        for step in stale if rounding is not Rounding.STOCHASTIC else ():
            step.slots[0].param[::9], step.slots[0].residual[::9] = 0.0, -5
        group = ADAMW._replace(lr=5e35, beta1=0.0, weight_decay=0.0)
        large = Step([Parameter(512, **common, grads=512 * (-1.0,))], [group])
        large.slots[0].param.fill_(torch.finfo(bf16).max)
        steps = [
            *stale,
            large,
            Step([Parameter(9 * 4096, **common)], orders=(0,)),
            Step([Parameter(4300, **common, is_8bit=False)]),
        ]
        for step in steps:
            (outputs,) = run(driver, [step.case()], folder)
            step.check(outputs)


class Family(NamedTuple):
    """What a family's drivers are compiled for, its bugs, and what must catch them."""

    dtypes: tuple[torch.dtype, ...]
    bugs: dict[str, Bug]
    check: Callable[[Path, Path], None]
    driver: str | None = None
    """Whose driver it is, if not that of the family's name."""


FAMILIES = {
    "row_norm": Family(ROW_NORM_PAIR, ROW_NORM_BUGS, check_row_norm),
    "softmax": Family((torch.bfloat16,), SOFTMAX_BUGS, check_softmax),
    "adam": Family((torch.float32, torch.float32), ADAM_BUGS, check_adam),
    "adam_rounding": Family((torch.bfloat16, torch.bfloat16), ROUNDING_BUGS, check_roundings, "adam"),
}


def driver_with(family: str, name: str | None, folder: Path) -> Path:
    """The driver of a family with one of its bugs, or with none, without sanitizers, for one kind of dtypes."""
    chosen = FAMILIES[family]
    bug = None if name is None else chosen.bugs[name]
    return build(chosen.driver or family, [chosen.dtypes], sources_with(bug, folder), sanitize=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_right_source_passes(family: str, tmp_path: Path) -> None:
    FAMILIES[family].check(driver_with(family, None, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "name"), [(family, name) for family in FAMILIES for name in FAMILIES[family].bugs])
def test_bug_is_caught(family: str, name: str, tmp_path: Path) -> None:
    driver = driver_with(family, name, tmp_path)
    with pytest.raises(AssertionError):
        FAMILIES[family].check(driver, tmp_path)
