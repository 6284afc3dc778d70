"""The key-parallel backward kernel: host entry, set-up, and the hand-over to the roles."""

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
from flash_hopper.device.pipelines import thread_pipeline, tma_pipeline
from flash_hopper.device.schedulers.mailbox import make_mailbox
from flash_hopper.device.schedulers.source import Work
from flash_hopper.device.sequences import RaggedArgs, make_batch
from flash_hopper.geometry.arith import ceil_div
from flash_hopper.kernels.backward_dkdv.args import DkdvArgs, DkdvAtoms, Pipelines, Resources
from flash_hopper.kernels.backward_dkdv.consumer import Consumer
from flash_hopper.kernels.backward_dkdv.dq_writer import DqWriter
from flash_hopper.kernels.backward_dkdv.fused_consumer import FusedConsumer
from flash_hopper.kernels.backward_dkdv.producer import Producer
from flash_hopper.kernels.backward_dkdv.split_consumer import SplitConsumer
from flash_hopper.kernels.backward_dkdv.storage import (
    WG_KEYS,
    TileLayouts,
    allocate,
    shared_struct,
    tile_layouts,
)
from flash_hopper.plan.backward import DQ_PIECE, BackwardDkdvPlan
from flash_hopper.plan.roles import WARPGROUP, backward_dkdv_pipelines, roles_of

LOG2_E = math.log2(math.e)
MOST_TILES = 2**31 - 1  # of a ragged batch the table says where they end


class BackwardDkdvKernel:
    """dV = P^T dO and dK = scale * dS^T Q, one persistent CTA per SM, one tile of keys at a time.

    A tile visits every query head of its key head, so dK and dV are complete in registers; or, with `adds_dkdv`, one
    query head, and dK and dV are added up in memory as dQ is (grouped queries: more tiles, and their data stays in L2).
    Scores are computed transposed, so that P^T and dS^T are register operands.

    | pipeline | stages | filled by | bytes a stage | freed by |
    |---|---|---|---|---|
    | tile | 2 | producer lane, 1 arrival | a tile | 1 arrival a thread of the consumers (with dQ: and its writer), when read |
    | keys | 1 | TMA, K and V | tile_n x (tile_hdim + tile_hdimv) | 1 a consumer warp, when its stores have read the buffers (with dQ: when its last wgmmas have) |
    | q | plan.q_stages | TMA, Q and LSE | tile_m x (tile_hdim + 4 bytes) | 1 a consumer warp, when S and dK are done |
    | do | plan.do_stages | TMA, dO and D | tile_m x (tile_hdimv + 4 bytes) | 1 a consumer warp, when dP and dV are done |
    | p | 1 | the P warpgroup's threads, split roles only | P^T, float32 | the dS warpgroup's threads, when read |

    Producer, per tile: post it, load K and V; per query head and block: Q, dO; find the next tile. Blocks outside the inner
    ones (`geometry/blocks.py`) are masked at both ends where the mask has two.
    Consumers: `consumer.py`; `split_consumer.py` for head dims above 128; `fused_consumer.py` if dQ is added up here as
    well, then with `dq_writer.py` in warp 1 of the producer's warpgroup.
    """

    def __init__(self, plan: BackwardDkdvPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)
        self.roles = roles_of(plan)
        self.producer = Producer(plan)
        self.dq_writer = DqWriter(plan)
        consumer = SplitConsumer if plan.splits_roles else FusedConsumer if plan.adds_dq else Consumer
        self.consumer = consumer(plan)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        statistics: cute.Tensor,
        accumulator: cute.Tensor | None,
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
        """Launch. q: (batch, seqlen_q, heads, head_dim); k, dk, v, dv: (batch, seqlen_k, heads_k, ...), dk and dv float32 if
        plan.accumulates; dout: (batch, seqlen_q, heads, head_dim_v). Of a ragged batch, all without the batch; `ragged` then
        says how it lies, with an entry for each of them. statistics: of the preprocess kernel; accumulator: (batch, heads, rows * plan.tile_hdim) float32, zero, if plan.adds_dq. If
        plan.adds_dkdv, dk and dv are accumulators, too: (batch, heads_k, keys * head dim of the plan) float32, zero, with
        keys in whole tiles, without an entry in `ragged`. tile_counter: (1,) int32, zero, if a dense batch has the dynamic
        scheduler. left, right, chunk: bounds of the mask if it is local or chunk. ctas: at most this many CTAs; section:
        `heads_per_section`, or `rows_per_section` of a ragged batch."""
        plan, batch = self.plan, self.batch
        table = batch.table(ragged)
        if const_expr(plan.adds_dkdv):
            q, k, v, dout = batch.entries((q, k, v, dout), ragged)
        else:
            q, k, v, dout, dk, dv = batch.entries((q, k, v, dout, dk, dv), ragged)
        mQ, mK, mV, mdO = (batch.view(t) for t in (q, k, v, dout))
        tiles = tile_layouts(plan)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, mQ_tma = cpasync.make_tiled_tma_atom(load, mQ, tiles.q, (plan.tile_m, plan.tile_hdim))
        tma_do, mdO_tma = cpasync.make_tiled_tma_atom(load, mdO, tiles.do, (plan.tile_m, plan.tile_hdimv))
        tma_k, mK_tma = cpasync.make_tiled_tma_atom(load, mK, tiles.k, (WG_KEYS, plan.tile_hdim))
        tma_v, mV_tma = cpasync.make_tiled_tma_atom(load, mV, tiles.v, (WG_KEYS, plan.tile_hdimv))
        tma_statistics, mStatistics = cpasync.make_tiled_tma_atom(
            load,
            cute.make_tensor(statistics.iterator, cute.select(statistics.layout, mode=[3, 2, 1, 0])),
            cute.make_layout(plan.tile_m),
            (plan.tile_m,),
        )
        if const_expr(plan.adds_dkdv):
            (tma_dk, mdK), (tma_dv, mdV) = (None, self.by_piece(dk)), (None, self.by_piece(dv))
        elif const_expr(plan.accumulates):
            (tma_dk, mdK), (tma_dv, mdV) = (None, seqlen_major(dk)), (None, seqlen_major(dv))
        else:
            tma_dk, mdK = cpasync.make_tiled_tma_atom(store, batch.view(dk), tiles.k, (WG_KEYS, plan.tile_hdim))
            tma_dv, mdV = cpasync.make_tiled_tma_atom(store, batch.view(dv), tiles.v, (WG_KEYS, plan.tile_hdimv))
            mdK, mdV = batch.with_batch(mdK, dk), batch.with_batch(mdV, dv)
        tma_tensors = ((mQ_tma, q), (mK_tma, k), (mV_tma, v), (mdO_tma, dout))
        mQ_tma, mK_tma, mV_tma, mdO_tma = (batch.with_batch(m, t) for m, t in tma_tensors)
        n_blocks, heads = ceil_div(k.shape[1], plan.tile_n), (q if plan.adds_dkdv else k).shape[2]
        total = n_blocks * heads * k.shape[0]
        tiles_at_most = Int32(MOST_TILES) if const_expr(plan.is_ragged) else total
        work = Work(tile_counter, table, tiles_at_most, n_blocks, heads, k.shape[0], Int32(1), section)
        args = DkdvArgs(
            mQ_tma, mK_tma, mV_tma, mdO_tma, mdK, mdV, mStatistics, self.by_piece(accumulator), left, right, chunk, scale,
            scale * Float32(LOG2_E), work,
        )  # fmt: skip
        atoms = DkdvAtoms(tma_q, tma_do, tma_k, tma_v, tma_statistics, tma_dk, tma_dv, *self.tiled_mmas())
        self.shared_struct = shared_struct(plan)
        self.kernel(args, atoms, tiles).launch(
            grid=[ctas if const_expr(plan.is_ragged) else min(ctas, total), 1, 1],
            block=[self.roles.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
            use_pdl=True,
        )

    def by_piece(self, accumulator: cute.Tensor | None) -> cute.Tensor | None:
        """(batch, heads, values) as (4096, batch, heads, piece)."""
        if accumulator is None:
            return None
        pieces = cute.logical_divide(accumulator, (None, None, DQ_PIECE))  # (batch, heads, (4096, piece))
        return cute.make_tensor(pieces.iterator, cute.select(cute.flatten(pieces.layout), mode=[2, 0, 1, 3]))

    def tiled_mmas(self) -> tuple[cute.TiledMma, ...]:
        """S and dP with both operands from shared memory; dK and dV with the left one from registers; dQ from shared
        memory, both operands transposed by the hardware."""
        plan, dtype = self.plan, ELEMENT_TYPES[self.plan.dtype]
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        source = warpgroup.OperandSource
        scores, dp = (
            make_trivial_tiled_mma(
                dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (WG_KEYS, plan.tile_m),
                source.RMEM if in_registers else source.SMEM,
            )
            for in_registers in (False, plan.v_in_registers)
        )  # fmt: skip
        dk, dv = (
            make_trivial_tiled_mma(dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), (WG_KEYS, cols), source.RMEM)
            for cols in (plan.tile_hdim, plan.tile_hdimv)
        )
        dq = make_trivial_tiled_mma(dtype, dtype, mn_major, mn_major, Float32, (1, 1, 1), (64, 64))
        return scores, dp, dk, dv, dq

    @cute.kernel
    def kernel(self, args: DkdvArgs, atoms: DkdvAtoms, tiles: TileLayouts):
        """Set-up by all warps, then each warpgroup takes its role."""
        plan, roles = self.plan, self.roles
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for descriptor in (atoms.tma_q, atoms.tma_do, atoms.tma_k, atoms.tma_v, atoms.tma_statistics):
                cpasync.prefetch_descriptor(descriptor)
        storage, shared = allocate(plan, self.shared_struct, tiles)
        pipes = self.pipelines(storage, tiles)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()  # every thread sees the initialised barriers
        cute.arch.griddepcontrol_wait()  # statistics are complete, and nobody reads dK's and dV's memory any more
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(roles.producer_registers)
            if warp == 0:
                self.producer.run(args, atoms, shared, pipes)
                cute.arch.griddepcontrol_launch_dependents()
            if const_expr(plan.adds_dq):
                if warp == 1:
                    self.dq_writer.run(args, shared, pipes)
        else:
            cute.arch.setmaxregister_increase(roles.consumer_registers)
            wg = cute.arch.make_warp_uniform(thread // WARPGROUP - 1)
            self.consumer.run(Resources(args, atoms, shared, pipes), wg, thread % WARPGROUP)

    def pipelines(self, storage: Any, tiles: TileLayouts) -> Pipelines:
        """All pipelines of the kernel; sizes are checked against the plan."""
        plan = self.plan
        specs = backward_dkdv_pipelines(plan)
        dtype = ELEMENT_TYPES[plan.dtype]
        size = {name: cute.size_in_bytes(dtype, getattr(tiles, name)) for name in ("q", "do", "k", "v")}
        statistics = plan.tile_m * 4
        return Pipelines(
            keys=tma_pipeline(specs["keys"], storage.bar_keys, (size["k"] + size["v"]) * (plan.tile_n // WG_KEYS)),
            q=tma_pipeline(specs["q"], storage.bar_q, size["q"] + statistics),
            do=tma_pipeline(specs["do"], storage.bar_do, size["do"] + statistics),
            tiles=make_mailbox(specs["tile"], storage, plan.is_ragged),
            p=thread_pipeline(specs["p"], storage.bar_p, producers=WARPGROUP) if plan.splits_roles else None,
        )


def placeholder_arguments(plan: BackwardDkdvPlan) -> tuple[Any, ...]:
    """Arguments for `cute.compile`."""
    dtype = ELEMENT_TYPES[plan.dtype]
    padded_batch = placeholders.size()
    batch = () if plan.is_ragged else (padded_batch,)
    seqlen_q, seqlen_k, heads, heads_k = (placeholders.size() for _ in range(4))
    hdim, hdimv = placeholders.head_dim_size(), placeholders.head_dim_size()

    def key_gradient(cols: Any) -> Any:
        if plan.adds_dkdv:
            return placeholders.accumulator(padded_batch, heads_k, DQ_PIECE)
        if plan.accumulates:
            return summed_tensor(*batch, seqlen_k, heads_k, cols)
        return placeholders.heads_tensor(dtype, *batch, seqlen_k, heads_k, cols)

    return (
        placeholders.heads_tensor(dtype, *batch, seqlen_q, heads, hdim),
        placeholders.heads_tensor(dtype, *batch, seqlen_k, heads_k, hdim),
        placeholders.heads_tensor(dtype, *batch, seqlen_k, heads_k, hdimv),
        placeholders.heads_tensor(dtype, *batch, seqlen_q, heads, hdimv),
        key_gradient(hdim),
        key_gradient(hdimv),
        placeholders.statistics(padded_batch, heads),
        placeholders.accumulator(padded_batch, heads, DQ_PIECE) if plan.adds_dq else None,
        None if plan.is_ragged else placeholders.tile_counter(plan.scheduler),
        placeholders.ragged(tensors=4 if plan.adds_dkdv else 6) if plan.is_ragged else None,
        *placeholders.mask_bounds(plan.mask),
        Float32(1.0),
        Int32(1),
        Int32(1),
        placeholders.stream(),
    )
