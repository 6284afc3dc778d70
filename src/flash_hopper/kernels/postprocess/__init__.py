"""From the float32 accumulator of dQ to dQ: `kernel.py`."""
