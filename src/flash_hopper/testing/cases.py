"""A test case: one attention call, forward or with its backward, as data, with a text form that replays it.

`str(case)` gives the argument of `flash-hopper verify --case`; `Case.parse` reads it back. What the words for
layouts and values mean is carried out by `testing.inputs`; `testing.suites` builds the grids; `tests/` and
`cli/verify.py` use both.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any

from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.tensor import TensorSpec

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

_DIRECTIONS = ("forward", "backward")
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
    "seed": "seed",
}
_WORDS = ("layout", "strided", "values", "direction", "grads", "dout", "dlse")
_FLAGS = ("causal", "return_lse", "give_out", "deterministic")


@dataclass(frozen=True, slots=True)
class Case:
    """One call of `flash_attn_func`; see `LAYOUTS`, `VALUES`, `DOUTS` and `DLSES` for the words.

    `strided` names the operands (of q, k, v and o for out) that have the layout; the others are contiguous. `scale`
    None means 1 / sqrt(d). `give_out` passes a tensor pre-filled with NaN as `out`. With the direction "backward"
    gradients of the inputs in `grads` are computed from those of out (`dout`) and lse (`dlse`); such a call allocates
    its out. Raises ArgumentError for words that are unknown and combinations that make no sense; what a call itself
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

    def __post_init__(self) -> None:
        words = {"layout": LAYOUTS, "values": VALUES, "direction": _DIRECTIONS, "dout": DOUTS, "dlse": DLSES}
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise ArgumentError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name, letters in (("strided", _OPERANDS), ("grads", _INPUTS)):
            given = getattr(self, name)
            if not given or given != "".join(letter for letter in letters if letter in given):
                raise ArgumentError(f"{name} must be letters of {letters!r} in this order, got {given!r}")
        self._check_direction()
        if self.layout == "packed":
            self._check_packed()
        if self.layout == "size1" and not any(1 in self.shape(operand)[:3] for operand in self.strided):
            raise ArgumentError(f"layout size1 needs a dimension of size 1 in one of {self.strided}")

    def _check_direction(self) -> None:
        if not self.is_backward:
            if (self.grads, self.dout, self.dlse) != (_INPUTS, "bshd", "none"):
                raise ArgumentError("grads, dout and dlse belong to direction backward")
            return
        if self.give_out:
            raise ArgumentError("a case of direction backward allocates its out: give_out must be off (out=0)")
        if self.dlse != "none" and not self.return_lse:
            raise ArgumentError(f"dlse={self.dlse} needs return_lse")
        if self.dout == self.dlse == "none":
            raise ArgumentError("one of dout and dlse must be there")

    def _check_packed(self) -> None:
        inputs = self.strided.replace("o", "")
        same_rows = self.seqlen_q == self.seqlen_k and self.d == self.dv
        if inputs not in ("kv", "qkv") or (inputs == "qkv" and not same_rows):
            raise ArgumentError(
                "layout packed holds k and v, or q, k and v of equal lengths and head dims, "
                f"got {self.strided} with lengths {self.seqlen_q}, {self.seqlen_k} and head dims {self.d}, {self.dv}"
            )

    @property
    def is_backward(self) -> bool:
        """True if gradients are computed, too."""
        return self.direction == "backward"

    def shape(self, operand: str) -> tuple[int, int, int, int]:
        """(batch, seqlen, heads, head dim) of operand "q", "k", "v" or "o"."""
        return {
            "q": (self.batch, self.seqlen_q, self.heads, self.d),
            "k": (self.batch, self.seqlen_k, self.heads_k, self.d),
            "v": (self.batch, self.seqlen_k, self.heads_k, self.dv),
            "o": (self.batch, self.seqlen_q, self.heads, self.dv),
        }[operand]

    def problem(self) -> AttentionProblem:
        """The request that the call makes. Raises what the call would raise for these sizes."""
        q, k, v, out = (self._spec(name, operand) for name, operand in zip(("q", "k", "v", "out"), "qkvo", strict=True))
        options = AttentionOptions(
            softmax_scale=self.scale,
            causal=self.causal,
            deterministic=self.deterministic,
            return_lse=self.return_lse or self.is_backward,  # the backward reads it
        )
        return attention_problem(q, k, v, options, dtypes=tuple(DType), out=out)

    def _spec(self, name: str, operand: str) -> TensorSpec:
        shape = self.shape(operand)
        heads, dim = max(shape[2], 1), max(shape[3], 1)
        strides = (max(shape[1], 1) * heads * dim, heads * dim, dim, 1)
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


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "none" if value is None else str(value)


def _read(key: str, text: str) -> Any:
    name = _KEYS[key]
    try:
        if name == "dtype":
            return DType(text)
        if name in _WORDS:
            return text
        if name in _FLAGS:
            return {"0": False, "1": True}[text]
        if name == "scale":
            return None if text == "none" else float(text)
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
