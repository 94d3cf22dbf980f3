"""ETTR and where the rest of the time went, from a job's events and metrics alone.

``ETTR = steps kept × healthy step time at full size / wall seconds since the job first started``. What is not
effective is split into the parts of :data:`LOSSES`, which together with the effective seconds sum to the wall.

The timeline is cut at the events. Between two events the job is in one *stage*; stages other than stepping are
losses as they stand. Stepping time is then divided by the metrics: stalls for saving, steps done again, the
healthy time of the steps kept, the excess of steps with fewer ranks; what is left is ``other`` (jitter, first
steps, validation). Rules for who writes the events:

* ``job.state`` tells waiting, starting, running, healing and the end;
* ``fault.detected`` may carry ``occurred`` (epoch seconds); else the last ``fault.injected`` before it counts;
* ``decision.made`` ends deciding; ``reform.completed`` or ``incarnation.started`` ends reallocating;
* ``checkpoint.loaded`` ends loading; ``step.completed`` (the first after a start or repair) ends starting;
* ``snapshot.taken`` and ``checkpoint.saved`` may carry ``stall_seconds``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.events import TERMINAL, Action, Event, JobState

LOSSES = (
    "waiting",  # no slots, or paused by a person
    "detect",  # from the fault to its detection
    "decide",  # from the detection to the decision
    "reallocate",  # from the decision until ranks are in place: leases, leaving the collective, re-forming
    "start",  # processes start, join, build the model, warm up
    "load",  # state is read
    "redo",  # steps and micro-batches done again
    "degraded",  # excess of steps done with fewer ranks than full size
    "checkpoint_stall",  # training stands still for a snapshot or save
    "other",
)

_STEPPING = "stepping"
_STAGE_OF_STATE = {
    JobState.QUEUED: "waiting",
    JobState.WAITING: "waiting",
    JobState.PAUSED: "waiting",
    JobState.STARTING: "start",
    JobState.RUNNING: _STEPPING,
}
_STALLS = (Action.SNAPSHOT_TAKEN, Action.CHECKPOINT_SAVED)


@dataclass(frozen=True)
class Account:
    """Where the wall time of a job went; all values in seconds."""

    wall: float
    effective: float
    """Steps kept × healthy step time."""
    losses: Mapping[str, float]
    """One entry per name of :data:`LOSSES`; with ``effective`` they sum to ``wall``."""
    healthy_step: float
    steps_kept: int

    @property
    def ettr(self) -> float:
        """Effective training time ratio, 0 to 1 (0 before the job started)."""
        return self.effective / self.wall if self.wall > 0 else 0.0


@dataclass
class _Timeline:
    """The walk over the events; all mutation of the account's raw material happens here."""

    start: float
    now: float
    stage: str
    spent: dict[str, float]
    stalls: float = 0.0
    injected: float | None = None

    def advance(self, time: float) -> None:
        """Attribute the time since the last event to the present stage."""
        if time > self.now:
            self.spent[self.stage] += time - self.now
            self.now = time

    def move(self, source: str, target: str, seconds: float) -> None:
        """Attribute ``seconds`` of a stage to another one after the fact."""
        moved = max(0.0, min(seconds, self.spent[source]))
        self.spent[source] -= moved
        self.spent[target] += moved


def account(
    events: Iterable[Event], metrics: Iterable[Mapping[str, Any]], now: float, full_workers: int | None = None
) -> Account:
    """The account of one job until ``now`` (seconds since the epoch) or until it ended.

    ``metrics`` are the lines of ``metrics.jsonl`` in order; ``full_workers`` is the job's full size, by default the
    largest size in the metrics.
    """
    lines = [line for line in metrics if _seconds(line) is not None]
    kept = {int(line["step"]): line for line in lines}
    full = full_workers if full_workers is not None else max((int(line["workers"]) for line in lines), default=0)
    ordered = sorted(events, key=lambda event: event.time)
    firsts = {(e.incarnation, e.details.get("step")) for e in ordered if e.action == Action.STEP_COMPLETED}
    healthy = _healthy_step(lines, full, firsts)
    timeline = _walk(ordered, now, healthy)
    if timeline is None:
        return Account(0.0, 0.0, dict.fromkeys(LOSSES, 0.0), healthy, len(kept))
    return _divide(timeline, lines, kept, healthy, full)


def _seconds(line: Mapping[str, Any]) -> float | None:
    value = line.get("seconds")
    return float(value) if isinstance(value, (int, float)) and value >= 0 and "step" in line else None


def _healthy_step(lines: Sequence[Mapping[str, Any]], full: int, firsts: set[tuple[int | None, Any]]) -> float:
    """Median seconds of a step at full size that was not the first after a start or a repair.

    Where there is none, first any other step at full size, then any step; 0 without steps.
    """
    at_full = [line for line in lines if int(line["workers"]) >= full]
    settled = [line for line in at_full if (line.get("incarnation"), line["step"]) not in firsts]
    for choice in (settled, at_full, lines):
        if choice:
            return statistics.median(float(line["seconds"]) for line in choice)
    return 0.0


def _walk(events: Sequence[Event], now: float, healthy: float) -> _Timeline | None:
    first = next((e for e in events if e.action == Action.JOB_STATE and e.new == JobState.STARTING), None)
    if first is None:
        return None
    spent = dict.fromkeys((*LOSSES, _STEPPING), 0.0)
    timeline = _Timeline(first.time, first.time, "start", spent)
    for index, event in enumerate(events):
        if event.time < first.time:
            continue
        if event.time > now:
            break
        timeline.advance(event.time)
        if event.action == Action.JOB_STATE and event.new in TERMINAL:
            if not any(e.action == Action.JOB_STATE and e.old == event.new for e in events[index + 1 :]):
                return timeline
            timeline.stage = "waiting"  # preempted, and submitted again later
            continue
        _apply(timeline, event, healthy)
    timeline.advance(now)
    return timeline


def _apply(timeline: _Timeline, event: Event, healthy: float) -> None:
    action, stage = event.action, timeline.stage
    if action == Action.JOB_STATE:
        state = JobState(event.new) if event.new else None
        if state == JobState.HEALING:
            timeline.stage = "decide" if stage == _STEPPING else stage
        elif state in _STAGE_OF_STATE and not (state == JobState.STARTING and stage == "load"):
            timeline.stage = _STAGE_OF_STATE[state]
    elif action == Action.FAULT_INJECTED:
        timeline.injected = event.time
    elif action == Action.FAULT_DETECTED:
        occurred = event.details.get("occurred", timeline.injected)
        timeline.injected = None
        if isinstance(occurred, (int, float)):
            # The ranks seemed to step on since then; the event before this one may have ended that stage already.
            timeline.move(_STEPPING if stage == "decide" else stage, "detect", event.time - float(occurred))
        timeline.stage = "decide"
    elif action in (Action.DECISION, Action.REFORM_STARTED):
        if stage == "decide" or (action == Action.REFORM_STARTED and stage != _STEPPING):
            timeline.stage = "reallocate"
    elif action == Action.REFORM_COMPLETED:
        seconds = event.details.get("seconds")
        if stage == _STEPPING and isinstance(seconds, (int, float)):
            timeline.move(_STEPPING, "reallocate", seconds)  # at a step's end: nobody stood still before
        timeline.stage = _STEPPING
    elif action == Action.INCARNATION_STARTED:
        timeline.stage = "load"
    elif action == Action.CHECKPOINT_LOADED and stage == "load":
        timeline.stage = "start"
    elif action == Action.STEP_COMPLETED:
        if stage != _STEPPING:
            timeline.move(stage, _STEPPING, healthy)
        timeline.stage = _STEPPING
    elif action in _STALLS:
        stall = event.details.get("stall_seconds")
        timeline.stalls += float(stall) if isinstance(stall, (int, float)) and stall > 0 else 0.0


def _divide(
    timeline: _Timeline,
    lines: Sequence[Mapping[str, Any]],
    kept: Mapping[int, Mapping[str, Any]],
    healthy: float,
    full: int,
) -> Account:
    """Split the stepping time; each part takes what is left at most, so nothing is negative and all sums up."""
    wall = timeline.now - timeline.start
    losses = {name: timeline.spent[name] for name in LOSSES}
    pool = timeline.spent[_STEPPING]

    def take(seconds: float) -> float:
        nonlocal pool
        taken = max(0.0, min(seconds, pool))
        pool -= taken
        return taken

    effective = take(len(kept) * healthy)
    losses["checkpoint_stall"] += take(timeline.stalls)
    dropped = sum(float(line["seconds"]) for line in lines if kept[int(line["step"])] is not line)
    repaired = sum(float(line.get("redo_seconds") or 0.0) for line in kept.values())
    losses["redo"] += take(dropped + repaired)
    slower = (float(line["seconds"]) - healthy for line in kept.values() if int(line["workers"]) < full)
    losses["degraded"] += take(sum(max(0.0, excess) for excess in slower))
    losses["other"] += pool
    return Account(wall, effective, losses, healthy, len(kept))
