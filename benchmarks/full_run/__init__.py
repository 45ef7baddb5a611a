"""`onetrip bench --everything`: the full GPU validation and benchmark suite."""

EXIT_SKIPPED = 5
"""How a part's process says that something was missing after all."""
