"""The producer warp of the key-parallel backward kernel.

Per tile K and V once; then, for every query head of the key head and every query block, Q with its LSE and dO with its D.
"""

from typing import Any

from flash_hopper.device.dsl import Float32, Int32, cpasync, cute, cutlass
from flash_hopper.device.pipelines import load, partition, producer_state
from flash_hopper.geometry.tiles import TileCoord, tile_coord
from flash_hopper.kernels.backward_dkdv.args import DkdvArgs, DkdvAtoms, Pipelines, SharedTensors
from flash_hopper.kernels.backward_dkdv.schedule import query_schedule
from flash_hopper.kernels.backward_dkdv.storage import WG_KEYS
from flash_hopper.plan.backward import BackwardDkdvPlan
from flash_hopper.plan.roles import TILE_SLOTS


class Producer:
    """One warp. `plan` is compile-time; everything else is passed in."""

    def __init__(self, plan: BackwardDkdvPlan) -> None:
        self.plan = plan

    @cute.jit
    def run(self, scheduler: Any, args: DkdvArgs, atoms: DkdvAtoms, shared: SharedTensors, pipes: Pipelines) -> None:
        """All tiles of this CTA, then the end marker for the consumers."""
        plan = self.plan
        keys_state, tile_state = producer_state(1), producer_state(TILE_SLOTS)
        q_state, do_state = producer_state(plan.q_stages), producer_state(plan.do_stages)
        heads_k, batch = cute.size(args.mK, mode=[2]), cute.size(args.mK, mode=[3])
        group = cute.size(args.mQ, mode=[2]) // heads_k
        tile = scheduler.first()
        while tile < args.tiles:
            coord = tile_coord(tile, args.n_blocks, heads_k, batch, args.heads_per_section, is_descending=False)
            pipes.tiles.post(tile_state, coord)
            tile_state.advance()
            requested = scheduler.request(tile)
            pipes.keys.producer_acquire(keys_state)
            self.load_keys(args.mK, atoms.tma_k, shared.sK, plan.tile_hdim, coord, pipes, keys_state)
            self.load_keys(args.mV, atoms.tma_v, shared.sV, plan.tile_hdimv, coord, pipes, keys_state)
            keys_state.advance()
            for i in cutlass.range(group, unroll=1):
                q_state, do_state = self.load_queries(
                    args, atoms, shared, pipes, coord, coord.head * group + i, q_state, do_state
                )
            tile = scheduler.resolve(requested)
        pipes.tiles.post_end(tile_state)

    @cute.jit
    def load_keys(
        self, m: cute.Tensor, tma: cute.CopyAtom, s: cute.Tensor, cols: int, coord: TileCoord, pipes: Pipelines,
        state: Any,
    ) -> None:  # fmt: skip
        """One tensor's keys of the tile, one load per band of 64."""
        bands = cute.local_tile(m[None, None, coord.head, coord.batch], (WG_KEYS, cols), (None, 0))
        src, dst = partition(tma, bands, s)
        count = self.plan.tile_n // WG_KEYS
        for band in cutlass.range_constexpr(count):
            load(tma, src[None, coord.block * count + band], dst[None, band], pipes.keys, state)

    @cute.jit
    def load_queries(
        self, args: DkdvArgs, atoms: DkdvAtoms, shared: SharedTensors, pipes: Pipelines, coord: TileCoord, head: Int32,
        q_state: Any, do_state: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """One query head's blocks, in the tile's order; returns the advanced cursors."""
        plan = self.plan
        order = query_schedule(plan, args, coord)
        mQ, mdO = args.mQ[None, None, head, coord.batch], args.mdO[None, None, head, coord.batch]
        q_src, q_dst = partition(atoms.tma_q, cute.local_tile(mQ, (plan.tile_m, plan.tile_hdim), (None, 0)), shared.sQ)
        do_src, do_dst = partition(
            atoms.tma_do, cute.local_tile(mdO, (plan.tile_m, plan.tile_hdimv), (None, 0)), shared.sdO
        )
        mLSE, mDelta = (args.mStatistics[i, coord.batch, head, None] for i in (0, 1))
        m_block = order.first
        for _ in cutlass.range(order.count, unroll=1):
            pipes.q.producer_acquire(q_state)
            load(atoms.tma_q, q_src[None, m_block], q_dst[None, q_state.index], pipes.q, q_state)
            self.load_statistics(mLSE, shared.sLSE, m_block, pipes.q, q_state)
            q_state.advance()
            pipes.do.producer_acquire(do_state)
            load(atoms.tma_do, do_src[None, m_block], do_dst[None, do_state.index], pipes.do, do_state)
            self.load_statistics(mDelta, shared.sDelta, m_block, pipes.do, do_state)
            do_state.advance()
            m_block = order.after(m_block)
        return q_state, do_state

    def load_statistics(self, m: cute.Tensor, s: cute.Tensor, m_block: Int32, pipe: Any, state: Any) -> None:
        """tile_m floats by a bulk copy, which one lane must issue."""
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        with cute.arch.elect_one():
            cute.copy(
                atom,
                cute.local_tile(m, (self.plan.tile_m,), (m_block,)),
                s[None, state.index],
                mbar_ptr=pipe.producer_get_barrier(state),
            )
