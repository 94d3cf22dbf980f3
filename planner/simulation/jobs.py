"""A training job while it is simulated: what it holds, what stage it is in, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor

from planner.ettr import LOSSES
from planner.simulation.workload import TrainingJob

RUNNING = "running"
ABSENT = "absent"
"""Not submitted yet, or ended: its time counts nowhere."""
_EDGE = 1e-6
"""Seconds by which a running clock may miss a checkpoint's boundary through rounding."""


@dataclass
class Account:
    """Weighted FLOP of one job: ``reference`` (full size without pause) = ``useful`` + the losses."""

    reference: float = 0.0
    useful: float = 0.0
    doubtful: float = 0.0
    """Part of ``useful`` that is expected to be thrown away: done while reports were awaited that may stop the run."""
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))


@dataclass
class RunningJob:
    """One job. ``nodes`` are all that it holds, ``active`` those that train; both are changed by policies only."""

    spec: TrainingJob
    full: float = 0.0
    """F at full size: its count in the plan of the undamaged cluster."""
    nodes: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    stage: str = ABSENT
    rate: float = 0.0
    """Weighted FLOP/s while running."""
    slowdown: float = 1.0
    stall_share: float = 0.0
    unread: int = 0
    """Its checkpoints whose reports are not out yet."""
    stop_probability: float = 0.0
    """How likely one of these reports stops the run or rolls it back."""
    since: float = 0.0
    """Until when the account is settled."""
    version: int = 0
    """Grows with each change of stage: callbacks of an older one do nothing."""
    undetected: int = 0
    run_clock: float = 0.0
    """Running seconds that were kept."""
    saved_clock: float = 0.0
    saved_useful: float = 0.0
    account: Account = field(default_factory=Account)
    ended: float | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        return self.spec.name

    @property
    def live(self) -> bool:
        """Submitted and not ended."""
        return self.stage != ABSENT

    @property
    def speed(self) -> float:
        """Weighted FLOP/s now, stragglers included."""
        return self.rate / self.slowdown if self.stage == RUNNING else 0.0

    @property
    def useful_flop(self) -> float:
        """FLOP kept, not weighted."""
        return self.account.useful / self.spec.weight

    @property
    def jitter(self) -> float:
        """Share of running time that is no step, or too slow a one; slow steps below full size count as degraded."""
        return self.spec.gaps + (self.spec.jitter if self.rate >= self.full * (1 - 1e-9) else 0.0)

    @property
    def kept_share(self) -> float:
        """Share of running time that is training."""
        return (1 - self.stall_share) * (1 - self.jitter)

    def settle(self, now: float) -> None:
        """Account for the time since the last call."""
        seconds, self.since = now - self.since, now
        if seconds <= 0 or not self.live:
            return
        account = self.account
        account.reference += self.full * seconds
        if self.stage != RUNNING:
            account.lost[self.stage] += self.full * seconds
            return
        before, kept = self.run_clock, self.speed * self.kept_share
        self.run_clock += seconds
        interval = self.spec.checkpoint_interval
        boundary = floor((self.run_clock + _EDGE) / interval)
        if boundary > floor((before + _EDGE) / interval):
            self.saved_clock = boundary * interval
            self.saved_useful = account.useful + kept * max(0.0, self.saved_clock - before)
        account.useful += kept * seconds
        account.doubtful += kept * seconds * (1 - (1 - self.stop_probability) ** self.unread)
        # As in planner.ettr: seconds that stand still are lost at full size, the others are degraded.
        account.lost["checkpoint_stall"] += self.full * self.stall_share * seconds
        account.lost["other"] += self.full * (1 - self.stall_share) * self.jitter * seconds
        account.lost["degraded"] += (self.full - self.speed) * self.kept_share * seconds

    def roll_back(self, snapshot_interval: float | None = None) -> None:
        """Give up what was done since the last checkpoint, or since the last snapshot where that is nearer."""
        back = self.run_clock - self.saved_clock
        if snapshot_interval is not None and back > 0:
            back = min(back, self.run_clock % snapshot_interval)
        span = self.run_clock - self.saved_clock
        whole = self.account.useful - self.saved_useful
        self._redo(whole * back / span if span > 0 else 0.0)
        self.run_clock -= back

    def share_micro_batches(self, replicas: int) -> None:
        """Peers do again what the lost one of ``replicas`` had done of this step: half of it on average, shared out
        over the others (Unicron: k/(DP - 1) micro-batches more for each)."""
        seconds = self.spec.seconds_of_step(len(self.active)) * 0.5 / (replicas - 1)
        self._redo(min(self.rate * seconds, self.account.useful - self.saved_useful))

    def _redo(self, flop: float) -> None:
        flop = min(max(0.0, flop), self.account.useful)  # all of it, but for the last digit of the sums
        self.account.useful -= flop
        self.account.lost["redo"] += flop

    def seconds_to_checkpoint(self) -> float:
        """Running seconds to the next checkpoint."""
        interval = self.spec.checkpoint_interval
        return (floor((self.run_clock + _EDGE) / interval) + 1) * interval - self.run_clock
