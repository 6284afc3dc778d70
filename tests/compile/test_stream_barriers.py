"""Named barriers of several streams in a CTA, traced as plain Python: who meets whom."""

from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from simt import copies

(barriers,) = copies("flash_hopper.device.barriers")

HARDWARE = 16
WARPGROUP = 128
# streams, warpgroups of a tile: whatever fits four consumer warpgroups
SHAPES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)]


class Call(NamedTuple):
    warpgroup: int
    barrier: int
    waits: bool
    threads: int


class Recorder:
    """Notes what a warpgroup does at named barriers."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[Call] = []
        self.warpgroup = 0
        arch = SimpleNamespace(barrier=self._note(True), barrier_arrive=self._note(False))
        monkeypatch.setattr(barriers, "cute", SimpleNamespace(arch=arch))
        monkeypatch.setattr(barriers.Turns, "start", barriers.Turns.start.__wrapped__)

    def _note(self, waits: bool):
        def note(barrier_id: int, number_of_threads: int) -> None:
            self.calls.append(Call(self.warpgroup, barrier_id, waits, number_of_threads))

        return note

    def of(self, warpgroup: int, function) -> list[Call]:
        """What `function(warpgroup)` does, of a warpgroup counted over all streams."""
        self.warpgroup, before = warpgroup, len(self.calls)
        function(warpgroup)
        return self.calls[before:]


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.mark.parametrize(("streams", "count"), SHAPES)
def test_a_barrier_is_met_by_one_warpgroup_or_by_two_neighbours_of_one_stream(streams, count, recorder):
    turns = barriers.Turns(count, True, streams)
    for wg in range(streams * count):
        for function in (turns.start, turns.wait, turns.pass_on, barriers.epilogue_sync):
            recorder.of(wg, function)
    met: dict[int, set[int]] = {}
    for call in recorder.calls:
        assert 0 < call.barrier < HARDWARE, "0 is the whole CTA's"
        met.setdefault(call.barrier, set()).add(call.warpgroup)
    for barrier, warpgroups in met.items():
        calls = [call for call in recorder.calls if call.barrier == barrier]
        assert {call.threads for call in calls} == {WARPGROUP * len(warpgroups)}, "all of them are counted"
        assert len({wg // count for wg in warpgroups}) == 1, "of one stream"
        assert len({call.warpgroup for call in calls if call.waits}) == 1, "one waits"
    epilogues = [recorder.of(wg, barriers.epilogue_sync)[0].barrier for wg in range(streams * count)]
    assert len(set(epilogues)) == streams * count


@pytest.mark.parametrize(("streams", "count"), [shape for shape in SHAPES if shape[1] > 1])
def test_turns_go_round_each_stream_from_its_first_warpgroup_on_whatever_the_other_does(streams, count, recorder):
    turns = barriers.Turns(count, True, streams)
    arrived = [call.barrier for wg in range(streams * count) for call in recorder.of(wg, turns.start)]
    awaited = {recorder.of(wg, turns.wait)[0].barrier: wg for wg in range(streams * count)}
    assert sorted(awaited[barrier] for barrier in arrived) == [stream * count for stream in range(streams)]
    for stream, other in product(range(streams), repeat=2):
        if stream == other:
            continue
        holder = stream * count
        for step in range(3 * count):  # the other stream stands still
            (passed,) = recorder.of(holder, turns.pass_on)
            holder = awaited[passed.barrier]
            assert holder == stream * count + (step + 1) % count


@pytest.mark.parametrize(("streams", "count"), SHAPES)
def test_without_turns_nobody_waits_for_another_warpgroup(streams, count, recorder):
    turns = barriers.Turns(count, False, streams)
    for wg in range(streams * count):
        for function in (turns.start, turns.wait, turns.pass_on):
            assert recorder.of(wg, function) == []
