"""The formulas in plain PyTorch, any floating dtype: the truth that tests compare with, and the slow fallback."""

import torch


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of values of this dtype, and the statistics of their rows, are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
