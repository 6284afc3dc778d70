"""FlashAttention-3 for Hopper GPUs, in Python.

    out = flash_hopper.flash_attn_func(q, k, v, causal=True)

Importing needs no GPU, no CUDA and no compiler. `api.py` and `fp8.py` document every function, `problem/errors.py` every error.
"""

from flash_hopper.api import (
    flash_attn_backward_func,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from flash_hopper.compile.pack import load_pack
from flash_hopper.fp8 import (
    flash_attn_fp8_func,
    flash_attn_varlen_fp8_func,
    hadamard_signs,
    hadamard_transform,
    quantize_fp8,
)
from flash_hopper.problem.errors import (
    ArgumentError,
    CacheError,
    CompileError,
    DeviceError,
    DTypeError,
    FlashHopperError,
    MissingDependencyError,
    UnsupportedError,
)
from flash_hopper.problem.fp8 import Fp8Values
from flash_hopper.version import __version__

__all__ = [
    "ArgumentError",
    "CacheError",
    "CompileError",
    "DTypeError",
    "DeviceError",
    "FlashHopperError",
    "Fp8Values",
    "MissingDependencyError",
    "UnsupportedError",
    "__version__",
    "flash_attn_backward_func",
    "flash_attn_combine",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_fp8_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "hadamard_signs",
    "hadamard_transform",
    "load_pack",
    "quantize_fp8",
]
