"""Patching models in place: their norms and residual blocks run as fused operators, and can be put back bit for bit."""

from .attention import register_attention
from .model import PATTERNS, patch_model, patched, unpatch_model
from .report import PatchedSite, PatchReport, SkippedSite

__all__ = [
    "PATTERNS",
    "PatchReport",
    "PatchedSite",
    "SkippedSite",
    "patch_model",
    "patched",
    "register_attention",
    "unpatch_model",
]
