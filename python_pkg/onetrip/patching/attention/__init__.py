"""Attention: modules that call transformers' attention interface, and forwards that compute a softmax themselves."""

from __future__ import annotations

from typing import Any

from ..report import Unsuitable
from .eager import PATTERN
from .interface import Attention, Interface, OneMask, read_interface, register_attention
from .softmax_regions import SoftmaxRegions, read_softmax_regions

__all__ = ["PATTERN", "Attention", "Interface", "OneMask", "SoftmaxRegions", "read_attention", "register_attention"]


def read_attention(cls: Any) -> Interface | SoftmaxRegions | Unsuitable | None:
    """How the class's forward computes attention; None if it computes none."""
    return read_interface(cls) or read_softmax_regions(cls)
