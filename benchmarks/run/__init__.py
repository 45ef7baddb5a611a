"""From options to records: which cases run, and what keeps their results."""
