"""Kernels in a library that was built for XLA, called on torch's tensors, memory and current stream.

XLA's foreign function interface is plain C: a handler gets a frame with buffers and attributes, and a table of functions
by which it asks for its stream, scratch memory and device. This module fills the frame and answers the questions, so that
such kernels run among torch's and can be timed like them, without JAX. `fa3_backward.py` is the caller.

Structures are those of version 0.4 of the interface (`xla/ffi/api/c_api.h`); handlers check the sizes that they depend on.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

EXECUTE = 3  # the stage of a frame that runs the kernels
BUFFER, SCALAR = 1, 3  # kinds of an argument or result, and of an attribute
VERSION = (0, 4)
MAX_ALIGNMENT = 512  # of torch's allocations
DTYPES = {torch.float32: 11, torch.float16: 10, torch.bfloat16: 16}
SCALARS: dict[type, tuple[Any, int]] = {
    bool: (ctypes.c_bool, 1),
    int: (ctypes.c_int64, 5),
    float: (ctypes.c_double, 12),
}
# the table of functions, in order; those that a handler of ours need not call answer with an error
FUNCTIONS = (
    "error_create", "error_details", "error_destroy", "handler_register", "stream", "type_register", "context_get",
    "state_set", "state_get", "allocate", "free", "threads_schedule", "threads_count", "future_create",
    "future_available", "future_error", "run_id", "device_ordinal", "find_extension",
)  # fmt: skip


class HandlerError(RuntimeError):
    """What a handler reported instead of running."""


def _struct(name: str, *fields: tuple[str, Any]) -> Any:
    """A structure of the interface; each begins with its size and a list of extensions."""
    header = [("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p)]
    return type(name, (ctypes.Structure,), {"_fields_": [*header, *fields]})


def _plain(name: str, *fields: tuple[str, Any]) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_CONTEXT = ("context", ctypes.c_void_p)
ByteSpan = _plain("ByteSpan", ("text", ctypes.c_char_p), ("length", ctypes.c_size_t))
Scalar = _plain("Scalar", ("dtype", ctypes.c_int), ("value", ctypes.c_void_p))
Version = _struct("Version", ("major", ctypes.c_int), ("minor", ctypes.c_int))
Api = _struct("Api", ("version", Version), ("internal", ctypes.c_void_p), *((name, Function) for name in FUNCTIONS))
Buffer = _struct(
    "Buffer",
    ("dtype", ctypes.c_int),
    ("data", ctypes.c_void_p),
    ("rank", ctypes.c_int64),
    ("dims", ctypes.POINTER(ctypes.c_int64)),
)
Buffers = _struct(
    "Buffers",
    ("size", ctypes.c_int64),
    ("kinds", ctypes.POINTER(ctypes.c_int)),
    ("items", ctypes.POINTER(ctypes.c_void_p)),
)
Attributes = _struct(
    "Attributes",
    ("size", ctypes.c_int64),
    ("kinds", ctypes.POINTER(ctypes.c_int)),
    ("names", ctypes.POINTER(ctypes.c_void_p)),
    ("items", ctypes.POINTER(ctypes.c_void_p)),
)
Frame = _struct(
    "Frame",
    ("api", ctypes.c_void_p),
    _CONTEXT,
    ("stage", ctypes.c_int),
    ("arguments", Buffers),
    ("results", Buffers),
    ("attributes", Attributes),
    ("future", ctypes.c_void_p),
)
ErrorCreate = _struct("ErrorCreate", ("message", ctypes.c_char_p), ("code", ctypes.c_int))
ErrorDetails = _struct("ErrorDetails", ("error", ctypes.c_void_p), ("message", ctypes.c_char_p))  # and a code: kept
ErrorDestroy = _struct("ErrorDestroy", ("error", ctypes.c_void_p))
StreamGet = _struct("StreamGet", _CONTEXT, ("stream", ctypes.c_void_p))
Allocate = _struct(
    "Allocate", _CONTEXT, ("size", ctypes.c_size_t), ("alignment", ctypes.c_size_t), ("data", ctypes.c_void_p)
)
Free = _struct("Free", _CONTEXT, ("size", ctypes.c_size_t), ("data", ctypes.c_void_p))
DeviceOrdinal = _struct("DeviceOrdinal", _CONTEXT, ("ordinal", ctypes.c_int32))


class Runtime:
    """The answers to what handlers ask; one for the process. Handlers run one at a time, on `device`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.scratch: dict[int, torch.Tensor] = {}
        self.errors: dict[int, bytes] = {}
        self._count = 0
        answers: dict[str, Callable[[int], int | None]] = {
            "error_create": lambda at: self.error(ErrorCreate.from_address(at).message or b"no message"),
            "error_details": self._error_details,
            "error_destroy": self._error_destroy,
            "stream": self._stream,
            "allocate": self._allocate,
            "free": self._free,
            "device_ordinal": self._device_ordinal,
        }
        functions = [Function(self._guarded(answers.get(name), name)) for name in FUNCTIONS]
        version = Version(ctypes.sizeof(Version), None, *VERSION)
        self.api = Api(ctypes.sizeof(Api), None, version, None, *functions)

    def error(self, message: bytes) -> int:
        """Keep a message; the handle that stands for it."""
        self._count += 1
        self.errors[self._count] = message
        return self._count

    def _guarded(self, answer: Callable[[int], int | None] | None, name: str) -> Callable[[int], int | None]:
        """An exception must not leave a callback: it becomes the error that the handler sees."""

        def function(at: int) -> int | None:
            if answer is None:
                return self.error(f"{name} is not offered to handlers".encode())
            try:
                return answer(at)
            except Exception as failure:
                return self.error(f"{name}: {failure}".encode())

        return function

    def _error_details(self, at: int) -> None:
        details = ErrorDetails.from_address(at)
        details.message = self.errors[details.error]  # the dictionary keeps the bytes alive

    def _error_destroy(self, at: int) -> None:
        self.errors.pop(ErrorDestroy.from_address(at).error, None)

    def _stream(self, at: int) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None
        StreamGet.from_address(at).stream = stream

    def _allocate(self, at: int) -> int | None:
        asked = Allocate.from_address(at)
        if asked.alignment > MAX_ALIGNMENT:
            return self.error(f"alignment {asked.alignment} exceeds {MAX_ALIGNMENT}".encode())
        block = torch.empty(max(asked.size, 1), dtype=torch.uint8, device=self.device)
        self.scratch[block.data_ptr()] = block
        asked.data = block.data_ptr()
        return None

    def _free(self, at: int) -> None:
        # later work on the same stream may reuse the memory, as with any tensor of torch
        self.scratch.pop(Free.from_address(at).data, None)

    def _device_ordinal(self, at: int) -> None:
        DeviceOrdinal.from_address(at).ordinal = self.device.index or 0


@cache
def runtime() -> Runtime:
    """The runtime of this process."""
    return Runtime()


class BoundCall:
    """A handler with its tensors and attributes; calling it enqueues its kernels on the current stream."""

    def __init__(self, name: str, function: Any, device: torch.device, frame: "_FrameBuilder") -> None:
        self.name = name
        self._function = function
        self._device = device
        self._built = frame  # owns what the frame points to

    def __call__(self) -> None:
        """Run the handler; raises HandlerError if it refuses."""
        place = runtime()
        place.device = self._device
        error = self._function(ctypes.addressof(self._built.frame))
        if error:
            raise HandlerError(f"{self.name}: {place.errors.pop(error, b'').decode(errors='replace')}")


class Handler:
    """A handler: an exported function of a library, by name. Raises AttributeError if there is none."""

    def __init__(self, library: Any, name: str) -> None:
        self.name = name
        self._function = getattr(library, name)
        self._function.argtypes, self._function.restype = [ctypes.c_void_p], ctypes.c_void_p

    def bind(
        self,
        arguments: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        attributes: Mapping[str, bool | int | float],
    ) -> BoundCall:
        """A call with these tensors and attributes (passed as bool, int64 and float64).

        Tensors are contiguous, on one device, float32 or 16 bit; ValueError says which is not.
        """
        for tensor in (*arguments, *results):
            if not tensor.is_contiguous() or tensor.dtype not in DTYPES:
                raise ValueError(f"{self.name} cannot take {tensor.dtype} of strides {tensor.stride()}")
        return BoundCall(self.name, self._function, arguments[0].device, _FrameBuilder(arguments, results, attributes))


class _FrameBuilder:
    """A frame, and everything that it points to."""

    def __init__(
        self,
        arguments: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        attributes: Mapping[str, bool | int | float],
    ) -> None:
        self.kept: list[Any] = [*arguments, *results]
        self.frame = Frame(struct_size=Frame.future.offset, stage=EXECUTE)
        self.frame.api = ctypes.addressof(runtime().api)
        self.frame.context = self.frame.api  # handlers only hand it back
        self.frame.arguments = self._buffers(arguments)
        self.frame.results = self._buffers(results)
        self.frame.attributes = self._attributes(attributes)

    def _buffers(self, tensors: Sequence[torch.Tensor]) -> Any:
        buffers = []
        for tensor in tensors:
            buffer = Buffer(struct_size=ctypes.sizeof(Buffer), dtype=DTYPES[tensor.dtype], rank=tensor.dim())
            buffer.data = tensor.data_ptr()
            buffer.dims = self._array(ctypes.c_int64, tensor.shape)
            buffers.append(buffer)
        kinds = self._array(ctypes.c_int, [BUFFER] * len(tensors))
        return Buffers(ctypes.sizeof(Buffers), None, len(tensors), kinds, self._addresses(buffers))

    def _attributes(self, values: Mapping[str, bool | int | float]) -> Any:
        """Scalars, sorted by name as the interface wants them."""
        names, scalars = [], []
        for name, value in sorted(values.items()):
            kind, dtype = SCALARS[type(value)]
            names.append(ByteSpan(name.encode(), len(name)))
            place = kind(value)
            self.kept.append(place)
            scalars.append(Scalar(dtype, ctypes.addressof(place)))
        kinds = self._array(ctypes.c_int, [SCALAR] * len(scalars))
        spans, places = self._addresses(names), self._addresses(scalars)
        return Attributes(ctypes.sizeof(Attributes), None, len(scalars), kinds, spans, places)

    def _addresses(self, items: Sequence[Any]) -> Any:
        self.kept += items
        return self._array(ctypes.c_void_p, [ctypes.addressof(item) for item in items])

    def _array(self, kind: Any, values: Sequence[int]) -> Any:
        """A pointer to an array of these values."""
        array = (kind * len(values))(*values)
        self.kept.append(array)
        return ctypes.cast(array, ctypes.POINTER(kind))
