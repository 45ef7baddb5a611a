"""Residual sums in a forward of any length: `residual + dropout(dense(x))`, and the norm that follows.

    h = self.dense(h)
    h = self.dropout(h)
    h = residual + h              ->      h, normed_0_ = sum_0_(self, residual,
    residual = h                                  dropped_linear_(self.dropout, self.dense, h), self.norm)
    h = self.norm(h)                      residual = h
                                          h = normed_0_

Each part may be missing or stand inside another expression, and the dropout may be functional. Everything else of the
forward stays as it was written: caches, keyword arguments, clamps, branches. A sum whose norm is in another module is
linked to it at run time (links.py). A dropout or a bias at the end of a child may join the parent's sum (tails.py).
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from ..classes import Rewrite
from ..rewriting import InForward
from .choose import PATTERNS, choose_sums
from .read import read_sums
from .rewrite import SumRewriting
from .verify import verify_sum

__all__ = ["PATTERNS", "ResidualSums", "choose_sums", "read_sums"]


class ResidualSums(InForward):
    """A module whose forward has sums to fuse, as a site."""

    patterns, in_wrapper = PATTERNS, True

    @property
    def pattern(self) -> str:
        """The pattern that fuses most, of those of its sums."""
        return min((choice.pattern for choice in self.chosen), key=PATTERNS.index)

    @property
    def detail(self) -> str:
        """The sums of a forward with several."""
        counts = Counter(choice.pattern for choice in self.chosen)
        return ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) if len(self.chosen) > 1 else ""

    def rewrite(self, cls: type) -> Rewrite:
        """The forward with its sums fused."""
        rewriting = SumRewriting(self.forward)
        for index, choice in enumerate(self.chosen):
            rewriting.put_sum(index, choice)
        norms = {choice.norm[0] for choice in self.chosen if choice.norm is not None}
        return rewriting.rewrite(self.pattern, sorted(path for path in norms if "." not in path))

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless each sum, fused, computes what torch's operators compute."""
        for choice in self.chosen:
            verify_sum(module, choice)
