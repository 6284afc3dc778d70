"""The pack: one library with many kernels and a manifest, read with tvm-ffi alone.

A pack is a shared library followed by a JSON manifest and a trailer (manifest length, checksum of all before it, magic),
so that it can be checked before any of its code runs. `pack` writes packs, `store` serves kernels from them. Loading
imports neither the DSL nor torch.
"""

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

from flash_hopper.compile.key import Plan, plan_digest, source_fingerprint
from flash_hopper.compile.load import Kernel, load_function
from flash_hopper.compile.target import (
    GPU_ARCH,
    INSTALL,
    INSTALL_FFI,
    driver_cuda_version,
    ffi_abi,
    flavour_major,
    host,
    require_ffi,
)
from flash_hopper.problem.errors import CacheError
from flash_hopper.version import __version__

MAGIC = b"flash-hopper/1\n\0"
_LENGTH = struct.Struct("<Q")  # of the manifest, in bytes
_TRAILER_BYTES = 32 + len(MAGIC)  # SHA-256 of all before it, magic
_REBUILD = "make it again with: flash-hopper compile --out PACK.so"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What made a pack, and its kernels: digest of the plan -> symbol (the plan's name)."""

    package_version: str
    sources: str
    dsl_version: str
    flavour: str
    ffi_version: str
    target: str
    host: str
    created: str
    kernels: dict[str, str]


class Pack:
    """An open pack. `plan in pack` and `pack.kernel(plan)` serve kernels; the library is loaded at the first one."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def __contains__(self, plan: Plan) -> bool:
        return plan_digest(plan) in self.manifest.kernels

    def __len__(self) -> int:
        return len(self.manifest.kernels)

    @property
    def names(self) -> list[str]:
        """Names of the plans inside, sorted."""
        return sorted(self.manifest.kernels.values())

    def kernel(self, plan: Plan) -> Kernel:
        """The kernel of a plan that is in the pack. Raises CacheError if the library cannot be loaded."""
        return load_function(self.path, self.manifest.kernels[plan_digest(plan)])


def append_manifest(library: Path, manifest: Manifest) -> None:
    """Turn a linked library into a pack."""
    text = json.dumps(asdict(manifest)).encode()
    body = text + _LENGTH.pack(len(text))
    digest = hashlib.sha256(library.read_bytes() + body).digest()
    with library.open("ab") as file:
        file.write(body + digest + MAGIC)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a pack whose bytes are intact. Raises CacheError."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise CacheError(f"pack {path} cannot be read: {error}") from error
    if len(content) < _LENGTH.size + _TRAILER_BYTES or content[-len(MAGIC) :] != MAGIC:
        raise CacheError(f"{path} is no pack of this version, or was cut short; {_REBUILD}")
    body, digest = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES : -len(MAGIC)]
    if hashlib.sha256(body).digest() != digest:
        raise CacheError(f"pack {path} is damaged: its checksum does not match; copy it again or {_REBUILD}")
    end = len(body) - _LENGTH.size
    (size,) = _LENGTH.unpack(body[end:])
    return Manifest(**json.loads(bytes(body[end - size : end])))


def open_pack(path: Path) -> Pack:
    """Open a pack after checking that it fits this package, processor, tvm-ffi and driver. Raises CacheError."""
    manifest = read_manifest(path)
    _check_fit(path, manifest)
    return Pack(path, manifest)


def _check_fit(path: Path, manifest: Manifest) -> None:
    if manifest.sources != source_fingerprint():
        raise CacheError(
            f"pack {path} was made by flash-hopper {manifest.package_version} from kernel sources {manifest.sources[:8]}, this "
            f"is {__version__} with sources {source_fingerprint()[:8]}; {_REBUILD}, or install the version that made it"
        )
    if (manifest.target, manifest.host) != (GPU_ARCH, host()):
        raise CacheError(
            f"pack {path} is for {manifest.target} GPUs and {manifest.host} processors, not for {GPU_ARCH} and {host()}; "
            f"{_REBUILD} on a machine of this kind"
        )
    installed = require_ffi()
    if ffi_abi(manifest.ffi_version) != ffi_abi(installed):
        raise CacheError(
            f"pack {path} was made for tvm-ffi {manifest.ffi_version}, installed is {installed}; {INSTALL_FFI} or {_REBUILD}"
        )
    driver = driver_cuda_version()
    if driver is not None and driver[0] < flavour_major(manifest.flavour):
        raise CacheError(
            f"pack {path} needs a driver for CUDA {flavour_major(manifest.flavour)}, this one serves {driver[0]}.{driver[1]}; "
            f"update the driver, or make the pack with the cu{driver[0]} flavour: {INSTALL.get(f'cu{driver[0]}', INSTALL['cu12'])}"
        )
