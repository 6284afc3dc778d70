"""Which plan is fastest for a shape on the GPU at hand: candidates checked, then measured in rounds.

`flash-hopper tune` calls it. Candidates come from `plan/candidates.py`, kernels from packs or the compiler. `Tuning` is plain
Python above a queue (`timing.py`) and is tested with a simulated one; `PlanCalls` alone launches kernels.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from flash_hopper.compile.key import Plan
from flash_hopper.compile.parallel import Progress, fill_cache_as_far_as_possible
from flash_hopper.compile.store import default_store
from flash_hopper.compile.target import toolkit
from flash_hopper.launch.forward import prepare
from flash_hopper.launch.sequences import sequences_of
from flash_hopper.plan.budget import OPlace
from flash_hopper.plan.forward import ForwardPlan, choice_of
from flash_hopper.plan.own_tiles import OwnRow
from flash_hopper.problem.attention import AttentionOptions
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.errors import ArgumentError, CompileError, DeviceError, MissingDependencyError
from flash_hopper.testing.bench_check import WrongResult
from flash_hopper.testing.bench_suites import PAPER_HIDDEN, PAPER_TOKENS, BenchShape
from flash_hopper.testing.compare import Target, compare, expect
from flash_hopper.testing.provider_base import Inputs, first_line, make_inputs
from flash_hopper.testing.timing import REST_S, ROUNDS, ROUNDS_PER_GROUP, Call, Queue, rested

FIRST_LAUNCHES = 3  # of each candidate, before the best are measured again
TOGETHER = 12  # candidates that are measured in turn with the tables' plan in the first round
FINALISTS = 8
MIN_GAIN = 1.01  # a run differs from the next by about 1 %: what gains less is no reason for a row

CallOf = Callable[[ForwardPlan], Call]


def tune_shape(
    dtype: str, d: int, dv: int | None, mask: str, seqlen: int, batch: int | None, heads: int | None,
    heads_k: int | None, lengths: str | None,
) -> BenchShape:  # fmt: skip
    """The shape that the options of `tune` describe; those left out are of a model with 2048 hidden features and 16k tokens.

    `mask`: full, causal or window:N (causal, with N keys to the left). Raises the errors of `problem`, and ArgumentError.
    """
    kinds = {str(kind): kind for kind in KERNEL_DTYPES}
    if dtype not in kinds:
        raise ArgumentError(f"dtype must be one of {', '.join(kinds)}, got {dtype!r}")
    word, _, number = mask.partition(":")
    left = int(number) if number.isascii() and number.isdigit() else None
    if (
        word not in ("full", "causal", "window")
        or (word == "window") != (left is not None)
        or (number and left is None)
    ):
        raise ArgumentError(f"mask must be full, causal or window:N, got {mask!r}")
    if seqlen < 1:
        raise ArgumentError(f"seqlen must be at least 1, got {seqlen}")
    many = heads or heads_k or max(1, PAPER_HIDDEN // max(d, 1))
    shape = BenchShape(
        "tune", kinds[dtype], d, d if dv is None else dv, word != "full", seqlen, seqlen, batch or max(1, PAPER_TOKENS // seqlen),
        many, heads_k or many, left=left, lengths=lengths,
    )  # fmt: skip
    if not max(length for length, _ in shape.sequences):
        raise ArgumentError(f"lengths {lengths!r} leave nothing to measure")
    _ = shape.problem  # checks the rest
    return shape


def with_lse(plan: ForwardPlan) -> ForwardPlan:
    """The plan for a call that wants the log-sum-exp as well, as training does: its kernel needs the most registers."""
    return replace(plan, has_lse=True)


def kernels_of(plans: Sequence[ForwardPlan]) -> list[ForwardPlan]:
    """All that must be there for candidates to be measured: a tile that only serves calls without log-sum-exp is no candidate."""
    return list(dict.fromkeys(kernel for plan in plans for kernel in (plan, with_lse(plan))))


def left_out(plans: Sequence[ForwardPlan], progress: Progress | None = None) -> dict[ForwardPlan, str]:
    """Candidates whose kernels cannot be had, and why; those that are in no pack are compiled if there is a compiler.

    Raises CacheError if what is compiled can be kept nowhere.
    """
    packs = default_store().packs
    missing = [kernel for kernel in kernels_of(plans) if not any(kernel in pack for pack in packs)]
    reasons: dict[Plan, str] = {}
    if missing:
        try:
            toolkit()
        except MissingDependencyError as error:
            reasons = dict.fromkeys(missing, f"in no pack, and cannot be compiled here: {error}")
        else:
            reasons = fill_cache_as_far_as_possible(missing, None, progress)
    return left_out_by(plans, reasons)


def left_out_by(plans: Sequence[ForwardPlan], reasons: dict[Plan, str]) -> dict[ForwardPlan, str]:
    """Candidates of which a kernel has a reason not to be there."""
    found = {plan: reasons.get(plan) or reasons.get(with_lse(plan)) for plan in plans}
    return {plan: reason for plan, reason in found.items() if reason}


@dataclass(frozen=True, slots=True)
class Measured:
    """GPU microseconds of a candidate and of the tables' plan in the same rounds, medians of so many launches each."""

    plan: ForwardPlan
    us: float
    table_us: float
    launches: int
    is_final: bool

    @property
    def gain(self) -> float:
        """Time of the tables' plan over its own."""
        return self.table_us / self.us


class Tuning:
    """What is known of the candidates of one shape, the first of which is the tables' plan. Can be read at any moment."""

    def __init__(self, plans: Sequence[ForwardPlan]) -> None:
        self.table = plans[0]
        self.plans = list(plans)
        self.errors: dict[ForwardPlan, str] = {}
        self._calls: dict[ForwardPlan, Call] = {}
        self._first: dict[ForwardPlan, Measured] = {}
        self._samples: dict[ForwardPlan, list[float]] = {}

    def leave_out(self, reasons: dict[ForwardPlan, str]) -> None:
        """Candidates that are not measured. Raises CompileError if the tables' plan is one."""
        self.errors |= reasons
        if self.table in reasons:
            raise CompileError(f"{self.table.name}, which the tables choose, cannot be measured: {reasons[self.table]}")

    def check(self, call_of: CallOf, progress: Progress) -> None:
        """Make the call of each candidate; one that is wrong is left out. Raises CompileError if the tables' plan is wrong."""
        waiting = [plan for plan in self.plans if plan not in self.errors]
        for done, plan in enumerate(waiting):
            progress(plan.name, done, len(waiting))  # before it runs: one that hangs is seen by its name
            try:
                self._calls[plan] = call_of(plan)
            except WrongResult as wrong:
                self.leave_out({plan: f"wrong: {wrong}"})
        progress("", len(waiting), len(waiting))

    def measure(self, queue: Queue, progress: Progress, *, rounds: int = ROUNDS, rest_s: float = REST_S) -> None:
        """Few launches of all that passed the check, then `rounds` of the best of them, in turn with the tables' plan."""
        others = [plan for plan in self._calls if plan != self.table]
        for start in range(0, len(others), TOGETHER):
            some = others[start : start + TOGETHER]
            times = self._timed([self.table, *some], queue, FIRST_LAUNCHES, rest_s)
            table_us = statistics.median(times[self.table])
            for plan in some:
                us = statistics.median(times[plan])
                self._first[plan] = Measured(plan, us, table_us, FIRST_LAUNCHES, False)
            progress("first round", start + len(some), len(others))
        best = sorted(self._first.values(), key=lambda m: -m.gain)[:FINALISTS]
        finalists = [self.table, *(m.plan for m in best)]
        for done in range(0, rounds, ROUNDS_PER_GROUP):
            launches = min(ROUNDS_PER_GROUP, rounds - done)
            for plan, samples in self._timed(finalists, queue, launches, rest_s).items():
                self._samples.setdefault(plan, []).extend(samples)
            progress(f"the best {len(best)}", done + launches, rounds)

    def results(self) -> list[Measured]:
        """All that was measured, the best first: the finalists among themselves, then the others. Empty before the first round."""
        if not self._first and not self._samples:
            return []
        if self._samples:
            table_us = statistics.median(self._samples[self.table])
            finals = [
                Measured(plan, statistics.median(samples), table_us, len(samples), True)
                for plan, samples in self._samples.items()
            ]
        else:
            table_us = statistics.median([m.table_us for m in self._first.values()])
            finals = [Measured(self.table, table_us, table_us, FIRST_LAUNCHES, False)]
        there = {m.plan for m in finals}
        found = [*finals, *(m for m in self._first.values() if m.plan not in there)]
        return sorted(found, key=lambda m: (not m.is_final, -m.gain))

    def winner(self) -> Measured | None:
        """The best of the last round if it gains enough over the tables' plan to be worth a row."""
        best = next((m for m in self.results() if m.is_final), None)
        return best if best is not None and best.plan != self.table and best.gain >= MIN_GAIN else None

    def _timed(
        self, plans: list[ForwardPlan], queue: Queue, launches: int, rest_s: float
    ) -> dict[ForwardPlan, tuple[float, ...]]:
        calls = {plan.name: self._calls[plan] for plan in plans}
        timings = rested(calls, queue, launches=launches, rest_s=rest_s)
        return {plan: timings[plan.name].samples for plan in plans}


class PlanCalls:
    """Calls of a shape by plan, on `device`; each plan's result is compared with float64, element by element, when its call is made."""

    def __init__(self, shape: BenchShape, device: str = "cuda") -> None:
        self._inputs = inputs = make_inputs(shape, device)
        self._target = exact_out(shape, inputs)
        self._options = AttentionOptions(causal=shape.causal, window_size=shape.window)
        offsets, longest = inputs.cu_seqlens, shape.seqlen_q
        self._sequences = None if offsets is None else sequences_of(offsets, offsets, None, None, longest, longest)

    def __call__(self, plan: ForwardPlan) -> Call:
        """The call, which writes into one out. Raises WrongResult, the errors of the compile layer, and DeviceError if the kernel fails,
        after which the process can use the GPU no more."""
        given, out, sequences = self._inputs, self._inputs.out, self._sequences
        q, k, v = given.q, given.k, given.v
        prepared = prepare(q, k, v, self._options, out, sequences, plan)
        out.fill_(torch.nan)
        try:
            prepared.run(q, k, v, out, sequences)
            comparison = compare("out", out, *self._target)
        except RuntimeError as error:
            raise DeviceError(f"{plan.name} failed on the GPU: {first_line(error)}") from error
        if not comparison.passed:
            raise WrongResult(comparison.message)
        return lambda: prepared.run(q, k, v, out, sequences)


@torch.no_grad()
def exact_out(shape: BenchShape, inputs: Inputs) -> Target:
    """out in float64 with the allowance of `compare`, shaped as the call gives it; sequences of one length go together."""
    scale, mask = shape.problem.softmax_scale, shape.problem.mask
    q, k, v = inputs.q, inputs.k, inputs.v
    if not shape.is_ragged:
        whole = expect(q, k, v, softmax_scale=scale, mask=mask)
        return Target(whole.out, whole.out_allowed)
    lengths = [length for length, _ in shape.sequences]
    starts = list(itertools.accumulate(lengths, initial=0))
    target = Target(*(torch.zeros(inputs.out.shape, dtype=torch.float64, device=q.device) for _ in range(2)))
    for length in sorted(set(lengths) - {0}):
        first = torch.tensor([s for s, n in zip(starts, lengths, strict=False) if n == length], device=q.device)
        rows = first[:, None] + torch.arange(length, device=q.device)
        part = expect(q[rows], k[rows], v[rows], softmax_scale=scale, mask=mask)
        target.want[rows], target.allowed[rows] = part.out, part.out_allowed
    return target


@dataclass(frozen=True, slots=True)
class TuneRow:
    """One candidate as it is stored; the fields are the JSON keys. `us` is None and `error` says why where nothing was measured."""

    dtype: DType
    d: int
    dv: int
    causal: bool
    left: int | None
    lengths: str | None
    seqlen: int
    batch: int
    heads: int
    heads_k: int
    m: int
    n: int
    has_pingpong: bool
    q_stages: int
    kv_stages: int
    o_place: OPlace
    streams: int
    is_table: bool
    us: float | None
    table_us: float | None
    launches: int
    error: str | None


def rows_of(shape: BenchShape, tuning: Tuning) -> list[TuneRow]:
    """All candidates, the best first, those without a time at the end."""

    def row(plan: ForwardPlan, measured: Measured | None, error: str | None) -> TuneRow:
        x, s = plan.layout, shape
        us, table_us = (None, None) if measured is None else (round(measured.us, 3), round(measured.table_us, 3))
        return TuneRow(
            s.dtype, s.d, s.dv, s.causal, s.left, s.lengths, s.seqlen_q, s.batch, s.heads, s.heads_k,
            x.m, x.n, x.has_pingpong, x.q_stages, x.kv_stages, x.o_place, x.streams,
            plan == tuning.table, us, table_us, 0 if measured is None else measured.launches, error,
        )  # fmt: skip

    results = tuning.results()
    known = {measured.plan for measured in results}
    rest = [plan for plan in tuning.plans if plan not in known]
    return [
        *(row(measured.plan, measured, None) for measured in results),
        *(row(plan, None, tuning.errors.get(plan, "not measured")) for plan in rest),
    ]


def own_row_of(shape: BenchShape, best: Measured, gpu: str, date: str) -> OwnRow:
    """The row that takes a plan for this shape's kind and for lengths up to the next power of two, from half of it, on GPUs of this name."""
    choice, layout = choice_of(shape.problem), best.plan.layout
    upper = 1 << max(choice.rows - 1, 0).bit_length()
    why = f"{gpu}, {date}, {shape}: {best.us:.1f} us, the tables' tile {best.table_us:.1f}; median of {best.launches} launches in turn"
    return OwnRow(
        choice.hdim, choice.hdimv, choice.mask, choice.is_ragged, upper // 2 + 1, upper,
        layout.m, layout.n, layout.has_pingpong, layout.q_stages, layout.kv_stages, layout.o_place, gpu, why, layout.streams,
    )  # fmt: skip
