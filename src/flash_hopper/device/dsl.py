"""Every name of the CuTe DSL that this project uses, imported in one place.

`device` and `kernels` take the DSL from here, so a rename in a new release is one edit, and the list shows how large the
dependency is. Importing this module needs nvidia-cutlass-dsl; nothing on the path of a warm call imports it.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Boolean, Constexpr, Float8E4M3FN, Float16, Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass._mlir.extras import types as mlir_types
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from flash_hopper.problem.dtypes import DType

ELEMENT_TYPES = {DType.BF16: BFloat16, DType.FP16: Float16, DType.E4M3: Float8E4M3FN}

__all__ = [
    "ELEMENT_TYPES",
    "BFloat16",
    "Boolean",
    "Constexpr",
    "Float8E4M3FN",
    "Float16",
    "Float32",
    "Int32",
    "Int64",
    "OperandMajorMode",
    "SmemAllocator",
    "const_expr",
    "cpasync",
    "cuda",
    "cute",
    "cutlass",
    "dsl_user_op",
    "llvm",
    "make_fake_stream",
    "make_fake_tensor",
    "make_trivial_tiled_mma",
    "mlir_types",
    "pipeline",
    "warp",
    "warpgroup",
]
