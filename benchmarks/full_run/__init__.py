"""`onetrip bench --everything`: the full GPU validation and benchmark suite."""
