"""`onetrip bench --everything`: the full GPU validation and benchmark suite."""

EXIT_UNFINISHED, EXIT_SKIPPED = 4, 5
"""How a part's process says that it ran out of time, or that something was missing after all."""
