"""Operands and accumulators of a warpgroup that owns 64 keys, and the four GEMMs of the key-parallel backward."""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import ELEMENT_TYPES, Float32, Int32, cute, warp
from flash_hopper.device.gemm import issue
from flash_hopper.device.layouts import acc_as_operand_a, transposed
from flash_hopper.kernels.backward_dkdv.args import DkdvAtoms, SharedTensors
from flash_hopper.kernels.backward_dkdv.storage import DS_STAGES, WG_KEYS
from flash_hopper.plan.backward import BackwardDkdvPlan


class ScoreSide(NamedTuple):
    """From Q and K to P^T, and P^T dO to dV."""

    tSrK: cute.Tensor  # (MMA, M, K) in shared memory
    tSrQ: cute.Tensor  # (MMA, N, K, stage) in shared memory
    tVrP: cute.Tensor  # (MMA, M, K) in registers, 16 bit
    tVrdO: cute.Tensor  # (MMA, N, K, stage) in shared memory, transposed
    acc_S: cute.Tensor  # 64 keys x tile_m, float32
    lse: cute.Tensor  # (tile_m / 4,) of the next block, in registers, if plan.reads_ahead
    acc_dV: cute.Tensor  # 64 keys x tile_hdimv, float32


class GradSide(NamedTuple):
    """From dO and V to dS^T, and dS^T Q to dK."""

    tPrV: cute.Tensor  # (MMA, M, K) in shared memory, or in registers
    tPrdO: cute.Tensor  # (MMA, N, K, stage) in shared memory
    tKrdS: cute.Tensor  # (MMA, M, K) in registers, 16 bit
    tKrQ: cute.Tensor  # (MMA, N, K, stage) in shared memory, transposed
    acc_dP: cute.Tensor  # 64 keys x tile_m, float32
    acc_dK: cute.Tensor  # 64 keys x tile_hdim, float32


class DqSide(NamedTuple):
    """From dS and K to one warpgroup's 64 x 64 piece of dQ."""

    tQrdS: cute.Tensor  # (MMA, M, K, stage) in shared memory, transposed
    tQrKt: cute.Tensor  # (MMA, N, K) in shared memory, transposed
    acc_dQ: cute.Tensor  # 64 x 64, float32


def dq_side(plan: BackwardDkdvPlan, atoms: DkdvAtoms, shared: SharedTensors, wg: Int32) -> DqSide:
    """Fragments for dQ. With 128 query rows a block warpgroup `wg` takes rows 64 wg .., with 64 rows columns 64 wg .. ."""
    dq = atoms.mma_dq.get_slice(0)
    splits_rows = plan.tile_m > 64
    ds = cute.local_tile(transposed(shared.sdS), (64, plan.tile_n, DS_STAGES), (wg if splits_rows else 0, 0, 0))
    keys = cute.group_modes(cute.make_tensor(shared.sK.iterator, cute.select(shared.sK.layout, mode=[0, 2, 1])), 0, 2)
    kt = cute.local_tile(transposed(keys), (64, plan.tile_n), (0 if splits_rows else wg, 0))
    return DqSide(
        tQrdS=atoms.mma_dq.make_fragment_A(dq.partition_A(ds)),
        tQrKt=atoms.mma_dq.make_fragment_B(dq.partition_B(kt)),
        acc_dQ=cute.make_rmem_tensor(atoms.mma_dq.partition_shape_C((64, 64)), Float32),
    )


def _accumulator(mma: cute.TiledMma, cols: int) -> cute.Tensor:
    return cute.make_rmem_tensor(mma.partition_shape_C((WG_KEYS, cols)), Float32)


def score_side(plan: BackwardDkdvPlan, atoms: DkdvAtoms, shared: SharedTensors, band: Int32) -> ScoreSide:
    """Fragments for S^T, P^T and dV of one band of keys."""
    s, dv = atoms.mma_s.get_slice(0), atoms.mma_dv.get_slice(0)
    acc_S = _accumulator(atoms.mma_s, plan.tile_m)
    lse = cute.make_rmem_tensor(plan.tile_m // 4, Float32)
    lse.fill(0.0)
    return ScoreSide(
        tSrK=atoms.mma_s.make_fragment_A(s.partition_A(shared.sK))[None, None, None, band],
        tSrQ=atoms.mma_s.make_fragment_B(s.partition_B(shared.sQ)),
        tVrP=cute.make_rmem_tensor(acc_as_operand_a(acc_S.layout), ELEMENT_TYPES[plan.dtype]),
        tVrdO=atoms.mma_dv.make_fragment_B(dv.partition_B(transposed(shared.sdO))),
        acc_S=acc_S,
        lse=lse,
        acc_dV=_accumulator(atoms.mma_dv, plan.tile_hdimv),
    )


def grad_side(plan: BackwardDkdvPlan, atoms: DkdvAtoms, shared: SharedTensors, band: Int32) -> GradSide:
    """Fragments for dP^T, dS^T and dK of one band of keys."""
    dp, dk = atoms.mma_dp.get_slice(0), atoms.mma_dk.get_slice(0)
    acc_dP = _accumulator(atoms.mma_dp, plan.tile_m)
    if plan.v_in_registers:
        shape = atoms.mma_dp.partition_shape_A((WG_KEYS, plan.tile_hdimv))
        values = cute.make_rmem_tensor(shape, ELEMENT_TYPES[plan.dtype])
    else:
        values = atoms.mma_dp.make_fragment_A(dp.partition_A(shared.sV))[None, None, None, band]
    return GradSide(
        tPrV=values,
        tPrdO=atoms.mma_dp.make_fragment_B(dp.partition_B(shared.sdO)),
        tKrdS=cute.make_rmem_tensor(acc_as_operand_a(acc_dP.layout), ELEMENT_TYPES[plan.dtype]),
        tKrQ=atoms.mma_dk.make_fragment_B(dk.partition_B(transposed(shared.sQ))),
        acc_dP=acc_dP,
        acc_dK=_accumulator(atoms.mma_dk, plan.tile_hdim),
    )


def load_values(
    plan: BackwardDkdvPlan, atoms: DkdvAtoms, shared: SharedTensors, side: GradSide, band: Int32, thread: Int32
) -> None:
    """V of a band of keys, which is there, to registers, if that is where dP's product takes it from."""
    if plan.v_in_registers:
        load_matrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), ELEMENT_TYPES[plan.dtype])
        s2r = cute.make_tiled_copy_A(load_matrix, atoms.mma_dp).get_slice(thread)
        cute.copy(s2r, s2r.partition_S(shared.sV[None, None, band]), s2r.retile(side.tPrV))


def issue_s(atoms: DkdvAtoms, side: ScoreSide, stage: Int32) -> None:
    """S^T = K Q^T of the Q in `stage`."""
    issue(atoms.mma_s, side.acc_S, side.tSrK, side.tSrQ[None, None, None, stage], True)


def issue_dv(atoms: DkdvAtoms, side: ScoreSide, do_state: Any) -> None:
    """dV += P^T dO."""
    issue(atoms.mma_dv, side.acc_dV, side.tVrP, side.tVrdO[None, None, None, do_state.index], False)


def issue_dp(atoms: DkdvAtoms, side: GradSide, do_state: Any) -> None:
    """dP^T = V dO^T."""
    issue(atoms.mma_dp, side.acc_dP, side.tPrV, side.tPrdO[None, None, None, do_state.index], True)


def issue_dk(atoms: DkdvAtoms, side: GradSide, q_state: Any) -> None:
    """dK += dS^T Q."""
    issue(atoms.mma_dk, side.acc_dK, side.tKrdS, side.tKrQ[None, None, None, q_state.index], False)
