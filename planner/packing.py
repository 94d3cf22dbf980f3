"""Which shard runs on which worker next, and how long it should be: pure, for the conductor and the simulator alike.

List scheduling, decided at the last moment: the broker holds at most :data:`DEPTH` messages per live worker, so order,
priority and ageing are decided here. With L the time at which everything could be done if it were fluid,

    L = (Σ_w load_w·speed_w + Σ pending seconds) / Σ_w speed_w,

a worker takes the longest shard that it would end by L, or sooner than any other worker could (its model change
included): so a slow worker does not start at the end what a fast one would finish first. Trials with a long CPU metric
go first, so that their tails overlap with the inference of others; before them what came back from a worker. A
piece is cut off a shard that is longer than half of a slot's share of what is left, so that all slots end together.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

DEPTH = 2
"""Messages per live worker: one that runs, one that waits, so that no worker idles between two."""
MAX_ATTEMPTS = 3
HOLD_SECONDS = 2.0
"""How long what a dead worker had begun is kept for a worker without work."""
NEWEST_SECONDS = 60.0
"""Waiting time over which a checkpoint stops being new."""
AGEING_SECONDS = 1800.0
"""Waiting time after which the oldest checkpoint goes before one that was published just now."""
RESIDENT_BONUS = 0.25
"""Worth of not having to change the model, on the scale of :func:`urgency`."""
PRESSED_BONUS = 2.0
"""What a run whose deadline needs all workers from now on is more urgent than one just published; ageing still
overtakes it."""
LATE_FACTOR = 3.0
"""A shard is late after this multiple of its estimate, where the estimate's uncertainty is not known."""
SECOND_COPY_SECONDS = 5.0
"""No shard is late sooner than this."""
SECOND_COPY_GAIN = 1.5
"""A second copy must be expected to end this many times sooner than the first."""
FINEST = 0.1
"""Smallest piece as a share of the usual one."""
SAME_LENGTH = 0.8
"""Shards at least this share as long as the longest give way to one whose prefix the worker holds."""
_EPSILON = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingShard:
    """A shard that waits. ``after`` is the time before which it is not sent again."""

    shard: str
    seconds: float
    """Estimated, on a slot of speed 1."""
    attempts: int = 0
    after: float = 0.0
    last_worker: str | None = None
    """Where it failed last: another worker is preferred."""
    back: bool = False
    """It was at a worker before, which died or gave its slot back."""
    tail: float = 0.0
    """CPU seconds of the longest metric that waits for its answers."""
    group: str = ""
    """Shards of one group share a prefix: their worker has it in its cache."""

    @property
    def returned(self) -> bool:
        """Whether it was sent before."""
        return self.back or self.attempts > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """An evaluation run with shards to be sent."""

    run: str
    created: float
    model: str
    """Digest of its model."""
    pending: tuple[PendingShard, ...]
    weight: float = 1.0
    deadline: float | None = None
    """When its report should be out, seconds since the epoch."""
    usual: float = inf
    """Seconds of a piece while much is left; ``inf``: shards are sent as they are."""
    finest: float = 0.0
    """Seconds below which nothing is cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutView:
    """A shard that is out at a worker. ``begun`` is 0 while it waits in the worker's queue."""

    run: str
    shard: str
    seconds: float
    begun: float = 0.0
    copies: int = 1
    high: float | None = None
    """Seconds that it takes at most, by the uncertainty of its estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """A live worker that takes work."""

    worker: str
    model: str | None
    """Digest of the model that it holds or was last sent."""
    out: tuple[OutView, ...] = ()
    speed: float = 1.0
    """Seconds of work per second."""
    load_seconds: float = 0.0
    """What another model costs it."""
    group: str = ""
    """Prefix group of what it was sent last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One shard, or the first ``seconds`` of it, for one worker."""

    worker: str
    run: str
    shard: str
    reason: str
    seconds: float | None = None
    """Where only a piece is to be sent: its estimated seconds. The rest goes on waiting, or is what later assignments
    of the same list name."""
    second_copy: bool = False


def urgency(run: RunView, now: float, speed: float = 1.0) -> float:
    """How much sooner a run goes than others: newest first, with ageing, times its weight; deadlines press.

    A fresh checkpoint has 1, which falls as it waits; the ageing term grows by 1 in :data:`AGEING_SECONDS` and has
    no bound, so nothing waits for ever behind newer ones. ``speed``: of all workers together.
    """
    waited = max(0.0, now - run.created)
    pressed = 0.0
    if run.deadline is not None:
        needed = sum(one.seconds for one in run.pending) / speed + max((one.tail for one in run.pending), default=0.0)
        pressed = PRESSED_BONUS if now + needed >= run.deadline else 0.0
    return run.weight * (pressed + 1.0 / (1.0 + waited / NEWEST_SECONDS) + waited / AGEING_SECONDS)


def piece_seconds(left: float, speed: float, usual: float, finest: float = 0.0) -> float:
    """How long the next piece is: ``usual``, or half of a slot's share of the ``left`` seconds where that is less."""
    return min(usual, max(left / (2 * speed), FINEST * usual if usual < inf else 0.0, finest))


def tail_rank(seconds: float) -> int:
    """Metrics of a second's difference count as equal, so that the longest shard still goes first among them. Finer
    than that matters: a task is to be finished before one with a shorter metric is begun."""
    return int(max(0.0, seconds))


def remaining(one: OutView, speed: float, now: float) -> float:
    """Seconds until a shard ends at its worker, from the moment that the worker is at it.

    One that is overdue is expected to take as long again as it has taken: a worker that hangs is less and less
    attractive.
    """
    whole = one.seconds / speed
    if one.begun <= 0:
        return whole
    elapsed = max(0.0, now - one.begun)
    return whole - elapsed if elapsed <= whole else elapsed - whole


@dataclass
class _Slot:
    """Working copy of a worker."""

    name: str
    speed: float
    load_seconds: float
    load: float
    """Seconds until it is through with what it has."""
    count: int
    model: str | None
    group: str

    def end(self, run: RunView, seconds: float) -> float:
        """When it would be through with ``seconds`` more of a run, from now."""
        return self.load + (0.0 if self.model == run.model else self.load_seconds) + seconds / self.speed


@dataclass
class _Desk:
    """Working copy of everything that a plan uses up."""

    now: float
    slots: dict[str, _Slot]
    pending: dict[str, list[PendingShard]]
    left: float
    """Seconds that wait."""
    speed: float = field(init=False)
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.speed = sum(slot.speed for slot in self.slots.values()) or 1.0
        self.level = fluid_end([(slot.load, slot.speed) for slot in self.slots.values()], self.left)


def fluid_end(slots: Sequence[tuple[float, float]], left: float) -> float:
    """L: when ``left`` seconds of fluid work end on slots given as (busy until, speed); no schedule ends sooner."""
    speed = work = 0.0
    level = inf
    for load, pace in sorted(slots):
        if load >= level:
            break
        speed += pace
        work += load * pace
        level = (work + left) / speed
    return level


def assign(runs: Sequence[RunView], workers: Sequence[WorkerView], now: float, depth: int = DEPTH) -> list[Assignment]:
    """What to send now; see the module's text.

    With nothing left to send, idle workers run a second time what is late elsewhere, or waits behind something long:
    the first answer wins.
    """
    desk = _desk(runs, workers, now)
    chosen: list[Assignment] = []
    open_workers = {view.worker for view in workers if len(view.out) < depth}
    while open_workers:
        slot = min((desk.slots[name] for name in open_workers), key=lambda one: (one.count, one.load, one.name))
        found = _best(runs, desk, slot)
        if found is None or (slot.count and _awaits_an_idle_worker(found[1], now)):
            open_workers.discard(slot.name)
            continue
        run, shard = found
        chosen.append(_take(desk, slot, run, shard))
        if slot.count >= depth:
            open_workers.discard(slot.name)
    return chosen if chosen or any(desk.pending.values()) else _second_copies(workers, now)


def _awaits_an_idle_worker(shard: PendingShard, now: float) -> bool:
    """Whether a shard that a dead worker had begun is kept from waiting behind another one: whoever is idle first takes
    it, often the successor. Not for long, since a worker that seems busy may be waiting for a message that was lost."""
    return shard.attempts > 0 and now - shard.after < HOLD_SECONDS


def _desk(runs: Sequence[RunView], workers: Sequence[WorkerView], now: float) -> _Desk:
    pending = {run.run: sorted(run.pending, key=_order) for run in runs}
    slots = {
        view.worker: _Slot(
            name=view.worker,
            speed=view.speed,
            load_seconds=view.load_seconds,
            load=sum(remaining(one, view.speed, now) for one in view.out),
            count=len(view.out),
            model=view.model,
            group=view.group,
        )
        for view in workers
    }
    return _Desk(now, slots, pending, sum(one.seconds for shards in pending.values() for one in shards))


def _order(shard: PendingShard) -> tuple[bool, int, float, float, str]:
    """What was at a worker before goes first, above all what it had begun: that has waited longest. Then long metrics,
    then long shards."""
    return (not shard.returned, -shard.attempts, -tail_rank(shard.tail), -shard.seconds, shard.shard)


def _best(runs: Sequence[RunView], desk: _Desk, slot: _Slot) -> tuple[RunView, PendingShard] | None:
    best: tuple[float, RunView, PendingShard] | None = None
    for run in runs:
        if not desk.pending[run.run]:
            continue
        score = urgency(run, desk.now, desk.speed) + (RESIDENT_BONUS if slot.model == run.model else 0.0)
        if best is not None and score <= best[0]:
            continue
        shard = _shard_for(desk, slot, run)
        if shard is not None:
            best = (score, run, shard)
    return None if best is None else (best[1], best[2])


def _shard_for(desk: _Desk, slot: _Slot, run: RunView) -> PendingShard | None:
    """The first in order that this worker should take; of about equal ones, one whose prefix it holds."""
    first: PendingShard | None = None
    alone = len(desk.slots) == 1
    refused: set[float] = set()
    for one in desk.pending[run.run]:
        if one.after > desk.now or (one.last_worker == slot.name and not alone):
            continue
        if first is not None and (
            first.returned or tail_rank(one.tail) != tail_rank(first.tail) or one.seconds < SAME_LENGTH * first.seconds
        ):
            break
        seconds = _piece(desk, slot, run, one) or one.seconds
        if seconds in refused:
            continue
        if not _fits(desk, slot, run, seconds):
            refused.add(seconds)
            continue
        if first is None:
            first = one
            if not slot.group or one.group == slot.group:
                break
        elif one.group == slot.group:
            return one
    return first


def _fits(desk: _Desk, slot: _Slot, run: RunView, seconds: float) -> bool:
    end = slot.end(run, seconds)
    if end <= desk.level + _EPSILON:
        return True
    return all(
        end <= other.end(run, seconds) * (1 + _EPSILON) + _EPSILON for other in desk.slots.values() if other is not slot
    )


def _piece(desk: _Desk, slot: _Slot, run: RunView, shard: PendingShard) -> float | None:
    """Seconds to be cut off a shard for this worker; None: it is sent whole. What failed before is not cut."""
    if run.usual == inf or shard.attempts:
        return None
    finest = max(FINEST * run.usual, run.finest)
    piece = piece_seconds(desk.left, desk.speed, run.usual, run.finest) * slot.speed
    return piece if shard.seconds - piece > finest else None


def _take(desk: _Desk, slot: _Slot, run: RunView, shard: PendingShard) -> Assignment:
    piece = _piece(desk, slot, run, shard)
    seconds = shard.seconds if piece is None else piece
    shards = desk.pending[run.run]
    shards.remove(shard)
    if piece is not None:
        insort(shards, replace(shard, seconds=shard.seconds - piece), key=_order)
    desk.left -= seconds
    slot.load, slot.count = slot.end(run, seconds), slot.count + 1
    slot.model, slot.group = run.model, shard.group
    waited = max(0.0, desk.now - run.created)
    reason = f"urgency {urgency(run, desk.now, desk.speed):.3f} after {waited:.0f} s"
    return Assignment(worker=slot.name, run=run.run, shard=shard.shard, reason=reason, seconds=piece)


def _second_copies(workers: Sequence[WorkerView], now: float) -> list[Assignment]:
    """For idle workers: what is late, what waits behind something long, what a slow worker would take longest for."""
    idle = sorted((view for view in workers if not view.out), key=lambda one: (-one.speed, one.worker))
    slow = sorted(_candidates(workers, now), key=lambda one: (-one.expected, one.out.shard))
    chosen: list[Assignment] = []
    for view in idle:
        for one in slow:
            again = one.out.seconds / view.speed + (0.0 if view.model == one.model else view.load_seconds)
            if one.late or one.expected > SECOND_COPY_GAIN * again + SECOND_COPY_SECONDS / 2:
                reason = f"straggler: {one.expected:.0f} s more expected where it is, {again:.0f} s here"
                chosen.append(
                    Assignment(
                        worker=view.worker, run=one.out.run, shard=one.out.shard, reason=reason, second_copy=True
                    )
                )
                slow.remove(one)
                break
    return chosen


@dataclass(frozen=True)
class _Candidate:
    """A shard that is out once: the seconds that are expected until it ends where it is, and whether it is late."""

    out: OutView
    model: str | None
    expected: float
    late: bool


def _candidates(workers: Sequence[WorkerView], now: float) -> list[_Candidate]:
    found: list[_Candidate] = []
    for view in workers:
        before = 0.0
        for one in sorted(view.out, key=lambda out: (out.begun <= 0, out.begun)):
            before += remaining(one, view.speed, now)
            usual = LATE_FACTOR * one.seconds if one.high is None else one.high
            elapsed = now - one.begun if one.begun > 0 else 0.0
            late = elapsed > max(SECOND_COPY_SECONDS, usual / view.speed)
            if one.copies == 1 and (late or elapsed <= one.seconds / view.speed):
                found.append(_Candidate(one, view.model, elapsed if late else before, late))
    return found


def slots_wanted(backlog_seconds: float, shards: int, most: int, target_seconds: float = 30.0) -> int:
    """Workers that the waiting work can use to be through in ``target_seconds``; never more than shards."""
    if shards <= 0 or most <= 0:
        return 0
    return max(1, min(most, shards, round(backlog_seconds / target_seconds)))
