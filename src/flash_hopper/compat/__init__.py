"""Attention with the positional signatures of FlashAttention-2 (`compat.fa2`) and FlashAttention-3 (`compat.fa3`).

For programs written for one of those: change the import, keep the dense and the ragged calls. Every call goes to the
public functions (`api.py`), so shapes, dtypes, errors and gradients are theirs. Unlike the originals they refuse, by
ArgumentError, a head dim that is not a multiple of 8 and a last stride other than 1. What they do not compute raises
UnsupportedError.
"""
