"""Cases, inputs, comparison, timing and benchmarks: used by `tests/` and by `cli/`."""
