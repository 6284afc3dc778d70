"""How the forward kernel is launched, and which arguments its host code refuses: seen without a GPU."""

import pytest
from launch_recorder import Recorder, gpu_tensor

from flash_hopper.cli.inspect import memory_map
from flash_hopper.compile.presets import forward_plans
from flash_hopper.plan.budget import SMEM_LIMIT_BYTES, SMEM_RESERVED_BYTES
from flash_hopper.plan.roles import roles_of
from flash_hopper.plan.schedule import table_ints
from flash_hopper.plan.tables.forward import ROWS
from flash_hopper.problem.dtypes import DType

# every tile, with one of the dtypes and masks; of ragged batches one of each mask
BF16 = (DType.BF16,)
PLANS = forward_plans([(r.hdim, r.hdimv) for r in ROWS], dtypes=BF16, mask=("causal",), lse=(True,))
PLANS += forward_plans([(64, 64), (256, 256)], dtypes=(DType.FP16,), mask=("full",), lse=(False,))
PLANS += forward_plans([(128, 128)], dtypes=BF16, mask=("local", "chunk"), lse=(True,))
RAGGED = forward_plans([(64, 64)], dtypes=BF16, mask=("full", "chunk"), ragged=(True,), lse=(True,))
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
    """By name, in the order of the call. A ragged batch is a padded one here."""
    dtype, d, dv = str(plan.dtype), plan.tile_hdim, plan.tile_hdimv
    bounds = (200, 100, 64) if plan.mask in ("local", "chunk") else (None, None, None)
    return {
        "q": gpu_tensor((batch, seqlen_q, heads, d), dtype),
        "k": gpu_tensor((batch, seqlen_k, heads_k, d), dtype),
        "v": gpu_tensor((batch, seqlen_k, heads_k, dv), dtype),
        "out": gpu_tensor((batch, seqlen_q, heads, dv), dtype),
        "lse": gpu_tensor((batch, heads, seqlen_q), "fp32") if plan.has_lse else None,
        "tile_counter": gpu_tensor((1,), "int32") if has_counter(plan) else None,
        "table": gpu_tensor((table_ints(batch),), "int32") if plan.is_ragged else None,
        **dict(zip(("left", "right", "chunk"), bounds, strict=True)),
        "scale": 0.125,
        "ctas": ctas,
        "section": 1,
    }


def has_counter(plan) -> bool:
    return plan.scheduler == "dynamic" and not plan.is_ragged


def tiles(plan, batch, seqlen_q, heads) -> int:
    return -(-seqlen_q // plan.tile_m) * batch * heads


@every_dense_plan
@pytest.mark.parametrize("sizes", [(2, 1000, 6), (1, 1, 1), (1, 64, 2), (3, 4096, 8), (1, 193, 132)], ids=str)
@pytest.mark.parametrize("ctas", [1, 132])
def test_the_grid_is_one_cta_per_sm_or_per_tile_if_those_are_fewer(plan, sizes, ctas, recorder):
    batch, seqlen_q, heads = sizes
    before = recorder.launch.launches
    call = arguments(plan, batch, seqlen_q, heads=heads, heads_k=heads, ctas=ctas)
    recorder.function(plan.name)(*call.values())
    assert recorder.launch.launches == before + 1
    assert recorder.launch.grid == (min(ctas, tiles(plan, batch, seqlen_q, heads)), 1, 1)
    assert recorder.launch.cluster == (1, 1, 1)


@every_ragged_plan
@pytest.mark.parametrize("ctas", [1, 7, 132])
def test_the_grid_of_a_ragged_batch_is_what_the_launcher_says(plan, ctas, recorder):
    before = recorder.launch.launches
    for sizes in ((1, 1, 1), (3, 4096, 8)):
        recorder.function(plan.name)(*arguments(plan, *sizes[:2], heads=sizes[2], heads_k=1, ctas=ctas).values())
        assert recorder.launch.grid == (ctas, 1, 1)
    assert recorder.launch.launches == before + 2


@every_plan
def test_block_stream_and_programmatic_launch_are_those_of_the_plan(plan, recorder):
    import tvm_ffi

    stream = 0x5EED
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
        recorder.function(plan.name)(*arguments(plan).values())
    assert recorder.launch.block == (roles_of(plan).threads, 1, 1)
    assert recorder.launch.stream == stream
    assert recorder.launch.pdl


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
    wrong = {
        "dtype of q": {"q": gpu_tensor((2, 1000, 6, d), other)},
        "dtype of v": {"v": gpu_tensor((2, 700, 2, dv), other)},
        "rank of k": {"k": gpu_tensor((700, 2, d), dtype)},
        "batch of k": {"k": gpu_tensor((3, 700, 2, d), dtype)},
        "length of v": {"v": gpu_tensor((2, 701, 2, dv), dtype)},
        "heads of out": {"out": gpu_tensor((2, 1000, 5, dv), dtype)},
        "head dim of k": {"k": gpu_tensor((2, 700, 2, d - 8), dtype)},
        "head dim that TMA cannot address": {"v": gpu_tensor((2, 700, 2, dv - 4), dtype), "out": gpu_tensor((2, 1000, 6, dv - 4), dtype)},
        "last stride": {"q": gpu_tensor((2, 1000, 6, d), dtype, (12000 * d, 12 * d, 2 * d, 2))},
        "stride that TMA cannot address": {"q": gpu_tensor((2, 1000, 6, d), dtype, (6004 * d, 6 * d + 4, d, 1))},
        "address": {"k": gpu_tensor((2, 700, 2, d), dtype, address=0x7F00_0000_0008)},
        "type of scale": {"scale": "0.125"},
        "missing counter" if has_counter(plan) else "needless counter": {
            "tile_counter": None if has_counter(plan) else gpu_tensor((1,), "int32")
        },
        "missing table" if plan.is_ragged else "needless table": {
            "table": None if plan.is_ragged else gpu_tensor((100,), "int32")
        },
        "missing bound" if plan.mask in ("local", "chunk") else "needless bound": {
            "left": None if plan.mask in ("local", "chunk") else 5
        },
        "missing lse" if plan.has_lse else "needless lse": {
            "lse": None if plan.has_lse else gpu_tensor((2, 6, 1000), "fp32")
        },
    }  # fmt: skip
    if plan.is_ragged:
        wrong["dtype of table"] = {"table": gpu_tensor((100,), "fp32")}
        wrong["address of table"] = {"table": gpu_tensor((100,), "int32", address=0x7F00_0000_0010)}
    if plan.has_lse:
        wrong["dtype of lse"] = {"lse": gpu_tensor((2, 6, 1000), dtype)}
        wrong["length of lse"] = {"lse": gpu_tensor((2, 6, 999), "fp32")}
    return {what: {**arguments(plan), **change} for what, change in wrong.items()}


@every_plan
def test_arguments_that_do_not_fit_are_refused_before_the_launch(plan, recorder):
    before = recorder.launch.launches
    for what, call in changed(plan).items():
        try:
            recorder.function(plan.name)(*call.values())
        except (TypeError, ValueError, RuntimeError):
            continue
        pytest.fail(f"accepted: {what}")
    assert recorder.launch.launches == before


@every_plan
def test_any_strides_with_a_unit_last_stride_are_accepted(plan, recorder):
    d, dv, dtype = plan.tile_hdim, plan.tile_hdimv, str(plan.dtype)
    before = recorder.launch.launches
    call = arguments(plan)
    views = [
        {"q": gpu_tensor((2, 1000, 6, d), dtype, (6000 * d, d, 1000 * d, 1))},
        {"k": gpu_tensor((2, 700, 2, d), dtype, (0, 2 * d, d, 1)), "v": gpu_tensor((2, 700, 2, dv), dtype, (0, 2 * dv, 0, 1))},
        {"q": gpu_tensor((2, 1000, 6, d), dtype, (2**33, 6 * d, d, 1)), "out": gpu_tensor((2, 1000, 6, dv), dtype, (2**34, 2**24, dv, 1))},
        {"v": gpu_tensor((2, 700, 2, dv), dtype, (8, 16 * dv, 8 * dv, 1))},
    ]  # fmt: skip
    for view in views:
        recorder.function(plan.name)(*{**call, **view}.values())
    assert recorder.launch.launches == before + len(views)
