"""What is known of a pretraining job: the record in Redis that the supervisor alone writes.

It holds everything a new coordinator needs to go on, so it stays small: lines, events and checkpoints are in the
job's folder, and ``files`` says how much of them belongs to this record.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from planner.events import TERMINAL, JobState
from planner.messages import LogVerdict
from planner.pretrain_config import PretrainConfig


class Record(BaseModel):
    """Base of all parts of the record."""

    model_config = ConfigDict(extra="ignore")


class RankRecord(Record):
    """One rank of the present incarnation."""

    rank: int
    origin: int
    """Rank at the job's start, which fault coordinates name."""
    node: str
    slot: int
    lease: str
    lease_token: int
    pid: int = 0
    hello: bool = False
    heals: bool = False
    """Whether it can leave a broken collective and re-form in place."""
    left: bool = False
    """It is out of its collective and waits for the order to re-form."""
    doomed: bool = False
    """It said that an exception ends it: it is as good as gone."""
    hung: bool = False
    """It hangs: it is being ended, after its stack was captured."""
    reformed: bool = True
    """It is part of the incarnation; False between the order to re-form and its word that it did."""
    since: float = 0.0
    """When it was started, for one that is to join."""
    joined: bool = False
    """It was started for this incarnation and holds no state before it says that it re-formed."""
    leaving: str = ""
    """It was told to leave from outside: ``signal``, or ``node`` where its whole node goes."""
    gone: bool = False
    done: str = ""
    """Why it said it was done; empty before."""
    phase: str = ""
    step: int = 0


class Parting(Record):
    """A rank that the job does without, whose process may still hold its slot."""

    incarnation: int
    rank: int
    node: str
    slot: int
    lease: str
    since: float = 0.0


class Seen(Record):
    """One thing that was seen of a fault; the root is chosen among them (:func:`planner.severity.root_cause`)."""

    method: str
    kind: str = ""
    """What a fault is called whose root this is: exit, sigkill, exception, hang …"""
    rank: int
    origin: int
    node: str
    time: float
    step: int
    exit_code: int | None = None
    """As :mod:`subprocess` gives it: negative for a signal."""
    exception_type: str | None = None
    message: str = ""
    collective: str | None = None
    verdict: LogVerdict | None = None
    """What the rank's log or traceback says."""


class FaultRecord(Record):
    """A fault: open until the first step after it, then an entry of the job's list."""

    detected: float
    occurred: float | None = None
    step: int
    rank: int
    """Origin rank of the root."""
    kind: str
    injected: int | None = None
    """Index in ``config.faults`` where it was asked for."""
    severity: str = ""
    cause: str = ""
    cure: str = ""
    reason: str = ""
    recovered: float | None = None
    seen: list[Seen] = []

    def summary(self) -> dict[str, Any]:
        """The entry of ``planaria run --json`` and ``demo --json``."""
        since = self.detected if self.occurred is None else self.occurred
        return {
            "step": self.step,
            "rank": self.rank,
            "kind": self.kind,
            "recovered_seconds": None if self.recovered is None else max(0.0, self.recovered - since),
            "severity": self.severity,
            "cause": self.cause,
            "cure": self.cure,
        }


class RollBack(Record):
    """The run went back to an earlier healthy checkpoint and leaves out the data of a bad stretch."""

    incarnation: int
    """The first incarnation after it; state that earlier ones made beyond ``at_most`` is void."""
    at_most: int
    """Newest step whose checkpoint may be healthy."""
    older: int = 0
    """Go back by so many checkpoints more: a spike that came again."""
    beyond: int
    """Last step of the bad stretch: the samples up to it are left out."""
    count: int = 1
    """Roll-backs of this stretch so far."""
    skip_to: int = 0
    """Sample position at which the run goes on; known once the checkpoint is chosen."""
    resumed: int = 0
    """Step of the checkpoint that was chosen."""
    anchor: tuple[int, int] = (0, 0)
    """Step and sample position at which the run went on after the roll-back before this one."""


class StepRecord(Record):
    """A step that some ranks have completed and others not yet."""

    ranks: list[int] = []
    ids: list[int] = []
    loss: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    redo_seconds: float = 0.0
    workers: int = 0
    valid_loss: float | None = None
    time: float = 0.0


class ExportRecord(Record):
    """A published checkpoint whose export is due."""

    step: int
    path: str
    tries: int = 0
    not_before: float = 0.0
    evaluate: bool = False
    """Whether the scheduler is to evaluate it."""


class JobRecord(Record):
    """A job. ``stage`` is where the present incarnation stands: none, store, starting, running, stopping; while it
    heals in place leaving (ranks get out of the collective), then reforming (they were ordered to re-form)."""

    format: int = 1
    id: str
    name: str
    folder: str
    config: dict[str, Any]
    submitted: float
    state: JobState = JobState.QUEUED
    reason: str = ""
    started: float | None = None
    ended: float | None = None

    incarnation: int = 0
    stage: str = "none"
    stop_why: str = ""
    """Why the incarnation is being stopped: heal, pause, cancel, resize, preempt."""
    since: float = 0.0
    """When the present stage began."""
    ranks: list[RankRecord] = []
    store_node: str | None = None
    size: int = 0
    """Ranks of the present or last incarnation."""
    store_host: str = ""
    store_port: int = 0
    former: int = 0
    """The incarnation before the last re-form, whose ranks went on in this one; 0: none."""
    renamed: dict[int, int] = {}
    """Rank in ``former`` → rank now."""
    joiners: list[RankRecord] = []
    """Ranks that were started to join; their ``rank`` is a name until the order takes them in."""
    parting: list[Parting] = []
    names: int = 0
    """Names given to joiners so far."""
    join_after: float = 0.0
    """No joiner is started before this."""
    boundary: bool = False
    """Whether the order to re-form takes effect at a step's end, so that training goes on until then."""
    redone: int = 0
    """Micro-batches that the present re-forming makes ranks run again for others."""
    due: float | None = None
    """When leaving or re-forming must have come to its end."""
    leaving_since: float | None = None
    """When the first of the ranks that are leaving was told to."""
    leaving_nodes: list[str] = []
    """Nodes that said that they go: nothing is started there before they are back."""
    told_step: int = 0
    """Highest step whose lines are written since all ranks were started last."""
    wanted: str = "run"
    """What a person wants: run, pause, cancel."""
    progressed: bool = False
    """Whether the present incarnation has completed a step."""

    step: int = 0
    loss: float | None = None
    step_seconds: float | None = None
    save_seconds: float | None = None
    """The longest of the last saves."""
    snapshot_step: int = 0
    """Step of the newest snapshot in host memory."""
    began: float = 0.0
    """When the last start of all ranks was ordered."""
    start_seconds: float | None = None
    """From there to the first step, the last time."""
    heal_seconds: float | None = None
    """Longest interruption of the last faults that were healed in place."""
    valid_loss: float | None = None
    partial: dict[int, StepRecord] = {}
    published: list[int] = []
    counted: int = 0
    """Publications so far, of which every ``evaluate.every_checkpoints``-th is evaluated."""
    exports: list[ExportRecord] = []
    exported: dict[int, bool] = {}
    """Step of each export that is there → whether its evaluation was asked for."""
    fault: FaultRecord | None = None
    roll_back: RollBack | None = None
    """The last roll-back."""
    given_up: str = ""
    """Why the job is to end as failed when its ranks are gone; empty: it is not."""
    history: list[FaultRecord] = []
    fired: list[int] = []
    escalation: dict[str, Any] = {}
    measured: dict[str, Any] = {}

    firing: tuple[int, float, int] | None = None
    """Injected fault (index, time, step) that has not been detected yet."""
    heard: dict[str, int] = {}
    """Process id → number of the last message that was taken from it (:class:`planner.messages.Acknowledged`)."""
    settle_until: float | None = None
    """A fault known only by its echo waits until then for its root."""
    outbox: list[dict[str, Any]] = []
    """Commands decided and not known to be sent: [{node, command}]."""
    cursor: str = "0-0"
    """Position in the reports' stream up to which this record speaks."""
    files: dict[str, int] = {}
    """Bytes of each file of the folder that belong to this record."""
    ettr: float | None = None
    ettr_losses: dict[str, float] = Field(default_factory=dict)
    accounted: bool = False
    """Whether the account of its time is the last one."""

    @cached_property
    def settings(self) -> PretrainConfig:
        """The job's config."""
        return PretrainConfig.model_validate(self.config)

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.state in TERMINAL

    @property
    def holder(self) -> str:
        """Its name as a holder of leases."""
        return f"job:{self.id}"

    def rank(self, number: int) -> RankRecord | None:
        """A rank of the present incarnation."""
        return next((rank for rank in self.ranks if rank.rank == number), None)

    def alive(self) -> list[RankRecord]:
        """Ranks that are not known to be gone."""
        return [rank for rank in self.ranks if not rank.gone]

    def joiner(self, name: int) -> RankRecord | None:
        """A rank that was started to join."""
        return next((rank for rank in self.joiners if rank.rank == name), None)

    def taken(self) -> set[tuple[str, int]]:
        """Slots (lease, index) on which a process of this job runs or may still run."""
        ranks = {(rank.lease, rank.slot) for rank in [*self.alive(), *self.joiners]}
        return ranks | {(one.lease, one.slot) for one in self.parting}

    def nodes(self) -> list[str]:
        """Nodes of the present incarnation."""
        return sorted({rank.node for rank in self.ranks})

    def faults(self) -> list[FaultRecord]:
        """All faults, the open one last."""
        return [*self.history, *([self.fault] if self.fault else [])]

    def to_store(self) -> dict[str, Any]:
        """The record as it is put into Redis, with the fields that ``status`` shows."""
        shown = {
            "steps": self.settings.steps,
            "workers": len(self.alive()) if self.stage not in ("none", "store", "stopping") else 0,
            "faults": [fault.summary() for fault in self.faults()],
        }
        return self.model_dump(mode="json", exclude={"settings"}) | shown
