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
def copy_async_16(dst: Any, src: Any, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """cp.async.cg.shared.global: 16 bytes to shared memory at `dst`, the first `size` of them from global memory at `src`, the others
    zeros. Both 16-byte aligned; nothing is read where the size is 0. Part of the thread's group that is committed next."""
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in (dst.toint(loc=loc, ip=ip), src.toint(loc=loc, ip=ip), Int32(size))],
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        "r,l,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def pack_16bit(lo: Float32, hi: Float32, dtype: DType, *, loc: Any = None, ip: Any = None) -> Int32:
    """cvt.rn.{bf16x2,f16x2}.f32: two floats to one register, `lo` in the low half.

    Volatile: LLVM would otherwise sink the conversion of P below the next QK, and the fp32 scores would stay live beside
    its accumulator (ptxas C7512 and spills; H200 prototype, 2026-11).
    """
    kind = {DType.BF16: "bf16x2", DType.FP16: "f16x2"}[dtype]
    return Int32(_asm(mlir_types.i32(), f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", (hi, lo), True, loc, ip))


@dsl_user_op
def pack_e4m3(a: Float32, b: Float32, c: Float32, d: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """cvt.rn.satfinite.e4m3x2.f32, twice: four floats to one register, `a` in the lowest byte. Volatile, as `pack_16bit`."""
    text = (
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
        "mov.b32 $0, {lo, hi}; }"
    )
    return Int32(_asm(mlir_types.i32(), text, "=r,f,f,f,f", (a, b, c, d), True, loc, ip))


@dsl_user_op
def sign_bit(a: Float32, *, loc: Any = None, ip: Any = None) -> Boolean:
    """True if the sign bit of `a` is set: a negative number, -0 or -inf."""
    return Int32(llvm.bitcast(mlir_types.i32(), Float32(a).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)) < 0


@dsl_user_op
def await_phase(barrier: Any, phase: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """mbarrier.try_wait.parity, again until it succeeds: a phase of an mbarrier in shared memory is over.

    With the one backward branch here ptxas puts what a failed wait does behind the kernel. With the two branches of the DSL's
    own wait it leaves that, in most kernels, in the caller's loop, and moves no instruction across it.
    """
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in (barrier.toint(loc=loc, ip=ip), Int32(phase))],
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1, 10000000; @!p bra WAIT; }",
        "r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


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
def add_products_f32(
    address: Any, column: int, columns: Int32, factor: Float32, values: tuple[Float32, Float32], *, loc: Any = None,
    ip: Any = None,
) -> None:  # fmt: skip
    """ld.global.f32, fma.rn.f32, st.global.f32: m[column] and m[column + 1] += factor * values, if column < columns.

    address: of the float32 m[0], 64 bit, 4-byte aligned; column and columns: multiples of 8. Subnormal numbers count.
    """
    # s0 and s1 are set before the loads because ptxas takes a register that is only loaded on a condition for one whose value
    # comes from outside, alive around every loop. The stores have a condition of their own, which means the same: predicates
    # that live until the loads are back are too few, and made 16 loads wait for memory in two turns.
    places = [f"[$0+{4 * (column + i)}]" for i in range(2)]
    load = "".join(f"mov.f32 s{i}, 0f00000000; @p ld.global.f32 s{i}, {place}; " for i, place in enumerate(places))
    store = "".join(
        f"fma.rn.f32 s{i}, $2, ${3 + i}, s{i}; @q st.global.f32 {place}, s{i}; " for i, place in enumerate(places)
    )
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in (address, Int32(columns), Float32(factor), *map(Float32, values))],
        f"{{ .reg .pred p, q; .reg .f32 s0, s1; setp.gt.s32 p, $1, {column}; setp.gt.s32 q, $1, {column + 4}; {load}{store}}}",
        "l,r,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
