"""Every request gets a plan that fits shared memory, registers and barriers."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.geometry.blocks import key_blocks, warpgroup_blocks
from flash_hopper.geometry.masks import UNBOUNDED, Lengths, MaskBounds
from flash_hopper.plan.budget import (
    MOST_STREAMS,
    SMEM_BARRIER_BYTES,
    SMEM_LIMIT_BYTES,
    SMEM_RESERVED_BYTES,
    choose_buffers,
    choose_layout,
    forward_smem_bytes,
    layout_fault,
)
from flash_hopper.plan.candidates import candidates
from flash_hopper.plan.forward import HDIM_STEP, ForwardPlan, plan_forward
from flash_hopper.plan.roles import (
    PRODUCER,
    REGISTER_FILE,
    REGISTERS,
    SCHEDULER,
    STREAM_WARPS,
    TILE_SLOTS,
    WARP,
    WARPGROUP,
    Roles,
    forward_pipelines,
    roles_of,
)
from flash_hopper.plan.tables.forward import (
    ANY,
    CHUNK_MAX_M,
    RAGGED_TO,
    RAGGED_WINDOW_TO,
    ROWS,
    Tile,
    choose_row,
    choose_tile,
)
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.errors import CompileError
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import Mask
from flash_hopper.problem.ragged import Ragged
from flash_hopper.problem.tensor import TensorSpec

HEAD_DIMS = range(8, 257, 8)
STEPS = {most for row in ROWS for steps in (row.full, row.masked, row.windows) for most, _ in steps if most != ANY}
PADDED_DIMS = range(HDIM_STEP, 257, HDIM_STEP)
LENGTHS = (1, 64, 128, 129, 192, 1024, 16_384)
MOST_SLOT_BYTES = 48  # a tile of a ragged batch: 11 ints, in whole 16-byte pieces
LONG = 32_768  # longer than every window and chunk below
KINDS = ("full", "causal", "local", "chunk")


def problem(d, dv, *, seqlen_q=1024, seqlen_k=1024, dtype=DType.BF16, **options) -> AttentionProblem:
    def spec(name, seqlen, dim):
        return TensorSpec(name, (2, seqlen, 4, dim), (seqlen * 4 * dim, 4 * dim, dim, 1), dtype, str(dtype), "cuda:0")

    q, k, v = spec("q", seqlen_q, d), spec("k", seqlen_k, d), spec("v", seqlen_k, dv)
    return attention_problem(q, k, v, AttentionOptions(**options), dtypes=KERNEL_DTYPES)


def masked(kind: str, length: int) -> Mask:
    """A mask of this kind that reaches over so many keys where it has a reach."""
    masks = {
        "full": Mask(),
        "causal": Mask(right=0),
        "local": Mask(length - 1, 0),
        "chunk": Mask(right=0, chunk=length),
    }
    assert masks[kind].kind == kind
    return masks[kind]


def with_mask(d: int, dv: int, kind: str, length: int, is_ragged: bool = False) -> AttentionProblem:
    """Of sequences of this length, or of long ones with windows or chunks of this length."""
    seqlen = LONG if kind in ("local", "chunk") else length
    ragged = Ragged(True, True, False, False, seqlen, seqlen, seqlen, seqlen) if is_ragged else None
    base = problem(d, dv, seqlen_q=seqlen, seqlen_k=seqlen)
    return dataclasses.replace(base, mask=masked(kind, length), ragged=ragged)


def every_plan() -> set[ForwardPlan]:
    """One plan for each choice that the head dims, the mask, the layout and the length lead to."""
    dense = {
        plan_forward(problem(d, dv, seqlen_q=seqlen, causal=causal))
        for d, dv, causal, seqlen in product(HEAD_DIMS, HEAD_DIMS, (False, True), sorted({*LENGTHS, *STEPS}))
    }
    cells = product(PADDED_DIMS, PADDED_DIMS, KINDS, sorted({*LENGTHS, RAGGED_WINDOW_TO, *STEPS}), (False, True))
    return dense | {plan_forward(with_mask(*cell)) for cell in cells}


@pytest.fixture(scope="module")
def plans():
    return every_plan()


@pytest.fixture(scope="module", params=["tables", "candidates"])
def runnable(request):
    """Plans that may run: those of the tables, and all that `tune` may try."""
    if request.param == "tables":
        return request.getfixturevalue("plans")
    dims = [(d, d) for d in (32, 64, 96, 128, 256)] + [(192, 128), (64, 256)]
    return {
        plan
        for dim, kind, is_ragged in product(dims, KINDS, (False, True))
        for plan in candidates(with_mask(*dim, kind, 4096, is_ragged))
    }


def test_every_head_dim_pair_fits_shared_memory(runnable):
    room = SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES - SMEM_BARRIER_BYTES
    for plan in runnable:
        tile, size = Tile(plan.tile_m, plan.tile_n, streams=plan.streams), plan.dtype.itemsize
        used = forward_smem_bytes(
            tile, plan.tile_hdim, plan.tile_hdimv, size, plan.q_stages, plan.kv_stages, plan.o_place
        )
        assert used <= room, plan
        # two K/V stages are what lets the next block load during this one
        assert plan.kv_stages >= 2, plan


def test_every_plan_fits_the_register_file(runnable):
    for plan in runnable:
        roles = roles_of(plan)
        pool = REGISTER_FILE // roles.threads // 8 * 8 * roles.threads
        asked = WARPGROUP * (roles.producer_registers + roles.consumer_warpgroups * roles.consumer_registers)
        assert asked <= pool, plan
        assert roles.producer_registers % 8 == 0, plan
        assert roles.consumer_registers % 8 == 0, plan
        # S and P of a step and O live in registers: fp32 scores, their 16-bit copy, fp32 output
        held = plan.tile_n // 2 + plan.tile_n // 4 + plan.tile_hdimv // 2
        assert held < roles.consumer_registers, plan


def test_tiles_are_what_the_instructions_can_do(runnable):
    for plan in runnable:
        assert plan.tile_m % 64 == 0, plan
        assert plan.tile_n % 16 == 0, plan
        assert plan.tile_n <= 256, plan
        assert plan.tile_hdim % HDIM_STEP == 0, plan
        assert plan.tile_hdimv % HDIM_STEP == 0, plan


def test_padding_covers_the_head_dims_and_stays_below_one_step():
    for d, dv in product(HEAD_DIMS, HEAD_DIMS):
        plan = plan_forward(problem(d, dv))
        assert d <= plan.tile_hdim < d + HDIM_STEP
        assert dv <= plan.tile_hdimv < dv + HDIM_STEP


def test_names_are_unique_identifiers(runnable):
    names = {plan.name for plan in runnable}
    assert len(names) == len(runnable)
    assert all(name.isidentifier() and name.isascii() for name in names)


@given(st.data())
def test_sizes_that_are_run_time_values_do_not_change_the_plan(data):
    d, dv = data.draw(st.sampled_from(HEAD_DIMS)), data.draw(st.sampled_from(HEAD_DIMS))
    causal = data.draw(st.booleans())
    seqlen_q = data.draw(st.integers(1, 20_000))
    first, second = (
        plan_forward(
            dataclasses.replace(
                problem(d, dv, seqlen_q=seqlen_q, seqlen_k=seqlen_q, causal=causal),
                batch=data.draw(st.integers(1, 100)),
                heads=8 * data.draw(st.integers(1, 8)),
                heads_k=data.draw(st.sampled_from([1, 2, 4, 8])),
                seqlen_k=data.draw(st.integers(1, 20_000)),
                softmax_scale=data.draw(st.floats(0, 10)),
            )
        )
        for _ in range(2)
    )
    assert first == second


def test_lengths_choose_among_few_tiles():
    for d, kind, is_ragged in product(PADDED_DIMS, KINDS, (False, True)):
        lengths = (*range(2, 1200, 7), *range(1900, 5000, 61))
        assert len({plan_forward(with_mask(d, d, kind, n, is_ragged)) for n in lengths}) <= 3 + (kind == "local")


def test_plans_of_every_mask_and_layout_are_there_and_say_so_in_their_names(plans):
    assert {(plan.mask, plan.is_ragged) for plan in plans} == set(product(KINDS, (False, True)))
    for plan in plans:
        assert plan.mask in plan.name.split("_"), plan
        assert plan.is_ragged == ("ragged" in plan.name.split("_")), plan


def test_only_the_full_mask_of_a_dense_batch_gives_tiles_of_equal_cost(runnable):
    for plan in runnable:
        assert (plan.scheduler == "static") == (plan.mask == "full" and not plan.is_ragged), plan


def test_bounds_that_cut_nothing_and_hidden_ones_give_the_plan_of_the_plainer_mask():
    for length, is_ragged in product((1, 2, 100, 1024), (False, True)):
        base = with_mask(128, 128, "full", length, is_ragged)
        for asked, plainer in (
            (Mask(length - 1, length - 1), Mask()),
            (Mask(length - 1, 0), Mask(right=0)),
            (Mask(right=0, chunk=length), Mask(right=0)),
            (Mask(length, None, 0), Mask()),
        ):
            plans = [plan_forward(dataclasses.replace(base, mask=mask)) for mask in (asked, plainer)]
            assert plans[0] == plans[1], (asked, length)


@given(
    d=st.sampled_from(PADDED_DIMS),
    kind=st.sampled_from(KINDS),
    packed=st.tuples(*[st.booleans()] * 4),
    batches=st.tuples(*[st.integers(1, 3000)] * 2),
    rows=st.integers(1, 1 << 24),
    hint=st.integers(1, 20_000),
)
def test_how_a_ragged_batch_lies_in_memory_does_not_change_the_plan(d, kind, packed, batches, rows, hint):
    base = with_mask(d, d, kind, 512, is_ragged=True)
    layouts = (True, True, False, False), packed
    first, second = (
        plan_forward(dataclasses.replace(base, batch=batch, ragged=Ragged(*layout, rows, rows, hint, other_hint)))
        for batch, layout, other_hint in zip(batches, layouts, (hint, None), strict=True)
    )
    assert first == second


def test_the_tile_of_a_ragged_batch_is_that_of_the_hint_in_powers_of_two_or_of_the_mean_length():
    for d, kind, length in product((64, 96, 128, 256), ("full", "causal"), (1, 100, 129, 1024, 1025, 5000)):
        base = with_mask(d, d, kind, LONG)
        hinted = Ragged(True, True, False, False, LONG, LONG, length, None)
        unhinted = Ragged(True, True, False, False, 7 * length - 6, 7 * length - 6, None, None)
        for batch, ragged, counted in ((3, hinted, 1 << (length - 1).bit_length()), (7, unhinted, length)):
            plan = plan_forward(dataclasses.replace(base, batch=batch, ragged=ragged))
            tile = choose_tile(d, d, kind, counted, is_ragged=True)
            assert (plan.tile_m, plan.tile_n, plan.streams) == (tile.m, tile.n, tile.streams), (d, kind, length)
    nothing = Ragged(True, True, False, False, 0, 0, None, None)
    for ragged in (nothing, dataclasses.replace(nothing, max_seqlen_q=0)):
        assert plan_forward(dataclasses.replace(with_mask(64, 64, "full", 1), batch=0, ragged=ragged)).is_ragged


def test_heads_share_tiles_where_the_longest_sequence_is_short_whatever_windows_reach(plans):
    for d, kind, length in product((64, 96, 128, 256), KINDS, (1, 64, 65, 128, 129, 1024)):
        base = with_mask(d, d, kind, LONG)
        ragged = Ragged(True, True, False, False, LONG, LONG, length, None)
        assert plan_forward(dataclasses.replace(base, ragged=ragged)).shares_tiles == (length <= 128)
    assert not any(plan.shares_tiles for plan in plans if not plan.is_ragged)


def test_windows_take_the_tile_for_their_reach_whichever_end_reaches():
    for row in ROWS:
        limits = [most for most, _ in (*row.windows, *row.masked) if most != ANY]
        for reach in {1, 128, 4096, *limits, *(most + 1 for most in limits)}:
            for left, right in ((reach - 1, 0), (reach // 2, reach - 1 - reach // 2)):
                base = problem(row.hdim, row.hdimv, seqlen_q=LONG, seqlen_k=LONG)
                plan = plan_forward(dataclasses.replace(base, mask=Mask(left, right)))
                steps = [(most, tile) for most, tile in row.windows if reach <= most]
                steps += [(most, tile) for most, tile in row.masked if reach <= most]
                tile = steps[0][1]
                taken = plan.tile_m, plan.tile_n, plan.has_pingpong, plan.streams, plan.o_place == "v"
                o_in_v = choose_layout(tile, row.hdim, row.hdimv, 2).o_place == "v"
                assert taken == (tile.m, tile.n, tile.has_pingpong, tile.streams, o_in_v), (row, left, right)


def test_deep_tiles_have_more_stages_of_keys_than_others_and_two_of_queries(plans):
    deep = [plan for plan in plans if plan.o_place == "q" and plan.q_stages == 2]
    assert deep
    for plan in deep:
        assert plan.kv_stages > 2, plan
        usual = choose_buffers(Tile(plan.tile_m, plan.tile_n), plan.tile_hdim, plan.tile_hdimv, plan.dtype.itemsize)
        assert plan.kv_stages > usual.kv_stages, plan


def test_a_warpgroup_whose_output_lies_in_v_has_a_stage_that_is_large_enough_and_nobody_elses(runnable):
    in_v = [plan for plan in runnable if plan.o_place == "v"]
    assert in_v
    for plan in in_v:
        assert plan.kv_stages >= plan.consumer_warpgroups, plan
        assert plan.tile_n * plan.tile_hdimv >= 64 * plan.tile_hdimv, plan
        assert not plan.looks_ahead, plan  # it has not waited for stages that it jumps over


def test_the_only_stage_of_q_is_freed_early_unless_the_output_lies_in_it(runnable):
    assert {(1, "v"), (1, "apart"), (2, "q")} <= {(plan.q_stages, plan.o_place) for plan in runnable}
    for plan in runnable:
        assert plan.frees_q_early == (plan.q_stages == 1 and plan.o_place != "q"), plan
        assert not (plan.frees_q_early and plan.looks_ahead), plan


def test_who_looks_ahead_never_jumps_over_a_round_of_stages(runnable):
    """Brute force over rows: from the last block that a warpgroup computes of one tile to its first of any other."""
    assert {"full", "causal", "local"} <= {plan.mask for plan in runnable if plan.looks_ahead}
    deepest_first = sorted((p for p in runnable if p.frees_unseen), key=lambda p: -p.kv_stages)
    for plan in {(p.tile_m, p.tile_n, p.mask): p for p in deepest_first}.values():
        assert plan.q_stages > 1 and plan.mask in ("causal", "local")
        jumps = []
        for left, right in (UNBOUNDED, 0), (0, 0), (100, 0), (5, 7), (1000, 300):
            bounds = MaskBounds(plan.mask, left, right)
            for seqlen_q, seqlen_k in (2000, 2000), (700, 1900), (1900, 700), (130, 60), (65, 1000):
                lengths = Lengths(seqlen_q, seqlen_k)
                for wg in range(plan.consumer_warpgroups):
                    ends = []
                    for row in range(0, seqlen_q, plan.tile_m):
                        own = warpgroup_blocks(row, wg, lengths, plan.tile_n, bounds)
                        whole = key_blocks(row, plan.tile_m, lengths, plan.tile_n, bounds)
                        ends.append((own.start - whole.start, whole.end - own.end))
                    jumps.append(max(x for x, _ in ends) + max(y for _, y in ends))
        assert max(jumps) < plan.kv_stages, plan


def test_chunks_have_the_registers_that_their_bounds_need(runnable):
    for plan in runnable:
        assert plan.mask != "chunk" or plan.streams * plan.tile_m <= CHUNK_MAX_M, plan


def test_flags_that_the_kernel_is_compiled_for_are_in_the_plan():
    base = problem(128, 128)
    assert not plan_forward(base).has_lse
    assert plan_forward(problem(128, 128, return_lse=True)).has_lse
    assert plan_forward(problem(128, 128, causal=True)).mask == "causal"
    assert plan_forward(problem(128, 128, window_size=(5, 0))).mask == "local"
    assert plan_forward(problem(128, 128, attention_chunk=64)).mask == "chunk"
    assert plan_forward(problem(128, 128, softmax_scale=-1.0)).negates_scores
    assert Feature.NEGATIVE_SCALE not in problem(128, 128, softmax_scale=0.0).features
    assert plan_forward(problem(128, 128, dtype=DType.FP16)).dtype is DType.FP16


def test_pipelines_count_one_arrival_a_warp_or_of_tiles_a_thread_that_reads_and_whole_stages(runnable):
    for plan in runnable:
        pipelines, size = forward_pipelines(plan), plan.dtype.itemsize
        o = pipelines.pop("o", None)
        assert (o is not None) == (plan.o_place == "v")
        assert o is None or (o.stages, o.consumer_arrivals, o.tx_bytes) == (1, 1, 0)  # the producer waits once a tile
        assert set(pipelines) == {"q", "k", "v", "tile"}
        assert pipelines["q"].tx_bytes == plan.tile_m * plan.tile_hdim * size
        assert pipelines["k"].tx_bytes == plan.tile_n * plan.tile_hdim * size
        assert pipelines["v"].tx_bytes == plan.tile_n * plan.tile_hdimv * size
        assert pipelines["q"].stages == plan.q_stages
        assert pipelines["k"].stages == pipelines["v"].stages == plan.kv_stages
        assert (pipelines["tile"].stages, pipelines["tile"].tx_bytes) == (TILE_SLOTS, 0)
        for name, spec in pipelines.items():
            # tiles are read by the producer as well, by each lane; of several streams each has pipelines of its own
            warps = 4 * plan.consumer_warpgroups
            assert spec.consumer_arrivals == (32 * (warps + 1) if name == "tile" else warps), plan
        barriers = 2 * 8 * sum(spec.stages for spec in pipelines.values())
        slots = TILE_SLOTS * MOST_SLOT_BYTES
        assert plan.streams * (barriers + slots) <= SMEM_BARRIER_BYTES, plan


def test_streams_have_two_warps_each_of_the_producers_warpgroup_and_consumers_of_their_own(runnable):
    assert MOST_STREAMS * STREAM_WARPS * WARP == WARPGROUP
    assert {PRODUCER, SCHEDULER} == set(range(STREAM_WARPS))
    for plan in runnable:
        roles = roles_of(plan)
        assert roles.threads == WARPGROUP * (1 + plan.streams * plan.consumer_warpgroups), plan
        assert 1 <= plan.streams <= MOST_STREAMS, plan


def test_the_tables_choose_two_streams_up_to_head_dim_64_where_nothing_is_chunked_and_nowhere_else(plans):
    of_streams = {plan for plan in plans if plan.streams == 2}
    assert {(p.tile_hdim, p.tile_hdimv) for p in of_streams} == set(product((32, 64), (32, 64)))
    assert {(p.mask, p.is_ragged) for p in of_streams} == set(product(("full", "causal", "local"), (False, True)))
    buffers = {(p.mask, p.is_ragged): set() for p in of_streams}
    for p in of_streams:
        buffers[p.mask, p.is_ragged].add((p.q_stages, p.kv_stages, p.o_place))
    three, in_v, four = (2, 3, "apart"), (2, 3, "v"), (2, 4, "apart")
    assert buffers == {
        ("full", False): {three}, ("full", True): {three}, ("causal", False): {in_v}, ("causal", True): {three},
        ("local", False): {four, in_v}, ("local", True): {three, four},
    }  # fmt: skip


def test_streams_are_all_that_tells_such_a_plan_from_one_with_the_same_tile(plans):
    """As `dataclasses.replace` makes one for measurements."""
    for plan in plans:
        one, two = (dataclasses.replace(plan, streams=streams) for streams in (1, 2))
        assert two.layout == dataclasses.replace(one.layout, streams=2)
        assert two.name != one.name
        of_tile = "consumer_warpgroups", "looks_ahead", "has_idle", "frees_unseen"
        assert [getattr(two, name) for name in of_tile] == [getattr(one, name) for name in of_tile]
        fault = layout_fault(two.layout, plan.tile_hdim, plan.tile_hdimv, plan.dtype.itemsize, plan.mask)
        if fault is None:
            assert roles_of(two).consumer_warps == roles_of(one).consumer_warps


def test_a_tile_that_cannot_fit_is_refused_with_the_arithmetic():
    with pytest.raises(CompileError, match=r"192x256.*more than \d+ bytes.*Q stages"):
        choose_buffers(Tile(192, 256), 256, 256, 2)


def test_a_register_sum_that_would_hang_the_gpu_is_refused_with_the_arithmetic():
    for warpgroups, (_, consumer) in REGISTERS.items():
        threads = WARPGROUP * (1 + warpgroups)
        at_launch = REGISTER_FILE // threads // 8 * 8
        most = at_launch * (1 + warpgroups) - consumer * warpgroups
        Roles(warpgroups, most, consumer).check_registers()
        with pytest.raises(CompileError, match=rf"registers wanted.*the launch allocates {at_launch} x {threads}"):
            Roles(warpgroups, most + 8, consumer).check_registers()


def test_rows_of_the_table_are_in_order_say_why_and_end_with_the_largest_head_dims():
    assert (ROWS[-1].hdim, ROWS[-1].hdimv) == (256, 256)
    areas = [row.hdim * row.hdimv for row in ROWS]
    assert areas == sorted(areas)
    assert all(row.why for row in ROWS)


def test_each_tile_is_taken_for_what_the_table_says_it_is_for():
    def of(steps, seqlen, kind):
        return next(t for most, t in steps if seqlen <= most and (kind != "chunk" or t.streams * t.m <= CHUNK_MAX_M))

    for row, kind, is_ragged in product(ROWS, KINDS, (False, True)):
        for seqlen in (*range(1, 6000, 1 + 6 * is_ragged), RAGGED_TO, RAGGED_TO + 1):
            tile = choose_tile(row.hdim, row.hdimv, kind, seqlen, is_ragged)
            assert choose_row(row.hdim, row.hdimv) is row and tile in row.tiles.values()
            for_ragged = row.ragged is not None and (
                kind != "chunk" or row.ragged.streams * row.ragged.m <= CHUNK_MAX_M
            )
            if is_ragged and kind == "local" and row.windows and seqlen <= RAGGED_WINDOW_TO:
                assert tile == row.windows[0][1]
            elif is_ragged and for_ragged and seqlen <= RAGGED_TO:
                assert tile == row.ragged
            elif kind == "full":
                usual = of(row.full, seqlen, kind)
                padded, spared = (-(-seqlen // t.m) * t.m for t in (usual, row.spare or usual))
                assert tile == (row.spare if row.spare and padded > 1.04 * spared else usual)
            else:
                windows = row.windows if kind == "local" else ()
                assert tile == of((*windows, *row.masked), seqlen, kind)


def test_steps_rise_and_serve_any_length_and_any_mask():
    for row in ROWS:
        for name, steps in (("full", row.full), ("masked", row.masked), ("windows", row.windows)):
            limits = [most for most, _ in steps]
            assert limits == sorted(set(limits)), (row, name)
            assert name == "windows" or limits[-1] == ANY, (row, name)
        assert row.masked[-1][1].m * row.masked[-1][1].streams <= CHUNK_MAX_M, row


def test_a_tile_with_its_output_in_v_gets_its_stages_of_q_before_those_of_keys():
    for row in ROWS:
        for tile in row.tiles.values():
            layout = choose_layout(tile, row.hdim, row.hdimv, 2)
            if tile.o_in_v:
                assert layout.o_place == "v", (row, tile)
                assert (layout.q_stages, layout.kv_stages) == (tile.q_stages, tile.kv_stages) or layout.q_stages == 1
    with pytest.raises(CompileError, match="O in V"):
        choose_buffers(Tile(256, 128, kv_stages=4, o_in_v=True), 256, 256, 2)
