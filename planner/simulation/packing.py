"""Plays the packing policy of production (:mod:`planner.packing`) on slots that come, go and differ."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from planner.packing import OutView, PendingShard, RunView, WorkerView, assign

DEPTH = 1
"""The simulator's broker takes no time, so nothing has to wait at a worker."""


@dataclass(frozen=True, kw_only=True)
class PlayedSlot:
    """A slot that works from ``start`` until ``stop`` (seconds); what it has in hand then waits again."""

    name: str
    speed: float = 1.0
    start: float = 0.0
    stop: float = inf
    model: str | None = None
    load_seconds: float = 0.0


@dataclass(kw_only=True)
class Played:
    """What came out: the last inference, and the end of each shard of the start (all of its pieces)."""

    end: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)
    pieces: int = 0
    copies: int = 0
    work: float = 0.0
    """Seconds that slots worked on shards, overheads and repetitions left out."""
    lost: float = 0.0
    """Seconds of work that was begun and not finished: on slots that went, and second copies that lost."""

    def makespan(self, tails: Mapping[str, float] | None = None) -> float:
        """Until the last metric is computed; ``tails`` are CPU seconds per shard of the start."""
        return max(end + (tails or {}).get(name, 0.0) for name, end in self.ends.items())


@dataclass
class _Running:
    piece: str
    run: RunView
    shard: PendingShard
    begun: float
    end: float


class _Play:
    def __init__(
        self, runs: Sequence[RunView], slots: Sequence[PlayedSlot], overhead: float, actual: Callable[[str], float]
    ) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.models = {slot.name: slot.model for slot in slots}
        self.runs = {run.run: run for run in runs}
        self.pending = {run.run: {one.shard: one for one in run.pending} for run in runs}
        self.origin = {one.shard: one.shard for run in runs for one in run.pending}
        self.running: dict[str, _Running] = {}
        self.overhead, self.actual = overhead, actual
        self.done: set[str] = set()
        self.result = Played()

    def feed(self, now: float) -> None:
        for one in assign(self._runs(), self._workers(now), now, depth=DEPTH):
            if one.second_copy:
                first = next(r for r in self.running.values() if r.piece == one.shard)
                self.result.copies += 1
                self._begin(one.worker, first.run, first.shard, one.shard, now)
            else:
                self._send(one.worker, self.runs[one.run], one.shard, one.seconds, now)

    def _runs(self) -> list[RunView]:
        return [replace(run, pending=tuple(self.pending[name].values())) for name, run in self.runs.items()]

    def _workers(self, now: float) -> list[WorkerView]:
        found = []
        copies: dict[str, int] = {}
        for one in self.running.values():
            copies[one.piece] = copies.get(one.piece, 0) + 1
        for name, slot in self.slots.items():
            if slot.start <= now < slot.stop:
                busy = self.running.get(name)
                out: tuple[OutView, ...] = ()
                if busy is not None:
                    out = (
                        OutView(
                            run=busy.run.run, shard=busy.piece, seconds=busy.shard.seconds, begun=busy.begun or 1e-9,
                            copies=copies[busy.piece],
                        ),
                    )  # fmt: skip
                found.append(
                    WorkerView(
                        worker=name, model=self.models[name], out=out, speed=slot.speed, load_seconds=slot.load_seconds
                    )
                )
        return found

    def _send(self, worker: str, run: RunView, name: str, seconds: float | None, now: float) -> None:
        shard = self.pending[run.run].pop(name)
        if seconds is not None:
            self.pending[run.run][name] = replace(shard, seconds=shard.seconds - seconds)
            shard = replace(shard, seconds=seconds)
        self.result.pieces += 1
        piece = f"{name}/{self.result.pieces}"
        self.origin[piece] = self.origin[name]
        self._begin(worker, run, replace(shard, shard=piece), piece, now)

    def _begin(self, worker: str, run: RunView, shard: PendingShard, piece: str, now: float) -> None:
        slot = self.slots[worker]
        load = 0.0 if self.models[worker] == run.model else slot.load_seconds
        self.models[worker] = run.model
        end = now + load + self.overhead + shard.seconds * self.actual(worker) / slot.speed
        self.running[worker] = _Running(piece, run, shard, now, end)

    def step(self, now: float) -> None:
        """Ends and departures up to now."""
        for name, one in sorted(self.running.items(), key=lambda entry: entry[1].end):
            slot = self.slots[name]
            if one.piece in self.done:  # its other copy was first
                self.result.lost += now - one.begun
                self.running.pop(name, None)
            elif one.end <= now and one.end <= slot.stop:
                del self.running[name]
                self.done.add(one.piece)
                self.result.work += one.shard.seconds / slot.speed
                self.result.end = max(self.result.end, one.end)
                origin = self.origin[one.piece]
                self.result.ends[origin] = max(self.result.ends.get(origin, 0.0), one.end)
            elif slot.stop <= now:
                del self.running[name]
                self.result.lost += now - one.begun
                if all(other.piece != one.piece for other in self.running.values()):
                    self.pending[one.run.run][one.piece] = one.shard


def play(
    runs: Sequence[RunView],
    slots: Sequence[PlayedSlot],
    *,
    overhead: float = 0.0,
    actual: Callable[[str], float] = lambda worker: 1.0,
) -> Played:
    """Run everything to its end. ``overhead``: seconds per piece; ``actual``: a worker's real over estimated seconds.

    Raises:
        ValueError: work is left and no slot will be there to do it.
    """
    world = _Play(runs, slots, overhead, actual)
    moments = [moment for slot in slots for moment in (slot.start, slot.stop) if moment < inf]
    heapq.heapify(moments)
    now = 0.0
    while True:
        world.step(now)
        world.feed(now)
        left = any(world.pending.values())
        if not left and not world.running:
            return world.result
        ends = [one.end for one in world.running.values() if one.end > now]
        while moments and moments[0] <= now:
            heapq.heappop(moments)
        ahead = [*ends, *moments[:1]]
        if not ahead:
            raise ValueError("work is left, and no slot will be there to do it")
        late = min(ahead)
        # Whether something runs late is looked at from time to time, as the conductor does.
        now = min(late, now + 1.0) if not left and world.running and _may_copy(world, now) else late


def _may_copy(world: _Play, now: float) -> bool:
    """Whether a slot is idle, so that a straggler could be run twice."""
    return any(slot.start <= now < slot.stop and name not in world.running for name, slot in world.slots.items())
