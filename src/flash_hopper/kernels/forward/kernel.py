"""The forward kernel: host entry, set-up, and the hand-over to the roles."""

import math
from typing import Any

from flash_hopper.device import placeholders
from flash_hopper.device.dsl import (
    ELEMENT_TYPES,
    Float32,
    Int32,
    OperandMajorMode,
    const_expr,
    cpasync,
    cuda,
    cute,
    make_fake_tensor,
    make_trivial_tiled_mma,
    pipeline,
    warpgroup,
)
from flash_hopper.device.pipelines import thread_pipeline, tma_pipeline
from flash_hopper.device.schedulers.mailbox import make_mailbox
from flash_hopper.device.schedulers.source import DenseTiles, RaggedTiles, SchedulerWarp, Work
from flash_hopper.device.sequences import RaggedArgs, make_batch
from flash_hopper.geometry.arith import ceil_div
from flash_hopper.kernels.forward.args import ForwardArgs, ForwardAtoms, Pipelines
from flash_hopper.kernels.forward.consumer import Consumer
from flash_hopper.kernels.forward.producer import Producer
from flash_hopper.kernels.forward.storage import (
    WG_ROWS,
    TileLayouts,
    allocate,
    shared_struct,
    stream_view,
    tile_layouts,
)
from flash_hopper.kernels.schedule.kernel import ScheduleKernel
from flash_hopper.plan.forward import ForwardPlan
from flash_hopper.plan.roles import PRODUCER, SCHEDULER, STREAM_WARPS, WARPGROUP, forward_pipelines, roles_of
from flash_hopper.plan.schedule import COUNTERS, is_few

LOG2_E = math.log2(math.e)


class ForwardKernel:
    """Attention forward, one persistent CTA per SM (specification chapters 4 and 5).

    Roles: warps 0 and 1 of warpgroup 0 are the producer and the scheduler (its other warps leave at once); warpgroups
    1.. are consumers, 64 query rows each. Registers a thread: `plan/roles.py`, set by setmaxnreg. With `plan.streams` = 2 there
    are two of everything below, warps 2 and 3 the producer and the scheduler of the second: each stream has its own tiles, and
    neither waits for the other, so that one computes scores while the other starts or ends a tile.

    | pipeline | stages | filled by | bytes a stage | freed by |
    |---|---|---|---|---|
    | tile | 2 | scheduler lane, 1 arrival | coordinates, lengths | 1 arrival a thread of the consumers and the producer, when read |
    | q | plan.q_stages | TMA, one load a warpgroup | tile_m x tile_hdim | 1 a consumer warp, when the tile is done, or after its last QK with `plan.frees_q_early`, or after O's store has read the buffer, if O is staged there |
    | k | plan.kv_stages | TMA | tile_n x tile_hdim | 1 a consumer warp, when QK is done, or by the producer in its place |
    | v | plan.kv_stages | TMA | tile_n x tile_hdimv | 1 a consumer warp, when PV is done, or by the producer in its place |
    | o, if O is staged in V | 1 | 1 arrival a warpgroup, when O's store has read its stage of V | - | nobody: the producer waits once a tile, before its first V |

    Scheduler, per tile: post it, wait until everybody has started on it, find the next. Producer, per tile: load Q, K(last);
    per block: K(j - 1), V(j); V(first).
    Consumer, per tile: QK(last), softmax; per block: QK(j - 1) and PV(j) issued in its turn, softmax(j - 1), rescale O
    if the reference moved; PV(0); normalise, store O and LSE. With `plan.looks_ahead` QK(last) of the next tile is issued
    behind PV(0). A warpgroup skips the blocks at both ends of the tile's that its rows cannot see; with `plan.frees_unseen`
    the producer frees their stages in its place. With `plan.has_idle` one without rows computes one block and frees the others.
    With `plan.shares_tiles` a tile's warpgroups may have rows of different heads, whose keys the producer loads in turn.

    Programmatic dependent launch: every thread waits for the previous kernel before its first access to global memory;
    the next kernel may start its set-up when this one's producers are done.
    """

    def __init__(self, plan: ForwardPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)
        self.roles = roles_of(plan)
        self.schedule = ScheduleKernel()
        self.scheduler = SchedulerWarp(
            RaggedTiles(
                plan.tile_m,
                by_keys=False,
                is_descending=True,
                counter=COUNTERS["forward"],
                makes_rows=True,
                sharing=plan.consumer_warpgroups if plan.shares_tiles else None,
                streams=plan.streams,
            )
            if plan.is_ragged
            else DenseTiles(plan.scheduler, is_descending=True, streams=plan.streams)
        )
        self.producer = Producer(plan)
        self.consumer = Consumer(plan)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
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
        """Launch. q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, heads_k, ...); out like q with v's
        head dim; lse: (batch, heads, seqlen_q) float32 if plan.has_lse. Of a ragged batch, all without the batch; `ragged` then
        says how it lies, with five entries and the lengths. Unless sequences are few, a kernel in front of this one makes the table
        from them; if they are, the table is a counter alone, as tile_counter.
        tile_counter: (1,) int32, zero, if a dense batch has the dynamic scheduler. left, right, chunk: bounds of the mask if
        it is local or chunk. scale: of raw scores, > 0; ctas: at most this many CTAs; section: `heads_per_section`, or
        `rows_per_section` of a ragged batch."""
        plan, batch = self.plan, self.batch
        table = batch.table(ragged)
        if const_expr(plan.is_ragged):
            if not is_few(ragged.sequences):
                self.schedule.launch(table, ragged.lengths, stream)
        q, k, v, out, lse = batch.entries((q, k, v, out, lse), ragged)
        mQ, mK, mV, mO = (batch.view(t) for t in (q, k, v, out))
        tiles = tile_layouts(plan)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, mQ_tma = cpasync.make_tiled_tma_atom(load, mQ, tiles.q, (WG_ROWS, plan.tile_hdim))
        tma_k, mK_tma = cpasync.make_tiled_tma_atom(load, mK, tiles.k, (plan.tile_n, plan.tile_hdim))
        tma_v, mV_tma = cpasync.make_tiled_tma_atom(load, mV, tiles.v, (plan.tile_n, plan.tile_hdimv))
        tma_o, mO_tma = cpasync.make_tiled_tma_atom(store, mO, tiles.o, (WG_ROWS, plan.tile_hdimv))
        mma_qk, mma_pv = self.tiled_mmas()
        tma_tensors = ((mQ_tma, q), (mK_tma, k), (mV_tma, v), (mO_tma, out))
        mQ_tma, mK_tma, mV_tma, mO_tma = (batch.with_batch(m, t) for m, t in tma_tensors)
        m_blocks, heads = ceil_div(q.shape[1], plan.tile_m), q.shape[2]
        total = m_blocks * heads * q.shape[0]
        lengths = ragged.lengths if const_expr(plan.is_ragged) else None
        work = Work(tile_counter, table, total, m_blocks, heads, q.shape[0], heads // k.shape[2], section, lengths)
        args = ForwardArgs(
            mQ_tma, mK_tma, mV_tma, mO_tma, lse, scale, scale * Float32(LOG2_E), left, right, chunk, work
        )
        atoms = ForwardAtoms(tma_q, tma_k, tma_v, tma_o, mma_qk, mma_pv)
        self.shared_struct = shared_struct(plan)
        self.kernel(args, atoms, tiles).launch(
            grid=[ctas if const_expr(plan.is_ragged) else min(ctas, total), 1, 1],
            block=[self.roles.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
            use_pdl=True,
        )

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """QK with both operands from shared memory, PV with P from registers and V transposed by the hardware."""
        plan, dtype = self.plan, ELEMENT_TYPES[self.plan.dtype]
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        registers = warpgroup.OperandSource.RMEM
        return (
            make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (WG_ROWS, plan.tile_n)),
            make_trivial_tiled_mma(
                dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), (WG_ROWS, plan.tile_hdimv), registers
            ),
        )

    @cute.kernel
    def kernel(self, args: ForwardArgs, atoms: ForwardAtoms, tiles: TileLayouts):
        """Set-up by all warps, then each warpgroup takes its role."""
        plan, roles = self.plan, self.roles
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for descriptor in (atoms.tma_q, atoms.tma_k, atoms.tma_v, atoms.tma_o):
                cpasync.prefetch_descriptor(descriptor)
        storage, shared = allocate(plan, self.shared_struct, tiles)
        pipes = self.pipelines(storage, tiles)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()  # every thread sees the initialised barriers
        cute.arch.griddepcontrol_wait()  # inputs are complete, and nobody reads the outputs any more
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(roles.producer_registers)
            stream = warp // STREAM_WARPS if const_expr(plan.streams > 1) else Int32(0)
            role = warp % STREAM_WARPS if const_expr(plan.streams > 1) else warp
            buffers, own = stream_view(plan, shared, pipes, stream)
            if role == PRODUCER:
                self.producer.run(args, atoms, buffers, own)
                cute.arch.griddepcontrol_launch_dependents()
            if role == SCHEDULER:
                self.scheduler.run(args.work, own.tiles, stream)
        else:
            cute.arch.setmaxregister_increase(roles.consumer_registers)
            wg = cute.arch.make_warp_uniform(thread // WARPGROUP - 1)
            buffers, own = stream_view(plan, shared, pipes, wg // plan.consumer_warpgroups)
            self.consumer.run(args, atoms, buffers, own, wg, thread % WARPGROUP)

    def pipelines(self, storage: Any, tiles: TileLayouts) -> Pipelines:
        """All pipelines of the kernel, initialised; returns those of stream 0. Sizes are checked against the plan."""
        specs = forward_pipelines(self.plan)
        dtype = ELEMENT_TYPES[self.plan.dtype]
        q_bytes = cute.size_in_bytes(dtype, tiles.q) * self.plan.consumer_warpgroups

        def of(stream: int) -> Pipelines:
            return Pipelines(
                q=tma_pipeline(specs["q"], storage.bar_q, q_bytes, stream),
                k=tma_pipeline(specs["k"], storage.bar_k, cute.size_in_bytes(dtype, tiles.k), stream),
                v=tma_pipeline(specs["v"], storage.bar_v, cute.size_in_bytes(dtype, tiles.v), stream),
                tiles=make_mailbox(specs["tile"], storage, self.plan.is_ragged, stream),
                o=(
                    thread_pipeline(specs["o"], storage.bar_o, self.plan.consumer_warpgroups, stream)
                    if self.plan.o_place == "v"
                    else None
                ),
            )

        first, *_ = [of(stream) for stream in range(self.plan.streams)]
        return first


def placeholder_arguments(plan: ForwardPlan) -> tuple[Any, ...]:
    """Arguments for `cute.compile`."""
    dtype = ELEMENT_TYPES[plan.dtype]
    batch = () if plan.is_ragged else (placeholders.size(),)
    seqlen_q, seqlen_k, heads, heads_k = (placeholders.size() for _ in range(4))
    hdim, hdimv = placeholders.head_dim_size(), placeholders.head_dim_size()
    lse = None
    if plan.has_lse:
        shape = (*batch, heads, seqlen_q)
        strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
        lse = make_fake_tensor(Float32, shape, strides, assumed_align=4)
    return (
        placeholders.heads_tensor(dtype, *batch, seqlen_q, heads, hdim),
        placeholders.heads_tensor(dtype, *batch, seqlen_k, heads_k, hdim),
        placeholders.heads_tensor(dtype, *batch, seqlen_k, heads_k, hdimv),
        placeholders.heads_tensor(dtype, *batch, seqlen_q, heads, hdimv),
        lse,
        None if plan.is_ragged else placeholders.tile_counter(plan.scheduler),
        placeholders.ragged(tensors=5, is_first=True) if plan.is_ragged else None,
        *placeholders.mask_bounds(plan.mask),
        Float32(1.0),
        Int32(1),
        Int32(1),
        placeholders.stream(),
    )
