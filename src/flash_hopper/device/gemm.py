"""Issuing wgmma: one GEMM of a tile as one commit group, asynchronous."""

from flash_hopper.device.dsl import cute, warpgroup


def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, starts_at_zero: bool) -> None:
    """acc (+)= a b as one commit group, not waited for.

    a: (MMA, M, K) fragment, registers or shared memory; b: (MMA, N, K). The caller keeps acc, a register operand a and
    the shared memory of both untouched until `warpgroup.wait_group` has covered the group.
    """
    # set() on the caller's object would leak a value out of a run-time loop it was called in
    mma = mma.__new_from_mlir_values__(mma.__extract_mlir_values__())
    warpgroup.fence()
    for k in range(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, k != 0 or not starts_at_zero)
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()
