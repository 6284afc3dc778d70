"""Every backward gets plans that fit shared memory, registers and barriers, and no kernel that it does not need."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.geometry.blocks import key_blocks
from flash_hopper.geometry.masks import UNBOUNDED, Lengths, MaskBounds
from flash_hopper.plan.backward import (
    DQ_PIECE,
    STATISTICS_ROWS,
    BackwardDkdvPlan,
    BackwardDqPlan,
    BackwardPlans,
    BackwardRequest,
    PostprocessPlan,
    PreprocessPlan,
    plan_backward,
)
from flash_hopper.plan.budget import SMEM_BARRIER_BYTES, SMEM_LIMIT_BYTES, SMEM_RESERVED_BYTES
from flash_hopper.plan.forward import HDIM_STEP
from flash_hopper.plan.roles import (
    STATISTIC_BYTES,
    WARPGROUP,
    backward_dkdv_pipelines,
    backward_dq_pipelines,
    roles_of,
)
from flash_hopper.plan.tables.backward import DKDV_ROWS, DQ_ROWS, FUSED_ROWS
from flash_hopper.problem.attention import MAX_HEAD_DIM, AttentionOptions, AttentionProblem, attention_problem
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.ragged import Ragged
from flash_hopper.problem.tensor import TensorSpec

HEAD_DIMS = range(8, 257, 8)
BOTH = (False, True)
PLAIN = ({}, {"causal": True})
WINDOWED = ({"window_size": (200, 100)}, {"window_size": (None, 100)}, {"causal": True, "attention_chunk": 256})
ROW_DIMS = (64, 128, 192, 256)
RAGGED = Ragged(True, True, False, False, 2048, 2048, None, None)
REQUESTS = [
    BackwardRequest(needs_dq, needs_dkdv, has_dlse, is_deterministic)
    for needs_dq, needs_dkdv, has_dlse, is_deterministic in product(BOTH, BOTH, BOTH, BOTH)
    if needs_dq or needs_dkdv
]
REQUESTS += [dataclasses.replace(request, accumulates=True) for request in REQUESTS if not request.has_dlse]
FUSED_UP_TO = FUSED_ROWS[-1][0]


def problem(d, dv, *, heads_k=4, dtype=DType.BF16, **options) -> AttentionProblem:
    def spec(name, heads, dim):
        return TensorSpec(
            name, (2, 1024, heads, dim), (1024 * heads * dim, heads * dim, dim, 1), dtype, str(dtype), "cuda:0"
        )

    q, k, v = spec("q", 4, d), spec("k", heads_k, d), spec("v", heads_k, dv)
    return attention_problem(q, k, v, AttentionOptions(**options), dtypes=KERNEL_DTYPES)


def kernels_of(plans: BackwardPlans) -> list:
    found = (getattr(plans, field.name) for field in dataclasses.fields(plans))
    return [plan for plan in found if plan is not None]


@pytest.fixture(scope="module")
def every() -> list[tuple[AttentionProblem, BackwardRequest, BackwardPlans]]:
    """Every pair of head dims, full and causal, some of them with windows and chunks and ragged, equal and grouped heads,
    and everything that may be asked."""
    found = []
    calls = [*product(HEAD_DIMS, HEAD_DIMS, PLAIN, (4, 2), (None,))]
    calls += product(ROW_DIMS, ROW_DIMS, WINDOWED, (4, 2), (None, RAGGED))
    calls += product(ROW_DIMS, ROW_DIMS, PLAIN, (4, 2), (RAGGED,))
    for d, dv, mask, heads_k, ragged in calls:
        asked = dataclasses.replace(problem(d, dv, heads_k=heads_k, **mask), ragged=ragged)
        found += [(asked, request, plan_backward(asked, request)) for request in REQUESTS]
    return found


@pytest.fixture(scope="module")
def kernels(every) -> set:
    return {plan for _, _, plans in every for plan in kernels_of(plans)}


def of_kind(kernels, kind) -> list:
    found = [plan for plan in kernels if isinstance(plan, kind)]
    assert found
    return found


def test_what_is_asked_for_is_computed_and_nothing_else(every):
    for asked, request, plans in every:
        where = asked.head_dim, asked.head_dim_v, request
        adds_dq = plans.dkdv is not None and plans.dkdv.adds_dq
        assert (plans.dq is not None) == (request.needs_dq and not adds_dq), where
        assert (plans.dkdv is not None) == request.needs_dkdv, where
        assert (plans.postprocess is not None) == adds_dq, where
        assert plans.preprocess.has_dlse == request.has_dlse, where
        assert not (adds_dq and not request.needs_dq), where


def test_nothing_is_added_up_in_memory_if_bits_must_repeat(every):
    for _, request, plans in every:
        if request.is_deterministic:
            assert plans.postprocess is None
            assert plans.preprocess.cleared_hdim == 0
            assert plans.dkdv is None or not (plans.dkdv.adds_dq or plans.dkdv.adds_dkdv)


def test_dq_is_added_up_where_head_dims_allow_and_all_gradients_are_asked_for(every):
    for asked, request, plans in every:
        fits = max(asked.head_dim, asked.head_dim_v) <= FUSED_UP_TO
        wanted = fits and request.needs_dq and request.needs_dkdv and not request.is_deterministic
        assert (plans.dkdv is not None and plans.dkdv.adds_dq) == wanted, (asked.head_dim, asked.head_dim_v, request)


def test_accumulators_are_cleared_filled_and_converted_in_one_layout(every):
    for _, _, plans in every:
        if plans.postprocess is None:
            continue
        assert plans.preprocess.cleared_hdim == plans.dkdv.tile_hdim == plans.postprocess.tile_hdim
        assert plans.dkdv.tile_m == plans.postprocess.tile_m
        # a query block's dQ is two pieces, one a warpgroup
        assert plans.dkdv.tile_m * plans.dkdv.tile_hdim == 2 * DQ_PIECE
        assert plans.dkdv.consumer_warpgroups == 2


def test_dk_and_dv_of_grouped_heads_are_converted_if_they_are_added_up(every):
    for asked, _, plans in every:
        adds = plans.dkdv is not None and plans.dkdv.adds_dkdv
        assert (plans.postprocess_dk is not None) == (plans.postprocess_dv is not None) == adds
        if adds:
            assert asked.heads > asked.heads_k
            assert plans.postprocess_dk.tile_hdim == plans.dkdv.tile_hdim
            assert plans.postprocess_dv.tile_hdim == plans.dkdv.tile_hdimv


def test_gradients_that_a_caller_sums_up_are_added_by_whatever_finishes_them(every):
    for _, request, plans in every:
        if plans.dq is not None:
            assert plans.dq.accumulates == request.accumulates
        if plans.dkdv is not None:
            assert plans.dkdv.accumulates == (request.accumulates and not plans.dkdv.adds_dkdv)
        for plan in (plans.postprocess, plans.postprocess_dk, plans.postprocess_dv):
            assert plan is None or plan.accumulates == request.accumulates


def test_kernels_of_a_call_agree_on_dtype_mask_and_head_dims(every):
    for asked, _, plans in every:
        for plan in kernels_of(plans):
            assert plan.dtype is asked.dtype
        for plan in (plans.dkdv, plans.dq):
            if plan is not None:
                assert plan.mask == asked.mask.kind
                assert plan.is_ragged == (asked.ragged is not None)
                assert plan.scheduler == ("static" if plan.mask == "full" and not plan.is_ragged else "dynamic")
                assert asked.head_dim <= plan.tile_hdim
                assert asked.head_dim_v <= plan.tile_hdimv
        assert plans.preprocess.is_ragged == (asked.ragged is not None)
        for plan, side in ((plans.postprocess, "q"), (plans.postprocess_dk, "k"), (plans.postprocess_dv, "k")):
            assert plan is None or plan.ragged_side == ("" if asked.ragged is None else side)


def test_padding_stays_below_one_step_unless_dq_is_added_up_in_pieces(every):
    for asked, _, plans in every:
        for plan in (plans.dkdv, plans.dq):
            if plan is not None and not getattr(plan, "adds_dq", False):
                assert plan.tile_hdim < asked.head_dim + HDIM_STEP
                assert plan.tile_hdimv < asked.head_dim_v + HDIM_STEP


def test_shared_memory_fits(kernels):
    room = SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES - SMEM_BARRIER_BYTES
    for plan in of_kind(kernels, BackwardDkdvPlan):
        used = sum(spec.stages * spec.tx_bytes for spec in backward_dkdv_pipelines(plan).values())
        if plan.adds_dq:  # dS of two blocks, and a piece of dQ a warpgroup
            used += 2 * plan.tile_n * plan.tile_m * plan.dtype.itemsize + 2 * DQ_PIECE * 4
        if plan.splits_roles:  # P in float32
            used += plan.tile_n * plan.tile_m * 4
        assert used <= room, plan
    for plan in of_kind(kernels, BackwardDqPlan):
        assert sum(spec.stages * spec.tx_bytes for spec in backward_dq_pipelines(plan).values()) <= room, plan


def test_registers_fit(kernels):
    for plan in of_kind(kernels, BackwardDkdvPlan):
        roles = roles_of(plan)
        gradients = max(plan.tile_hdim, plan.tile_hdimv) if plan.splits_roles else plan.tile_hdim + plan.tile_hdimv
        scores = plan.tile_m if plan.splits_roles else 2 * plan.tile_m
        assert (scores + gradients + 64 * plan.adds_dq) // 2 < roles.consumer_registers, plan
    for plan in of_kind(kernels, BackwardDqPlan):
        # S, dP and dQ
        assert (2 * plan.tile_n + plan.tile_hdim) // 2 < roles_of(plan).consumer_registers, plan


def test_tiles_are_what_the_instructions_can_do(kernels):
    for plan in of_kind(kernels, BackwardDkdvPlan):
        assert plan.tile_n == 64 * (1 if plan.splits_roles else plan.consumer_warpgroups), plan
        assert plan.tile_m % 16 == 0 and plan.tile_m % STATISTICS_ROWS == 0, plan
        assert plan.tile_m <= 256, plan
        assert not (plan.splits_roles and (plan.is_deferred or plan.adds_dq)), plan
        assert not (plan.is_deferred and min(plan.q_stages, plan.do_stages) < 3), plan
        assert plan.adds_dq or not plan.adds_dkdv, plan
    for plan in of_kind(kernels, BackwardDqPlan):
        assert plan.tile_m == 64 * plan.consumer_warpgroups, plan
        assert plan.tile_n % 16 == 0 and plan.tile_n <= 256, plan
    for plan in of_kind(kernels, BackwardDkdvPlan) + of_kind(kernels, BackwardDqPlan):
        assert plan.tile_hdim % HDIM_STEP == plan.tile_hdimv % HDIM_STEP == 0, plan
        assert max(plan.tile_hdim, plan.tile_hdimv) <= MAX_HEAD_DIM, plan
    for plan in of_kind(kernels, PostprocessPlan):
        assert plan.tile_m * plan.tile_hdim == 2 * DQ_PIECE, plan
    for plan in of_kind(kernels, PreprocessPlan):
        assert WARPGROUP % plan.threads_per_row == 0, plan
        assert 32 % plan.threads_per_row == 0, plan  # the threads of a row are of one warp


def test_a_row_of_the_preprocess_is_covered_by_its_threads(every):
    """16 bytes a thread and step; up to 64 columns one step, beyond that two."""
    for asked, _, plans in every:
        per_step = 8 * plans.preprocess.threads_per_row
        assert per_step * (1 if plans.preprocess.threads_per_row == 8 else 2) >= asked.head_dim_v


def test_pipelines_count_one_arrival_a_consumer_warp_or_of_tiles_a_thread_and_whole_stages(kernels):
    for plan in of_kind(kernels, BackwardDkdvPlan):
        specs, size = backward_dkdv_pipelines(plan), plan.dtype.itemsize
        assert specs["keys"].tx_bytes == plan.tile_n * (plan.tile_hdim + plan.tile_hdimv) * size
        assert specs["q"].tx_bytes == plan.tile_m * (plan.tile_hdim * size + STATISTIC_BYTES)
        assert specs["do"].tx_bytes == plan.tile_m * (plan.tile_hdimv * size + STATISTIC_BYTES)
        assert (specs["q"].stages, specs["do"].stages) == (plan.q_stages, plan.do_stages)
        assert ("p" in specs) == plan.splits_roles
        for spec in specs.values():
            # P goes from thread to thread between two warpgroups, a tile to every thread, those of the dQ writer as well
            warps = 4 * plan.consumer_warpgroups
            arrivals = {"p": WARPGROUP, "tile": 32 * (warps + plan.adds_dq)}.get(spec.name, warps)
            assert spec.consumer_arrivals == arrivals, (plan, spec)
    for plan in of_kind(kernels, BackwardDqPlan):
        specs, size = backward_dq_pipelines(plan), plan.dtype.itemsize
        assert specs["rows"].tx_bytes == plan.tile_m * (plan.tile_hdim + plan.tile_hdimv) * size
        assert specs["k"].tx_bytes == plan.tile_n * plan.tile_hdim * size
        assert specs["v"].tx_bytes == plan.tile_n * plan.tile_hdimv * size
        assert (specs["k"].stages, specs["v"].stages) == (plan.k_stages, plan.v_stages)
        for spec in specs.values():
            warps = 4 * plan.consumer_warpgroups
            # the producer reads what the scheduler warp posts, too
            assert spec.consumer_arrivals == (32 * (warps + 1) if spec.name == "tile" else warps), (plan, spec)


def test_names_are_unique_identifiers(kernels):
    names = {plan.name for plan in kernels}
    assert len(names) == len(kernels)
    assert all(name.isidentifier() and name.isascii() for name in names)
    half = [plan_backward(problem(64, 64, dtype=DType.FP16), request) for request in REQUESTS]
    assert not {plan.name for plans in half for plan in kernels_of(plans)} & names


@given(st.data())
def test_sizes_that_are_run_time_values_do_not_change_the_plans(data):
    request = data.draw(st.sampled_from(REQUESTS))
    asked = problem(
        data.draw(st.sampled_from(HEAD_DIMS)),
        data.draw(st.sampled_from(HEAD_DIMS)),
        causal=data.draw(st.booleans()),
        heads_k=data.draw(st.sampled_from([4, 2, 1])),
    )
    batch, factor = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 9))
    other = dataclasses.replace(
        asked,
        batch=batch,
        heads=factor * asked.heads,
        heads_k=factor * asked.heads_k,
        seqlen_q=data.draw(st.integers(2, 20_000)),  # of one query causal leaves nothing out
        seqlen_k=data.draw(st.integers(1, 20_000)),
        softmax_scale=data.draw(st.floats(-10, 10)),
    )
    assert plan_backward(asked, request) == plan_backward(other, request)


@given(st.data())
def test_what_a_warpgroup_visits_lies_within_what_its_tile_loads_and_skips_count_blocks(data):
    """The query-parallel kernel loads the tile's key blocks; a warpgroup skips those before its own and those after."""
    lengths = Lengths(data.draw(st.integers(1, 700)), data.draw(st.integers(0, 700)))
    kind = data.draw(st.sampled_from(["full", "causal", "local", "chunk"]))
    bound = st.integers(0, 300) | st.just(UNBOUNDED)
    mask = MaskBounds(kind, data.draw(bound), data.draw(bound), data.draw(st.integers(1, 300)))
    tile = data.draw(st.sampled_from([tile for *_, full, masked in DQ_ROWS for tile in (full, masked)]))
    for row in range(0, lengths.q, tile.m):
        whole = key_blocks(row, tile.m, lengths, tile.n, mask)
        for first in range(row, row + tile.m, 64):
            own = key_blocks(first, 64, lengths, tile.n, mask)
            assert whole.start <= own.start < own.end <= whole.end


def test_rows_of_the_tables_are_in_order_and_end_with_the_largest_head_dims():
    for rows in (DQ_ROWS, DKDV_ROWS):
        assert rows[-1][:2] == (MAX_HEAD_DIM, MAX_HEAD_DIM)
    for rows in (DQ_ROWS, DKDV_ROWS, FUSED_ROWS):
        areas = [row[0] * row[1] for row in rows]
        assert areas == sorted(areas)


def test_padded_sequences_start_on_tiles_of_every_kernel_that_looks_them_up(every):
    """Statistics and accumulators of a ragged batch: a block of the key-parallel kernel, of the preprocess and of the
    postprocess lies in one sequence, and a pass of the preprocess meets at most one start."""
    for _, _, plans in every:
        multiple = STATISTICS_ROWS if plans.dkdv is None else plans.dkdv.tile_m
        assert WARPGROUP // plans.preprocess.threads_per_row <= multiple
        if plans.postprocess is not None:
            assert multiple % plans.postprocess.tile_m == 0
        for plan in (plans.postprocess_dk, plans.postprocess_dv):
            assert plan is None or plans.dkdv.tile_n % plan.tile_m == 0
