"""The producer warp: loads Q, K and V by TMA for the tiles that the scheduler warp posts.

Loads are issued in the order in which the consumers need them: Q, K(last), then K(j - 1) and V(j) in turn, V(first). K and
V stages keep rolling over tile boundaries, so the next tile's first loads run during this tile's last blocks.
"""

from typing import Any

from flash_hopper.device.dsl import Constexpr, Int32, const_expr, cute, cutlass
from flash_hopper.device.pipelines import await_full, consumer_state, load, partition, producer_state
from flash_hopper.device.sequences import make_batch
from flash_hopper.geometry.blocks import Blocks, key_blocks, warpgroup_blocks
from flash_hopper.geometry.tiles import shares
from flash_hopper.kernels.forward.args import ForwardArgs, ForwardAtoms, Pipelines, SharedTensors
from flash_hopper.kernels.forward.storage import WG_ROWS
from flash_hopper.plan.forward import ForwardPlan
from flash_hopper.plan.roles import TILE_SLOTS, WARP, WARPGROUP

WG_WARPS = WARPGROUP // WARP


class Producer:
    """One warp. `plan` is compile-time; everything else is passed in."""

    def __init__(self, plan: ForwardPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)

    @cute.jit
    def run(self, args: ForwardArgs, atoms: ForwardAtoms, shared: SharedTensors, pipes: Pipelines) -> None:
        """All tiles of this CTA."""
        plan = self.plan
        q_state, tile_state = producer_state(plan.q_stages), consumer_state(TILE_SLOTS)
        k_state, v_state = producer_state(plan.kv_stages), producer_state(plan.kv_stages)
        o_state = producer_state(1)  # of O of the tile before, a barrier that counts as passed at first
        tile = pipes.tiles.read(tile_state)
        tile_state.advance()
        while tile.block >= 0:
            self.load_q(args, atoms, shared, pipes, tile, q_state)
            q_state.advance()
            if const_expr(plan.shares_tiles):
                share = shares(tile.allocated_q, plan.consumer_warpgroups)
                first = share.head(tile.head, 0)
                for i in cutlass.range(share.heads(tile.head, args.work.heads), unroll=1):
                    k_state, v_state = self.load_kv(
                        args, atoms, shared, pipes, tile, first + i, k_state, v_state, o_state
                    )
            else:
                k_state, v_state = self.load_kv(args, atoms, shared, pipes, tile, tile.head, k_state, v_state, o_state)
            o_state.advance()
            tile = pipes.tiles.read(tile_state)
            tile_state.advance()

    @cute.jit
    def load_q(
        self, args: ForwardArgs, atoms: ForwardAtoms, shared: SharedTensors, pipes: Pipelines, tile: Any, state: Any
    ) -> None:
        """The tile's rows, one load per consumer warpgroup; they complete on one barrier."""
        wgs = self.plan.consumer_warpgroups
        pipes.q.producer_acquire(state)
        if const_expr(self.plan.shares_tiles):
            share = shares(tile.allocated_q, wgs)
            for wg in cutlass.range(wgs, unroll=1):
                head, band = share.head(tile.head, wg), share.band(tile.block, tile.head, wg)
                self.load_bands(args, atoms, shared, pipes, tile, state, head, band, wg, 1)
        else:
            self.load_bands(args, atoms, shared, pipes, tile, state, tile.head, tile.block * wgs, Int32(0), wgs)

    @cute.jit
    def load_bands(
        self, args: ForwardArgs, atoms: ForwardAtoms, shared: SharedTensors, pipes: Pipelines, tile: Any, state: Any,
        head: Int32, band: Int32, first: Int32, count: Constexpr[int],
    ) -> None:  # fmt: skip
        """So many bands of 64 rows of a head, from `band` on, for the warpgroups from `first` on."""
        plan = self.plan
        rows = cute.local_tile(
            self.batch.queries(args.mQ, tile, head), (WG_ROWS, plan.tile_hdim), (None, 0)
        )  # (64, tile_hdim, row band)
        src, dst = partition(atoms.tma_q, rows, shared.sQ)
        slot = state.index * plan.consumer_warpgroups + first
        for i in cutlass.range_constexpr(count):
            load(atoms.tma_q, src[None, band + i], dst[None, slot + i], pipes.q, state)

    @cute.jit
    def load_kv(
        self,
        args: ForwardArgs,
        atoms: ForwardAtoms,
        shared: SharedTensors,
        pipes: Pipelines,
        tile: Any,
        head: Int32,
        k_state: Any,
        v_state: Any,
        o_state: Any,
    ) -> tuple[Any, Any]:
        """The tile's key blocks for a head from the last to the first; returns the advanced cursors."""
        plan, batch = self.plan, self.batch
        blocks = key_blocks(
            tile.block * plan.tile_m, plan.tile_m, batch.lengths(tile, args.mQ, args.mK), plan.tile_n,
            args.mask(plan.mask),
        )  # fmt: skip
        own = self.lane_blocks(args, tile, blocks)
        head_k = head // args.work.group
        mK = batch.keys(args.mK, tile, head_k)
        k_src, k_dst = partition(atoms.tma_k, cute.local_tile(mK, (plan.tile_n, plan.tile_hdim), (None, 0)), shared.sK)
        v_src, v_dst = partition(atoms.tma_v, self.value_blocks(args, tile, head_k), shared.sV)
        pipes.k.producer_acquire(k_state)
        load(atoms.tma_k, k_src[None, blocks.end - 1], k_dst[None, k_state.index], pipes.k, k_state)
        self.free_unseen(pipes.k, k_state, own, blocks.end - 1)
        k_state.advance()
        for i in cutlass.range(blocks.end - 1 - blocks.start, unroll=1):
            n_block = blocks.end - 2 - i
            pipes.k.producer_acquire(k_state)
            load(atoms.tma_k, k_src[None, n_block], k_dst[None, k_state.index], pipes.k, k_state)
            self.free_unseen(pipes.k, k_state, own, n_block)
            k_state.advance()
            self.acquire_v(pipes, v_state, o_state)
            load(atoms.tma_v, v_src[None, n_block + 1], v_dst[None, v_state.index], pipes.v, v_state)
            self.free_unseen(pipes.v, v_state, own, n_block + 1)
            v_state.advance()
        self.acquire_v(pipes, v_state, o_state)
        load(atoms.tma_v, v_src[None, blocks.start], v_dst[None, v_state.index], pipes.v, v_state)
        self.free_unseen(pipes.v, v_state, own, blocks.start)
        v_state.advance()
        return k_state, v_state

    def acquire_v(self, pipes: Pipelines, v_state: Any, o_state: Any) -> None:
        """Until a stage of V is free, of O of the tile before as well. That is said once a tile, and true until the tile's end."""
        pipes.v.producer_acquire(v_state)
        if self.plan.o_place == "v":
            await_full(pipes.o, o_state)

    def value_blocks(self, args: ForwardArgs, tile: Any, head_k: Int32) -> cute.Tensor:
        """V of the tile's sequence and key head: (tile_n, tile_hdimv, key block)."""
        mV = self.batch.keys(args.mV, tile, head_k)
        return cute.local_tile(mV, (self.plan.tile_n, self.plan.tile_hdimv), (None, 0))

    def lane_blocks(self, args: ForwardArgs, tile: Any, whole: Blocks) -> Blocks:
        """What the warpgroup of the consumer warp with this lane's number sees; the whole tile's in lanes beyond."""
        plan = self.plan
        if not plan.frees_unseen:
            return whole
        lane = cute.arch.lane_idx()
        row, lengths = tile.block * plan.tile_m, self.batch.lengths(tile, args.mQ, args.mK)
        own = warpgroup_blocks(row, lane // WG_WARPS, lengths, plan.tile_n, args.mask(plan.mask))
        is_computing = lane < WG_WARPS * plan.consumer_warpgroups
        if const_expr(plan.has_idle):
            is_computing = is_computing & (row + lane // WG_WARPS * WG_ROWS < lengths.q)
        start, end = (
            cutlass.select_(is_computing, Int32(a), Int32(b))
            for a, b in ((own.start, whole.start), (own.end, whole.end))
        )
        return Blocks(start, own.inner_start, own.inner_end, end)

    @cute.jit
    def free_unseen(self, pipe: Any, state: Any, own: Blocks, n_block: Int32) -> None:
        """Arrive, in place of the consumer warps that do not see this block, on the barrier that frees its stage.

        They jump over the stage without looking at it. Right after `producer_acquire` the barrier counts for this filling,
        complete or not; the warpgroups that see the block arrive later.
        """
        if const_expr(self.plan.frees_unseen):
            if n_block < own.start or n_block >= own.end:
                cute.arch.mbarrier_arrive(pipe.sync_object_empty.get_barrier(state.index))
