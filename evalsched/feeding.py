"""Which shard goes to which worker next: pure, the same for the scheduler, ``planaria eval`` and the simulator.

The broker holds at most :data:`DEPTH` messages per live worker, so order, priority and ageing are decided here, at
the last moment, and not by the broker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DEPTH = 2
"""Messages per live worker: one that runs, one that waits, so that no worker idles between two."""
MAX_ATTEMPTS = 3
NEWEST_SECONDS = 60.0
"""Waiting time over which a checkpoint stops being new."""
AGEING_SECONDS = 1800.0
"""Waiting time after which the oldest checkpoint goes before one that was published just now."""
RESIDENT_BONUS = 0.25
"""Worth of not having to change the model, on the scale of :func:`urgency`."""
SECOND_COPY_FACTOR = 3.0
"""A shard that runs this many times longer than estimated is run a second time elsewhere when nothing else is left."""
SECOND_COPY_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class PendingShard:
    """A shard that waits. ``after`` is the time before which it is not sent again."""

    shard: str
    seconds: float
    attempts: int = 0
    after: float = 0.0
    last_worker: str | None = None
    """Where it failed last: another worker is preferred."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """An evaluation run with shards to be sent."""

    run: str
    created: float
    model: str
    """Digest of its model."""
    pending: tuple[PendingShard, ...]
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class OutView:
    """A shard that is out at a worker. ``begun`` is 0 while it waits in the worker's queue."""

    run: str
    shard: str
    seconds: float
    begun: float = 0.0
    copies: int = 1


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """A live worker that takes work."""

    worker: str
    model: str | None
    """Digest of the model that it holds or was last sent."""
    out: tuple[OutView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One shard for one worker."""

    worker: str
    run: str
    shard: str
    reason: str
    second_copy: bool = False


def urgency(run: RunView, now: float) -> float:
    """How much sooner a run goes than others: newest first, with ageing, times its weight.

    A fresh checkpoint has 1, which falls as it waits; the ageing term grows by 1 in :data:`AGEING_SECONDS` and has
    no bound, so nothing waits for ever behind newer ones.
    """
    waited = max(0.0, now - run.created)
    return run.weight * (1.0 / (1.0 + waited / NEWEST_SECONDS) + waited / AGEING_SECONDS)


@dataclass
class _Desk:
    """Working copy of the lists that a plan uses up."""

    pending: dict[str, list[PendingShard]]
    load: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    model: dict[str, str | None] = field(default_factory=dict)


def assign(runs: Sequence[RunView], workers: Sequence[WorkerView], now: float, depth: int = DEPTH) -> list[Assignment]:
    """What to send now. Least loaded worker first; longest shard of the most urgent run first.

    With nothing left to send, shards that take far longer than estimated are sent a second time to idle workers:
    the first answer wins.
    """
    desk = _Desk({run.run: sorted(run.pending, key=lambda one: (-one.seconds, one.shard)) for run in runs})
    for view in workers:
        desk.load[view.worker] = sum(one.seconds for one in view.out)
        desk.count[view.worker] = len(view.out)
        desk.model[view.worker] = view.model
    chosen: list[Assignment] = []
    open_workers = {view.worker for view in workers if len(view.out) < depth}
    while open_workers:
        worker = min(open_workers, key=lambda name: (desk.count[name], desk.load[name], name))
        found = _best(runs, desk, worker, now, alone=len(workers) == 1)
        if found is None:
            open_workers.discard(worker)
            continue
        run, shard = found
        desk.pending[run.run].remove(shard)
        desk.load[worker] += shard.seconds
        desk.count[worker] += 1
        desk.model[worker] = run.model
        chosen.append(Assignment(worker=worker, run=run.run, shard=shard.shard, reason=_why(run, now)))
        if desk.count[worker] >= depth:
            open_workers.discard(worker)
    return chosen or _second_copies(workers, now)


def _best(
    runs: Sequence[RunView], desk: _Desk, worker: str, now: float, alone: bool
) -> tuple[RunView, PendingShard] | None:
    best: tuple[float, RunView, PendingShard] | None = None
    for run in runs:
        shard = next(
            (one for one in desk.pending[run.run] if one.after <= now and (alone or one.last_worker != worker)), None
        )
        if shard is None:
            continue
        score = urgency(run, now) + (RESIDENT_BONUS if desk.model[worker] == run.model else 0.0)
        if best is None or score > best[0]:
            best = (score, run, shard)
    return None if best is None else (best[1], best[2])


def _why(run: RunView, now: float) -> str:
    return f"urgency {urgency(run, now):.3f} after {max(0.0, now - run.created):.0f} s"


def _second_copies(workers: Sequence[WorkerView], now: float) -> list[Assignment]:
    idle = [view.worker for view in workers if not view.out]
    late = [
        one
        for view in workers
        for one in view.out
        if one.begun > 0
        and one.copies == 1
        and now - one.begun > max(SECOND_COPY_SECONDS, SECOND_COPY_FACTOR * one.seconds)
    ]
    late.sort(key=lambda one: one.begun)
    return [
        Assignment(
            worker=worker,
            run=one.run,
            shard=one.shard,
            reason=f"straggler: {now - one.begun:.0f} s instead of {one.seconds:.0f} s",
            second_copy=True,
        )
        for worker, one in zip(sorted(idle), late, strict=False)
    ]


def slots_wanted(backlog_seconds: float, shards: int, most: int, target_seconds: float = 30.0) -> int:
    """Workers that the waiting work can use to be through in ``target_seconds``; never more than shards."""
    if shards <= 0 or most <= 0:
        return 0
    return max(1, min(most, shards, round(backlog_seconds / target_seconds)))


def silent_workers(seen: Mapping[str, float], now: float, limit: float) -> list[str]:
    """Workers whose last word is older than ``limit`` seconds."""
    return sorted(worker for worker, at in seen.items() if now - at > limit)
