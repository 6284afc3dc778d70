"""Is a provider's result right? Some rows of two heads against float64, element by element, before anything is timed.

Kernels round the probabilities, their gradients and the result to 16 bit. Roundings are independent, so what they cost a
sum is the root of the sum of squares of its terms; the allowance is `SLACK` eps times that, and as much of the value
itself. A bound by absolute values would grow with the length until it allows anything. `providers.py` calls it.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from flash_hopper.testing.bench_suites import BenchShape
from flash_hopper.testing.provider_base import Inputs

CHECKED_ROWS = 8  # rows (or keys) of each checked (batch, head), spread over the sequence
SCORES_AT_ONCE = 1 << 25  # float64 elements: 256 MB
SLACK = 4  # one rounding has a standard deviation of at most 0.29 eps
FLOOR = 1e-5
E4M3_ERROR = 2.0**-4 / 3**0.5  # standard deviation of a rounded weight, at most
DEVIATIONS = 6.0
E4M3_SUMS = 0.005  # part of a sum of amounts


class WrongResult(Exception):
    """A provider whose result is further from float64 than its dtype allows."""


class Checked(NamedTuple):
    """Exact rows of one tensor and head of a sequence, and the allowance of each element."""

    name: str
    sequence: int
    head: int
    rows: list[int]
    want: torch.Tensor
    allowed: torch.Tensor


def check_result(result: object, shape: BenchShape, inputs: Inputs, *, seqlen_dim: int = 1) -> None:
    """Check out, (batch, seqlen, heads, head_dim_v) or packed (rows, heads, head_dim_v), or a tuple that begins with it; raise WrongResult with the worst.

    `seqlen_dim` is 2 for (batch, heads, seqlen, head_dim_v). Its terms are p_ij v_j.
    """
    out = result[0] if isinstance(result, tuple | list) else result
    if isinstance(out, torch.Tensor) and seqlen_dim == 2 and out.dim() == 4:
        out = out.transpose(1, 2)
    out = _tensor("out", out, (*shape.rows("q"), shape.heads, shape.dv))
    for sequence, head in _places(shape, shape.heads):
        _compare(shape, out, _exact_out(shape, inputs, sequence, head))


def check_gradients(result: object, shape: BenchShape, inputs: Inputs) -> None:
    """Check the gradients (dq, dk, dv) of inputs.dout, shaped like q, k, v; raise WrongResult with the worst.

    Terms are p_ij do_i for dv, scale dS_ij k_j for dq and scale dS_ij q_i for dk; as the backward makes dS from the
    rounded out, the error of D_i = do_i o_i adds to the last two.
    """
    if not (isinstance(result, tuple | list) and len(result) == 3):
        raise WrongResult(f"returned {type(result).__name__} instead of three gradients")
    gradients = {
        name: _tensor(name, gradient, tuple(like.shape))
        for name, gradient, like in zip(("dq", "dk", "dv"), result, (inputs.q, inputs.k, inputs.v), strict=True)
    }
    for checked in _exact_gradients(shape, inputs):
        _compare(shape, gradients[checked.name], checked)


def _tensor(name: str, value: object, shape: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise WrongResult(f"returned {type(value).__name__} instead of a tensor as {name}")
    if tuple(value.shape) != shape:
        raise WrongResult(f"returned {name} of shape {tuple(value.shape)} instead of {shape}")
    return value


def _places(shape: BenchShape, heads: int) -> set[tuple[int, int]]:
    """(sequence, head) of what is looked at: the ends, and the longest sequence of a packed batch."""
    ends = {(0, 0), (shape.batch - 1, heads - 1)}
    lengths = [length for length, _ in shape.sequences]
    return ends | {(lengths.index(max(lengths)), heads // 2)} if shape.is_ragged else ends


def _of(shape: BenchShape, tensor: torch.Tensor, sequence: int) -> torch.Tensor:
    """(rows, heads, dim) of one sequence; of a packed batch, which has as many keys as queries, some of the rows."""
    if not shape.is_ragged:
        return tensor[sequence]
    first = sum(length for length, _ in shape.sequences[:sequence])
    return tensor[first : first + shape.sequences[sequence][0]]


def _compare(shape: BenchShape, tensor: torch.Tensor, checked: Checked) -> None:
    got = _of(shape, tensor, checked.sequence)[checked.rows, checked.head].double()
    excess = (got - checked.want).abs() - checked.allowed
    if not bool((excess <= 0).all()):  # also catches NaN
        at = int(torch.nan_to_num(excess, nan=torch.inf).argmax())
        row, column = divmod(at, got.shape[1])
        raise WrongResult(
            f"{checked.name}[{checked.sequence}, {checked.rows[row]}, {checked.head}, {column}] is "
            f"{float(got[row, column]):.6g}, float64 gives {float(checked.want[row, column]):.6g}, "
            f"allowed {float(checked.allowed[row, column]):.2g}"
        )


def _some(length: int) -> list[int]:
    places: list[int] = torch.linspace(0, length - 1, CHECKED_ROWS).round().long().unique().tolist()
    return places


def _probabilities(
    shape: BenchShape, q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, seqlen_q: int
) -> torch.Tensor:
    """softmax of the scores of some rows, (rows, keys); a row that sees no key is 0."""
    scores = q @ k.T * shape.problem.softmax_scale
    diagonal, keys = rows[:, None] + len(k) - seqlen_q, torch.arange(len(k), device=q.device)
    if shape.causal:
        scores = scores.masked_fill(keys > diagonal, -torch.inf)
    if shape.left is not None:
        scores = scores.masked_fill(keys < diagonal - shape.left, -torch.inf)
    return torch.softmax(scores, dim=-1).nan_to_num(0.0)


def _allowed(spread: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The allowance for values whose terms have this root of the sum of squares."""
    return SLACK * torch.finfo(dtype).eps * (spread + want.abs()) + FLOOR


def _allowed_e4m3(spread: torch.Tensor, absolute: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The same for weights that are rounded to e4m3, each by at most 2^-4, and sums that the tensor core keeps to 14 bits."""
    return (
        DEVIATIONS * E4M3_ERROR * spread
        + E4M3_SUMS * absolute
        + torch.finfo(torch.bfloat16).eps / 2 * want.abs()
        + FLOOR
    )


def _spread(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Root of the sum of squares of the terms of left @ right."""
    return (left.square() @ right.square()).sqrt()


def _exact_out(shape: BenchShape, inputs: Inputs, sequence: int, head: int) -> Checked:
    """Rows of out of one head."""
    head_k = head // (shape.heads // shape.heads_k)
    q, k, v = (_of(shape, x, sequence) for x in (inputs.q, inputs.k, inputs.v))
    rows = _some(len(q))
    k, v = k[:, head_k].double(), v[:, head_k].double()
    p = _probabilities(shape, q[rows, head].double(), k, torch.tensor(rows, device=k.device), len(q))
    want = p @ v
    if inputs.rounds_weights:
        allowed = _allowed_e4m3(_spread(p, v), p @ v.abs(), want)
    else:
        allowed = _allowed(_spread(p, v), want, inputs.v.dtype)
    return Checked("out", sequence, head, rows, want, allowed)


@lru_cache(maxsize=1)  # the providers of a shape share it
def _exact_gradients(shape: BenchShape, inputs: Inputs) -> tuple[Checked, ...]:
    """Rows of dq, dk, dv for the first and the last key head and the query heads that share it."""
    with torch.no_grad():
        return tuple(
            checked
            for sequence, head_k in _places(shape, shape.heads_k)
            for checked in _gradients_of_key_head(shape, inputs, sequence, head_k)
        )


def _gradients_of_key_head(shape: BenchShape, inputs: Inputs, sequence: int, head_k: int) -> Iterator[Checked]:
    """dS_ij = p_ij (do_i v_j - D_i); dq_i = scale sum_j dS_ij k_j, dk_j = scale sum_i dS_ij q_i, dv_j = sum_i p_ij do_i."""
    scale, dtype = shape.problem.softmax_scale, inputs.v.dtype
    all_q, k, v, all_dout = (_of(shape, x, sequence) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    k, v = k[:, head_k].double(), v[:, head_k].double()
    rows, keys = _some(len(all_q)), _some(len(k))
    dk, dv = torch.zeros_like(k[keys]), torch.zeros_like(v[keys])
    dk_squares, dv_squares = torch.zeros_like(dk), torch.zeros_like(dv)
    group = shape.heads // shape.heads_k
    for head in range(head_k * group, (head_k + 1) * group):
        for part in torch.arange(len(all_q), device=k.device).split(max(1, SCORES_AT_ONCE // len(k))):
            q, dout = all_q[part, head].double(), all_dout[part, head].double()
            p = _probabilities(shape, q, k, part, len(all_q))
            delta, delta_squares = _delta(p, v, dout)
            p_keys = p[:, keys]
            ds = p_keys * (dout @ v[keys].T - delta)
            dv += p_keys.T @ dout
            dv_squares += p_keys.T.square() @ dout.square()
            dk += scale * ds.T @ q
            dk_squares += scale**2 * (ds.square() + p_keys.square() * delta_squares).T @ q.square()
            here = [row for row in rows if int(part[0]) <= row <= int(part[-1])]
            if here:
                at = torch.tensor(here, device=k.device) - part[0]
                ds = scale * p[at] * (dout[at] @ v.T - delta[at])
                spread = _spread(ds, k) + abs(scale) * delta_squares[at].sqrt() * (p[at] @ k).abs()
                yield Checked("dq", sequence, head, here, ds @ k, _allowed(spread, ds @ k, dtype))
    yield Checked("dk", sequence, head_k, keys, dk, _allowed(dk_squares.sqrt(), dk, dtype))
    yield Checked("dv", sequence, head_k, keys, dv, _allowed(dv_squares.sqrt(), dv, dtype))


def _delta(p: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """D of each row and the sum of squares of what its error is made of, (rows, 1): out is rounded, and so was p."""
    out = p @ v
    squares = dout.square() * (out.square() + p.square() @ v.square())
    return (dout * out).sum(dim=-1, keepdim=True), squares.sum(dim=-1, keepdim=True)
