"""What runs on the GPU: one folder per kernel. `registry.py` is the door that `compile` uses."""
