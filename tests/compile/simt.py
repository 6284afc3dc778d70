"""Runs traced device code as plain Python: every GPU thread is a Python thread, so barriers, shuffles and votes mean what they mean.

Only what `device/schedulers` and `kernels/schedule` use of the DSL is here. The threads of a CTA run one at a time, each up to
the next place where it needs the others; CTAs run beside each other. Threads that do not meet at the same place raise
`DivergedError`, where a GPU would hang.
"""

import importlib
import sys
import threading
from types import ModuleType, SimpleNamespace

WARP = 32


class DivergedError(AssertionError):
    """Threads wait for others that are elsewhere, or gone."""


def copies(*names: str) -> list[ModuleType]:
    """Modules anew, which import each other's copies: of a function that was compiled the DSL keeps its own version."""
    originals = {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        for name, module in originals.items():
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)


class Pointer:
    def __init__(self, values: list, offset: int = 0) -> None:
        self.values, self.offset = values, offset

    def __add__(self, step: int) -> "Pointer":
        return Pointer(self.values, self.offset + step)


class Tensor:
    """One dimension, in memory that all threads share."""

    def __init__(self, iterator: Pointer, size: int) -> None:
        self.iterator, self.shape = iterator, (size,)

    @classmethod
    def of(cls, values) -> "Tensor":
        values = list(values)
        return cls(Pointer(values), len(values))

    @property
    def values(self) -> list:
        start = self.iterator.offset
        return self.iterator.values[start : start + self.shape[0]]

    def __getitem__(self, i: int):
        assert 0 <= i < self.shape[0], f"read of element {i} of {self.shape[0]}"
        return self.iterator.values[self.iterator.offset + i]

    def __setitem__(self, i: int, value) -> None:
        assert 0 <= i < self.shape[0], f"write of element {i} of {self.shape[0]}"
        self.iterator.values[self.iterator.offset + i] = value


class State:
    """A position in a pipeline."""

    def __init__(self, stages: int, count: int = 0) -> None:
        self.stages, self.count = stages, count

    def clone(self) -> "State":
        return State(self.stages, self.count)

    def advance(self) -> None:
        self.count += 1


class _Cta:
    """The threads' turns, and two boards on which each posts a value when it meets the others: nobody is ever more than one
    meeting ahead."""

    def __init__(self, block: int, stream: int, threads: int) -> None:
        self.block, self.stream = block, stream
        self.turns = [threading.Semaphore(0) for _ in range(threads)]
        self.boards: tuple[list, list] = ([None] * threads, [None] * threads)
        self.has_left = [False] * threads
        self.shared: list[Tensor] = []

    def pass_on(self, thread: int) -> None:
        """To the next one in the ring that has not left."""
        count = len(self.turns)
        ring = ((thread + step) % count for step in range(1, count + 1))
        following = next((other for other in ring if not self.has_left[other]), None)
        if following is not None:
            self.turns[following].release()


class Device:
    """Patches `copies` of modules so that their functions can be called; `run` launches."""

    def __init__(self, monkeypatch, *modules) -> None:
        self._here = threading.local()
        self._lock = threading.Lock()
        self.cute, self.cutlass = SimpleNamespace(), SimpleNamespace(range=_steps, range_constexpr=range)
        self.cute.arch = SimpleNamespace(
            **{name: getattr(self, name) for name in dir(self) if not name.startswith("_") and name in _ARCH}
        )
        self.cute.make_layout = lambda shape: shape
        self.cute.make_tensor = Tensor
        swaps = {
            "cute": self.cute, "cutlass": self.cutlass, "Int32": int, "Boolean": bool, "producer_state": State,
            "SmemAllocator": lambda: SimpleNamespace(allocate_tensor=self._allocate),
        }  # fmt: skip
        for module in modules:
            for name, value in vars(module).copy().items():
                if name in swaps:
                    monkeypatch.setattr(module, name, swaps[name])
                elif hasattr(value, "__wrapped__") and hasattr(value, "_dsl_cls"):
                    monkeypatch.setattr(module, name, value.__wrapped__)
                elif isinstance(value, type) and value.__module__ == module.__name__:
                    _unwrap(monkeypatch, value)

    def run(self, grid: int, threads: int, function, streams: int = 1) -> None:
        """`function()` in every thread of `grid` CTAs, all at once; the first failure is raised. Of `streams` > 1 each has so many
        threads, which meet among themselves only and have a number by `stream`."""
        self._grid, failures = grid, []
        ctas = [_Cta(block, stream, threads) for block in range(grid) for stream in range(streams)]

        def work(cta: _Cta, thread: int) -> None:
            here = self._here
            here.cta, here.thread, here.meetings, here.allocated = cta, thread, 0, 0
            cta.turns[thread].acquire()
            try:
                function()
            except Exception as error:
                failures.append(error)
            cta.has_left[thread] = True
            cta.pass_on(thread)

        pool = [threading.Thread(target=work, args=(cta, i), daemon=True) for cta in ctas for i in range(threads)]
        for thread in pool:
            thread.start()
        for cta in ctas:
            cta.turns[0].release()
        for thread in pool:
            thread.join()
        if failures:
            raise next((f for f in failures if not isinstance(f, DivergedError)), failures[0])

    def _meet(self, what: str, value=None, threads: slice | None = None) -> list:
        """Wait for all threads of the CTA to come here; what those of the slice brought."""
        here = self._here
        place = what, here.meetings
        board = here.cta.boards[here.meetings % 2]
        here.meetings += 1
        board[here.thread] = place, value
        here.cta.pass_on(here.thread)
        here.cta.turns[here.thread].acquire()
        if any(other is None or other[0] != place for other in board):
            raise DivergedError(f"thread {here.thread} waits at {place}, others do not come")
        return [value for _, value in board[threads or slice(None)]]

    def _exchange(self, what: str, value) -> list:
        first = self._here.thread // WARP * WARP
        return self._meet(what, value, slice(first, first + WARP))

    def _allocate(self, element, layout: int, align: int) -> Tensor:
        here = self._here
        with self._lock:
            if here.allocated == len(here.cta.shared):
                here.cta.shared.append(Tensor.of([None] * layout))
        here.allocated += 1
        return here.cta.shared[here.allocated - 1]

    def stream(self) -> int:
        return self._here.cta.stream

    def thread_idx(self):
        return self._here.thread, 0, 0

    def block_idx(self):
        return self._here.cta.block, 0, 0

    def grid_dim(self):
        return self._grid, 1, 1

    def lane_idx(self) -> int:
        return self._here.thread % WARP

    def barrier(self) -> None:
        self._meet("barrier")

    def shuffle_sync(self, value, offset: int):
        return self._exchange("shuffle", value)[offset]

    def shuffle_sync_up(self, value, offset: int, mask_and_clamp: int):
        source = self.lane_idx() - offset
        return self._exchange("shuffle up", value)[source if source >= mask_and_clamp else self.lane_idx()]

    def vote_ballot_sync(self, predicate) -> int:
        return sum(bool(p) << lane for lane, p in enumerate(self._exchange("ballot", predicate)))

    def popc(self, value: int) -> int:
        return value.bit_count()

    def clz(self, value: int) -> int:
        return 32 - value.bit_length()

    def atomic_add(self, pointer: Pointer, value: int, sem: str, scope: str) -> int:
        with self._lock:
            before = pointer.values[pointer.offset]
            pointer.values[pointer.offset] += value
        return before

    def griddepcontrol_wait(self) -> None:
        pass

    def griddepcontrol_launch_dependents(self) -> None:
        pass


_ARCH = {name for name in vars(Device) if not name.startswith("_") and name not in ("run", "stream")}


def _steps(*bounds: int, unroll: int) -> range:
    return range(*bounds)


def _unwrap(monkeypatch, owner: type) -> None:
    """Methods as they were before the DSL decorated them."""
    for name, value in vars(owner).copy().items():
        if hasattr(value, "__wrapped__") and hasattr(value, "_dsl_cls"):
            monkeypatch.setattr(owner, name, value.__wrapped__)
