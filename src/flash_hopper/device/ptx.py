"""Single instructions that the DSL does not offer in the form needed, one function each.

All inline assembly of the project lives here. Functions marked volatile have side effects on purpose: their docstring
says what would move otherwise.
"""

from typing import Any

from flash_hopper.device.dsl import Boolean, DType, Float32, Int32, dsl_user_op, llvm, mlir_types


def _asm(result: Any, text: str, constraints: str, args: tuple, is_volatile: bool, loc: Any, ip: Any) -> Any:
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in args]
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=is_volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def max3_bits(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """VIMNMX3: the largest of three floats compared as signed integers. Right unless the result is negative."""
    text = (
        "{ .reg .s32 x, y, z; mov.b32 x, $1; mov.b32 y, $2; mov.b32 z, $3; "
        "max.s32 x, x, y; max.s32 x, x, z; mov.b32 $0, x; }"
    )
    return Float32(_asm(mlir_types.f32(), text, "=f,f,f,f", (a, b, c), False, loc, ip))


@dsl_user_op
def multiply_rounded(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """mul.rn.f32: a product that the compiler may not contract with a later addition into one FMA."""
    return Float32(_asm(mlir_types.f32(), "mul.rn.f32 $0, $1, $2;", "=f,f,f", (a, b), False, loc, ip))


@dsl_user_op
def pack_16bit(lo: Float32, hi: Float32, dtype: DType, *, loc: Any = None, ip: Any = None) -> Int32:
    """cvt.rn.{bf16x2,f16x2}.f32: two floats to one register, `lo` in the low half.

    Volatile: LLVM would otherwise sink the conversion of P below the next QK, and the fp32 scores would stay live beside
    its accumulator (ptxas C7512 and spills; H200 prototype, 2026-11).
    """
    kind = {DType.BF16: "bf16x2", DType.FP16: "f16x2"}[dtype]
    return Int32(_asm(mlir_types.i32(), f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", (hi, lo), True, loc, ip))


@dsl_user_op
def sign_bit(a: Float32, *, loc: Any = None, ip: Any = None) -> Boolean:
    """True if the sign bit of `a` is set: a negative number, -0 or -inf."""
    return Int32(llvm.bitcast(mlir_types.i32(), Float32(a).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)) < 0


@dsl_user_op
def bulk_reduce_add_f32(dst: Any, src: Any, size_bytes: int, *, loc: Any = None, ip: Any = None) -> None:
    """cp.reduce.async.bulk .add.f32: add shared memory at `src` to global memory at `dst`, element by element.

    Both 16-byte aligned, size a multiple of 16. One lane issues it; the group is that lane's to commit and wait for.
    """
    operands = [dst.toint(loc=loc, ip=ip), src.toint(loc=loc, ip=ip), Int32(size_bytes)]
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in operands],
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;",
        "l,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def reduce_add_f32(
    address: Any, offset_bytes: int, value: Float32, column: int, columns: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """red.global.add.f32: add to the float32 at `address` (64 bit) + offset_bytes, if column < columns; 4-byte aligned.

    Predicated here, because a branch around each would compute its address again.
    """
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in (address, Float32(value), Int32(columns))],
        f"{{ .reg .pred p; setp.gt.s32 p, $2, {column}; @p red.relaxed.gpu.global.add.f32 [$0+{offset_bytes}], $1; }}",
        "l,f,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
