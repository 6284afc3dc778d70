"""The producer warp of the key-parallel backward kernel.

Per tile K and V once; then, for every query head of the key head and every query block, Q with its LSE and dO with its D.
"""

from typing import Any

from flash_hopper.device.dsl import Boolean, Int32, const_expr, cute, cutlass
from flash_hopper.device.pipelines import load, partition, producer_state
from flash_hopper.device.schedulers.source import DenseTiles, RaggedTiles
from flash_hopper.device.sequences import make_batch
from flash_hopper.kernels.backward_dkdv.args import DkdvArgs, DkdvAtoms, Pipelines, SharedTensors
from flash_hopper.kernels.backward_dkdv.schedule import first_query_head, key_head, query_heads, query_schedule
from flash_hopper.kernels.backward_dkdv.storage import WG_KEYS
from flash_hopper.plan.backward import BackwardDkdvPlan
from flash_hopper.plan.roles import TILE_SLOTS
from flash_hopper.plan.schedule import COUNTERS


class Producer:
    """One warp. `plan` is compile-time; everything else is passed in."""

    def __init__(self, plan: BackwardDkdvPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)
        self.source = (
            RaggedTiles(plan.tile_n, by_keys=True, is_descending=False, counter=COUNTERS["backward_dkdv"])
            if plan.is_ragged
            else DenseTiles(plan.scheduler, is_descending=False)
        )

    @cute.jit
    def run(self, args: DkdvArgs, atoms: DkdvAtoms, shared: SharedTensors, pipes: Pipelines) -> None:
        """All tiles of this CTA, then the end marker for the consumers."""
        plan, work = self.plan, args.work
        keys_state, tile_state = producer_state(1), producer_state(TILE_SLOTS)
        q_state, do_state = producer_state(plan.q_stages), producer_state(plan.do_stages)
        number, place = self.source.first(), self.source.start(args.work)
        while number < work.tiles:
            tile, place = self.source.locate(work, number, place)
            has_tile = tile.block >= 0 if const_expr(plan.is_ragged) else Boolean(True)
            if has_tile:
                pipes.tiles.post(tile_state, tile)
                tile_state.advance()
                pipes.keys.producer_acquire(keys_state)
                self.load_keys(args, args.mK, atoms.tma_k, shared.sK, plan.tile_hdim, tile, pipes, keys_state)
                self.load_keys(args, args.mV, atoms.tma_v, shared.sV, plan.tile_hdimv, tile, pipes, keys_state)
                keys_state.advance()
                head = first_query_head(plan, args, tile)
                if const_expr(plan.adds_dkdv):
                    q_state, do_state = self.load_queries(args, atoms, shared, pipes, tile, head, q_state, do_state)
                else:
                    for i in cutlass.range(query_heads(plan, args), unroll=1):
                        q_state, do_state = self.load_queries(
                            args, atoms, shared, pipes, tile, head + i, q_state, do_state
                        )
                # not earlier: a register less, and the producer is a few blocks ahead of the consumers here
                number = self.source.following(work, number, place)
            else:
                number = work.tiles  # the table has no more
        pipes.tiles.post_end(tile_state)

    @cute.jit
    def load_keys(
        self, args: DkdvArgs, m: cute.Tensor, tma: cute.CopyAtom, s: cute.Tensor, cols: int, tile: Any,
        pipes: Pipelines, state: Any,
    ) -> None:  # fmt: skip
        """One tensor's keys of the tile, one load per band of 64."""
        mine = self.batch.keys(m, tile, key_head(self.plan, args, tile))
        bands = cute.local_tile(mine, (WG_KEYS, cols), (None, 0))
        src, dst = partition(tma, bands, s)
        count = self.plan.tile_n // WG_KEYS
        for band in cutlass.range_constexpr(count):
            load(tma, src[None, tile.block * count + band], dst[None, band], pipes.keys, state)

    @cute.jit
    def load_queries(
        self, args: DkdvArgs, atoms: DkdvAtoms, shared: SharedTensors, pipes: Pipelines, tile: Any, head: Int32,
        q_state: Any, do_state: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """One query head's blocks, in the tile's order; returns the advanced cursors."""
        plan, batch = self.plan, self.batch
        order = query_schedule(plan, args, tile)
        mQ, mdO = batch.queries(args.mQ, tile, head), batch.queries(args.mdO, tile, head)
        q_src, q_dst = partition(atoms.tma_q, cute.local_tile(mQ, (plan.tile_m, plan.tile_hdim), (None, 0)), shared.sQ)
        do_src, do_dst = partition(
            atoms.tma_do, cute.local_tile(mdO, (plan.tile_m, plan.tile_hdimv), (None, 0)), shared.sdO
        )
        (lse_src, lse_dst), (delta_src, delta_dst) = (
            self.statistics(args.mStatistics[None, head, batch.padded_entry(tile), i], atoms.tma_statistics, s)
            for i, s in ((0, shared.sLSE), (1, shared.sDelta))
        )
        m_block = order.first
        padded = batch.padded_query(tile) // plan.tile_m  # the first block of the statistics
        for _ in cutlass.range(order.count, unroll=1):
            pipes.q.producer_acquire(q_state)
            load(atoms.tma_q, q_src[None, m_block], q_dst[None, q_state.index], pipes.q, q_state)
            load(atoms.tma_statistics, lse_src[None, padded + m_block], lse_dst[None, q_state.index], pipes.q, q_state)
            q_state.advance()
            pipes.do.producer_acquire(do_state)
            load(atoms.tma_do, do_src[None, m_block], do_dst[None, do_state.index], pipes.do, do_state)
            load(
                atoms.tma_statistics,
                delta_src[None, padded + m_block],
                delta_dst[None, do_state.index],
                pipes.do,
                do_state,
            )
            do_state.advance()
            m_block = order.after(m_block)
        return q_state, do_state

    def statistics(self, m: cute.Tensor, tma: cute.CopyAtom, s: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """(global, shared) views of one head's LSE or D, tile_m rows a block. A tensor copy although one-dimensional: of
        plain bulk copies in a loop compute-sanitizer's racecheck reports hazards that are none."""
        return partition(tma, cute.local_tile(m, (self.plan.tile_m,), (None,)), s, modes=1)
