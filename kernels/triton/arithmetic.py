"""Exponentials and quotients in few instructions, for every family of kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e^x, 0 below 2^-126. Two instructions; tl.exp takes five, to scale what would be subnormal.

    Within 2 units in the last place for |x| < 1, and |x| 2^-24 e^x beyond, as tl.exp.
    """
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def reciprocal(x):
    """1 / x of positive normal numbers, within 4 units in the last place. Two instructions; a quotient takes eight."""
    root = tl.rsqrt(x)
    return root * root
