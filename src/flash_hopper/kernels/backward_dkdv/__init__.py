"""The key-parallel backward kernel: dK and dV. `kernel.py` holds the schedule."""
