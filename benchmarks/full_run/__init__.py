"""`onetrip bench --everything`: the full GPU validation and benchmark suite."""

EXIT_SKIPPED = 77
"""How a part's process says that something was missing after all; pytest's 5 says that it found no test."""
