"""How the forward kernel is launched, and which arguments its host code refuses: seen without a GPU."""

import pytest
from launch_recorder import Recorder, gpu_tensor, ragged_args

from flash_hopper.cli.inspect import memory_map
from flash_hopper.compile.presets import forward_plans
from flash_hopper.kernels.schedule.kernel import THREADS
from flash_hopper.plan.budget import SMEM_LIMIT_BYTES, SMEM_RESERVED_BYTES
from flash_hopper.plan.roles import roles_of
from flash_hopper.plan.tables.forward import ROWS
from flash_hopper.problem.dtypes import DType

# every tile, with one of the dtypes and masks; of ragged batches one of each mask
BF16 = (DType.BF16,)
PLANS = forward_plans([(r.hdim, r.hdimv) for r in ROWS], dtypes=BF16, mask=("causal",), lse=(True,))
PLANS += forward_plans([(64, 64), (256, 256)], dtypes=(DType.FP16,), mask=("full",), lse=(False,))
PLANS += forward_plans([(128, 128)], dtypes=BF16, mask=("local", "chunk"), lse=(True,))
RAGGED = forward_plans([(64, 64)], dtypes=BF16, mask=("full", "local", "chunk"), ragged=(True,), lse=(True,))
RAGGED += forward_plans([(192, 128)], dtypes=BF16, mask=("causal",), ragged=(True,), lse=(True,))
RAGGED += forward_plans(
    [(128, 128)], dtypes=(DType.FP16,), mask=("local",), ragged=(True,), lse=(False,), negative_scale=(True,)
)
every_dense_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
every_ragged_plan = pytest.mark.parametrize("plan", RAGGED, ids=lambda p: p.name)
every_plan = pytest.mark.parametrize("plan", [*PLANS, *RAGGED], ids=lambda p: p.name)


@pytest.fixture(scope="module")
def recorder(kernels, tmp_path_factory) -> Recorder:
    return Recorder([kernels.object_file(p) for p in (*PLANS, *RAGGED)], tmp_path_factory.mktemp("recorder"))


def arguments(plan, batch=2, seqlen_q=1000, seqlen_k=700, heads=6, heads_k=2, ctas=132) -> dict:
    """By name, in the order of the call. Queries of a ragged batch are packed here, keys padded."""
    dtype, d, dv = str(plan.dtype), plan.tile_hdim, plan.tile_hdimv
    bounds = (200, 100, 64) if plan.mask in ("local", "chunk") else (None, None, None)
    lead = leading(plan, batch)
    entry_k, entry_v = seqlen_k * heads_k * d, seqlen_k * heads_k * dv
    lengths = (0x7F00_2000_0000, 0, 0, 0x7F00_2000_1000, seqlen_q, seqlen_k, 1, 1)
    return {
        "q": gpu_tensor((*lead, seqlen_q, heads, d), dtype),
        "k": gpu_tensor((*lead, seqlen_k, heads_k, d), dtype),
        "v": gpu_tensor((*lead, seqlen_k, heads_k, dv), dtype),
        "out": gpu_tensor((*lead, seqlen_q, heads, dv), dtype),
        "lse": gpu_tensor((*lead, heads, seqlen_q), "fp32") if plan.has_lse else None,
        "tile_counter": gpu_tensor((1,), "int32") if has_counter(plan) else None,
        "ragged": ragged_args((0, entry_k, entry_v, 0, 0), batch, lengths) if plan.is_ragged else None,
        **dict(zip(("left", "right", "chunk"), bounds, strict=True)),
        "scale": 0.125,
        "ctas": ctas,
        "section": 1,
    }


def leading(plan, batch: int) -> tuple[int, ...]:
    """The batch dimension, which tensors of a ragged launch lack."""
    return () if plan.is_ragged else (batch,)


def has_counter(plan) -> bool:
    return plan.scheduler == "dynamic" and not plan.is_ragged


def tiles(plan, batch, seqlen_q, heads) -> int:
    return -(-seqlen_q // plan.tile_m) * batch * heads


@every_dense_plan
@pytest.mark.parametrize("sizes", [(2, 1000, 6), (1, 1, 1), (1, 64, 2), (3, 4096, 8), (1, 193, 132)], ids=str)
@pytest.mark.parametrize("ctas", [1, 132])
def test_the_grid_is_one_cta_per_sm_or_per_tile_if_those_are_fewer(plan, sizes, ctas, recorder):
    batch, seqlen_q, heads = sizes
    before = recorder.launches
    call = arguments(plan, batch, seqlen_q, heads=heads, heads_k=heads, ctas=ctas)
    recorder.function(plan.name)(*call.values())
    assert recorder.launches == before + 1
    assert recorder.launch.grid == (min(ctas, tiles(plan, batch, seqlen_q, heads)), 1, 1)
    assert recorder.launch.cluster == (1, 1, 1)


@every_ragged_plan
@pytest.mark.parametrize("ctas", [1, 7, 132])
def test_a_ragged_call_launches_the_writer_of_its_table_if_it_needs_one_and_then_the_grid_of_the_launcher(
    plan, ctas, recorder
):
    for sizes in ((1, 1, 1), (3, 4096, 8), (31, 4096, 8), (32, 4096, 8), (5000, 40_000, 2)):
        before = recorder.launches
        recorder.function(plan.name)(*arguments(plan, *sizes[:2], heads=sizes[2], heads_k=1, ctas=ctas).values())
        has_table = sizes[0] > 31
        assert recorder.launches == before + 1 + has_table
        assert (recorder.launch.grid, recorder.launch.cluster) == ((ctas, 1, 1), (1, 1, 1))
        if not has_table:
            continue
        writer, forward = recorder.last(2)
        assert "ScheduleKernel" in writer.kernel and "ForwardKernel" in forward.kernel
        assert (writer.grid, writer.block, writer.cluster) == ((1, 1, 1), (THREADS, 1, 1), (1, 1, 1))


@every_plan
def test_block_stream_and_programmatic_launch_are_those_of_the_plan(plan, recorder):
    import tvm_ffi

    stream = 0x5EED
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
        recorder.function(plan.name)(*arguments(plan, batch=40).values())
    assert recorder.launch.block == (roles_of(plan).threads, 1, 1)
    for launch in recorder.last(1 + plan.is_ragged):
        assert launch.stream == stream
        assert launch.pdl


@every_plan
def test_shared_memory_is_what_inspect_shows_and_is_opted_into(plan, recorder):
    recorder.function(plan.name)(*arguments(plan).values())
    shown = sum(size for _, size, _ in memory_map(plan)) - SMEM_RESERVED_BYTES
    assert recorder.launch.smem == shown
    assert recorder.launch.smem <= SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES
    assert recorder.launch.allowed_smem >= recorder.launch.smem


def changed(plan) -> dict[str, dict]:
    """Calls with one thing wrong, by what it is."""
    d, dv, dtype = plan.tile_hdim, plan.tile_hdimv, str(plan.dtype)
    other = "fp16" if dtype == "bf16" else "bf16"
    lead = leading(plan, 2)
    wrong_rank = (2,) if plan.is_ragged else ()
    wrong = {
        "dtype of q": {"q": gpu_tensor((*lead, 1000, 6, d), other)},
        "dtype of v": {"v": gpu_tensor((*lead, 700, 2, dv), other)},
        "rank of k": {"k": gpu_tensor((*wrong_rank, 700, 2, d), dtype)},
        "length of v": {"v": gpu_tensor((*lead, 701, 2, dv), dtype)},
        "heads of out": {"out": gpu_tensor((*lead, 1000, 5, dv), dtype)},
        "head dim of k": {"k": gpu_tensor((*lead, 700, 2, d - 8), dtype)},
        "head dim that TMA cannot address": {"v": gpu_tensor((*lead, 700, 2, dv - 4), dtype), "out": gpu_tensor((*lead, 1000, 6, dv - 4), dtype)},
        "last stride": {"q": gpu_tensor((*lead, 1000, 6, d), dtype, (12000 * d, 12 * d, 2 * d, 2)[-3 - len(lead):])},
        "stride that TMA cannot address": {"q": gpu_tensor((*lead, 1000, 6, d), dtype, (6004 * d, 6 * d + 4, d, 1)[-3 - len(lead):])},
        "address": {"k": gpu_tensor((*lead, 700, 2, d), dtype, address=0x7F00_0000_0008)},
        "type of scale": {"scale": "0.125"},
        "missing counter" if has_counter(plan) else "needless counter": {
            "tile_counter": None if has_counter(plan) else gpu_tensor((1,), "int32")
        },
        "missing lengths" if plan.is_ragged else "needless lengths": {
            "ragged": None if plan.is_ragged else ragged_args((0, 0, 0, 0, 0), 2)
        },
        "missing bound" if plan.mask in ("local", "chunk") else "needless bound": {
            "left": None if plan.mask in ("local", "chunk") else 5
        },
        "missing lse" if plan.has_lse else "needless lse": {
            "lse": None if plan.has_lse else gpu_tensor((*lead, 6, 1000), "fp32")
        },
    }  # fmt: skip
    if plan.is_ragged:
        address, batch, entries, lengths = arguments(plan)["ragged"]
        wrong["table that is a tensor"] = {"ragged": (gpu_tensor((100,), "int32"), batch, entries, lengths)}
        wrong["an entry too few"] = {"ragged": (address, batch, entries[1:], lengths)}
        wrong["no lengths"] = {"ragged": (address, batch, entries, None)}
    else:
        wrong["batch of k"] = {"k": gpu_tensor((3, 700, 2, d), dtype)}
    if plan.has_lse:
        wrong["dtype of lse"] = {"lse": gpu_tensor((*lead, 6, 1000), dtype)}
        wrong["length of lse"] = {"lse": gpu_tensor((*lead, 6, 999), "fp32")}
    return {what: {**arguments(plan), **change} for what, change in wrong.items()}


@every_plan
def test_arguments_that_do_not_fit_are_refused_before_the_launch(plan, recorder):
    before = recorder.launches
    for what, call in changed(plan).items():
        try:
            recorder.function(plan.name)(*call.values())
        except (TypeError, ValueError, RuntimeError):
            continue
        pytest.fail(f"accepted: {what}")
    assert recorder.launches == before


@every_plan
def test_any_strides_with_a_unit_last_stride_are_accepted(plan, recorder):
    d, dv, dtype = plan.tile_hdim, plan.tile_hdimv, str(plan.dtype)
    before = recorder.launches
    call = arguments(plan)

    def view(rows, heads, cols, *strides):
        lead = leading(plan, 2)
        return gpu_tensor((*lead, rows, heads, cols), dtype, (*strides[1 - len(lead) :], 1))

    views = [
        {"q": view(1000, 6, d, 6000 * d, d, 1000 * d)},
        {"k": view(700, 2, d, 0, 2 * d, d), "v": view(700, 2, dv, 0, 2 * dv, 0)},
        {"q": view(1000, 6, d, 2**33, 6 * d, d), "out": view(1000, 6, dv, 2**34, 2**24, dv)},
        {"v": view(700, 2, dv, 8, 16 * dv, 8 * dv)},
    ]  # fmt: skip
    for changes in views:
        recorder.function(plan.name)(*{**call, **changes}.values())
    assert recorder.launches == before + len(views)
