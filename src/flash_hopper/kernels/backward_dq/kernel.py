"""The query-parallel backward kernel: host entry, set-up, and the hand-over to the roles."""

import math
from typing import Any

from flash_hopper.device import placeholders
from flash_hopper.device.accumulate import summed_tensor
from flash_hopper.device.dsl import (
    ELEMENT_TYPES,
    Float32,
    Int32,
    OperandMajorMode,
    const_expr,
    cpasync,
    cuda,
    cute,
    make_trivial_tiled_mma,
    pipeline,
    warpgroup,
)
from flash_hopper.device.layouts import seqlen_major
from flash_hopper.device.pipelines import tma_pipeline
from flash_hopper.device.schedulers.mailbox import make_mailbox
from flash_hopper.device.schedulers.source import DenseTiles, RaggedTiles, SchedulerWarp, Work
from flash_hopper.device.sequences import RaggedArgs, make_batch
from flash_hopper.geometry.arith import ceil_div
from flash_hopper.kernels.backward_dq.args import DqArgs, DqAtoms, Pipelines
from flash_hopper.kernels.backward_dq.consumer import Consumer
from flash_hopper.kernels.backward_dq.producer import Producer
from flash_hopper.kernels.backward_dq.storage import WG_ROWS, TileLayouts, allocate, shared_struct, tile_layouts
from flash_hopper.plan.backward import BackwardDqPlan
from flash_hopper.plan.roles import PRODUCER, SCHEDULER, WARPGROUP, backward_dq_pipelines, roles_of
from flash_hopper.plan.schedule import COUNTERS

LOG2_E = math.log2(math.e)


class BackwardDqKernel:
    """dQ = scale * dS K, one persistent CTA per SM, one CTA per query tile at a time: no accumulation in memory.

    Roles as in the forward: a producer warp, a scheduler warp, consumer warpgroups of 64 query rows each.

    | pipeline | stages | filled by | bytes a stage | freed by |
    |---|---|---|---|---|
    | tile | 2 | scheduler lane, 1 arrival | a tile | 1 arrival a thread of the consumers and the producer, when read |
    | rows | 1 | TMA, Q and dO | tile_m x (tile_hdim + tile_hdimv) | 1 a consumer warp, when dQ's store has read Q's buffer |
    | k | plan.k_stages | TMA | tile_n x tile_hdim | 1 a consumer warp, when dQ is done |
    | v | plan.v_stages | TMA | tile_n x tile_hdimv | 1 a consumer warp, when dP is done |

    Scheduler, per tile: post it, find the next one. Producer, per tile: load Q and dO; per block: K(j), V(j).
    Consumer, per tile and block: S(j) and dP(j) issued in its turn, P, dS, dQ; then the store. A warpgroup skips the blocks
    at both ends of the tile's that its rows cannot see; inner blocks (`geometry/blocks.py`) run no mask code.
    """

    def __init__(self, plan: BackwardDqPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)
        self.roles = roles_of(plan)
        self.scheduler = SchedulerWarp(
            RaggedTiles(plan.tile_m, by_keys=False, is_descending=True, counter=COUNTERS["backward_dq"])
            if plan.is_ragged
            else DenseTiles(plan.scheduler, is_descending=True)
        )
        self.producer = Producer(plan)
        self.consumer = Consumer(plan)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        dq: cute.Tensor,
        statistics: cute.Tensor,
        tile_counter: cute.Tensor | None,
        ragged: RaggedArgs | None,
        left: Int32 | None,
        right: Int32 | None,
        chunk: Int32 | None,
        scale: Float32,
        ctas: Int32,
        section: Int32,
        stream: cuda.CUstream,
    ):
        """Launch. q, dq: (batch, seqlen_q, heads, head_dim), dq float32 if plan.accumulates; k, v: (batch, seqlen_k, heads_k,
        ...); dout: (batch, seqlen_q, heads, head_dim_v). Of a ragged batch, all without the batch; `ragged` then says how it
        lies, with five entries. statistics: of the preprocess kernel. tile_counter: (1,) int32, zero, if a dense batch has the
        dynamic scheduler. left, right, chunk: bounds of the mask if it is local or chunk. ctas: at most this many CTAs;
        section: `heads_per_section`, or `rows_per_section` of a ragged batch."""
        plan, batch = self.plan, self.batch
        table = batch.table(ragged)
        q, k, v, dout, dq = batch.entries((q, k, v, dout, dq), ragged)
        mQ, mK, mV, mdO = (batch.view(t) for t in (q, k, v, dout))
        tiles = tile_layouts(plan)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, mQ_tma = cpasync.make_tiled_tma_atom(load, mQ, tiles.q, (WG_ROWS, plan.tile_hdim))
        tma_do, mdO_tma = cpasync.make_tiled_tma_atom(load, mdO, tiles.do, (WG_ROWS, plan.tile_hdimv))
        tma_k, mK_tma = cpasync.make_tiled_tma_atom(load, mK, tiles.k, (plan.tile_n, plan.tile_hdim))
        tma_v, mV_tma = cpasync.make_tiled_tma_atom(load, mV, tiles.v, (plan.tile_n, plan.tile_hdimv))
        if const_expr(plan.accumulates):
            tma_dq, mdQ = None, seqlen_major(dq)
        else:
            tma_dq, mdQ = cpasync.make_tiled_tma_atom(store, batch.view(dq), tiles.q, (WG_ROWS, plan.tile_hdim))
            mdQ = batch.with_batch(mdQ, dq)
        tma_tensors = ((mQ_tma, q), (mK_tma, k), (mV_tma, v), (mdO_tma, dout))
        mQ_tma, mK_tma, mV_tma, mdO_tma = (batch.with_batch(m, t) for m, t in tma_tensors)
        m_blocks, heads = ceil_div(q.shape[1], plan.tile_m), q.shape[2]
        total = m_blocks * heads * q.shape[0]
        work = Work(tile_counter, table, total, m_blocks, heads, q.shape[0], heads // k.shape[2], section)
        args = DqArgs(
            mQ_tma, mK_tma, mV_tma, mdO_tma, mdQ, statistics, left, right, chunk, scale, scale * Float32(LOG2_E), work
        )
        atoms = DqAtoms(tma_q, tma_k, tma_v, tma_do, tma_dq, *self.tiled_mmas())
        self.shared_struct = shared_struct(plan)
        self.kernel(args, atoms, tiles).launch(
            grid=[ctas if const_expr(plan.is_ragged) else min(ctas, total), 1, 1],
            block=[self.roles.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
            use_pdl=True,
        )

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        """S, dP with both operands from shared memory, dQ with dS from registers and K transposed by the hardware."""
        plan, dtype = self.plan, ELEMENT_TYPES[self.plan.dtype]
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        scores = make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (WG_ROWS, plan.tile_n))
        dq = make_trivial_tiled_mma(
            dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), (WG_ROWS, plan.tile_hdim),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        return scores, scores, dq

    @cute.kernel
    def kernel(self, args: DqArgs, atoms: DqAtoms, tiles: TileLayouts):
        """Set-up by all warps, then each warpgroup takes its role."""
        plan, roles = self.plan, self.roles
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for descriptor in filter(None, (atoms.tma_q, atoms.tma_k, atoms.tma_v, atoms.tma_do, atoms.tma_dq)):
                cpasync.prefetch_descriptor(descriptor)
        storage, shared = allocate(plan, self.shared_struct, tiles)
        pipes = self.pipelines(storage, tiles)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()  # every thread sees the initialised barriers
        cute.arch.griddepcontrol_wait()  # statistics are complete, and nobody reads dQ's memory any more
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(roles.producer_registers)
            if warp == PRODUCER:
                self.producer.run(args, atoms, shared, pipes)
                cute.arch.griddepcontrol_launch_dependents()
            if warp == SCHEDULER:
                self.scheduler.run(args.work, pipes.tiles)
        else:
            cute.arch.setmaxregister_increase(roles.consumer_registers)
            wg = cute.arch.make_warp_uniform(thread // WARPGROUP - 1)
            self.consumer.run(args, atoms, shared, pipes, wg, thread % WARPGROUP)

    def pipelines(self, storage: Any, tiles: TileLayouts) -> Pipelines:
        """All pipelines of the kernel; sizes are checked against the plan."""
        specs = backward_dq_pipelines(self.plan)
        dtype = ELEMENT_TYPES[self.plan.dtype]
        size = {name: cute.size_in_bytes(dtype, getattr(tiles, name)) for name in ("q", "do", "k", "v")}
        return Pipelines(
            rows=tma_pipeline(
                specs["rows"], storage.bar_rows, (size["q"] + size["do"]) * self.plan.consumer_warpgroups
            ),
            k=tma_pipeline(specs["k"], storage.bar_k, size["k"]),
            v=tma_pipeline(specs["v"], storage.bar_v, size["v"]),
            tiles=make_mailbox(specs["tile"], storage, self.plan.is_ragged),
        )


def placeholder_arguments(plan: BackwardDqPlan) -> tuple[Any, ...]:
    """Arguments for `cute.compile`."""
    dtype = ELEMENT_TYPES[plan.dtype]
    padded_batch = placeholders.size()
    batch = () if plan.is_ragged else (padded_batch,)
    seqlen_q, seqlen_k, heads, heads_k = (placeholders.size() for _ in range(4))
    hdim, hdimv = placeholders.head_dim_size(), placeholders.head_dim_size()
    return (
        placeholders.heads_tensor(dtype, *batch, seqlen_q, heads, hdim),
        placeholders.heads_tensor(dtype, *batch, seqlen_k, heads_k, hdim),
        placeholders.heads_tensor(dtype, *batch, seqlen_k, heads_k, hdimv),
        placeholders.heads_tensor(dtype, *batch, seqlen_q, heads, hdimv),
        summed_tensor(*batch, seqlen_q, heads, hdim)
        if plan.accumulates
        else placeholders.heads_tensor(dtype, *batch, seqlen_q, heads, hdim),
        placeholders.statistics(padded_batch, heads),
        None if plan.is_ragged else placeholders.tile_counter(plan.scheduler),
        placeholders.ragged(tensors=5) if plan.is_ragged else None,
        *placeholders.mask_bounds(plan.mask),
        Float32(1.0),
        Int32(1),
        Int32(1),
        placeholders.stream(),
    )
