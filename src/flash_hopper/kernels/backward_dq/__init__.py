"""The query-parallel backward kernel: dQ. `kernel.py` holds the schedule."""
