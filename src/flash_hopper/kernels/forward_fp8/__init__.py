"""The e4m3 attention forward kernel. `kernel.py` holds the schedule; `support.py`, plain Python, what it can do."""
