"""16- and 32-bit tensors to e4m3, with scales; also rotary embedding and Hadamard transform in front of that (specification 6.3, 6.4)."""
