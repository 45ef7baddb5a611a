"""The kernels of Adam; adam.py beside this file launches them. The formulas stand in onetrip/reference/adam.py.

Their bits are the reference's: compiled without contraction into fused multiply-adds, divisions and square roots
rounded to nearest, and codes from exact thresholds.

Tables are those of csrc/launch.h, rows of int64: tensors [n, 10] (struct AdamTensor), chunks [n, 2] (AdamChunk),
counters [n, 2] (AdamCounter); scalars are [n_counters, 12] float32 (AdamScalars).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..reference.rounding import Rounding
from .launch import kernel
from .philox import random_tile

BLOCK, CHUNK = tl.constexpr(128), tl.constexpr(4096)  # kAdamBlock, kAdamChunk
ZERO_CODE = tl.constexpr(127)  # kSignedZeroCode
SMALLEST_SCALE = tl.constexpr(2.0**-126)  # kSmallestAdamScale
_NO_SIGN = tl.constexpr(0x7FFFFFFF)
_EXPONENT = tl.constexpr(0x7F800000)  # bits of infinity
_NAN = tl.constexpr(0x7FC00000)
# For |x| < 2^22, 1.5 * 2^23 + x is x rounded half to even, and its bits exceed those of 1.5 * 2^23 by that integer.
_INTEGERS, _INTEGERS_BITS = tl.constexpr(1.5 * 2**23), tl.constexpr(0x4B400000)
RESIDUAL_8, RESIDUAL_16 = tl.constexpr(int(Rounding.RESIDUAL_8)), tl.constexpr(int(Rounding.RESIDUAL_16))
STOCHASTIC = tl.constexpr(int(Rounding.STOCHASTIC))


@triton.jit
def _double(bits, COUNT: tl.constexpr):
    """[COUNT] of the float64 with these bits: Triton rounds a float argument to float32."""
    return (tl.zeros([COUNT], tl.int64) + bits).to(tl.float64, bitcast=True)


@triton.jit
def _expm1(x):
    """exp(x) - 1 of float64, to about 1e-13 of the result: near 0, where the difference would cancel, by its series."""
    series = x * (1.0 + x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120)))))
    return tl.where(tl.abs(x) < 1.0 / 1024, series, tl.exp(x) - 1.0)


@kernel
def _adam_prepare_kernel(
    counters_ptr,
    scalars_ptr,
    lr_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    n_counters: tl.int64,
    group: tl.int64,
    grad_sign: tl.float32,
    l2: tl.float32,
    one_minus_beta1: tl.float32,
    beta2: tl.float32,
    one_minus_beta2: tl.float32,
    eps: tl.float32,
    lr: tl.int64,
    weight_decay: tl.int64,
    log_beta1: tl.int64,
    log_beta2: tl.int64,
    log_ratio: tl.int64,
    sum_factor: tl.int64,
    sum_per_step: tl.int64,
    largest_factor: tl.int64,
    COUNT: tl.constexpr,
):
    """Counts the step of one group's parameters, and computes the scalars of each in float64: reference.adam.scalars.

    Where found_inf is not 0 the counts stay, and the step in the scalars is 0. lr, grad_scale: read from lr_ptr and
    grad_scale_ptr where those are not None. l2, weight_decay: one of them is 0. beta^t is exp(t log beta). C_t is
    largest_factor / (1 - beta1^t) * sqrt((1 - beta2^t) * sum), where sum, of the first t powers of ratio =
    beta1^2 / beta2, is sum_per_step * t + sum_factor * (ratio^t - 1): (1, 0) where ratio is 1, else
    (0, 1 / (ratio - 1)).

    A program takes COUNT counters, and leaves alone those of other groups. Moves 72 bytes a parameter.
    """
    index = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = index < n_counters
    inside &= tl.load(counters_ptr + 2 * index + 1, mask=inside, other=-1) == group
    step_ptr = tl.load(counters_ptr + 2 * index, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    t = tl.load(step_ptr, mask=inside, other=0.0) + 1.0
    counted = inside
    if found_inf_ptr is not None:
        counted &= tl.zeros([COUNT], tl.float32) + tl.load(found_inf_ptr) == 0.0
    tl.store(step_ptr, t, mask=counted)

    step = t.to(tl.float64)
    rate = _double(lr, COUNT)
    if lr_ptr is not None:
        rate = tl.zeros([COUNT], tl.float64) + tl.load(lr_ptr).to(tl.float64)
    one = tl.full([COUNT], 1.0, tl.float64)
    factor = one
    if grad_scale_ptr is not None:
        factor = one / tl.load(grad_scale_ptr).to(tl.float64)
    correction1 = -_expm1(step * _double(log_beta1, COUNT))
    correction2 = -_expm1(step * _double(log_beta2, COUNT))
    powers = _double(sum_per_step, COUNT) * step + _double(sum_factor, COUNT) * _expm1(step * _double(log_ratio, COUNT))
    largest = _double(largest_factor, COUNT) / correction1 * tl.sqrt(correction2 * powers)

    out = scalars_ptr + 12 * index
    tl.store(out + 0, factor.to(tl.float32) * grad_sign, mask=inside)
    tl.store(out + 1, l2, mask=inside)
    tl.store(out + 2, (one - rate * _double(weight_decay, COUNT)).to(tl.float32), mask=inside)
    tl.store(out + 3, one_minus_beta1, mask=inside)
    tl.store(out + 4, beta2, mask=inside)
    tl.store(out + 5, one_minus_beta2, mask=inside)
    tl.store(out + 6, (one / correction1).to(tl.float32), mask=inside)
    tl.store(out + 7, (one / tl.sqrt(correction2)).to(tl.float32), mask=inside)
    tl.store(out + 8, eps, mask=inside)
    tl.store(out + 9, rate.to(tl.float32), mask=inside)
    tl.store(out + 10, largest.to(tl.float32), mask=inside)
    tl.store(out + 11, tl.where(counted, t, 0.0), mask=inside)


@triton.jit
def _chunk_ptr(address, first, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a program's elements start. ALIGNED: at a multiple of 16 bytes, which Triton is told here."""
    ptr = address.to(tl.pointer_type(DTYPE)) + first
    if ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def _load(ptr, offsets, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=inside, other=0)


@triton.jit
def _store(ptr, offsets, values, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(ptr + offsets, values.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + offsets, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize(codes, scale, map_ptr):
    return tl.load(map_ptr + codes.to(tl.int32)) * scale


@triton.jit
def _scale(values):
    """[rows, 1]: the largest magnitude of each row, over its bits as an integer: of all numbers NaN is the largest."""
    largest = tl.max(values.to(tl.int32, bitcast=True) & _NO_SIGN, axis=1, keep_dims=True)
    scale = largest.to(tl.float32, bitcast=True)
    return tl.where(scale < SMALLEST_SCALE, 0.0, scale)


@triton.jit
def _magnitude_codes(normalized, code_ptr, SHIFT: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The codes of |normalized|, int32: 0 below the table and above it, and for NaN. code_ptr: adam.py's CodeTable."""
    bits = normalized.to(tl.int32, bitcast=True) & _NO_SIGN
    bucket = (bits >> SHIFT) - FIRST
    known = (bucket >= 0) & (bucket < COUNT)
    entry = tl.load(code_ptr + bucket, mask=known, other=0)
    return (entry + (bits & ((1 << SHIFT) - 1))) >> SHIFT


@triton.jit
def _inverse(scale):
    """Infinite for 0. What that makes of a block's zeros and tiny numbers is not finite and gets code 0, as they do."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _power_of_2(exponent):
    """float32; exponent: biased by 127."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _unit_exponent(weight):
    """Biased by 127: of the last place of float16 numbers, given as float32; 2^-24 for subnormal ones."""
    return tl.maximum((weight.to(tl.int32, bitcast=True) & _EXPONENT) >> 23, 127 - 14) - 10


@triton.jit
def _bits_of_bfloat16(values):
    """Bits of the same numbers in float32. The interpreter's conversion makes zeros of subnormal ones."""
    return values.to(tl.uint16, bitcast=True).to(tl.int32) << 16


@triton.jit
def _join(weight, residual):
    """reference.rounding.join."""
    BITS: tl.constexpr = residual.dtype.primitive_bitwidth
    if weight.dtype.is_bf16():
        upper = _bits_of_bfloat16(weight)
        joined = upper + (residual.to(tl.int32) << (16 - BITS))
        return tl.where((joined ^ upper) < 0, upper, joined).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(weight.dtype.is_fp16())
        master = weight.to(tl.float32)
        # Exact, and not a conversion from 8 or 16 bits, which has less throughput than an addition.
        units = (residual.to(tl.int32) + _INTEGERS_BITS).to(tl.float32, bitcast=True) - _INTEGERS
        return master + units * _power_of_2(_unit_exponent(master) - BITS)


@triton.jit
def _bfloat16(bits):
    """bfloat16 numbers from the upper halves of float32 bits. A conversion rounds; in the interpreter it truncates."""
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _split(master, PARAM_DTYPE: tl.constexpr, BITS: tl.constexpr):
    """reference.rounding.split: (weight, residual of BITS bits as int32)."""
    if PARAM_DTYPE == tl.bfloat16:  # noqa: SIM300 (in triton 3.2 a constant dtype has no is_bf16)
        bits = master.to(tl.int32, bitcast=True)
        lower = (bits << 16) >> 16
        upper = tl.where(master != master, _NAN, bits - lower)
        weight = _bfloat16(upper)
        residual = (lower + ((1 << (16 - BITS)) >> 1)) >> (16 - BITS)
    else:
        tl.static_assert(PARAM_DTYPE == tl.float16)  # noqa: SIM300
        weight = master.to(tl.float16)
        rounded = weight.to(tl.float32)
        upper = rounded.to(tl.int32, bitcast=True)
        scaled = (master - rounded) * _power_of_2(254 + BITS - _unit_exponent(rounded))
        residual = (scaled + _INTEGERS).to(tl.int32, bitcast=True) - _INTEGERS_BITS
    residual = tl.minimum(residual, (1 << (BITS - 1)) - 1)
    return weight, tl.where((upper & _EXPONENT) == _EXPONENT, 0, residual)


@triton.jit
def _round_stochastically(values, key, step, rows):
    """reference.rounding.round_stochastically of [n_rows, 128] values. rows: [n_rows, 1] int64, their blocks' indices
    in the whole parameter."""
    N_ROWS: tl.constexpr = values.shape[0]
    PHILOX_COLS: tl.constexpr = 8 if N_ROWS > 1 else 4  # a warp's 32 lanes call Philox once each
    random = random_tile(key, step, rows, 0, BLOCK, PHILOX_COLS, N_ROWS, BLOCK)
    bits = values.to(tl.int32, bitcast=True) + (random >> 16).to(tl.int32)
    return _bfloat16(tl.where(values != values, _NAN, bits))


@kernel
def _adam_step_kernel(
    tensors_ptr,
    chunks_ptr,
    scalars_ptr,
    signed_map_ptr,
    unsigned_map_ptr,
    signed_code_ptr,
    unsigned_code_ptr,
    first_chunk: tl.int64,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    IS_8BIT: tl.constexpr,
    ROUNDING: tl.constexpr,
    SIGNED_SHIFT: tl.constexpr,
    SIGNED_FIRST: tl.constexpr,
    SIGNED_COUNT: tl.constexpr,
    UNSIGNED_SHIFT: tl.constexpr,
    UNSIGNED_FIRST: tl.constexpr,
    UNSIGNED_COUNT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One step for every element of the chunks from first_chunk on, whose tensors have these dtypes.

    A program takes one of the PARTS equal parts of a chunk, in tiles of BLOCK_ROWS blocks of 128: first the whole
    tiles, with accesses of 16 bytes, where all addresses are multiples of 16; then, element by element, what remains:
    the end of a tensor, or all of a misaligned one. signed_map, unsigned_map: [256] float32, what the codes stand for.
    signed_code, unsigned_code: [..._COUNT] int32. The four are None where states are float32. ROUNDING: of
    reference.rounding. Moves 2 * param + grad + 4.125 bytes an element with 8-bit states, 2 * param + grad + 16 with
    float32 ones, and 2 * residual.
    """
    STATE_DTYPE: tl.constexpr = tl.uint8 if IS_8BIT else tl.float32
    RESIDUAL_BITS: tl.constexpr = 8 if ROUNDING == RESIDUAL_8 else 16 if ROUNDING == RESIDUAL_16 else 0
    RESIDUAL_DTYPE: tl.constexpr = tl.int8 if RESIDUAL_BITS == 8 else tl.int16
    part = tl.program_id(0)
    chunk = chunks_ptr + 2 * (first_chunk + part // PARTS)
    tensor = tensors_ptr + 10 * tl.load(chunk)
    first = tl.load(chunk + 1) + part % PARTS * (CHUNK // PARTS)
    param, grad = tl.load(tensor), tl.load(tensor + 1)
    exp_avg, exp_avg_sq = tl.load(tensor + 2), tl.load(tensor + 3)
    n = tl.maximum(tl.minimum(tl.load(tensor + 6) - first, CHUNK // PARTS), 0).to(tl.int32)  # 0: past a tensor's end
    scalars = scalars_ptr + 12 * tl.load(tensor + 7)
    grad_factor, l2, decay = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    one_minus_beta1, beta2, one_minus_beta2 = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    inv_bias_correction1, inv_sqrt_bias_correction2 = tl.load(scalars + 6), tl.load(scalars + 7)
    eps, lr, largest_update = tl.load(scalars + 8), tl.load(scalars + 9), tl.load(scalars + 10)
    step = tl.load(scalars + 11)
    n = tl.where(step == 0.0, 0, n)  # a gradient was not finite
    if IS_8BIT:
        m_scale_ptr = tl.load(tensor + 4).to(tl.pointer_type(tl.float32)) + first // BLOCK
        root_scale_ptr = tl.load(tensor + 5).to(tl.pointer_type(tl.float32)) + first // BLOCK
    addresses = param | grad | exp_avg | exp_avg_sq
    if RESIDUAL_BITS > 0:
        residual = tl.load(tensor + 8)
        addresses |= residual
    elif ROUNDING == STOCHASTIC:
        first_row = (tl.load(tensor + 8) + first) // BLOCK
        key, step = tl.load(tensor + 9).to(tl.uint64), step.to(tl.int64).to(tl.uint64)

    n_whole = tl.where((addresses & 15) == 0, n // (BLOCK_ROWS * BLOCK), 0) * BLOCK_ROWS
    for WHOLE in tl.static_range(1, -1, -1):
        param_ptr = _chunk_ptr(param, first, PARAM_DTYPE, WHOLE)
        grad_ptr = _chunk_ptr(grad, first, GRAD_DTYPE, WHOLE)
        exp_avg_ptr = _chunk_ptr(exp_avg, first, STATE_DTYPE, WHOLE)
        exp_avg_sq_ptr = _chunk_ptr(exp_avg_sq, first, STATE_DTYPE, WHOLE)
        if RESIDUAL_BITS > 0:
            residual_ptr = _chunk_ptr(residual, first, RESIDUAL_DTYPE, WHOLE)
        end = n_whole if WHOLE else tl.cdiv(n, BLOCK)
        for row in range(0 if WHOLE else n_whole, end, BLOCK_ROWS if WHOLE else 1):
            rows = row + tl.arange(0, BLOCK_ROWS if WHOLE else 1)[:, None]
            offsets = rows * BLOCK + tl.arange(0, BLOCK)[None, :]
            inside = offsets < n
            p = _load(param_ptr, offsets, inside, WHOLE)
            if RESIDUAL_BITS > 0:
                p = _join(p, _load(residual_ptr, offsets, inside, WHOLE))
            elif ROUNDING == STOCHASTIC:
                p = _bits_of_bfloat16(p).to(tl.float32, bitcast=True)
            else:
                p = p.to(tl.float32)
            g = _load(grad_ptr, offsets, inside, WHOLE).to(tl.float32) * grad_factor
            m = _load(exp_avg_ptr, offsets, inside, WHOLE)
            v = _load(exp_avg_sq_ptr, offsets, inside, WHOLE)
            g = tl.where(l2 != 0.0, g + p * l2, g)
            if IS_8BIT:
                m = _dequantize(m, tl.load(m_scale_ptr + rows), signed_map_ptr)
                root = _dequantize(v, tl.load(root_scale_ptr + rows), unsigned_map_ptr)
                v = root * root
            m = m + (g - m) * one_minus_beta1
            v = v * beta2 + (g * one_minus_beta2) * g
            root = tl.sqrt_rn(v)
            u = tl.div_rn(m * inv_bias_correction1, root * inv_sqrt_bias_correction2 + eps)
            if IS_8BIT:
                u = tl.where(u > largest_update, largest_update, tl.where(u < -largest_update, -largest_update, u))
                if not WHOLE:
                    m = tl.where(inside, m, 0.0)  # past the end of the tensor, in its last block
                    root = tl.where(inside, root, 0.0)
                scale = _scale(m)
                m = m * _inverse(scale)
                codes = _magnitude_codes(m, signed_code_ptr, SIGNED_SHIFT, SIGNED_FIRST, SIGNED_COUNT)
                codes = tl.where(m < 0.0, ZERO_CODE - tl.minimum(codes, ZERO_CODE), ZERO_CODE + codes)
                _store(exp_avg_ptr, offsets, codes, inside, WHOLE)
                tl.store(m_scale_ptr + rows, scale)
                scale = _scale(root)
                codes = _magnitude_codes(
                    root * _inverse(scale), unsigned_code_ptr, UNSIGNED_SHIFT, UNSIGNED_FIRST, UNSIGNED_COUNT
                )
                codes = tl.where(root > 0.0, tl.maximum(codes, 1), codes)
                _store(exp_avg_sq_ptr, offsets, codes, inside, WHOLE)
                tl.store(root_scale_ptr + rows, scale)
            else:
                _store(exp_avg_ptr, offsets, m, inside, WHOLE)
                _store(exp_avg_sq_ptr, offsets, v, inside, WHOLE)
            p = p * decay - u * lr
            if RESIDUAL_BITS > 0:
                p, rest = _split(p, PARAM_DTYPE, RESIDUAL_BITS)
                _store(residual_ptr, offsets, rest, inside, WHOLE)
            elif ROUNDING == STOCHASTIC:
                p = _round_stochastically(p, key, step, first_row + rows)
            _store(param_ptr, offsets, p, inside, WHOLE)
