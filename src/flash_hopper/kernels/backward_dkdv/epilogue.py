"""dK and dV of one warpgroup: registers -> K's or V's buffer -> TMA store, which clips keys past seqlen_k.

Where the caller sums gradients up: registers -> float32 values in memory.
"""

from typing import Any

from flash_hopper.device.accumulate import add_to_rows
from flash_hopper.device.barriers import epilogue_sync
from flash_hopper.device.dsl import ELEMENT_TYPES, Float32, Int32, const_expr, cute, warp
from flash_hopper.device.pipelines import partition
from flash_hopper.device.probabilities import clear_rows
from flash_hopper.device.sequences import make_batch
from flash_hopper.kernels.backward_dkdv.args import DkdvArgs
from flash_hopper.kernels.backward_dkdv.storage import WG_KEYS
from flash_hopper.plan.backward import BackwardDkdvPlan


class Epilogue:
    """Called by one consumer warpgroup; `thread` is the index within it."""

    def __init__(self, plan: BackwardDkdvPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)

    @cute.jit
    def stage(
        self, acc: cute.Tensor, mma: cute.TiledMma, factor: Float32, s: cute.Tensor, wg: Int32, thread: Int32
    ) -> None:
        """factor * acc in 16 bit into shared memory `s` (64, head dim), ready for a TMA store by this warpgroup."""
        dtype = ELEMENT_TYPES[self.plan.dtype]
        store_matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        r2s = cute.make_tiled_copy_C(store_matrix, mma).get_slice(thread)
        r = cute.make_rmem_tensor_like(acc, dtype)
        r.store((acc.load() * factor).to(dtype))
        cute.copy(r2s, r2s.retile(r), r2s.partition_D(s))
        cute.arch.fence_proxy("async.shared", space="cta")  # these writes, before the TMA store reads them
        epilogue_sync(wg)  # ... from all threads of the warpgroup

    @cute.jit
    def store(
        self,
        tma: cute.CopyAtom,
        m: cute.Tensor,
        s: cute.Tensor,
        cols: int,
        tile: Any,
        band: Int32,
        thread: Int32,
    ) -> None:
        """Start the store of one band of 64 keys; `wait_stored` completes it."""
        if thread < 32:
            row = tile.block * (self.plan.tile_n // WG_KEYS) + band
            g = cute.local_tile(self.batch.stored_keys(m, tile, tile.head), (WG_KEYS, cols), (row, 0))
            dst, src = partition(tma, g, s)
            with cute.arch.elect_one():
                cute.copy(tma, src, dst)
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def add(
        self, acc: cute.Tensor, factor: Float32, args: DkdvArgs, m: cute.Tensor, tile: Any, band: Int32,
        thread: Int32,
    ) -> None:  # fmt: skip
        """factor * acc to one band of 64 keys of float32 dK or dV."""
        batch = self.batch
        start, keys = batch.key_row(tile), batch.lengths(tile, args.mQ, args.mK).k
        key = start + tile.block * self.plan.tile_n + band * WG_KEYS
        mine = m[None, None, tile.head, batch.entry(tile, m.shape[3])]
        add_to_rows(acc, factor, mine, key, Int32(0), start + keys, thread)

    @cute.jit
    def clear_unused(self, acc: cute.Tensor, tile: Any, band: Int32, thread: Int32) -> None:
        """Zero the keys of a band that are allocated but not used: what was computed of them means nothing."""
        if const_expr(self.plan.is_ragged):
            first_key = tile.block * self.plan.tile_n + band * WG_KEYS + thread // 32 * 16 + thread % 32 // 4
            clear_rows(acc, tile.seqlen_k - first_key)

    @cute.jit
    def wait_stored(self, thread: Int32) -> None:
        """Until this warpgroup's stores have read their buffers; the caller may then free them."""
        if thread < 32:
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
