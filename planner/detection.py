"""Per-phase limits that are learned, and what breaking them means: a hang, or a straggler.

A phase (start, load, first_step, step, save, validate, export, reform) has a limit of its own: an average of what
it took, times a safety factor, never below a floor; before anything is learned, a configured bound. So a long
checkpoint, a first step that compiles or an evaluation is never measured by the steps' yardstick (R1), the first
step is never part of the steps' average (R2), and a finding is reported once per incarnation, not once per life
(R3). Unicron: 3 × the average iteration is a hang, 1.1 × a warning (the latter unverified).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.pretrain_config import HealthLimits

UNLIMITED = frozenset({"done", "idle", "paused"})
"""Phases in which a rank may stay for ever."""
WARM_UP = frozenset({"start", "load"})
"""Phases bounded by ``start_seconds`` alone: there is one of each per incarnation, so nothing is learned."""
SLOW_ONCE = frozenset({"save", "validate", "export", "snapshot"})
"""Rare phases: learned per phase, with the bound of a first step until then."""
LEARN_AFTER = 3
"""Observations before an average counts."""
WINDOW = 64
"""The average follows about this many last observations."""


@dataclass(frozen=True)
class Average:
    """A mean over the first observations, then an exponential one: it follows a changed number of ranks."""

    count: int = 0
    seconds: float = 0.0

    def observe(self, seconds: float) -> Average:
        """The average with one more observation."""
        count = self.count + 1
        weight = 1.0 / min(count, WINDOW)
        return Average(count, self.seconds + (seconds - self.seconds) * weight)


class Kind(StrEnum):
    """What a finding says."""

    HANG = "hang"
    STRAGGLER = "straggler"


@dataclass(frozen=True)
class Finding:
    """Something that took longer than it may."""

    kind: Kind
    rank: int
    phase: str
    step: int
    seconds: float
    """How long it has lasted (hang) or what the rank spent in its own work (straggler)."""
    limit: float
    since: float
    """When the phase began, seconds since the epoch."""
    collective: str | None = None
    """Set where the rank waits in a collective, so that it is a victim or a broken link, not a stuck process."""

    @property
    def reason(self) -> str:
        """One line for the event log."""
        return f"rank {self.rank}: {self.phase} of step {self.step} took {self.seconds:.2f} s, limit {self.limit:.2f} s"


@dataclass(frozen=True)
class Progress:
    """Where a rank stands, as it last said."""

    phase: str
    step: int
    since: float
    order: int = 0
    """How far it is within the step (micro-batches done, then the reduction …): the hung rank is the last one."""


class LearnedLimits:
    """What each phase usually takes in one job, over all incarnations."""

    def __init__(self, health: HealthLimits) -> None:
        self._health = health
        self._averages: dict[tuple[str, int], Average] = {}

    def observe(self, phase: str, seconds: float, workers: int = 0) -> None:
        """Learn from one finished phase. Steps are learned per number of ranks: fewer ranks are slower, not hung."""
        if phase in WARM_UP or phase == "first_step" or not seconds >= 0:
            return
        key = (phase, workers)
        self._averages[key] = self._averages.get(key, Average()).observe(seconds)

    def average(self, phase: str, workers: int = 0) -> float | None:
        """Average seconds of a phase, None before :data:`LEARN_AFTER` observations.

        For a number of ranks that was never seen, the slowest known number counts.
        """
        exact = self._averages.get((phase, workers))
        if exact is not None and exact.count >= LEARN_AFTER:
            return exact.seconds
        known = [a.seconds for (name, _), a in self._averages.items() if name == phase and a.count >= LEARN_AFTER]
        return max(known) if known else None

    def hang_limit(self, phase: str, workers: int = 0) -> float | None:
        """Longest a phase may last, in seconds; None where there is no limit."""
        health = self._health
        if phase in UNLIMITED:
            return None
        if phase in WARM_UP:
            return health.start_seconds
        if phase == "first_step":
            return health.first_step_seconds
        average = self.average(phase, workers)
        if average is None:
            return health.first_step_seconds
        limit = max(health.hang_floor_seconds, health.hang_factor * average)
        if phase in SLOW_ONCE:
            # Storage and held-out data vary more than steps do; three times the average of a rare phase is noise.
            limit = max(limit, min(health.first_step_seconds, health.hang_factor * limit))
        return limit

    def straggler_limit(self, seconds: Sequence[float]) -> float:
        """Longest own work of a rank that is not a warning, given that of all ranks in one step: the factor times
        their median."""
        ordered = sorted(seconds)
        return self._health.straggler_factor * ordered[(len(ordered) - 1) // 2]


class Monitor:
    """Watches the ranks of one job; one instance lives as long as the job, :meth:`start` begins an incarnation."""

    def __init__(self, health: HealthLimits, limits: LearnedLimits | None = None) -> None:
        self.limits = limits or LearnedLimits(health)
        self._ranks: dict[int, Progress] = {}
        self._slow_in_a_row: dict[int, int] = {}
        self._reported: set[tuple[Kind, int]] = set()

    def start(self, ranks: Sequence[int], now: float, phase: str = "start", step: int = 0) -> None:
        """A new incarnation: its ranks enter ``phase`` now, and every finding may be reported again."""
        self._ranks = {rank: Progress(phase, step, now) for rank in ranks}
        self._slow_in_a_row = {}
        self._reported = set()

    def drop(self, rank: int) -> None:
        """A rank left the incarnation."""
        self._ranks.pop(rank, None)

    def enter(self, rank: int, phase: str, step: int, now: float, order: int = 0) -> None:
        """A rank says where it stands. The limit runs from the entry into a phase, not from its parts."""
        before = self._ranks.get(rank)
        if before is None:
            return
        same = before.phase == phase and before.step == step
        if not same:
            self.limits.observe(before.phase, now - before.since) if before.phase in SLOW_ONCE else None
        self._ranks[rank] = Progress(phase, step, before.since if same else now, order)

    def step_completed(self, rank: int, step: int, seconds: float, workers: int, now: float, *, first: bool) -> None:
        """A rank finished a step; ``first`` of its incarnation (or with a repair in it) teaches nothing."""
        before = self._ranks.get(rank)
        if before is None:
            return
        if not first:
            self.limits.observe("step", seconds, workers)
        self._ranks[rank] = Progress("step", step + 1, now)

    def stragglers(self, step: int, own_seconds: Mapping[int, float], now: float) -> list[Finding]:
        """The slowest rank, named, if its *own* work (not its waiting for others) is past the limit.

        One slow step is noise: the warning comes at the second in a row or where a rank is past the hang factor.
        """
        if len(own_seconds) < 2:
            return []
        limit = self.limits.straggler_limit(list(own_seconds.values()))
        rank, worst = max(own_seconds.items(), key=lambda item: (item[1], item[0]))
        for other in own_seconds:
            if other != rank or worst <= limit:
                self._slow_in_a_row.pop(other, None)
        if worst <= limit:
            return []
        self._slow_in_a_row[rank] = self._slow_in_a_row.get(rank, 0) + 1
        clear = worst > limit * 3.0
        if (self._slow_in_a_row[rank] < 2 and not clear) or (Kind.STRAGGLER, rank) in self._reported:
            return []
        self._reported.add((Kind.STRAGGLER, rank))
        return [Finding(Kind.STRAGGLER, rank, "step", step, worst, limit, now - worst)]

    def hangs(self, now: float, workers: int) -> list[Finding]:
        """The ranks that are stuck now, each reported once per incarnation.

        When one rank is stuck all others wait for it: of the ranks past their limit only those least far are
        named. Where all are equally far, nobody can be told from his victims, and all are named with the
        collective as their place.
        """
        late = {}
        for rank, progress in self._ranks.items():
            limit = self.limits.hang_limit(progress.phase, workers)
            if limit is not None and now - progress.since > limit:
                late[rank] = (progress, limit)
        if not late:
            return []
        furthest = min((progress.step, progress.order) for progress, _ in late.values())
        stuck = {rank: pair for rank, pair in late.items() if (pair[0].step, pair[0].order) == furthest}
        all_equal = len(stuck) == len(self._ranks) > 1
        findings = []
        for rank, (progress, limit) in sorted(stuck.items()):
            if (Kind.HANG, rank) in self._reported:
                continue
            self._reported.add((Kind.HANG, rank))
            place = "unknown" if all_equal else None
            seconds = now - progress.since
            findings.append(
                Finding(Kind.HANG, rank, progress.phase, progress.step, seconds, limit, progress.since, place)
            )
        return findings
