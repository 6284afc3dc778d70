"""How tensors reach a kernel: check, plan, look up, allocate, run. torch lives here; nothing is computed."""
