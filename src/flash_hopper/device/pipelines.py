"""mbarrier pipelines built from the plan, so that counts and bytes cannot drift apart from it."""

from dataclasses import replace
from typing import Any

from flash_hopper.device.dsl import Int32, cute, pipeline
from flash_hopper.device.ptx import await_phase
from flash_hopper.plan.roles import PipelineSpec
from flash_hopper.problem.errors import CompileError


def tma_pipeline(spec: PipelineSpec, storage: Any, stage_bytes: int, stream: int = 0) -> pipeline.PipelineTmaAsync:
    """A pipeline filled by TMA loads of `stage_bytes` and freed by one arrival a consumer warp.

    Barriers are initialised, not yet visible: the kernel synchronises once for all pipelines. `storage` holds
    2 * stages mbarriers for each stream of a CTA, of which `stream` (compile-time) gets its own. Raises CompileError if a stage is not
    as large as the plan says.
    """
    if stage_bytes != spec.tx_bytes:
        raise CompileError(f"pipeline {spec.name}: a stage holds {stage_bytes} bytes, the plan expects {spec.tx_bytes}")
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=_barriers(spec, storage, stream),
        num_stages=spec.stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, spec.consumer_arrivals),
        tx_count=spec.tx_bytes,
        defer_sync=True,
    )


def thread_pipeline(spec: PipelineSpec, storage: Any, producers: int = 1, stream: int = 0) -> pipeline.PipelineAsync:
    """A pipeline filled by ordinary stores of so many threads, each of which commits, and freed by as many arrivals as the
    plan says. `storage` and `stream` as above."""
    return pipeline.PipelineAsync.create(
        barrier_storage=_barriers(spec, storage, stream),
        num_stages=spec.stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, producers),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, spec.consumer_arrivals),
        defer_sync=True,
    )


def _barriers(spec: PipelineSpec, storage: Any, stream: int) -> cute.Pointer:
    return storage.data_ptr() + 2 * spec.stages * stream if stream else storage.data_ptr()


def of_stream(pipe: Any, stream: Int32) -> Any:
    """The pipeline of a stream (run-time, the same in a warp), whose barriers have been initialised, from that of stream 0."""
    offset = 2 * pipe.num_stages * stream

    def moved(barriers: Any) -> Any:
        return barriers.__new_from_mlir_values__([barriers.get_barrier(offset)])

    full, empty = moved(pipe.sync_object_full), moved(pipe.sync_object_empty)
    return replace(pipe, sync_object_full=full, sync_object_empty=empty)


def producer_state(stages: int) -> pipeline.PipelineState:
    """Cursor of the filling side."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int) -> pipeline.PipelineState:
    """Cursor of the draining side."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


def await_full(pipe: Any, state: Any) -> None:
    """Consumer: until the stage is full. As `pipe.consumer_wait`, for inner loops (`ptx.await_phase` says why)."""
    await_phase(pipe.sync_object_full.get_barrier(state.index), state.phase)


def await_empty(pipe: Any, state: Any) -> None:
    """Producer of a pipeline that threads fill: until the stage is empty. As `pipe.producer_acquire`, for inner loops."""
    await_phase(pipe.sync_object_empty.get_barrier(state.index), state.phase)


def await_stage(pipe: Any, state: Any, may_have_jumped: bool) -> None:
    """Consumer: until the stage is full. `may_have_jumped`: it may not have waited for what the stage held before.

    Who did not cannot know whether that ever arrived, and until it has, the next filling seems to be there: a parity tells a filling
    apart only from the one after. But the next one is loaded only when the one before has been freed, and the barrier of the free
    stage cannot be two rounds ahead, as this consumer takes part in the next round.
    """
    if may_have_jumped:
        pipe.sync_object_empty.wait(state.index, state.phase ^ 1)
    pipe.consumer_wait(state)


def skip_stage(pipe: Any, state: Any, may_have_jumped: bool = False) -> Any:
    """Consumer: free the next stage unread; returns the cursor behind it.

    The wait is needed: an arrival before the stage was filled could count for the round before.
    """
    await_stage(pipe, state, may_have_jumped)
    pipe.consumer_release(state)
    state.advance()
    return state


def load(tma: cute.CopyAtom, src: cute.Tensor, dst: cute.Tensor, pipe: Any, state: Any) -> None:
    """Start a TMA load that completes on the stage's full barrier. Called by one whole warp, after `producer_acquire`."""
    cute.copy(tma, src, dst, tma_bar_ptr=pipe.producer_get_barrier(state))


def partition(
    tma: cute.CopyAtom, gmem: cute.Tensor, smem: cute.Tensor, modes: int = 2
) -> tuple[cute.Tensor, cute.Tensor]:
    """(global, shared) views of a TMA copy whose tile is the first `modes` modes, for a CTA without multicast."""
    dst, src = cute.nvgpu.cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, modes), cute.group_modes(gmem, 0, modes)
    )
    return src, dst
