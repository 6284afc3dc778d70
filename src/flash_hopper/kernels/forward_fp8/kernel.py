"""The e4m3 forward kernel: host entry, set-up, and the hand-over to the roles."""

import math
from typing import Any

from flash_hopper.device import placeholders
from flash_hopper.device.descales import Descale, DescaleArgs
from flash_hopper.device.dsl import (
    ELEMENT_TYPES,
    Float32,
    Int32,
    Int64,
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
from flash_hopper.device.pipelines import tma_pipeline
from flash_hopper.device.schedulers.mailbox import make_mailbox
from flash_hopper.device.schedulers.source import DenseTiles, RaggedTiles, SchedulerWarp, Work
from flash_hopper.device.sequences import RaggedArgs, make_batch
from flash_hopper.geometry.arith import ceil_div
from flash_hopper.kernels.forward.args import Pipelines
from flash_hopper.kernels.forward.storage import WG_ROWS
from flash_hopper.kernels.forward_fp8.args import Fp8Args, Fp8Atoms, ValuePlaces
from flash_hopper.kernels.forward_fp8.consumer import Fp8Consumer
from flash_hopper.kernels.forward_fp8.producer import Fp8Producer
from flash_hopper.kernels.forward_fp8.storage import TileLayouts, allocate, shared_struct, tile_layouts, write_ones
from flash_hopper.kernels.schedule.kernel import ScheduleKernel
from flash_hopper.plan.forward_fp8 import SUM_COLUMNS, ForwardFp8Plan
from flash_hopper.plan.roles import PRODUCER, SCHEDULER, WARPGROUP, forward_pipelines, roles_of
from flash_hopper.plan.schedule import COUNTERS, is_few

LOG2_E = math.log2(math.e)


class ForwardFp8Kernel:
    """Attention forward on e4m3, one persistent CTA per SM (specification chapter 6).

    Roles, pipelines, scheduler and producer are those of `ForwardKernel`. V comes transposed, so that both operands of PV have
    the keys contiguous, as 8-bit wgmma wants them, with keys in the order of P's registers (`geometry/fp8.py`).

    Consumer, per block: QK; the reference moves if a score of the warp exceeds it; PV of the block before is waited for and
    added to O in float32 (two-level accumulation); exponentials, in whose shadow that addition runs; rounding to e4m3. Row
    sums come from PV, of columns of ones. If the registers do not hold a second sum beside S, PV comes in place of S, before
    the next QK, and in pieces if need be; then row sums are a product of their own. Plain accumulation leaves sums to the tensor core.
    """

    def __init__(self, plan: ForwardFp8Plan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)
        self.roles = roles_of(plan)
        self.schedule = ScheduleKernel()
        self.scheduler = SchedulerWarp(
            RaggedTiles(plan.tile_m, by_keys=False, is_descending=True, counter=COUNTERS["forward"], makes_rows=True)
            if plan.is_ragged
            else DenseTiles(plan.scheduler, is_descending=True)
        )
        self.producer = Fp8Producer(plan)
        self.consumer = Fp8Consumer(plan)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        descales: DescaleArgs,
        values: ValuePlaces | None,
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
        """Launch. As `ForwardKernel`, but for v: (batch, heads_k, head_dim_v, keys) as `Fp8Values` has it, also of a ragged batch,
        where `values` says how sequences lie in it. descales: where they are; scale: of real scores, > 0."""
        plan, batch = self.plan, self.batch
        table = batch.table(ragged)
        if const_expr(plan.is_ragged):
            if not is_few(ragged.sequences):
                self.schedule.launch(table, ragged.lengths, stream)
        q, k, out, lse = batch.entries((q, k, out, lse), ragged)
        mQ, mK, mO = (batch.view(t) for t in (q, k, out))
        mV = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[2, 3, 1, 0]))
        tiles = tile_layouts(plan)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, mQ_tma = cpasync.make_tiled_tma_atom(load, mQ, tiles.q, (WG_ROWS, plan.tile_hdim))
        tma_k, mK_tma = cpasync.make_tiled_tma_atom(load, mK, tiles.k, (plan.tile_n, plan.tile_hdim))
        tma_v, mV_tma = cpasync.make_tiled_tma_atom(load, mV, tiles.v, (plan.tile_hdimv, plan.tile_n))
        tma_o, mO_tma = cpasync.make_tiled_tma_atom(store, mO, tiles.o, (WG_ROWS, plan.tile_hdimv))
        mQ_tma, mK_tma, mO_tma = (batch.with_batch(m, t) for m, t in ((mQ_tma, q), (mK_tma, k), (mO_tma, out)))
        m_blocks, heads = ceil_div(q.shape[1], plan.tile_m), q.shape[2]
        total = m_blocks * heads * q.shape[0]
        lengths = ragged.lengths if const_expr(plan.is_ragged) else None
        work = Work(tile_counter, table, total, m_blocks, heads, q.shape[0], heads // k.shape[2], section, lengths)
        args = Fp8Args(
            mQ_tma, mK_tma, mV_tma, mO_tma, lse, scale * Float32(LOG2_E), descales, values, left, right, chunk, work
        )
        atoms = Fp8Atoms(tma_q, tma_k, tma_v, tma_o, *self.tiled_mmas())
        self.shared_struct = shared_struct(plan)
        self.kernel(args, atoms, tiles).launch(
            grid=[ctas if const_expr(plan.is_ragged) else min(ctas, total), 1, 1],
            block=[self.roles.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # without it setmaxnreg is dropped
            use_pdl=True,
        )

    def tiled_mmas(self) -> tuple[cute.TiledMma, ...]:
        """QK; the layout of O; PV of a piece and row sums, with P from registers."""
        plan, dtype, k_major = self.plan, ELEMENT_TYPES[self.plan.dtype], OperandMajorMode.K
        registers = warpgroup.OperandSource.RMEM

        def mma(columns: int, *source: Any) -> cute.TiledMma:
            tile = (WG_ROWS, columns)
            return make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), tile, *source)

        piece = mma(plan.value_rows // plan.pieces, registers)
        return mma(plan.tile_n), mma(plan.tile_hdimv, registers), piece, mma(SUM_COLUMNS, registers)

    @cute.kernel
    def kernel(self, args: Fp8Args, atoms: Fp8Atoms, tiles: TileLayouts):
        """Set-up by all warps, then each warpgroup takes its role."""
        plan, roles = self.plan, self.roles
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for descriptor in (atoms.tma_q, atoms.tma_k, atoms.tma_v, atoms.tma_o):
                cpasync.prefetch_descriptor(descriptor)
        storage, shared = allocate(plan, self.shared_struct, tiles)
        pipes = self.pipelines(storage, tiles)
        if const_expr(plan.has_sum_columns):
            write_ones(plan, storage, thread)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()  # every thread sees the initialised barriers and the ones
        cute.arch.griddepcontrol_wait()  # inputs are complete, and nobody reads the outputs any more
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
        specs = forward_pipelines(self.plan)
        dtype = ELEMENT_TYPES[self.plan.dtype]
        q_bytes = cute.size_in_bytes(dtype, tiles.q) * self.plan.consumer_warpgroups
        return Pipelines(
            q=tma_pipeline(specs["q"], storage.bar_q, q_bytes),
            k=tma_pipeline(specs["k"], storage.bar_k, cute.size_in_bytes(dtype, tiles.k)),
            v=tma_pipeline(specs["v"], storage.bar_v, cute.size_in_bytes(dtype, tiles.v)),
            tiles=make_mailbox(specs["tile"], storage, self.plan.is_ragged),
        )


def placeholder_arguments(plan: ForwardFp8Plan) -> tuple[Any, ...]:
    """Arguments for `cute.compile`."""
    dtype, out_dtype = ELEMENT_TYPES[plan.dtype], ELEMENT_TYPES[plan.out_dtype]
    batch = () if plan.is_ragged else (placeholders.size(),)
    seqlen_q, seqlen_k, heads, heads_k, value_entries = (placeholders.size() for _ in range(5))
    hdim, hdimv = placeholders.head_dim_size(16), placeholders.head_dim_size(16)
    lse = None
    if plan.has_lse:
        shape = (*batch, heads, seqlen_q)
        strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
        lse = make_fake_tensor(Float32, shape, strides, assumed_align=4)
    descale = Descale(Int64(0), *(Int32(0) for _ in Descale._fields[1:]))
    keys = cute.sym_int32(divisibility=plan.tile_n)
    entries = batch[0] if batch else value_entries
    return (
        placeholders.heads_tensor(dtype, *batch, seqlen_q, heads, hdim),
        placeholders.heads_tensor(dtype, *batch, seqlen_k, heads_k, hdim),
        placeholders.heads_tensor(dtype, entries, heads_k, hdimv, keys),
        placeholders.heads_tensor(out_dtype, *batch, seqlen_q, heads, hdimv),
        lse,
        DescaleArgs(descale, descale, descale, Int32(1)),
        ValuePlaces(Int32(0), Int32(0)) if plan.is_ragged else None,
        None if plan.is_ragged else placeholders.tile_counter(plan.scheduler),
        placeholders.ragged(tensors=4, is_first=True) if plan.is_ragged else None,
        *placeholders.mask_bounds(plan.mask),
        Float32(1.0),
        Int32(1),
        Int32(1),
        placeholders.stream(),
    )
