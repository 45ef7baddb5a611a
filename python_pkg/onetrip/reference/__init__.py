"""The formulas in plain PyTorch, any floating dtype: the truth that tests compare with, and the slow fallback."""
