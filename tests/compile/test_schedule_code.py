"""The prepare kernel as compiled and as launched; what it writes is in `test_tile_search.py`."""

import pytest
from launch_recorder import Recorder, gpu_tensor

from flash_hopper.kernels.schedule.kernel import BUCKETS, THREADS
from flash_hopper.plan.schedule import SchedulePlan, table_ints

PLAN = SchedulePlan()


@pytest.fixture(scope="module")
def recorder(kernels, tmp_path_factory) -> Recorder:
    return Recorder([kernels.object_file(PLAN)], tmp_path_factory.mktemp("recorder"))


def arguments(batch=3, **changed) -> dict:
    """By name, in the order of the call: all four tensors are there, queries packed, keys padded."""
    call = {
        "cu_seqlens_q": gpu_tensor((batch + 1,), "int32"),
        "cu_seqlens_k": gpu_tensor((batch + 1,), "int32"),
        "seqused_q": gpu_tensor((batch,), "int32"),
        "seqused_k": gpu_tensor((batch,), "int32"),
        "table": gpu_tensor((table_ints(batch),), "int32"),
        **dict.fromkeys(("given", "size_q", "size_k", "rows_q", "rows_k", "multiple_q", "multiple_k"), 1),
    }
    assert changed.keys() <= call.keys()
    return {**call, **changed}


def test_nothing_is_spilled_and_ptxas_objects_to_nothing(kernels):
    report = kernels.report(PLAN)
    assert report.ptxas.faults == []
    assert report.count("LDL") == report.count("STL") == 0


def test_the_kernel_waits_for_the_previous_one_and_releases_the_next(kernels):
    report = kernels.report(PLAN)
    assert report.count("ACQBULK") >= 1 and report.count("PREEXIT") >= 1


def test_one_cta_whose_threads_suffice_for_the_histogram_is_launched_whatever_the_batch(recorder):
    import tvm_ffi

    assert BUCKETS <= THREADS
    stream = 0x5EED
    for batch in (0, 1, 31, 5000, 1 << 20):
        before = recorder.launch.launches
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
            recorder.function(PLAN.name)(*arguments(batch).values())
        launch = recorder.launch
        assert launch.launches == before + 1
        assert (launch.grid, launch.block, launch.cluster) == ((1, 1, 1), (THREADS, 1, 1), (1, 1, 1))
        assert launch.pdl and launch.stream == stream


def test_a_tensor_that_a_call_lacks_is_stood_for_by_the_table_as_the_launcher_does(recorder):
    before = recorder.launch.launches
    table = arguments()["table"]
    for absent in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        recorder.function(PLAN.name)(*arguments(**{absent: table}).values())
    assert recorder.launch.launches == before + 4


def test_arguments_that_do_not_fit_are_refused_before_the_launch(recorder):
    before = recorder.launch.launches
    wrong = {
        "dtype of lengths": {"cu_seqlens_q": gpu_tensor((4,), "fp32")},
        "rank of lengths": {"seqused_k": gpu_tensor((3, 1), "int32")},
        "strided lengths": {"cu_seqlens_k": gpu_tensor((4,), "int32", (2,))},
        "missing lengths": {"seqused_q": None},
        "address of table": {"table": gpu_tensor((table_ints(3),), "int32", address=0x7F00_0000_0010)},
        "dtype of table": {"table": gpu_tensor((table_ints(3),), "fp32")},
        "type of size": {"size_q": "12"},
    }
    for what, change in wrong.items():
        try:
            recorder.function(PLAN.name)(*arguments(**change).values())
        except (TypeError, ValueError, RuntimeError):
            continue
        pytest.fail(f"accepted: {what}")
    assert recorder.launch.launches == before
