"""What the operator families share: backends, checks, random numbers, native launches, tracing."""
