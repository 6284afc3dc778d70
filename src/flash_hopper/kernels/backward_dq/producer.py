"""The producer warp of the query-parallel backward kernel: a tile's Q and dO, then K and V block by block."""

from typing import Any

from flash_hopper.device.dsl import cute, cutlass
from flash_hopper.device.pipelines import load, partition, producer_state
from flash_hopper.geometry.blocks import key_blocks
from flash_hopper.geometry.tiles import TileCoord, tile_coord
from flash_hopper.kernels.backward_dq.args import DqArgs, DqAtoms, Pipelines, SharedTensors
from flash_hopper.kernels.backward_dq.storage import WG_ROWS
from flash_hopper.plan.backward import BackwardDqPlan
from flash_hopper.plan.roles import TILE_SLOTS


class Producer:
    """One warp. `plan` is compile-time; everything else is passed in."""

    def __init__(self, plan: BackwardDqPlan) -> None:
        self.plan = plan

    @cute.jit
    def run(self, scheduler: Any, args: DqArgs, atoms: DqAtoms, shared: SharedTensors, pipes: Pipelines) -> None:
        """All tiles of this CTA, then the end marker for the consumers."""
        plan = self.plan
        rows_state, tile_state = producer_state(1), producer_state(TILE_SLOTS)
        k_state, v_state = producer_state(plan.k_stages), producer_state(plan.v_stages)
        heads, batch = cute.size(args.mQ, mode=[2]), cute.size(args.mQ, mode=[3])
        tile = scheduler.first()
        while tile < args.tiles:
            coord = tile_coord(tile, args.m_blocks, heads, batch, args.heads_per_section)
            pipes.tiles.post(tile_state, coord)
            tile_state.advance()
            requested = scheduler.request(tile)
            pipes.rows.producer_acquire(rows_state)
            self.load_rows(args.mQ, atoms.tma_q, shared.sQ, plan.tile_hdim, coord, pipes, rows_state)
            self.load_rows(args.mdO, atoms.tma_do, shared.sdO, plan.tile_hdimv, coord, pipes, rows_state)
            rows_state.advance()
            k_state, v_state = self.load_kv(args, atoms, shared, pipes, coord, k_state, v_state)
            tile = scheduler.resolve(requested)
        pipes.tiles.post_end(tile_state)

    @cute.jit
    def load_rows(
        self, m: cute.Tensor, tma: cute.CopyAtom, s: cute.Tensor, cols: int, coord: TileCoord, pipes: Pipelines,
        state: Any,
    ) -> None:  # fmt: skip
        """One tensor's rows of the tile, one load per consumer warpgroup."""
        bands = cute.local_tile(m[None, None, coord.head, coord.batch], (WG_ROWS, cols), (None, 0))
        src, dst = partition(tma, bands, s)
        wgs = self.plan.consumer_warpgroups
        for wg in cutlass.range_constexpr(wgs):
            load(tma, src[None, coord.block * wgs + wg], dst[None, wg], pipes.rows, state)

    @cute.jit
    def load_kv(
        self, args: DqArgs, atoms: DqAtoms, shared: SharedTensors, pipes: Pipelines, coord: TileCoord, k_state: Any,
        v_state: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The tile's key blocks from the last to the first; returns the advanced cursors."""
        plan = self.plan
        blocks = key_blocks(coord.block * plan.tile_m, plan.tile_m, args.lengths(), plan.tile_n, args.mask(plan.mask))
        head_k = coord.head // (args.mQ.shape[2] // args.mK.shape[2])
        mK, mV = args.mK[None, None, head_k, coord.batch], args.mV[None, None, head_k, coord.batch]
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
