"""Statistics of query rows for the backward: `kernel.py`."""
