"""One turn of the job machine: the record being changed, the time, and the actions so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from planner.events import Action, Event, JobState
from planner.job_events import JobAction, Tell, Write
from planner.job_record import JobRecord


@dataclass
class Turn:
    """Collects what a decision does. ``job`` is the decision's own copy."""

    job: JobRecord
    now: float
    actions: list[JobAction] = field(default_factory=list)

    def do(self, action: JobAction) -> None:
        """Add an action."""
        self.actions.append(action)

    def tell(self, action: Action, *, reason: str = "", old: str | None = None, new: str | None = None,
             time: float | None = None, incarnation: int | None = None, **details: Any) -> None:  # fmt: skip
        """Add an event of this job."""
        job = self.job
        self.do(
            Tell(
                Event(
                    time=self.now if time is None else time,
                    action=action,
                    job=job.id,
                    incarnation=incarnation if incarnation is not None else job.incarnation or None,
                    old=old,
                    new=new,
                    reason=reason,
                    details=details,
                )
            )
        )

    def write(self, file: str, **line: Any) -> None:
        """Add a line to one of the job's files."""
        self.do(Write(file, line))

    def move(self, state: JobState, reason: str) -> None:
        """The one mutator of the job's state; a transition is an event."""
        job = self.job
        if job.state == state and job.reason == reason:
            return
        if job.state != state:
            self.tell(Action.JOB_STATE, old=job.state, new=state, reason=reason)
        job.state, job.reason = state, reason

    def stage(self, stage: str) -> None:
        """The one mutator of the incarnation's stage."""
        self.job.stage, self.job.since = stage, self.now
