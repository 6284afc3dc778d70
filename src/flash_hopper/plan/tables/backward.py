"""Backward tiles by head dim. A row is the first that covers both padded head dims."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DqTile:
    """Query-parallel kernel: m query rows (64 per consumer warpgroup), n keys a step, stages of K and of V."""

    m: int
    n: int
    k_stages: int
    v_stages: int
    has_pingpong: bool = True


@dataclass(frozen=True, slots=True)
class DkdvTile:
    """Key-parallel kernel: m query rows a step, n keys, stages of Q and of dO.

    causal_v_in_registers: in causal attention to a dense batch with a key head for each query head dP's product takes V from
    there. Other masks and batches need the registers (8 to 152 bytes a thread were spilled), and full attention is faster without.
    """

    m: int
    n: int
    q_stages: int
    do_stages: int
    splits_roles: bool = False
    is_deferred: bool = False
    causal_v_in_registers: bool = False


# (head dim up to, head dim of v up to, tile for full attention, for masks); H200, 2026-11, docs/findings/backward.md
DQ_ROWS = (
    (64, 64, DqTile(192, 64, 3, 2), DqTile(192, 80, 3, 3)),
    (128, 128, DqTile(128, 128, 2, 2), DqTile(128, 128, 2, 2)),
    (192, 192, DqTile(128, 80, 2, 2, has_pingpong=False), DqTile(128, 80, 2, 2, has_pingpong=False)),
    (256, 256, DqTile(128, 64, 2, 1, has_pingpong=False), DqTile(128, 64, 2, 1, has_pingpong=False)),
)
DKDV_ROWS = (
    (64, 64, DkdvTile(96, 128, 3, 3, is_deferred=True)),
    (128, 128, DkdvTile(64, 128, 3, 3)),
    (192, 192, DkdvTile(64, 64, 3, 3, splits_roles=True)),
    (256, 256, DkdvTile(64, 64, 2, 2, splits_roles=True)),
)


def choose_dq_tile(hdim: int, hdimv: int, is_full: bool) -> DqTile:
    """The query-parallel kernel's tile for padded head dims."""
    full, masked = next((full, masked) for d, dv, full, masked in DQ_ROWS if hdim <= d and hdimv <= dv)
    return full if is_full else masked


def choose_dkdv_tile(hdim: int, hdimv: int) -> DkdvTile:
    """The key-parallel kernel's tile for padded head dims."""
    return next(tile for d, dv, tile in DKDV_ROWS if hdim <= d and hdimv <= dv)


# Key-parallel kernel that also adds up dQ; head dims beyond the last row use the two-kernel route.
FUSED_ROWS = (
    (64, 64, DkdvTile(128, 128, 3, 2, causal_v_in_registers=True)),
    (128, 128, DkdvTile(64, 128, 3, 2)),
)


def choose_fused_tile(hdim: int, hdimv: int) -> DkdvTile | None:
    """The tile of the key-parallel kernel with dQ, or None where dK, dV and dQ do not fit together."""
    return next((tile for d, dv, tile in FUSED_ROWS if hdim <= d and hdimv <= dv), None)
