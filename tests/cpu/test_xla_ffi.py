"""Frames for XLA's foreign function interface: laid out as its header says, filled as handlers expect."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from flash_hopper.testing import xla_ffi
from flash_hopper.testing.xla_ffi import Api, Buffer, ByteSpan, Frame, Function, Handler, HandlerError, Scalar, runtime

FAILURES = []  # an exception cannot leave a C callback


@pytest.fixture(autouse=True)
def failures_in_handlers_fail_the_test():
    FAILURES.clear()
    yield
    if FAILURES:
        raise FAILURES[0]


def handler(python, name="handler"):
    """A handler of a library that is a Python function of (frame, api) -> error or None."""

    def entry(at):
        frame = Frame.from_address(at)
        try:
            return python(frame, Api.from_address(frame.api))
        except BaseException as failure:
            FAILURES.append(failure)

    return Handler(SimpleNamespace(**{name: Function(entry)}), name)


def ask(function, struct, frame, **fields):
    """Call a function of the table as a handler does; the filled structure and the error, if any."""
    arguments = struct(struct_size=ctypes.sizeof(struct), **fields)
    if hasattr(arguments, "context"):
        arguments.context = frame.context
    return arguments, function(ctypes.addressof(arguments))


def test_structures_have_the_sizes_and_offsets_of_the_header():
    # printed by a C program that includes xla/ffi/api/c_api.h of jaxlib 0.11.2 on x86-64
    assert Frame.future.offset == 168
    offsets = {name: getattr(Frame, name).offset for name in ("api", "context", "stage", "arguments", "results")}
    assert offsets == {"api": 16, "context": 24, "stage": 32, "arguments": 40, "results": 80}
    assert Frame.attributes.offset == 120
    assert ctypes.sizeof(Api) == 200
    functions = {name: getattr(Api, name).offset for name in ("error_create", "stream", "allocate", "device_ordinal")}
    assert functions == {"error_create": 48, "stream": 80, "allocate": 120, "device_ordinal": 184}
    assert (ctypes.sizeof(Buffer), Buffer.data.offset, Buffer.dims.offset) == (48, 24, 40)
    assert (ctypes.sizeof(xla_ffi.Buffers), ctypes.sizeof(xla_ffi.Attributes)) == (40, 48)
    assert (ctypes.sizeof(Scalar), ctypes.sizeof(ByteSpan), ctypes.sizeof(xla_ffi.Version)) == (16, 16, 24)
    assert (ctypes.sizeof(xla_ffi.StreamGet), ctypes.sizeof(xla_ffi.Allocate)) == (32, 48)


def test_a_handler_meets_its_tensors_and_its_attributes_sorted_by_name():
    tensors = [torch.randn(2, 3), torch.randn(5).to(torch.bfloat16), torch.empty(4, 1, 2, dtype=torch.float16)]
    seen = {}

    def read(frame, api):
        assert frame.struct_size == 168
        assert frame.stage == 3
        assert (api.struct_size, api.version.major, api.version.minor) == (200, 0, 4)
        buffers = [Buffer.from_address(frame.arguments.items[i]) for i in range(frame.arguments.size)]
        buffers += [Buffer.from_address(frame.results.items[i]) for i in range(frame.results.size)]
        assert all(frame.arguments.kinds[i] == 1 for i in range(frame.arguments.size))
        seen["buffers"] = [(b.data, b.dtype, [b.dims[i] for i in range(b.rank)]) for b in buffers]
        attributes = frame.attributes
        kinds = {1: ctypes.c_bool, 5: ctypes.c_int64, 12: ctypes.c_double}
        for i in range(attributes.size):
            assert attributes.kinds[i] == 3
            name = ByteSpan.from_address(attributes.names[i])
            scalar = Scalar.from_address(attributes.items[i])
            seen[name.text[: name.length].decode()] = kinds[scalar.dtype].from_address(scalar.value).value

    call = handler(read).bind(tensors[:2], tensors[2:], {"window": -1, "causal": True, "a_scale": 0.125})
    call()
    assert seen["buffers"] == [
        (tensor.data_ptr(), dtype, list(tensor.shape)) for tensor, dtype in zip(tensors, (11, 16, 10), strict=True)
    ]
    assert list(seen)[1:] == ["a_scale", "causal", "window"]
    assert (seen["a_scale"], seen["causal"], seen["window"]) == (0.125, True, -1)
    assert seen["causal"] is True


def test_scratch_memory_is_there_until_it_is_given_back():
    def use(frame, api):
        asked, error = ask(api.allocate, xla_ffi.Allocate, frame, size=1000, alignment=64)
        assert error is None
        ctypes.memset(asked.data, 7, 1000)
        assert bool((runtime().scratch[asked.data] == 7).all())
        _, error = ask(api.free, xla_ffi.Free, frame, size=1000, data=asked.data)
        assert error is None
        assert not runtime().scratch
        ordinal, _ = ask(api.device_ordinal, xla_ffi.DeviceOrdinal, frame, ordinal=9)
        assert ordinal.ordinal == 0
        stream, _ = ask(api.stream, xla_ffi.StreamGet, frame)
        assert stream.stream is None

    handler(use).bind([torch.zeros(1)], [], {})()


@pytest.mark.parametrize(
    ("fields", "message"), [({"size": 1 << 62, "alignment": 1}, "allocate:"), ({"size": 8, "alignment": 4096}, "4096")]
)
def test_a_request_that_fails_is_an_error_for_the_handler_and_never_an_exception_in_it(fields, message):
    def use(frame, api):
        asked, error = ask(api.allocate, xla_ffi.Allocate, frame, **fields)
        assert asked.data is None
        details, _ = ask(api.error_details, xla_ffi.ErrorDetails, frame, error=error)
        assert message in details.message.decode()
        ask(api.error_destroy, xla_ffi.ErrorDestroy, frame, error=error)

    handler(use).bind([torch.zeros(1)], [], {})()
    assert not runtime().errors


def test_functions_that_are_not_offered_answer_with_an_error():
    names = set(xla_ffi.FUNCTIONS) - {
        "error_create", "error_details", "error_destroy", "stream", "allocate", "free", "device_ordinal"
    }  # fmt: skip

    def use(frame, api):
        for name in names:
            error = getattr(api, name)(0)
            assert name.encode() in runtime().errors.pop(error)

    handler(use).bind([torch.zeros(1)], [], {})()


def test_the_error_of_a_handler_is_raised_with_its_message_and_forgotten():
    def refuse(frame, api):
        _, error = ask(api.error_create, xla_ffi.ErrorCreate, frame, message=b"wrong architecture", code=3)
        return error

    call = handler(refuse, "some_kernel").bind([torch.zeros(1)], [], {})
    for _ in range(2):
        with pytest.raises(HandlerError, match="some_kernel: wrong architecture"):
            call()
    assert not runtime().errors


def test_tensors_that_a_handler_would_misread_are_refused():
    bound = handler(lambda frame, api: None)
    for tensor in (torch.zeros(4, 4).T, torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="handler cannot take"):
            bound.bind([tensor], [], {})
    with pytest.raises(AttributeError):
        Handler(SimpleNamespace(), "missing")
