"""The producer warp of the query-parallel backward kernel: a tile's Q and dO, then K and V block by block."""

from typing import Any

from flash_hopper.device.dsl import cute, cutlass
from flash_hopper.device.pipelines import consumer_state, load, partition, producer_state
from flash_hopper.device.sequences import make_batch
from flash_hopper.geometry.blocks import key_blocks
from flash_hopper.kernels.backward_dq.args import DqArgs, DqAtoms, Pipelines, SharedTensors
from flash_hopper.kernels.backward_dq.storage import WG_ROWS
from flash_hopper.plan.backward import BackwardDqPlan
from flash_hopper.plan.roles import TILE_SLOTS


class Producer:
    """One warp. `plan` is compile-time; everything else is passed in."""

    def __init__(self, plan: BackwardDqPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)

    @cute.jit
    def run(self, args: DqArgs, atoms: DqAtoms, shared: SharedTensors, pipes: Pipelines) -> None:
        """All tiles that the scheduler posts."""
        plan = self.plan
        rows_state, tile_state = producer_state(1), consumer_state(TILE_SLOTS)
        k_state, v_state = producer_state(plan.k_stages), producer_state(plan.v_stages)
        tile = pipes.tiles.read(tile_state)
        tile_state.advance()
        while tile.block >= 0:
            pipes.rows.producer_acquire(rows_state)
            self.load_rows(args.mQ, atoms.tma_q, shared.sQ, plan.tile_hdim, tile, pipes, rows_state)
            self.load_rows(args.mdO, atoms.tma_do, shared.sdO, plan.tile_hdimv, tile, pipes, rows_state)
            rows_state.advance()
            k_state, v_state = self.load_kv(args, atoms, shared, pipes, tile, k_state, v_state)
            tile = pipes.tiles.read(tile_state)
            tile_state.advance()

    @cute.jit
    def load_rows(
        self, m: cute.Tensor, tma: cute.CopyAtom, s: cute.Tensor, cols: int, tile: Any, pipes: Pipelines,
        state: Any,
    ) -> None:  # fmt: skip
        """One tensor's rows of the tile, one load per consumer warpgroup."""
        bands = cute.local_tile(self.batch.queries(m, tile, tile.head), (WG_ROWS, cols), (None, 0))
        src, dst = partition(tma, bands, s)
        wgs = self.plan.consumer_warpgroups
        # not unrolled: with many loads in a row (7 of dO at head dim 224) the producer's registers do not suffice
        for wg in cutlass.range(wgs, unroll=1):
            load(tma, src[None, tile.block * wgs + wg], dst[None, wg], pipes.rows, state)

    @cute.jit
    def load_kv(
        self, args: DqArgs, atoms: DqAtoms, shared: SharedTensors, pipes: Pipelines, tile: Any, k_state: Any,
        v_state: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The tile's key blocks from the last to the first; returns the advanced cursors."""
        plan, batch = self.plan, self.batch
        blocks = key_blocks(
            tile.block * plan.tile_m, plan.tile_m, batch.lengths(tile, args.mQ, args.mK), plan.tile_n,
            args.mask(plan.mask),
        )  # fmt: skip
        head_k = tile.head // args.work.group
        mK, mV = batch.keys(args.mK, tile, head_k), batch.keys(args.mV, tile, head_k)
        k_src, k_dst = partition(atoms.tma_k, cute.local_tile(mK, (plan.tile_n, plan.tile_hdim), (None, 0)), shared.sK)
        v_src, v_dst = partition(atoms.tma_v, cute.local_tile(mV, (plan.tile_n, plan.tile_hdimv), (None, 0)), shared.sV)
        for i in cutlass.range(blocks.end - blocks.start, unroll=1):
            n_block = blocks.end - 1 - i
            pipes.k.producer_acquire(k_state)
            load(atoms.tma_k, k_src[None, n_block], k_dst[None, k_state.index], pipes.k, k_state)
            k_state.advance()
            pipes.v.producer_acquire(v_state)
            load(atoms.tma_v, v_src[None, n_block], v_dst[None, v_state.index], pipes.v, v_state)
            v_state.advance()
        return k_state, v_state
