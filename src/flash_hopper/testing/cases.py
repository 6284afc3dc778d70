"""A test case: one attention call, forward or with its backward, as data, with a text form that replays it.

`str(case)` gives the argument of `flash-hopper verify --case`; `Case.parse` reads it back. What the words for
layouts and values mean is carried out by `testing.inputs`; `testing.suites` builds the grids; `tests/` and
`cli/verify.py` use both.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any

from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem, varlen_problem
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.mask import Mask
from flash_hopper.problem.tensor import TensorSpec
from flash_hopper.testing.lengths import Side, lengths_of, packed_side

Dims = tuple[int, int]

LAYOUTS = {
    "bshd": "contiguous (batch, seqlen, heads, dim)",
    "bhsd": "transposed view of (batch, heads, seqlen, dim)",
    "sbhd": "transposed view of (seqlen, batch, heads, dim)",
    "packed": "slices of one buffer: q, k, v along heads; k, v of different dims along the last dimension",
    "headslice": "some of the heads of a larger tensor",
    "dimslice": "part of a larger head dim, 8 elements in",
    "expand_batch": "stride 0 over the batch (inputs only)",
    "expand_heads": "stride 0 over the heads (inputs only)",
    "size1": "meaningless strides on dimensions of size 1",
    "offset": "contiguous, 16-byte but not 32-byte aligned",
    "misaligned": "contiguous, one element off any alignment",
    "misstride": "head dim rows that are not a multiple of 16 bytes apart",
}
"""How tensors lie in memory, by name."""

VALUES = {
    "normal": "standard normal",
    "extreme": "logits of about +120 and -120; in every second key head all keys of a row on one side",
    "outlier": "normal, every sixteenth channel 20 times as large",
    "onehot": "each query row matches one key, 40 above the others",
    "small": "normal times 1e-3",
    "large": "q and v normal times 1e3",
    "rising": "logits grow with the key position, by 10 and more a block",
    "falling": "logits grow against the key position: in the order in which the kernel visits blocks",
    "slopes": "rising and falling rows side by side, with different steepness",
    "negative": "all logits of all rows far below zero",
    "mixed": "a different scale in every batch entry",
    "samesign": "normal, but all of v and dout is positive",
    "gated": "normal, rows of dout times gates from 1e-4 to 1, every fifth gate closed (backward only)",
}
"""What the tensors hold, by name. Values of dout are normal unless said here or in `testing.inputs`."""

FP8_VALUES = {
    "zeros": "normal, every third row of q and every seventh of k and v zero; one head of q and one of k all zero",
    "saturated": "all of the largest magnitude, with random signs",
    "blocks": "normal, blocks of 128 rows of different size: k from 1/4 to 4, v by powers of ten",
    "tiny": "normal times 1e-15 (k times 1e15)",
    "ramp": "keys in the order of their scores, up to 12 nats apart, upwards for some rows and downwards for others",
}
"""More of them for e4m3 tensors."""

DESCALES = {
    "n": "not given",
    "0": "one number, of no dimension",
    "1": "one number",
    "h": "a number for each sequence and key head",
    "b": "a number for each block of 128 rows and head",
}
"""In which form a tensor's descale is, by letter."""

V_FORMS = {"rows": "like k", "transposed": "Fp8Values"}
"""In which form v of an e4m3 call is, by name."""

DOUTS = {
    "bshd": LAYOUTS["bshd"],
    "bhsd": LAYOUTS["bhsd"],
    "sbhd": LAYOUTS["sbhd"],
    "dimfirst": "transposed view of (batch, dim, seqlen, heads): last stride not 1",
    "headslice": LAYOUTS["headslice"],
    "dimslice": LAYOUTS["dimslice"],
    "step": "every second element of a head dim twice as large: last stride 2",
    "offset": LAYOUTS["offset"],
    "misaligned": LAYOUTS["misaligned"],
    "misstride": LAYOUTS["misstride"],
    "expand_batch": "stride 0 over the batch",
    "expand_rows": "stride 0 over the rows",
    "expand_heads": "stride 0 over the heads",
    "expand_dim": "stride 0 over the head dim, as out.sum(-1) passes back",
    "expand_all": "one value with all strides 0, as out.sum() passes back",
    "none": "not there: only lse passes a gradient back",
}
"""How the gradient of out lies in memory, by name."""

DLSES = {
    "none": "not there",
    "bhs": "contiguous (batch, heads, seqlen)",
    "bsh": "transposed view of (batch, seqlen, heads)",
    "expand_all": "one value with all strides 0, as lse.sum() passes back",
}
"""How the gradient of lse lies in memory, by name."""

HINTS = {
    "exact": "max_seqlen is the longest length, as an int",
    "loose": "an int larger than any length",
    "numpy": "the longest length as a numpy integer",
    "host": "the longest length as a tensor in host memory",
    "device": "the longest length as a tensor on the device of q, which must not be read",
    "none": "not given",
}
"""How a ragged call says how long its sequences are at most, by name."""

TARGETS = {
    "fresh": "tensors that autograd returns",
    "zeros": "compact float32 buffers of zeros, by `flash_attn_backward_func`",
    "holes": "float32 buffers of zeros that are parts of larger tensors, by `flash_attn_backward_func`",
}
"""Where gradients go, by name."""

_DIRECTIONS = ("forward", "backward")
_SIDES = {"none": "", "q": "q", "k": "k", "qk": "qk"}
_OPERANDS, _INPUTS = "qkvo", "qkv"
_KEYS = {
    "dtype": "dtype",
    "b": "batch",
    "h": "heads",
    "hk": "heads_k",
    "sq": "seqlen_q",
    "sk": "seqlen_k",
    "d": "d",
    "dv": "dv",
    "causal": "causal",
    "left": "left",
    "right": "right",
    "chunk": "chunk",
    "pack": "packed",
    "used": "used",
    "lq": "lengths_q",
    "lk": "lengths_k",
    "slack": "slack",
    "max": "hint",
    "scale": "scale",
    "lse": "return_lse",
    "layout": "layout",
    "of": "strided",
    "values": "values",
    "out": "give_out",
    "dir": "direction",
    "det": "deterministic",
    "grads": "grads",
    "do": "dout",
    "dlse": "dlse",
    "into": "into",
    "desc": "descales",
    "v": "v_form",
    "odt": "out_dtype",
    "seed": "seed",
}
_WORDS = (
    "layout", "strided", "values", "direction", "grads", "dout", "dlse", "packed", "used", "lengths_q", "lengths_k", "hint", "into",
    "descales", "v_form",
)  # fmt: skip
_OPTIONAL_INTS = ("left", "right")
_FLAGS = ("causal", "return_lse", "give_out", "deterministic")


@dataclass(frozen=True, slots=True)
class Case:
    """One call; see `LAYOUTS`, `VALUES`, `DOUTS`, `DLSES`, `TARGETS`, `HINTS` and `lengths.WORDS` for words.

    `left` and `right` are the window, `chunk` the attention chunk. The call is ragged, one of `flash_attn_varlen_func`, if
    anything is `packed` (which of q and of k with v are, with cu_seqlens) or `used` (whose used lengths are given). Then
    `batch` is the number of sequences, and `lengths_q` and `lengths_k` say how long they are, at most `seqlen_q` and
    `seqlen_k`, which are the sizes of what is not packed. `slack` unused rows lie behind packed sequences. `strided` names the operands (of q, k, v and o for out) that have the layout; the others are contiguous. `scale`
    None means 1 / sqrt(d). `give_out` passes a tensor pre-filled with NaN as `out`. With the direction "backward"
    gradients of the inputs in `grads` are computed from those of out (`dout`) and lse (`dlse`) and put where `into` says;
    such a call allocates its out. With dtype e4m3 `descales` has a letter of `DESCALES` for each of q, k and v, `v_form` says how v
    is given, and `out_dtype` what dtype a given out has. Raises ArgumentError for words that are unknown and combinations that make no sense; what a call itself
    would refuse is found by `problem()`.
    """

    dtype: DType
    batch: int
    heads: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    d: int
    dv: int
    causal: bool = False
    scale: float | None = None
    return_lse: bool = True
    layout: str = "bshd"
    strided: str = _OPERANDS
    values: str = "normal"
    give_out: bool = True
    direction: str = "forward"
    deterministic: bool = False
    grads: str = _INPUTS
    dout: str = "bshd"
    dlse: str = "none"
    seed: int = 0
    left: int | None = None
    right: int | None = None
    chunk: int = 0
    packed: str = "none"
    used: str = "none"
    lengths_q: str = "equal"
    lengths_k: str = "equal"
    slack: int = 0
    hint: str = "exact"
    into: str = "fresh"
    descales: str = "nnn"
    v_form: str = "rows"
    out_dtype: DType = DType.BF16

    def __post_init__(self) -> None:
        words = {
            "layout": LAYOUTS, "values": VALUES | (FP8_VALUES if self.is_fp8 else {}), "v_form": V_FORMS, "direction": _DIRECTIONS, "dout": DOUTS, "dlse": DLSES,
            "packed": _SIDES, "used": _SIDES, "hint": HINTS, "into": TARGETS,
        }  # fmt: skip
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise ArgumentError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name, letters in (("strided", _OPERANDS), ("grads", _INPUTS)):
            given = getattr(self, name)
            if not given or given != "".join(letter for letter in letters if letter in given):
                raise ArgumentError(f"{name} must be letters of {letters!r} in this order, got {given!r}")
        self._check_direction()
        self._check_lengths()
        self._check_fp8()
        if self.layout == "packed":
            self._check_packed()
        if self.layout == "size1" and not any(1 in self.shape(operand)[:-1] for operand in self.strided):
            raise ArgumentError(f"layout size1 needs a dimension of size 1 in one of {self.strided}")

    def _check_direction(self) -> None:
        if not self.is_backward:
            if (self.grads, self.dout, self.dlse, self.into) != (_INPUTS, "bshd", "none", "fresh"):
                raise ArgumentError("grads, dout, dlse and into belong to direction backward")
            return
        if self.give_out:
            raise ArgumentError("a case of direction backward allocates its out: give_out must be off (out=0)")
        if self.dlse != "none" and not self.return_lse:
            raise ArgumentError(f"dlse={self.dlse} needs return_lse")
        if self.into != "fresh" and (self.dout == "none" or not self.return_lse):
            raise ArgumentError(f"into={self.into} needs dout and return_lse")
        if self.dout == self.dlse == "none":
            raise ArgumentError("one of dout and dlse must be there")

    def _check_fp8(self) -> None:
        if len(self.descales) != len(_INPUTS) or not set(self.descales) <= set(DESCALES):
            raise ArgumentError(
                f"descales must be a letter of {', '.join(DESCALES)} for each of q, k and v, got {self.descales!r}"
            )
        if not self.is_fp8 and (self.descales, self.v_form, self.out_dtype) != ("nnn", "rows", DType.BF16):
            raise ArgumentError("descales, v_form and out_dtype belong to dtype e4m3")
        if self.is_fp8 and (self.is_backward or self.layout == "packed"):
            raise ArgumentError("a case of dtype e4m3 has no backward, and no layout packed")
        if self.is_fp8 and self.v_form == "transposed" and "v" in self.strided and self.layout != "bshd":
            raise ArgumentError("transposed values have no layout: leave v out of what is strided")
        if self.is_fp8 and self.out_dtype not in KERNEL_DTYPES:
            raise ArgumentError(f"out_dtype must be bf16 or fp16, got {self.out_dtype}")
        if self.is_fp8 and self.out_dtype != DType.BF16 and not self.give_out:
            raise ArgumentError("an out that is not bf16 must be given")

    def _check_lengths(self) -> None:
        if not self.is_ragged:
            if (self.lengths_q, self.lengths_k, self.slack, self.hint) != ("equal", "equal", 0, "exact"):
                raise ArgumentError("lengths, slack and hint belong to a ragged call: say what is packed or used")
            return
        if self.slack < 0:
            raise ArgumentError(f"slack must be at least 0, got {self.slack}")
        if "expand_batch" in (self.layout, self.dout):
            raise ArgumentError(
                "the rows of a ragged batch are not the same in every sequence: expand_batch makes no sense"
            )
        if self.lengths_k == "same" and self.seqlen_q != self.seqlen_k:
            raise ArgumentError(f"lengths_k=same needs equal longest lengths, got {self.seqlen_q} and {self.seqlen_k}")
        for side in ("q", "k"):
            longest, lengths = self._longest(side), self.lengths(side)
            if side not in self.packed + self.used and any(length != longest for length in lengths):
                raise ArgumentError(
                    f"{side} is a padded batch without used lengths: all its sequences are of length {longest}"
                )

    def _check_packed(self) -> None:
        inputs = self.strided.replace("o", "")
        same_rows = self.shape("q")[:-2] == self.shape("k")[:-2] and self.d == self.dv
        if inputs not in ("kv", "qkv") or (inputs == "qkv" and not same_rows):
            raise ArgumentError(
                "layout packed holds k and v, or q, k and v of equal lengths and head dims, "
                f"got {self.strided} with lengths {self.seqlen_q}, {self.seqlen_k} and head dims {self.d}, {self.dv}"
            )

    @property
    def is_backward(self) -> bool:
        """True if gradients are computed, too."""
        return self.direction == "backward"

    @property
    def is_fp8(self) -> bool:
        """True for e4m3 tensors."""
        return self.dtype == DType.E4M3

    def is_packed(self, operand: str) -> bool:
        """True if an operand ("q", "k", "v" or "o") has rows in place of batch and seqlen."""
        return ("k" if operand in "kv" else "q") in _SIDES[self.packed]

    @property
    def is_ragged(self) -> bool:
        """True for a call of `flash_attn_varlen_func`."""
        return (self.packed, self.used) != ("none", "none")

    @property
    def mask(self) -> Mask:
        """The mask that the call asks for."""
        return self.problem().mask

    def _longest(self, side: str) -> int:
        return self.seqlen_q if side == "q" else self.seqlen_k

    def lengths(self, side: str) -> tuple[int, ...]:
        """How many rows (side "q") or keys ("k") each sequence of a ragged call has."""
        text = self.lengths_k if side == "k" and self.lengths_k != "same" else self.lengths_q
        return lengths_of(text, self.batch, self._longest(side))

    def side(self, side: str) -> Side:
        """How the sequences of "q" or "k" lie in memory; those of a dense call fill a padded batch."""
        if not self.is_ragged:
            return Side((self._longest(side),) * self.batch, None, self._longest(side))
        if side in _SIDES[self.packed]:
            return packed_side(self.lengths(side), side in _SIDES[self.used], self.slack)
        return Side(self.lengths(side), None, self._longest(side))

    def shape(self, operand: str) -> tuple[int, ...]:
        """(batch, seqlen, heads, head dim) or, packed, (rows, heads, head dim) of operand "q", "k", "v" or "o"."""
        whole = self.grid(operand)
        return whole[1:] if self.is_packed(operand) else whole

    def grid(self, operand: str) -> tuple[int, int, int, int]:
        """`shape` with a packed tensor as a batch of one."""
        name = "k" if operand in "kv" else "q"
        batch, rows = self.batch, self._longest(name)
        if name in _SIDES[self.packed]:
            batch, rows = 1, self.side(name).rows
        heads, dim = {
            "q": (self.heads, self.d),
            "k": (self.heads_k, self.d),
            "v": (self.heads_k, self.dv),
            "o": (self.heads, self.dv),
        }[operand]
        return batch, rows, heads, dim

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, heads, seqlen_q), or (heads, rows) with a packed q."""
        batch, rows, heads, _ = self.grid("q")
        return (heads, rows) if "q" in _SIDES[self.packed] else (batch, heads, rows)

    def length_tensors(self) -> dict[str, tuple[int, ...]]:
        """What the int32 tensors of a ragged call hold, by the name of the argument; those not given are missing."""
        found: dict[str, tuple[int, ...]] = {}
        for name in ("q", "k"):
            side = self.side(name)
            if name in _SIDES[self.packed]:
                assert side.offsets is not None, "a packed side has offsets"
                found[f"cu_seqlens_{name}"] = side.offsets
            if name in _SIDES[self.used]:
                found[f"seqused_{name}"] = side.lengths
        return found

    def longest_used(self, side: str) -> int:
        """The longest length there is."""
        return max(self.lengths(side), default=0)

    def options(self) -> AttentionOptions:
        """The keyword arguments of the call that are no tensors."""
        return AttentionOptions(
            softmax_scale=self.scale,
            causal=self.causal,
            window_size=(self.left, self.right),
            attention_chunk=self.chunk,
            deterministic=self.deterministic,
            return_lse=self.return_lse or self.is_backward,  # the backward reads it
        )

    def problem(self) -> AttentionProblem:
        """The request that the call makes. Raises what the call would raise for these sizes."""
        q, k, v = (self._spec(name, name) for name in _INPUTS)
        out = None if self.is_fp8 else self._spec("out", "o")
        if not self.is_ragged:
            return attention_problem(q, k, v, self.options(), dtypes=tuple(DType), out=out)
        given = {name: _index_spec(name, len(values)) for name, values in self.length_tensors().items()}
        hints: dict[str, Any] = {
            f"max_seqlen_{side}": None if self.hint in ("none", "device") else self.hinted(side) for side in ("q", "k")
        }
        absent: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"))
        return varlen_problem(q, k, v, self.options(), **(absent | given), **hints, dtypes=tuple(DType), out=out)

    def hinted(self, side: str) -> int:
        """The value of max_seqlen, however it is given."""
        longest = self.longest_used(side)
        return 2 * longest + 5 if self.hint == "loose" else longest

    def _spec(self, name: str, operand: str) -> TensorSpec:
        shape = self.shape(operand)
        rows, heads, dim = (max(size, 1) for size in shape[-3:])
        strides = (rows * heads * dim, heads * dim, dim, 1)[-len(shape) :]
        return TensorSpec(name, shape, strides, self.dtype, str(self.dtype), "any")

    def __str__(self) -> str:
        """All sizes, and what differs from the defaults, as key=value with commas."""
        parts = []
        for key, name in _KEYS.items():
            value = getattr(self, name)
            if name not in _DEFAULTS or value != _DEFAULTS[name]:
                parts.append(f"{key}={_text(value)}")
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The case that `str` wrote as `text`. Raises ArgumentError, naming what cannot be read."""
        found: dict[str, Any] = {}
        for part in text.split(","):
            key, equals, value = part.strip().partition("=")
            if not equals or key not in _KEYS or _KEYS[key] in found:
                raise ArgumentError(
                    f"cannot read {part!r} in a case; expected each of {', '.join(_KEYS)} once, as key=value"
                )
            found[_KEYS[key]] = _read(key, value)
        missing = [key for key, name in _KEYS.items() if name not in found and name not in _DEFAULTS]
        if missing:
            raise ArgumentError(f"the case {text!r} lacks {', '.join(missing)}")
        return cls(**found)


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Case) if f.default is not MISSING}


def _index_spec(name: str, size: int) -> TensorSpec:
    return TensorSpec(name, (size,), (1,), None, "torch.int32", "any")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "none" if value is None else str(value)


def _read(key: str, text: str) -> Any:
    name = _KEYS[key]
    try:
        if name in ("dtype", "out_dtype"):
            return DType(text)
        if name in _WORDS:
            return text
        if name in _FLAGS:
            return {"0": False, "1": True}[text]
        if name == "scale":
            return None if text == "none" else float(text)
        if name in _OPTIONAL_INTS:
            return None if text == "none" else int(text)
        return int(text)
    except (ValueError, KeyError):
        raise ArgumentError(f"cannot read {key}={text!r} in a case") from None


def case_of(
    dims: Dims | int, lengths: Dims, causal: bool = False, *, batch: int = 1, heads: Dims = (2, 2),
    dtype: DType = DType.BF16,
) -> Case:  # fmt: skip
    """A forward case from (d, dv) or d, (seqlen_q, seqlen_k) and (heads, heads_k)."""
    d, dv = dims if isinstance(dims, tuple) else (dims, dims)
    return Case(dtype, batch, *heads, *lengths, d, dv, causal)
