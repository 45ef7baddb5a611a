"""The benchmark suite: `onetrip bench`, or under pytest-benchmark `pytest benchmarks/`."""
