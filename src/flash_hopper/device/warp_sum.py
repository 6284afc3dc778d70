"""Sums over the lanes of a warp, for the search of tiles and the kernel that orders sequences."""

from flash_hopper.device.dsl import Int32, cute


@cute.jit
def inclusive_sum(value: Int32, lane: Int32) -> Int32:
    """The sum over this and all lower lanes. All lanes of the warp."""
    for step in (1, 2, 4, 8, 16):
        lower = cute.arch.shuffle_sync_up(value, offset=step, mask_and_clamp=0)
        if lane >= step:
            value = value + lower
    return value
