"""Tensors for a case: values, strides, and NaN in every byte that nobody may touch.

Each operand is a view into a flat buffer that was filled with one NaN pattern first: in front of the view, behind
it and in the gaps between its rows. A kernel that reads beyond a view meets NaN; one that writes beyond `out`
leaves a trace, which `Inputs.out_is_contained` finds. Rows that no sequence of a ragged batch uses hold NaN as well, and
around the tensors of lengths lie wild numbers. Values are drawn on the CPU from the case's seed, so that a case holds the
same bits on every device. `testing.run` is the caller.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.fp8 import FP8_BLOCK, Fp8Values
from flash_hopper.testing import fp8_inputs
from flash_hopper.testing.cases import FP8_VALUES, Case
from flash_hopper.testing.lengths import Side

TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
    DType.FP64: torch.float64,
    DType.E4M3: torch.float8_e4m3fn,
}

GUARD = 64  # elements of NaN in front of and behind every buffer; keeps a view 128-byte aligned
# integer type of the same size, and a quiet NaN with a payload that no arithmetic produces
_NAN_BITS = {
    torch.bfloat16: (torch.int16, 0x7FE5),
    torch.float16: (torch.int16, 0x7FE5),
    torch.float32: (torch.int32, 0x7FE5E5E5),
    torch.float64: (torch.int64, 0x7FFDE5E5E5E5E5E5),
    torch.float8_e4m3fn: (torch.int8, 0x7F),
    torch.int32: (torch.int32, 0x7FE5E5E5),  # no NaN, but no length either
}
# dimensions of stride 0, by layout
_EXPANDED = {
    "expand_batch": (0,),
    "expand_rows": (1,),
    "expand_heads": (2,),
    "expand_dim": (3,),
    "expand_all": (0, 1, 2, 3),
}
# dout and dlse must not repeat what was drawn for q, k, v; torch's generator on the CPU takes 32 bits of a seed
_GRADIENT_SEED, _SEEDS = 0x9E3779B1, 1 << 32
# strides for dimensions of size 1: no offset is ever computed from them
_ODD_STRIDES = (2**33 + 1, 7, 3)


@dataclass
class Inputs:
    """Operands of a case on a device; `buffers` holds each view's memory.

    `out` is None if the case gives none, `dout` and `dlse` where nothing is passed back. `lengths` holds the tensors of
    a ragged call by the names of its arguments, `descales` those of an e4m3 call. `values` is given in place of v, if it is there.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    buffers: dict[str, Tensor]
    dout: Tensor | None = None
    dlse: Tensor | None = None
    lengths: dict[str, Tensor] = field(default_factory=dict)
    descales: dict[str, Tensor] = field(default_factory=dict)
    values: Fp8Values | None = None

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the memory of all inputs: q, k, v, dout, dlse and lengths."""
        return {name: _bits(flat).clone() for name, flat in self.buffers.items() if name != "o"}

    def changed(self, snapshot: dict[str, Tensor]) -> str | None:
        """Which input differs from the snapshot in any bit, inside its view or around it."""
        return next((n for n, bits in snapshot.items() if not torch.equal(bits, _bits(self.buffers[n]))), None)

    def refill_out(self) -> None:
        """NaN again in all of out's memory."""
        fill_nan(self.buffers["o"])

    def out_is_contained(self) -> bool:
        """True if nothing around the view of out was written. `out` holds NaN afterwards: read it first."""
        assert self.out is not None
        fill_nan(self.out)
        flat = self.buffers["o"]
        return bool((_bits(flat) == _NAN_BITS[flat.dtype][1]).all())


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """q, k, v (and out, dout and dlse, if the case has them) with the strides and values of the case."""
    dtype = TORCH_DTYPES[case.dtype]
    buffers: dict[str, Tensor] = {}
    views: dict[str, Tensor] = {}

    def view(name: str, shape: tuple[int, ...], place: _Place, dtype: torch.dtype) -> Tensor:
        buffers[name] = nan_buffer(place.elements, dtype, device)
        return buffers[name].as_strided(shape, place.strides, GUARD + place.offset)

    if case.layout == "packed":
        views.update(_packed_views(case, dtype, device, buffers))
    for operand in "qkvo" if case.give_out else "qkv":
        if operand not in views:
            of_operand = TORCH_DTYPES[case.out_dtype] if case.is_fp8 and operand == "o" else dtype
            views[operand] = view(operand, case.grid(operand), _place(case, operand), of_operand)
    used = {name: used_rows(case.side(name)) if case.is_ragged else None for name in ("q", "k")}
    drawn = dict(zip("qkv", draw(case), strict=True))
    descales: dict[str, Tensor] = {}
    values = None
    if case.is_fp8:
        for operand, x in drawn.items():
            at = _positions(case, "q" if operand == "q" else "k")
            rows = fp8_inputs.rows_of(case, operand, at.sequence, at.place, at.length > 0)
            drawn[operand], descale = fp8_inputs.coded(case, operand, x, rows)
            if descale is not None:
                name, shape = f"{operand}_descale", tuple(descale.shape)
                descales[name] = view(name, shape, _slice_of(shape), torch.float32).copy_(descale)
            if operand == "v" and case.v_form == "transposed":
                shape = fp8_inputs.transposed_shape(case)
                codes = view("values", shape, _slice_of(shape), dtype)
                values = Fp8Values(codes.copy_(fp8_inputs.transposed(case, drawn["v"], rows)), case.grid("v")[1])
    for operand, x in drawn.items():
        _write(views[operand], x, used["q" if operand == "q" else "k"])
    q, k, v, out = (_as_given(case, operand, views.get(operand)) for operand in "qkvo")
    assert q is not None and k is not None and v is not None, "inputs are always made"
    inputs = Inputs(q, k, v, out, buffers, descales=descales, values=values)
    for name, lengths in case.length_tensors().items():
        inputs.lengths[name] = view(name, (len(lengths),), _slice_of((len(lengths),)), torch.int32)
        inputs.lengths[name].copy_(torch.tensor(lengths, dtype=torch.int32))
    if case.is_backward:
        dout, dlse = draw_gradients(case)
        if case.dout != "none":
            whole = view("dout", case.grid("o"), _dout_place(case.grid("o"), case.dout), dtype)
            _write(whole, dout, used["q"])
            inputs.dout = _as_given(case, "o", whole)
        if case.dlse != "none":
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            whole = view("dlse", tuple(dlse.shape), _dlse_place(tuple(dlse.shape), case.dlse), wide)
            _write(whole.transpose(1, 2), dlse.transpose(1, 2), used["q"])
            inputs.dlse = whole[0] if len(case.lse_shape) == 2 else whole
    return inputs


def _as_given(case: Case, operand: str, view: Tensor | None) -> Tensor | None:
    """A view of the sizes of `Case.grid` as the call takes it: a packed one has no batch."""
    return view[0] if view is not None and len(case.shape(operand)) == 3 else view


def used_rows(side: Side) -> tuple[Tensor, Tensor]:
    """Indices (batch entry, row) of all rows that sequences use, one after another, in a tensor of `Case.grid`'s sizes."""
    lengths = torch.tensor(side.lengths, dtype=torch.int64)
    starts = torch.tensor(side.starts, dtype=torch.int64).view(-1, 2)
    entry, first = (x.repeat_interleave(lengths) for x in starts.unbind(1))
    return entry, first + _places(side)


def _places(side: Side) -> Tensor:
    """The place within its sequence of each row that `used_rows` lists."""
    lengths = torch.tensor(side.lengths, dtype=torch.int64)
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1]) if len(ends) else 0) - (ends - lengths).repeat_interleave(lengths)


def nan_buffer(elements: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A flat buffer of NaN with `GUARD` more elements on both sides."""
    flat = torch.empty(elements + 2 * GUARD, dtype=dtype, device=device)
    fill_nan(flat)
    return flat


def fill_nan(x: Tensor) -> None:
    """The NaN pattern in every element of a tensor of any strides."""
    _bits(x).fill_(_NAN_BITS[x.dtype][1])


def _bits(x: Tensor) -> Tensor:
    return x.view(_NAN_BITS[x.dtype][0])


class _Place(NamedTuple):
    """Where a view lies behind the guard: strides and offset, in a buffer of so many elements."""

    strides: tuple[int, ...]
    offset: int
    elements: int


def _place(case: Case, operand: str) -> _Place:
    shape = case.grid(operand)
    layout = case.layout if operand in case.strided else "bshd"
    if layout in _EXPANDED:
        return _expanded(shape, *_EXPANDED[layout]) if operand != "o" else _slice_of(shape)
    place = _strided_place(shape, layout)
    if layout == "size1":
        odd = (*_ODD_STRIDES, 1)
        return place._replace(
            strides=tuple(o if n == 1 else s for n, s, o in zip(shape, place.strides, odd, strict=True))
        )
    return place


def _strided_place(shape: tuple[int, int, int, int], layout: str) -> _Place:
    """Layouts in which every element has its own address; compact for words that mean nothing here."""
    batch, seqlen, heads, dim = shape
    if layout == "bhsd":
        return _slice_of(shape, (0, 2, 1, 3))
    if layout == "sbhd":
        return _slice_of(shape, (1, 0, 2, 3))
    if layout == "headslice":
        return _slice_of((batch, seqlen, heads + 3, dim), offset=2 * dim)
    if layout == "dimslice":
        return _slice_of((batch, seqlen, heads, dim + 24), offset=8)
    if layout == "misstride":
        return _slice_of((batch, seqlen, heads, dim + 1))
    if layout in ("offset", "misaligned"):
        return _slice_of(shape, offset=8 if layout == "offset" else 1)
    return _slice_of(shape)


def _dout_place(shape: tuple[int, int, int, int], layout: str) -> _Place:
    batch, seqlen, heads, dim = shape
    if layout == "dimfirst":
        return _slice_of(shape, (0, 3, 1, 2))
    if layout == "step":
        place = _slice_of((batch, seqlen, heads, 2 * dim))
        return place._replace(strides=(*place.strides[:3], 2))
    if layout in _EXPANDED:
        return _expanded(shape, *_EXPANDED[layout])
    return _strided_place(shape, layout)


def _dlse_place(shape: tuple[int, ...], layout: str) -> _Place:
    if layout == "bsh":
        return _slice_of(shape, (0, 2, 1))
    return _expanded(shape, 0, 1, 2) if layout == "expand_all" else _slice_of(shape)


def _expanded(shape: tuple[int, ...], *dims: int) -> _Place:
    """Compact but for a stride of 0 in `dims`."""
    place = _slice_of(tuple(min(1, n) if i in dims else n for i, n in enumerate(shape)))
    return place._replace(strides=tuple(0 if i in dims else s for i, s in enumerate(place.strides)))


def _slice_of(sizes: tuple[int, ...], order: tuple[int, ...] | None = None, offset: int = 0) -> _Place:
    """Strides of a compact tensor of `sizes` whose dimensions lie in memory in `order`, the last one fastest."""
    strides, step = [0] * len(sizes), 1
    for dim in reversed(order or range(len(sizes))):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return _Place(tuple(strides), offset, step + offset)


def _packed_views(
    case: Case, dtype: torch.dtype, device: torch.device | str, buffers: dict[str, Tensor]
) -> Iterable[tuple[str, Tensor]]:
    """Slices of one buffer, which is put under "packed" into `buffers`."""
    operands = case.strided.replace("o", "")
    along = 2 if case.d == case.dv else 3
    sizes = [case.grid(operand)[along] for operand in operands]
    whole = list(case.grid("k"))
    whole[along] = sum(sizes)
    place = _slice_of(tuple(whole))
    buffers["packed"] = nan_buffer(place.elements, dtype, device)
    views = torch.split(buffers["packed"].as_strided(whole, place.strides, GUARD), sizes, dim=along)
    return zip(operands, views, strict=True)


def _write(view: Tensor, values: Tensor, used: tuple[Tensor, Tensor] | None) -> None:
    """Store values (batch, rows, ...), only those of used rows if any are not; a dimension of stride 0 takes its first."""
    is_shared = any(view.shape[dim] > 1 and view.stride(dim) == 0 for dim in (0, 1))
    for dim in range(view.dim()):
        if view.stride(dim) == 0 and view.shape[dim] > 1:
            view, values = view.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    if used is None or is_shared:
        view.copy_(values)
        return
    entry, row = used
    view[entry.to(view.device), row.to(view.device)] = values[entry, row].to(view.device, view.dtype)


def draw(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Values of q, k and v as float32 on the CPU, of the sizes of `Case.grid`, before they are rounded to the dtype."""
    generator = Generator().manual_seed(case.seed)
    q, k, v = (torch.randn(case.grid(operand), generator=generator) for operand in "qkv")
    if case.values == "small":
        return q * 1e-3, k * 1e-3, v * 1e-3
    if case.values == "large":
        return q * 1e3, k, v * 1e3
    if case.values == "outlier":
        for x in (q, k, v):
            x[..., 3::16] *= 20
        return q, k, v
    if case.values == "mixed":
        of_rows, of_keys = (10.0 ** (_positions(case, side).sequence % 5 - 2)[..., None, None] for side in ("q", "k"))
        return q * of_rows.sqrt(), k * of_keys.sqrt(), v * of_keys
    if case.values == "samesign":
        return q, k, v.abs() + 0.5
    if case.values in FP8_VALUES:
        return _fp8_values(case, q, k, v, generator)
    if case.values == "onehot":
        return *_one_hot(case, k, generator), v
    if case.values not in ("normal", "gated"):
        return *_directed(case, q, k, generator), v
    return q, k, v


def _fp8_values(case: Case, q: Tensor, k: Tensor, v: Tensor, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The words of `FP8_VALUES`."""
    if case.values == "saturated":
        return q.sign(), k.sign(), v.sign()
    if case.values == "tiny":
        return q * 1e-15, k * 1e15, v * 1e-15
    if case.values == "blocks":
        block = _positions(case, "k").place[..., None, None] // FP8_BLOCK
        return q, k * 4.0 ** (block % 3 - 1), v * 10.0 ** (3 * (block % 5 - 2))
    if case.values == "zeros":
        for x, step in ((q, 3), (k, 7), (v, 7)):
            x[:, 1::step] = 0.0
            x[:, :, 1:2] = 0.0 if x is not v else x[:, :, 1:2]
        return q, k, v
    at = _positions(case, "k")
    slope = at.place / at.length.clamp_min(2) * 12  # nats, over all keys
    row = torch.randn(case.grid("q")[:3], generator=generator).sign()
    return *_along(case, q, k, row, slope[..., None].expand(case.grid("k")[:3]).clone(), generator), v


def draw_gradients(case: Case) -> tuple[Tensor, Tensor]:
    """Values of dout, of the sizes of `Case.grid`, and dlse (batch, heads, rows) as float32 on the CPU, not rounded."""
    generator = Generator().manual_seed((case.seed + 1) * _GRADIENT_SEED % _SEEDS)
    batch, rows, heads, _ = case.grid("o")
    dout = torch.randn(case.grid("o"), generator=generator)
    dlse = 4 * torch.randn(batch, heads, rows, generator=generator)
    if case.values == "large":
        dout = dout * 1e-3  # the gradients of k stay within float16
    if case.values == "outlier":
        dout[..., 3::16] *= 20
    if case.values == "samesign":
        dout = dout.abs() + 0.5
    if case.values == "mixed":
        factor = 10.0 ** ((_positions(case, "q").sequence + 2) % 5 - 2)  # another order than that of v
        dout = dout * factor[..., None, None]
    if case.values == "gated":
        gate = 10 ** (-4 * torch.rand(dout.shape[:3], generator=generator))
        dout = dout * (gate * (torch.rand(gate.shape, generator=generator) > 0.2))[..., None]
    return dout, dlse


class _Positions(NamedTuple):
    """For each row of a tensor of `Case.grid`'s sizes, (batch, rows): its sequence, its place there, and its length.

    A row that no sequence uses has length 0.
    """

    sequence: Tensor
    place: Tensor
    length: Tensor


def _positions(case: Case, name: str) -> _Positions:
    side = case.side(name)
    batch, rows = case.grid(name)[:2]
    lengths = torch.tensor(side.lengths, dtype=torch.int64)
    found = _Positions(*(torch.zeros(batch, rows, dtype=torch.int64) for _ in range(3)))
    at = used_rows(side)
    found.sequence[at] = torch.arange(len(lengths)).repeat_interleave(lengths)
    found.place[at], found.length[at] = _places(side), lengths.repeat_interleave(lengths)
    return found


def _magnitude(case: Case) -> float:
    """The factor between q k^T and the logits; 1 if the scale is zero, and no less than fp16 values can make up for."""
    scale = abs(case.problem().softmax_scale)
    return max(scale, 1e-3) if scale else 1.0


def _one_hot(case: Case, k: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Keys of signs; every query is a multiple of one of its key head's keys, with 40 as the logit of this pair."""
    k = k.sign()
    batch, rows, heads, d = case.grid("q")
    if k.numel() == 0 or heads == 0:
        return torch.zeros(case.grid("q")), k
    chosen = _chosen_keys(case, torch.rand(batch, rows, heads, generator=generator))
    of_head = k.repeat_interleave(heads // case.heads_k, dim=2).flatten(0, 1)
    q = of_head.gather(0, chosen.flatten(0, 1)[..., None].expand(-1, -1, d)).view(batch, rows, heads, d)
    return q * _towards(case) * (40 / (_magnitude(case) * case.d)), k


def _chosen_keys(case: Case, share: Tensor) -> Tensor:
    """For share (batch, rows, heads) of 0 to 1 a key of the row's sequence: its index in k with the batch flattened."""
    keys, sequence = case.side("k"), _positions(case, "q").sequence
    lengths = torch.tensor(keys.lengths or (0,), dtype=torch.int64)
    starts = torch.tensor([entry * keys.rows + row for entry, row in keys.starts] or [0], dtype=torch.int64)
    place = (share * lengths[sequence][..., None]).long()
    return (starts[sequence][..., None] + place).clamp_max(case.grid("k")[0] * case.grid("k")[1] - 1)


def _towards(case: Case) -> float:
    """-1 where a negative scale would turn the meant logits around."""
    return -1.0 if case.scale is not None and case.scale < 0 else 1.0


def _directed(case: Case, q: Tensor, k: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Noise plus a direction a head: the logit of a pair is about (row factor) x (key factor) x 1 nat."""
    return _along(case, q, k, *_factors(case, generator), generator)


def _along(case: Case, q: Tensor, k: Tensor, row: Tensor, key: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """The same for given factors, row (batch, rows, heads) and key (batch, keys, heads_k)."""
    direction = torch.randn(max(case.heads_k, 1), case.d, generator=generator).sign() / case.d**0.5
    # the same length for q and k along the direction
    length = (float(key.abs().max()) / _magnitude(case)) ** 0.5 if key.numel() else 1.0
    key = key / (_magnitude(case) * length)
    group = case.heads // case.heads_k if case.heads_k else 1
    along_q, along_k = direction[: case.heads_k].repeat_interleave(group, dim=0), direction[: case.heads_k]
    # logits of the noise alone stay below about 1
    noise = 0.5 * min(1.0, (_magnitude(case) * case.d**0.5) ** -0.5)
    return (
        q * noise + (row * length * _towards(case))[..., None] * along_q,
        k * noise + key[..., None] * along_k,
    )


def _factors(case: Case, generator: Generator) -> tuple[Tensor, Tensor]:
    """Row factors (batch, rows, heads) and key factors (batch, keys, heads_k); products are logits."""
    row = torch.ones(case.grid("q")[:3])
    key = torch.ones(case.grid("k")[:3])
    if case.values == "negative":
        return row, key * -200
    if case.values == "extreme":
        sides = torch.randn(key.shape, generator=generator).sign()
        sides[:, :, 1::2] = 1.0
        return torch.randn(row.shape, generator=generator).sign(), 120 * sides
    # a slope over each sequence: up to 400 nats over all keys, at most a quarter nat a key
    at = _positions(case, "k")
    height = (0.25 * at.length).clamp_max(400.0)
    slope = torch.where(at.length > 1, height * (at.place / (at.length - 1).clamp_min(1) - 0.5), 1.0)
    key = key * slope[..., None]
    if case.values == "slopes":
        return torch.rand(row.shape, generator=generator) * 2 - 1, key
    return row, -key if case.values == "falling" else key
