"""For developers of onetrip: simulators, surveys and counters. Never in the wheel; run from the repository's root."""
