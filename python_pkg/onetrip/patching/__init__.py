"""Patches models in place: what is memory-bound in them runs as fused operators until unpatch_model."""

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
