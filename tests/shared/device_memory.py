"""Memory of a GPU as programs ask for it: exact, while what the allocator hands out depends on the blocks it has at hand."""

import gc

import torch


def in_use(device) -> int:
    """Bytes that live tensors asked for; garbage in reference cycles is collected first."""
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_stats(device)["requested_bytes.all.current"]


def peak_of(device, function):
    """What a function returns, and the most bytes in use meanwhile beyond those in use before."""
    before = in_use(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = function()
    torch.cuda.synchronize(device)
    return result, torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
