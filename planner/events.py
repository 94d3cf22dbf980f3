"""The one enumeration of actions and states, and the record that every transition leaves behind.

``status``, the report, the ETTR account and the chaos tests read these events and nothing else, so a
transition that is not an event did not happen. A job's events are lines of ``events.jsonl`` in its folder;
the cluster's are entries of a Redis stream with the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class JobState(StrEnum):
    """Where a pretraining job stands. ``TERMINAL`` below lists the states that are never left."""

    QUEUED = "queued"  #: accepted, no slot asked for yet
    WAITING = "waiting"  #: its minimum of slots is not to be had now; the reason says what is missing
    STARTING = "starting"  #: slots granted, an incarnation is coming up
    RUNNING = "running"  #: steps complete
    HEALING = "healing"  #: a fault was detected and its cure is under way
    PAUSED = "paused"  #: a person paused it; its state is published
    DONE = "done"  #: all steps complete, last checkpoint published
    FAILED = "failed"  #: given up: restarting cannot help, a person must act
    CANCELLED = "cancelled"  #: a person ended it
    PREEMPTED = "preempted"  #: told to leave (SIGTERM); its state is published, run it again


TERMINAL = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.PREEMPTED})


class TrialState(StrEnum):
    """Where one checkpoint on one task stands."""

    QUEUED = "queued"
    RECORDING = "recording"
    RUNNING = "running"
    SCORING = "scoring"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


class Action(StrEnum):
    """What happened. The value is the ``action`` of the event; the part before the dot is its subject."""

    JOB_SUBMITTED = "job.submitted"
    JOB_STATE = "job.state"  #: old and new are JobState values
    JOB_CANCEL_REQUESTED = "job.cancel_requested"
    JOB_PAUSE_REQUESTED = "job.pause_requested"
    JOB_RESUME_REQUESTED = "job.resume_requested"
    JOB_PREEMPT_REQUESTED = "job.preempt_requested"  #: publish and leave; submitted again it goes on

    INCARNATION_STARTED = "incarnation.started"  #: all ranks said hello and met; loading comes next
    INCARNATION_STOPPING = "incarnation.stopping"  #: its ranks were told to publish at the step's end and leave
    INCARNATION_ENDED = "incarnation.ended"
    RANK_STARTED = "rank.started"
    RANK_EXITED = "rank.exited"
    RANK_EXCEPTION = "rank.exception"
    RANK_STRAGGLER = "rank.straggler"
    RANK_HUNG = "rank.hung"
    RANK_JOINED = "rank.joined"
    REFORM_STARTED = "reform.started"
    REFORM_COMPLETED = "reform.completed"
    STEP_COMPLETED = "step.completed"  #: only the first step after a start, a fault or a re-form is an event

    FAULT_INJECTED = "fault.injected"
    FAULT_DETECTED = "fault.detected"
    FAULT_RECOVERED = "fault.recovered"
    SEVERITY_DECIDED = "severity.decided"
    VERDICT = "diagnosis.verdict"
    LOSS_SPIKE = "loss.spike"
    SAMPLES_SKIPPED = "samples.skipped"
    ROLLED_BACK = "job.rolled_back"

    SNAPSHOT_FETCHED = "snapshot.fetched"  #: a node that had none got it from another node's memory
    SNAPSHOT_TAKEN = "snapshot.taken"
    CHECKPOINT_SAVED = "checkpoint.saved"
    CHECKPOINT_PUBLISHED = "checkpoint.published"
    CHECKPOINT_FAILED = "checkpoint.failed"
    CHECKPOINT_REFUSED = "checkpoint.refused"
    CHECKPOINT_DELETED = "checkpoint.deleted"
    CHECKPOINT_LOADED = "checkpoint.loaded"
    EXPORT_PUBLISHED = "export.published"
    EXPORT_FAILED = "export.failed"

    DECISION = "decision.made"  #: a plan with its reason, its costs and the priced alternatives
    LEASE_GRANTED = "lease.granted"
    LEASE_REVOKED = "lease.revoked"
    LEASE_RELEASED = "lease.released"
    LEASE_EXPIRED = "lease.expired"

    NODE_JOINED = "node.joined"
    NODE_SUSPECTED = "node.suspected"
    NODE_RECOVERED = "node.recovered"
    NODE_DEAD = "node.dead"
    NODE_LEFT = "node.left"
    NODE_CORDONED = "node.cordoned"
    NODE_UNCORDONED = "node.uncordoned"
    NODE_DRAINED = "node.drained"
    NODE_CHECKED = "node.checked"
    COORDINATOR_STARTED = "coordinator.started"
    COORDINATOR_STOPPED = "coordinator.stopped"
    LOOP_CRASHED = "loop.crashed"  #: one of the coordinator's loops raised; it goes on after a pause

    WORKER_STARTED = "worker.started"
    WORKER_READY = "worker.ready"
    WORKER_SWAPPED = "worker.swapped"  #: the weights of the next checkpoint are in the resident engine
    WORKER_EXITED = "worker.exited"
    TRIAL_STATE = "trial.state"  #: old and new are TrialState values
    SHARD_COMPLETED = "shard.completed"
    SHARD_FAILED = "shard.failed"
    SHARD_QUARANTINED = "shard.quarantined"
    MESSAGE_REFUSED = "message.refused"
    REPORT_PUBLISHED = "report.published"
    GATE_DECIDED = "gate.decided"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One transition.

    ``time`` is in seconds since the epoch. ``old`` and ``new`` are the states before and after where the
    action has states. ``details`` holds what the action needs besides; its keys stand at the top level of
    the line, so they must not be field names.
    """

    time: float
    action: Action
    job: str | None = None
    incarnation: int | None = None
    old: str | None = None
    new: str | None = None
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The event as the flat object that ``events.jsonl`` holds."""
        own: dict[str, Any] = {
            "time": self.time,
            "action": self.action.value,
            "job": self.job,
            "incarnation": self.incarnation,
            "old": self.old,
            "new": self.new,
            "reason": self.reason,
        }
        clash = own.keys() & self.details.keys()
        if clash:
            raise ValueError(f"event details may not redefine the fields {sorted(clash)}")
        return own | dict(self.details)

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Event:
        """The event that a line holds; keys that are no field become details."""
        known = {"time", "action", "job", "incarnation", "old", "new", "reason"}
        own = {key: line[key] for key in known if key in line and line[key] is not None}
        own["action"] = Action(own["action"])
        return cls(**own, details={key: value for key, value in line.items() if key not in known})
