"""Runs the host code of compiled kernels without a GPU: their library is linked with a CUDA runtime that only takes notes.

The host code checks its arguments, makes TMA descriptors and computes the launch as ever; `Recorder.launch` is what it asked
for. `GpuTensor` is an argument that claims to lie on a GPU; nothing reads its memory.
"""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

from flash_hopper.compile.link import require_linker
from flash_hopper.compile.target import toolkit

_RUNTIME = r"""
#include <stddef.h>
#include <string.h>

typedef struct { unsigned x, y, z; } dims;
typedef struct { int id; int pad; union { char bytes[64]; dims cluster; int flag; } value; } attribute; /* cudaLaunchAttribute */
typedef struct { dims grid, block; size_t smem; void *stream; attribute *attributes; unsigned count; } config; /* cudaLaunchConfig_t */
enum { CLUSTER = 4, PROGRAMMATIC = 6, MAX_DYNAMIC_SMEM = 8, OPTIN_SMEM = 97 };

enum { KEPT = 8 };
typedef struct { const char *kernel; dims grid, block, cluster; size_t smem, allowed_smem; void *stream; int pdl; } note;
struct { int launches; note last[KEPT]; } notes; /* launch i is last[i % KEPT] */
enum { MOST_PARAMETERS = 64, MOST_BYTES = 128 };
struct { const char *of; int count; int sizes[MOST_PARAMETERS]; char bytes[MOST_PARAMETERS][MOST_BYTES]; } wanted;

static struct { const void *kernel; size_t smem; } allowed[4096];
static size_t *allowed_smem(const void *kernel) {
  int i = 0;
  while (allowed[i].kernel && allowed[i].kernel != kernel) i++;
  allowed[i].kernel = kernel;
  return &allowed[i].smem;
}

int cudaLaunchKernelExC(const config *c, const void *kernel, void **arguments) {
  note *n = &notes.last[notes.launches++ % KEPT];
  *n = (note){kernel, c->grid, c->block, {1, 1, 1}, c->smem, *allowed_smem(kernel), c->stream, 0};
  for (unsigned i = 0; i < c->count; i++) {
    if (c->attributes[i].id == CLUSTER) n->cluster = c->attributes[i].value.cluster;
    if (c->attributes[i].id == PROGRAMMATIC) n->pdl = c->attributes[i].value.flag;
  }
  if (!wanted.count || !strstr(kernel, wanted.of)) return 0;
  for (int i = 0; i < wanted.count; i++) memcpy(wanted.bytes[i], arguments[i], wanted.sizes[i]);
  return 0;
}
int cudaKernelSetAttributeForDevice(void *kernel, int id, int value, int device) {
  if (id == MAX_DYNAMIC_SMEM) *allowed_smem(kernel) = value;
  return 0;
}
int cudaFuncSetAttribute(const void *kernel, int id, int value) {
  return cudaKernelSetAttributeForDevice((void *)kernel, id, value, 0);
}
int cudaDeviceGetAttribute(int *value, int id, int device) { *value = id == OPTIN_SMEM ? 232448 : 132; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
  *library = (void *)code;
  return 0;
}
int cudaLibraryUnload(void *library) { return 0; }
int cudaLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = strdup(name); return 0; }

static int get_kernel_attribute(int *value, int id, void *kernel, int device) { *value = 0; return 0; }
static int get_device(int *device, int ordinal) { *device = ordinal; return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version, unsigned long long flags, int *status) {
  *entry = !strcmp(name, "cuKernelGetAttribute") ? (void *)get_kernel_attribute
           : !strcmp(name, "cuDeviceGet")        ? (void *)get_device
                                                 : NULL;
  if (status) *status = 0;
  return *entry ? 0 : 1;
}
const char *cudaGetErrorName(int code) { return "recorded"; }
const char *cudaGetErrorString(int code) { return "recorded"; }

/* named by the archive, called by none of our kernels */
#define REFUSE(name) int name(void) { return 999; }
REFUSE(cudaDeviceSynchronize) REFUSE(cudaEventCreate) REFUSE(cudaEventDestroy) REFUSE(cudaEventElapsedTime)
REFUSE(cudaEventRecord) REFUSE(cudaFree) REFUSE(cudaFreeAsync) REFUSE(cudaFreeHost) REFUSE(cudaGetLastError)
REFUSE(cudaGraphDestroy) REFUSE(cudaGraphExecDestroy) REFUSE(cudaGraphInstantiate) REFUSE(cudaGraphLaunch)
REFUSE(cudaLibraryGetGlobal) REFUSE(cudaLibraryGetKernelCount) REFUSE(cudaLibraryGetManaged)
REFUSE(cudaLibraryGetUnifiedFunction) REFUSE(cudaLibraryLoadFromFile) REFUSE(cudaMalloc) REFUSE(cudaMallocAsync)
REFUSE(cudaMallocHost) REFUSE(cudaMallocManaged) REFUSE(cudaMemcpy) REFUSE(cudaMemcpyAsync) REFUSE(cudaMemset)
REFUSE(cudaMemsetAsync) REFUSE(cudaOccupancyMaxActiveBlocksPerMultiprocessor) REFUSE(cudaProfilerStart)
REFUSE(cudaProfilerStop) REFUSE(cudaStreamAddCallback) REFUSE(cudaStreamBeginCapture) REFUSE(cudaStreamCreate)
REFUSE(cudaStreamDestroy) REFUSE(cudaStreamEndCapture) REFUSE(cudaStreamSynchronize) REFUSE(cudaStreamWaitEvent)

typedef void (*raise_t)(const char *kind, const char **parts, int count);
void CuteDSLRT_TVMFFISetRaisedCudaError(raise_t raise, int code) {
  const char *parts[] = {"CUDA error in the recorder"};
  raise("RuntimeError", parts, 1);
}
"""


class _Dims(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]


class _Note(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p), ("grid", _Dims), ("block", _Dims), ("cluster", _Dims), ("smem", ctypes.c_size_t),
        ("allowed_smem", ctypes.c_size_t), ("stream", ctypes.c_void_p), ("pdl", ctypes.c_int),
    ]  # fmt: skip


_KEPT = 8


class _Notes(ctypes.Structure):
    _fields_ = [("launches", ctypes.c_int), ("last", _Note * _KEPT)]


DESCRIPTOR_BYTES = 128
_MOST_PARAMETERS = 64


class _Wanted(ctypes.Structure):
    _fields_ = [
        ("of", ctypes.c_char_p), ("count", ctypes.c_int), ("sizes", ctypes.c_int * _MOST_PARAMETERS),
        ("bytes", ctypes.c_char * DESCRIPTOR_BYTES * _MOST_PARAMETERS),
    ]  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A launch; the name of its kernel holds that of the class (`ForwardKernel`)."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    allowed_smem: int
    stream: int
    pdl: bool


class Recorder:
    """Object files of kernels, linked with the note-taking runtime; `function(symbol)` is called like the kernel."""

    def __init__(self, objects: list[Path], folder: Path) -> None:
        import tvm_ffi

        kit = toolkit()
        source, library = folder / "runtime.c", folder / "recorded.so"
        source.write_text(_RUNTIME)
        # symbolic: take this runtime, not the one that torch may have loaded
        flags = ["-shared", "-fPIC", "-O1", "-w", "-Wl,-Bsymbolic"]
        command = [*require_linker(kit).command, *flags, "-o", library, *objects, source, kit.runtime_archive]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
        self._notes = _Notes.in_dll(loaded, "notes")
        self._wanted = _Wanted.in_dll(loaded, "wanted")
        self._module = tvm_ffi.load_module(str(library))

    def function(self, symbol: str):
        return getattr(self._module, symbol)

    def parameters(self, symbol: str, kernel: str, sizes: list[int], arguments) -> list[bytes]:
        """The parameters that a call hands to the kernel of a class; `sizes`: the bytes of each. One that is a TMA descriptor
        has `DESCRIPTOR_BYTES`."""
        assert len(sizes) <= _MOST_PARAMETERS and max(sizes) <= DESCRIPTOR_BYTES
        wanted = self._wanted
        wanted.of, wanted.count = kernel.encode(), len(sizes)
        wanted.sizes[: len(sizes)] = sizes
        try:
            self.function(symbol)(*arguments)
        finally:
            wanted.count = 0
        return [wanted.bytes[i].raw[:size] for i, size in enumerate(sizes)]

    @property
    def launches(self) -> int:
        """How many there were."""
        return self._notes.launches

    @property
    def launch(self) -> Launch:
        """The last one."""
        return self.last(1)[0]

    def last(self, count: int) -> list[Launch]:
        """The last launches in order."""
        assert 0 <= count <= min(_KEPT, self.launches)
        return [self._noted(self._notes.last[i % _KEPT]) for i in range(self.launches - count, self.launches)]

    def _noted(self, n: _Note) -> Launch:
        grid, block, cluster = ((d.x, d.y, d.z) for d in (n.grid, n.block, n.cluster))
        return Launch(n.kernel.decode(), grid, block, cluster, n.smem, n.allowed_smem, n.stream or 0, bool(n.pdl))


class _DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _DlManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DlTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_CODES = {"bf16": (4, 16), "fp16": (2, 16), "fp32": (2, 32), "int32": (0, 32), "e4m3": (10, 8)}
_CUDA = 2


def ragged_args(entries: tuple[int, ...], batch: int, lengths: tuple[int, ...] | None = None) -> tuple:
    """`device.sequences.RaggedArgs` with a table somewhere; `lengths`: the fields of `LengthArgs`, for the first kernel of a call."""
    return 0x7F00_1000_0000, batch, entries, lengths


_kept: list = []  # there is no deleter: whoever takes a tensor may hold it to the end of the process


def gpu_tensor(
    shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None, address: int = 0x7F00_0000_0000
):
    """A tvm-ffi tensor that claims to lie on GPU 0."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(_GpuTensor(shape, dtype, strides, address))


class _GpuTensor:
    def __init__(self, shape, dtype, strides, address) -> None:
        if strides is None:
            strides, step = [], 1
            for size in reversed(shape):
                strides.insert(0, step)
                step *= size
        array = ctypes.c_int64 * len(shape)
        self._arrays = array(*shape), array(*strides)
        pointers = (ctypes.cast(a, ctypes.POINTER(ctypes.c_int64)) for a in self._arrays)
        tensor = _DlTensor(address, _CUDA, 0, len(shape), *_CODES[dtype], 1, *pointers, 0)
        self._managed = _DlManagedTensor(tensor, None, None)
        _kept.append(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **_):
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return capsule(ctypes.addressof(self._managed), b"dltensor", None)
