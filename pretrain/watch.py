"""Online statistics of one job: what its ranks say goes into the learned limits, and findings come out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from planner.detection import Finding, LearnedLimits, Monitor
from planner.job_events import JobEvent, Said
from planner.job_record import JobRecord
from planner.messages import RankPhase, RankStep
from planner.pretrain_config import HealthLimits

_OWN_WORK = ("data", "forward_backward", "optimizer")
"""Parts of a step that a rank spends on its own, not waiting for others."""


class JobWatch:
    """One per job, for the life of the supervisor; what it learned is learned again by the next one."""

    def __init__(self, health: HealthLimits) -> None:
        self._monitor = Monitor(health, LearnedLimits(health))
        self._incarnation = 0
        self._first: set[int] = set()
        self._own: defaultdict[int, dict[int, float]] = defaultdict(dict)

    def start(self, record: JobRecord, now: float) -> None:
        """Begin to watch the present incarnation (again)."""
        self._incarnation = record.incarnation
        ranks = [rank.rank for rank in record.ranks]
        self._first = set(ranks)
        self._own.clear()
        self._monitor.start(ranks, now, "first_step" if record.progressed else "start", record.step)

    def observe(self, record: JobRecord, events: Sequence[JobEvent], now: float) -> list[Finding]:
        """Take what ranks said; the hangs and stragglers that follow from it and from the time."""
        if record.stage not in ("starting", "running"):
            return []
        if record.incarnation != self._incarnation:
            self.start(record, now)
        findings: list[Finding] = []
        for event in events:
            if isinstance(event, Said) and event.incarnation == self._incarnation:
                if isinstance(event.message, RankPhase):
                    self._monitor.enter(event.rank, event.message.phase, event.message.step, now)
                elif isinstance(event.message, RankStep):
                    findings += self._step(record, event.rank, event.message, now)
        return findings + self._monitor.hangs(now, record.size)

    def _step(self, record: JobRecord, rank: int, message: RankStep, now: float) -> list[Finding]:
        first = rank in self._first
        self._first.discard(rank)
        self._monitor.step_completed(rank, message.step, message.seconds, message.workers, now, first=first)
        own = self._own[message.step]
        own[rank] = sum(message.phases.get(part, 0.0) for part in _OWN_WORK)
        if len(own) < record.size:
            return []
        del self._own[message.step]
        return [] if first else self._monitor.stragglers(message.step, own, now)
