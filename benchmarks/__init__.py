"""The benchmark suite: `python -m onetrip.benchmarks`, or one file at a time under pytest-benchmark."""
